// Attention over tiles of the block-major pool: for six query rows at a time, scores of 64 positions (a small matrix product with K), softmax of
// the tile, values (a small matrix product with V), and the merge with what the tiles before it gave.
//
// Online softmax: Milakov and Gimelshein 2018; over tiles: FlashAttention (Dao et al. 2022). A tile's maximum, sum and values are computed apart from
// the other tiles and then merged, so that they depend on the query and the tile alone; nothing in a row's arithmetic depends on the rows beside it.
//
// bfloat16 and int8: the query and the probabilities are rounded to bfloat16 and multiplied in pairs, sums are float32; an int8 value is exact as
// bfloat16, K's scale is applied to the score, V's to the probability before it is rounded. float32: float32 throughout.
#include <algorithm>
#include <cmath>
#include <cstdlib>
#include <cstring>
#include <limits>
#include <new>
#include <type_traits>

#include "attention_plan.h"

#if defined(KVD_ISA_avx512) || defined(KVD_ISA_avx2)
#include <immintrin.h>
#endif

namespace kvd {
namespace KVD_ISA {
namespace {

constexpr float MINUS_INFINITY = -std::numeric_limits<float>::infinity();

// ---- sixteen floats -------------------------------------------------------------------------------------------------------------------------

#if defined(KVD_ISA_avx512)

constexpr int MAX_ROWS = 6, MAX_COLUMNS = 4;  // 24 of the 32 registers are sums
using Vec = __m512;
using PairElement = uint16_t;  // a bfloat16 query or probability

inline Vec load(const float* p) { return _mm512_loadu_ps(p); }
inline void store(float* p, Vec x) { _mm512_storeu_ps(p, x); }
inline Vec fill(float x) { return _mm512_set1_ps(x); }
inline Vec fma(Vec a, Vec b, Vec c) { return _mm512_fmadd_ps(a, b, c); }
inline Vec mul(Vec a, Vec b) { return _mm512_mul_ps(a, b); }
inline Vec add(Vec a, Vec b) { return _mm512_add_ps(a, b); }
inline Vec sub(Vec a, Vec b) { return _mm512_sub_ps(a, b); }
inline Vec max(Vec a, Vec b) { return _mm512_max_ps(a, b); }  // b where either is NaN
inline float largest(Vec x) { return _mm512_reduce_max_ps(x); }
inline float sum(Vec x) { return _mm512_reduce_add_ps(x); }
// x in lanes [first, end), elsewhere `other`.
inline Vec within(Vec x, int64_t first, int64_t end, Vec other) {
    const uint32_t below_end = end >= 16 ? 0xffffu : end <= 0 ? 0u : (1u << end) - 1;
    const uint32_t below_first = first >= 16 ? 0xffffu : first <= 0 ? 0u : (1u << first) - 1;
    return _mm512_mask_blend_ps(static_cast<__mmask16>(below_end & ~below_first), other, x);
}
inline Vec scale_by_power(Vec x, Vec n) { return _mm512_scalef_ps(x, n); }
inline Vec round_to_integer(Vec x) { return _mm512_roundscale_ps(x, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC); }

inline void store_pairs(PairElement* p, Vec x) { _mm256_storeu_si256(reinterpret_cast<__m256i*>(p), (__m256i)_mm512_cvtneps_pbh(x)); }
inline void store_bf16(bf16* p, Vec x) { _mm256_storeu_si256(reinterpret_cast<__m256i*>(p), (__m256i)_mm512_cvtneps_pbh(x)); }

struct Pairs {
    using Element = PairElement;
    using Packed = __m512i;
    using Factor = __m512i;
    static constexpr int WIDTH = 2;  // k that one step takes
    static Packed packed(const uint8_t* p) { return _mm512_loadu_si512(p); }
    static Factor factor(const Element* p) {
        int32_t pair;
        std::memcpy(&pair, p, 4);
        return _mm512_set1_epi32(pair);
    }
    static Vec step(Vec sum, Factor a, Packed b) { return _mm512_dpbf16_ps(sum, (__m512bh)a, (__m512bh)b); }
    static void keep(Element* p, Vec x) { store_pairs(p, x); }
};

struct Singles {
    using Element = float;
    using Packed = Vec;
    using Factor = Vec;
    static constexpr int WIDTH = 1;
    static Packed packed(const uint8_t* p) { return _mm512_loadu_ps(p); }
    static Factor factor(const Element* p) { return _mm512_set1_ps(*p); }
    static Vec step(Vec sum, Factor a, Packed b) { return _mm512_fmadd_ps(a, b, sum); }
    static void keep(Element* p, Vec x) { store(p, x); }
};

// `count` (a multiple of 32) int8 as bfloat16, exactly.
inline void expand(const int8_t* from, uint16_t* to, int64_t count) {
    for (int64_t i = 0; i < count; i += 32) {
        const Vec low = _mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(from + i))));
        const Vec high = _mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(from + i + 16))));
        _mm512_storeu_si512(to + i, (__m512i)_mm512_cvtne2ps_pbh(high, low));
    }
}

#elif defined(KVD_ISA_avx2)

constexpr int MAX_ROWS = 4, MAX_COLUMNS = 1;
struct Vec {
    __m256 a, b;
};
using PairElement = float;  // rounded to bfloat16

inline Vec load(const float* p) { return {_mm256_loadu_ps(p), _mm256_loadu_ps(p + 8)}; }
inline void store(float* p, Vec x) {
    _mm256_storeu_ps(p, x.a);
    _mm256_storeu_ps(p + 8, x.b);
}
inline Vec fill(float x) { return {_mm256_set1_ps(x), _mm256_set1_ps(x)}; }
inline Vec fma(Vec a, Vec b, Vec c) { return {_mm256_fmadd_ps(a.a, b.a, c.a), _mm256_fmadd_ps(a.b, b.b, c.b)}; }
inline Vec mul(Vec a, Vec b) { return {_mm256_mul_ps(a.a, b.a), _mm256_mul_ps(a.b, b.b)}; }
inline Vec add(Vec a, Vec b) { return {_mm256_add_ps(a.a, b.a), _mm256_add_ps(a.b, b.b)}; }
inline Vec sub(Vec a, Vec b) { return {_mm256_sub_ps(a.a, b.a), _mm256_sub_ps(a.b, b.b)}; }
inline Vec max(Vec a, Vec b) { return {_mm256_max_ps(a.a, b.a), _mm256_max_ps(a.b, b.b)}; }
inline float largest(Vec x) {
    const __m256 m = _mm256_max_ps(x.a, x.b);
    __m128 h = _mm_max_ps(_mm256_castps256_ps128(m), _mm256_extractf128_ps(m, 1));
    h = _mm_max_ps(h, _mm_movehl_ps(h, h));
    return _mm_cvtss_f32(_mm_max_ss(h, _mm_movehdup_ps(h)));
}
inline float sum(Vec x) {
    const __m256 s = _mm256_add_ps(x.a, x.b);
    __m128 h = _mm_add_ps(_mm256_castps256_ps128(s), _mm256_extractf128_ps(s, 1));
    h = _mm_add_ps(h, _mm_movehl_ps(h, h));
    return _mm_cvtss_f32(_mm_add_ss(h, _mm_movehdup_ps(h)));
}
inline __m256 within_half(__m256 x, int32_t first, int32_t end, __m256 other) {
    const __m256i lanes = _mm256_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7);
    const __m256i inside = _mm256_andnot_si256(_mm256_cmpgt_epi32(_mm256_set1_epi32(first), lanes), _mm256_cmpgt_epi32(_mm256_set1_epi32(end), lanes));
    return _mm256_blendv_ps(other, x, _mm256_castsi256_ps(inside));
}
inline Vec within(Vec x, int64_t first, int64_t end, Vec other) {
    const auto from = static_cast<int32_t>(first), to = static_cast<int32_t>(end);
    return {within_half(x.a, from, to, other.a), within_half(x.b, from - 8, to - 8, other.b)};
}
// x * 2^n for n in [-200, 0] or so: in two steps, so that both powers are normal numbers.
inline __m256 scale_half(__m256 x, __m256 n) {
    const __m256i all = _mm256_cvtps_epi32(n);
    const __m256i half = _mm256_srai_epi32(all, 1);
    const auto power = [](__m256i e) { return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_add_epi32(e, _mm256_set1_epi32(127)), 23)); };
    return _mm256_mul_ps(_mm256_mul_ps(x, power(half)), power(_mm256_sub_epi32(all, half)));
}
inline Vec scale_by_power(Vec x, Vec n) { return {scale_half(x.a, n.a), scale_half(x.b, n.b)}; }
inline Vec round_to_integer(Vec x) {
    constexpr int NEAREST = _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC;
    return {_mm256_round_ps(x.a, NEAREST), _mm256_round_ps(x.b, NEAREST)};
}

inline __m256 rounded_half(__m256 x) {
    const __m256i bits = _mm256_castps_si256(x);
    const __m256i odd = _mm256_and_si256(_mm256_srli_epi32(bits, 16), _mm256_set1_epi32(1));
    const __m256i rounded = _mm256_and_si256(_mm256_add_epi32(bits, _mm256_add_epi32(odd, _mm256_set1_epi32(0x7fff))), _mm256_set1_epi32(static_cast<int>(0xffff0000u)));
    return _mm256_blendv_ps(_mm256_castsi256_ps(rounded), x, _mm256_cmp_ps(x, x, _CMP_UNORD_Q));
}
inline Vec rounded(Vec x) { return {rounded_half(x.a), rounded_half(x.b)}; }
inline void store_pairs(PairElement* p, Vec x) { store(p, rounded(x)); }
inline void store_bf16(bf16* p, Vec x) {
    float values[16];
    store(values, x);
    for (int i = 0; i < 16; ++i) p[i] = to_bf16(values[i]);
}

struct Pairs {
    using Element = PairElement;
    struct Packed {
        Vec even, odd;
    };
    struct Factor {
        __m256 even, odd;
    };
    static constexpr int WIDTH = 2;
    static Packed packed(const uint8_t* p) {
        const __m256i a = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(p)), b = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(p + 32));
        const __m256i high = _mm256_set1_epi32(static_cast<int>(0xffff0000u));
        return {{_mm256_castsi256_ps(_mm256_slli_epi32(a, 16)), _mm256_castsi256_ps(_mm256_slli_epi32(b, 16))},
                {_mm256_castsi256_ps(_mm256_and_si256(a, high)), _mm256_castsi256_ps(_mm256_and_si256(b, high))}};
    }
    static Factor factor(const Element* p) { return {_mm256_broadcast_ss(p), _mm256_broadcast_ss(p + 1)}; }
    static Vec step(Vec sum, Factor a, Packed b) {
        sum = {_mm256_fmadd_ps(a.even, b.even.a, sum.a), _mm256_fmadd_ps(a.even, b.even.b, sum.b)};
        return {_mm256_fmadd_ps(a.odd, b.odd.a, sum.a), _mm256_fmadd_ps(a.odd, b.odd.b, sum.b)};
    }
    static void keep(Element* p, Vec x) { store_pairs(p, x); }
};

struct Singles {
    using Element = float;
    using Packed = Vec;
    using Factor = __m256;
    static constexpr int WIDTH = 1;
    static Packed packed(const uint8_t* p) { return load(reinterpret_cast<const float*>(p)); }
    static Factor factor(const Element* p) { return _mm256_broadcast_ss(p); }
    static Vec step(Vec sum, Factor a, Packed b) { return {_mm256_fmadd_ps(a, b.a, sum.a), _mm256_fmadd_ps(a, b.b, sum.b)}; }
    static void keep(Element* p, Vec x) { store(p, x); }
};

#else  // any processor: the compiler's own vectors

constexpr int MAX_ROWS = 2, MAX_COLUMNS = 1;
typedef float Vec __attribute__((vector_size(64)));
typedef int32_t Ints __attribute__((vector_size(64)));
typedef uint32_t Words __attribute__((vector_size(64)));
using PairElement = float;  // rounded to bfloat16

inline Vec load(const float* p) {
    Vec x;
    std::memcpy(&x, p, sizeof x);
    return x;
}
inline void store(float* p, Vec x) { std::memcpy(p, &x, sizeof x); }
inline Vec fill(float x) { return Vec{} + x; }
inline Vec fma(Vec a, Vec b, Vec c) { return a * b + c; }
inline Vec mul(Vec a, Vec b) { return a * b; }
inline Vec add(Vec a, Vec b) { return a + b; }
inline Vec sub(Vec a, Vec b) { return a - b; }
inline Vec max(Vec a, Vec b) { return a > b ? a : b; }
inline float largest(Vec x) {
    float m = x[0];
    for (int i = 1; i < 16; ++i) m = x[i] > m ? x[i] : m;
    return m;
}
inline float sum(Vec x) {
    float s = 0;
    for (int i = 0; i < 16; ++i) s += x[i];
    return s;
}
inline Vec within(Vec x, int64_t first, int64_t end, Vec other) {
    const Ints lanes = {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15};
    const Ints inside = (lanes >= static_cast<int32_t>(first)) & (lanes < static_cast<int32_t>(end));
    return inside ? x : other;
}
inline Vec scale_by_power(Vec x, Vec n) {
    const Ints all = __builtin_convertvector(n, Ints);
    const Ints half = all >> 1;
    return x * (Vec)((half + 127) << 23) * (Vec)((all - half + 127) << 23);
}
// To the nearest integer, |x| below 2^22.
inline Vec round_to_integer(Vec x) {
    const Vec magic = fill(12582912.0f);
    return (x + magic) - magic;
}
inline Vec rounded(Vec x) {
    const Words bits = (Words)x;
    const Words up = (bits + 0x7fffu + ((bits >> 16) & 1u)) & 0xffff0000u;
    return x == x ? (Vec)up : x;
}
inline void store_pairs(PairElement* p, Vec x) { store(p, rounded(x)); }
inline void store_bf16(bf16* p, Vec x) {
    for (int i = 0; i < 16; ++i) p[i] = to_bf16(x[i]);
}

struct Pairs {
    using Element = PairElement;
    struct Packed {
        Vec even, odd;
    };
    struct Factor {
        float even, odd;
    };
    static constexpr int WIDTH = 2;
    static Packed packed(const uint8_t* p) {
        Words x;
        std::memcpy(&x, p, sizeof x);
        return {(Vec)(x << 16), (Vec)(x & 0xffff0000u)};
    }
    static Factor factor(const Element* p) { return {p[0], p[1]}; }
    static Vec step(Vec sum, Factor a, const Packed& b) { return b.odd * a.odd + (b.even * a.even + sum); }
    static void keep(Element* p, Vec x) { store_pairs(p, x); }
};

struct Singles {
    using Element = float;
    using Packed = Vec;
    using Factor = float;
    static constexpr int WIDTH = 1;
    static Packed packed(const uint8_t* p) { return load(reinterpret_cast<const float*>(p)); }
    static Factor factor(const Element* p) { return *p; }
    static Vec step(Vec sum, Factor a, Packed b) { return b * a + sum; }
    static void keep(Element* p, Vec x) { store(p, x); }
};

#endif

#if !defined(KVD_ISA_avx512)
inline void expand(const int8_t* from, uint16_t* to, int64_t count) {
    for (int64_t i = 0; i < count; ++i) {
        const auto value = static_cast<float>(from[i]);
        uint32_t bits;
        std::memcpy(&bits, &value, 4);
        to[i] = static_cast<uint16_t>(bits >> 16);
    }
}
#endif

constexpr int PREFETCH_LEVEL = 2;

// 2^x for x <= 0 (minimax polynomials on [-1/2, 1/2], 2^0 = 1 exactly): to 1e-7, or to 3e-6 where the result is rounded to bfloat16. NaN stays NaN.
template <bool ACCURATE>
inline Vec power_of_two(Vec x) {
    x = max(fill(-200.0f), x);  // far below the smallest number; keeps NaN
    const Vec n = round_to_integer(x);
    const Vec f = sub(x, n);
    Vec y;
    if constexpr (ACCURATE) {
        y = fma(fill(0.00015353361959569156f), f, fill(0.0013398875016719103f));
        y = fma(y, f, fill(0.00961843691766262f));
        y = fma(y, f, fill(0.055503323674201965f));
        y = fma(y, f, fill(0.24022647738456726f));
        y = fma(y, f, fill(0.6931471824645996f));
    } else {
        y = fma(fill(0.009582852944731712f), f, fill(0.055906426161527634f));
        y = fma(y, f, fill(0.24024099111557007f));
        y = fma(y, f, fill(0.6931241750717163f));
    }
    return scale_by_power(fma(y, f, fill(1.0f)), n);
}

// ---- the two products -----------------------------------------------------------------------------------------------------------------------

// A tile is read once and the memory is far: while a product reads a line, it asks for the line at the same place of the next tile, `ahead` bytes
// further (the first rows of a tile do; without AHEAD nobody does).

// s[r, c * 16 : ...] = q[r] . K of block c, over `num_steps` steps.
template <class Kind, bool AHEAD, int R, int C>
inline void score(const typename Kind::Element* q, int64_t ldq, const uint8_t* const* k, const int64_t* ahead, int64_t num_steps, float* s) {
    Vec sums[R][C];
#pragma GCC unroll 6
    for (int r = 0; r < R; ++r)
#pragma GCC unroll 4
        for (int c = 0; c < C; ++c) sums[r][c] = fill(0.0f);
    for (int64_t step = 0; step < num_steps; ++step) {
        typename Kind::Packed columns[C];
#pragma GCC unroll 4
        for (int c = 0; c < C; ++c) {
            columns[c] = Kind::packed(k[c] + step * 64);
            if constexpr (AHEAD) __builtin_prefetch(k[c] + step * 64 + ahead[c], 0, PREFETCH_LEVEL);
        }
#pragma GCC unroll 6
        for (int r = 0; r < R; ++r) {
            const auto factor = Kind::factor(q + r * ldq + step * Kind::WIDTH);
#pragma GCC unroll 4
            for (int c = 0; c < C; ++c) sums[r][c] = Kind::step(sums[r][c], factor, columns[c]);
        }
    }
#pragma GCC unroll 6
    for (int r = 0; r < R; ++r)
#pragma GCC unroll 4
        for (int c = 0; c < C; ++c) store(s + r * TILE + c * BLOCK, sums[r][c]);
}

// o[r] = o[r] * keep[r] + (p[r] . V) * take[r] for C columns of 16 dimensions beginning at byte `column`; without `keep`, o[r] = p[r] . V.
template <class Kind, bool AHEAD, int R, int C>
inline void weigh(const typename Kind::Element* p, const uint8_t* const* v, const int64_t* ahead, int64_t num_blocks, int64_t row_bytes, int64_t column, float* const* o, int64_t dim,
                  const float* keep, const float* take) {
    Vec sums[R][C];
#pragma GCC unroll 6
    for (int r = 0; r < R; ++r)
#pragma GCC unroll 4
        for (int c = 0; c < C; ++c) sums[r][c] = fill(0.0f);
    for (int64_t block = 0; block < num_blocks; ++block) {
        const uint8_t* rows = v[block] + column;
        for (int step = 0; step < BLOCK / Kind::WIDTH; ++step) {
            typename Kind::Packed columns[C];
#pragma GCC unroll 4
            for (int c = 0; c < C; ++c) {
                columns[c] = Kind::packed(rows + step * row_bytes + c * 64);
                if constexpr (AHEAD) __builtin_prefetch(rows + step * row_bytes + c * 64 + ahead[block], 0, PREFETCH_LEVEL);
            }
#pragma GCC unroll 6
            for (int r = 0; r < R; ++r) {
                const auto factor = Kind::factor(p + r * TILE + block * BLOCK + step * Kind::WIDTH);
#pragma GCC unroll 4
                for (int c = 0; c < C; ++c) sums[r][c] = Kind::step(sums[r][c], factor, columns[c]);
            }
        }
    }
#pragma GCC unroll 6
    for (int r = 0; r < R; ++r)
#pragma GCC unroll 4
        for (int c = 0; c < C; ++c) {
            float* target = o[r] + dim + c * 16;
            store(target, keep ? fma(sums[r][c], fill(take[r]), mul(load(target), fill(keep[r]))) : sums[r][c]);
        }
}

// Calls f(std::integral_constant<int, n>) for a run-time n in [1, MAX].
template <int MAX, class F>
inline void with_constant(int64_t n, const F& f) {
    if constexpr (MAX > 1) {
        if (n < MAX) return with_constant<MAX - 1>(n, f);
    }
    f(std::integral_constant<int, MAX>{});
}

// ---- one task -------------------------------------------------------------------------------------------------------------------------------

// Scratch memory of a thread, grown as needed.
class Scratch {
public:
    ~Scratch() { std::free(data_); }
    // `bytes` of 64-byte-aligned memory; the last one is no longer valid.
    uint8_t* reserve(size_t bytes) {
        if (bytes > size_) {
            std::free(data_);
            size_ = 0;
            const size_t wanted = (bytes + 4095) / 4096 * 4096;
            data_ = static_cast<uint8_t*>(std::aligned_alloc(64, wanted));
            if (data_ == nullptr) throw std::bad_alloc();
            size_ = wanted;
        }
        return data_;
    }

private:
    uint8_t* data_ = nullptr;
    size_t size_ = 0;
};

// The factors that merge a partial (m, l) into a running one (largest, sum): running * keep + partial * take. A partial that saw nothing is
// m = -inf, l = 0. Sixteen pairs at once; a lane's result does not depend on the others.
inline void merge_factors(float* largest_so_far, float* sum_so_far, const float* m, const float* l, float factor, float* keep, float* take) {
    const Vec before = load(largest_so_far), partial = load(m), partial_sum = load(l);
    Vec after = max(before, partial);
    Vec kept = power_of_two<true>(mul(sub(before, after), fill(factor)));
    Vec taken = power_of_two<true>(mul(sub(partial, after), fill(factor)));
    float state[3][16];
    store(state[0], after);
    store(state[1], kept);
    store(state[2], taken);
    for (int i = 0; i < 16; ++i) {
        if (m[i] == MINUS_INFINITY && l[i] == 0.0f) {
            state[0][i] = largest_so_far[i];
            state[1][i] = 1.0f;
            state[2][i] = 0.0f;
        }
    }
    store(largest_so_far, load(state[0]));
    kept = load(state[1]);
    taken = load(state[2]);
    store(keep, kept);
    store(take, taken);
    store(sum_so_far, fma(partial_sum, taken, mul(load(sum_so_far), kept)));
}

inline void write_out(const AttendCall& call, int64_t token, int64_t head, const float* values, float sum) {
    const int64_t head_dim = call.plan->layout.head_dim;
    const int64_t place = (token * call.plan->num_heads + head) * head_dim;
    const Vec share = fill(1.0f / sum);
    for (int64_t d = 0; d < head_dim; d += 16) {
        const Vec x = mul(load(values + d), share);
        if (call.compute == Compute::bf16) {
            store_bf16(static_cast<bf16*>(call.out) + place + d, x);
        } else {
            store(static_cast<float*>(call.out) + place + d, x);
        }
    }
}

template <KvType TYPE>
class Task {
    using Kind = std::conditional_t<TYPE == KvType::f32, Singles, Pairs>;
    using Element = typename Kind::Element;
    static constexpr int64_t CODE_BYTES = TYPE == KvType::f32 ? 4 : TYPE == KvType::bf16 ? 2 : 1;
    static constexpr int64_t WORK_BYTES = TYPE == KvType::f32 ? 4 : 2;  // of a value as the products read it

public:
    Task(const AttendCall& call, int64_t task, int64_t kv_head)
        : call_(call), plan_(*call.plan), task_(plan_.tasks[static_cast<size_t>(task)]), kv_head_(kv_head), head_dim_(plan_.layout.head_dim), group_(plan_.group()),
          factor_(call.scale * 1.44269504088896341f) {}

    void run() {
        place();
        gather_queries();
        for (int64_t tile = task_.first_tile; tile < task_.end_tile; ++tile) run_tile(tile);
        finish();
    }

private:
    using Impl = AttentionPlan::Impl;

    const Impl::Unit& unit(int64_t member) const { return plan_.units[static_cast<size_t>(plan_.members[static_cast<size_t>(task_.first_member + member)].unit)]; }
    const Impl::Part& part(int64_t member) const { return plan_.parts[static_cast<size_t>(plan_.members[static_cast<size_t>(task_.first_member + member)].part)]; }

    // Cuts the scratch memory up.
    void place() {
        num_rows_ = 0;
        for (int64_t i = 0; i < task_.num_members; ++i) num_rows_ += unit(i).num_tokens * group_;
        const int64_t rows = (num_rows_ + 31) / 16 * 16;  // loads of sixteen may begin at the last row
        const int64_t block_bytes = BLOCK * head_dim_ * WORK_BYTES;
        const int64_t sizes[] = {rows * head_dim_ * static_cast<int64_t>(sizeof(Element)), rows * head_dim_ * 4, rows * 4, rows * 4, rows * 8, rows * 8,
                                 MAX_ROWS * TILE * 4, MAX_ROWS * TILE * static_cast<int64_t>(sizeof(Element)), block_bytes, TYPE == KvType::int8 ? 2 * BLOCKS_OF_TILE * block_bytes : 0};
        size_t total = 0;
        for (const int64_t size : sizes) total += static_cast<size_t>(size + 63) / 64 * 64;
        static thread_local Scratch scratch;
        uint8_t* next = scratch.reserve(total);
        const auto take = [&next](int64_t size) {
            uint8_t* taken = next;
            next += (size + 63) / 64 * 64;
            return taken;
        };
        queries_ = reinterpret_cast<Element*>(take(sizes[0]));
        values_ = reinterpret_cast<float*>(take(sizes[1]));
        largest_ = reinterpret_cast<float*>(take(sizes[2]));
        sums_ = reinterpret_cast<float*>(take(sizes[3]));
        positions_ = reinterpret_cast<int64_t*>(take(sizes[4]));
        records_ = reinterpret_cast<float**>(take(sizes[5]));
        scores_ = reinterpret_cast<float*>(take(sizes[6]));
        weights_ = reinterpret_cast<Element*>(take(sizes[7]));
        clean_ = take(sizes[8]);
        expanded_ = take(sizes[9]);
    }

    // The query rows (token by token, its heads of this KV head together) as the products read them.
    void gather_queries() {
        int64_t row = 0;
        const int64_t stride = plan_.num_heads * plan_.record_floats();
        first_position_ = std::numeric_limits<int64_t>::max();
        last_position_ = 0;
        for (int64_t i = 0; i < task_.num_members; ++i) {
            const Impl::Unit& described = unit(i);
            const Impl::Part& kept = part(i);
            first_position_ = std::min(first_position_, described.first_position);
            last_position_ = std::max(last_position_, described.first_position + described.num_tokens - 1);
            for (int64_t token = 0; token < described.num_tokens; ++token) {
                const float* q = call_.q + (described.first_token + token) * call_.ldq + kv_head_ * group_ * head_dim_;
                for (int64_t head = 0; head < group_; ++head, ++row) {
                    for (int64_t d = 0; d < head_dim_; d += 16) Kind::keep(queries_ + row * head_dim_ + d, load(q + head * head_dim_ + d));
                    positions_[row] = described.first_position + token;
                    records_[row] = call_.records + (kept.record + token * kept.num_records) * stride + (kv_head_ * group_ + head) * plan_.record_floats();
                }
            }
        }
        if (task_.folds) {
            std::memset(values_, 0, static_cast<size_t>(num_rows_ * head_dim_ * 4));
            for (int64_t i = 0; i < num_rows_; ++i) {
                largest_[i] = MINUS_INFINITY;
                sums_[i] = 0.0f;
            }
        }
    }

    const uint8_t* plane(const int32_t* table, int64_t block, int64_t kv) const {
        return call_.pool_rows + table[block] * plan_.layout.row_bytes() + (call_.layer * 2 + kv) * plan_.layout.plane_bytes();
    }

    void run_tile(int64_t tile) {
        const int64_t start = tile * TILE;
        // what the earliest and the latest query see of the tile bounds what is read
        const int64_t low = std::max<int64_t>(0, plan_.first_seen(first_position_) - start), high = std::min(TILE, last_position_ + 1 - start);
        if (low >= high) return nothing_seen(tile);
        const int64_t first_block = low / BLOCK, end_block = (high + BLOCK - 1) / BLOCK;
        const int32_t* table = plan_.shape.block_tables + unit(0).row * plan_.shape.table_stride + tile * BLOCKS_OF_TILE;
        const int64_t block_values = BLOCK * head_dim_;
        for (int64_t b = first_block; b < end_block; ++b) {
            const uint8_t* k = plane(table, b, 0);
            const uint8_t* v = plane(table, b, 1);
            k_[b] = k + kv_head_ * block_values * CODE_BYTES;
            v_[b] = v + kv_head_ * block_values * CODE_BYTES;
            if constexpr (TYPE == KvType::int8) {
                const int64_t scales = plan_.layout.num_kv_heads * block_values + kv_head_ * BLOCK * 4;
                k_scales_[b] = reinterpret_cast<const float*>(k + scales);
                v_scales_[b] = reinterpret_cast<const float*>(v + scales);
                auto* k_values = reinterpret_cast<uint16_t*>(expanded_) + b * block_values;
                auto* v_values = k_values + BLOCKS_OF_TILE * block_values;
                expand(reinterpret_cast<const int8_t*>(k_[b]), k_values, block_values);
                expand(reinterpret_cast<const int8_t*>(v_[b]), v_values, block_values);
                k_[b] = reinterpret_cast<const uint8_t*>(k_values);
                v_[b] = reinterpret_cast<const uint8_t*>(v_values);
            }
        }
        // Zero times what stands behind the last position would still be NaN, were it NaN.
        if (high % BLOCK) {
            std::memcpy(clean_, v_[end_block - 1], static_cast<size_t>(block_values * WORK_BYTES));
            clear_positions(clean_, high % BLOCK);
            v_[end_block - 1] = clean_;
        }
        look_ahead(tile + 1, table + BLOCKS_OF_TILE, first_block, end_block);
        for (int64_t row = 0; row < num_rows_; row += MAX_ROWS) {
            const int64_t count = std::min<int64_t>(MAX_ROWS, num_rows_ - row);
            if (row == 0) {
                run_rows<TYPE != KvType::int8>(tile, row, count, first_block, end_block);
            } else {
                run_rows<false>(tile, row, count, first_block, end_block);
            }
        }
    }

    // How far the blocks of the next tile are from those of this one.
    void look_ahead(int64_t tile, const int32_t* table, int64_t first_block, int64_t end_block) {
        const int64_t num_blocks = tile < task_.end_tile ? std::min(BLOCKS_OF_TILE, (last_position_ - tile * TILE) / BLOCK + 1) : 0;
        for (int64_t b = first_block; b < end_block; ++b) {
            k_ahead_[b] = v_ahead_[b] = 0;
            if (b >= num_blocks) continue;
            const int64_t head = kv_head_ * BLOCK * head_dim_ * CODE_BYTES;
            if constexpr (TYPE == KvType::int8) {
                for (int64_t i = 0; i < BLOCK * head_dim_; i += 64) {
                    __builtin_prefetch(plane(table, b, 0) + head + i, 0, PREFETCH_LEVEL);
                    __builtin_prefetch(plane(table, b, 1) + head + i, 0, PREFETCH_LEVEL);
                }
            } else {
                k_ahead_[b] = plane(table, b, 0) + head - k_[b];
                v_ahead_[b] = plane(table, b, 1) + head - v_[b];
            }
        }
    }

    void clear_positions(uint8_t* block, int64_t first) const {
        const int64_t row_bytes = head_dim_ * 4;  // of one step: a pair of bfloat16 or one float32 a dimension
        if (Kind::WIDTH == 2 && first % 2) {
            auto* values = reinterpret_cast<uint16_t*>(block + first / 2 * row_bytes);
            for (int64_t d = 0; d < head_dim_; ++d) values[2 * d + 1] = 0;
            ++first;
        }
        std::memset(block + first / Kind::WIDTH * row_bytes, 0, static_cast<size_t>((BLOCK - first) / Kind::WIDTH * row_bytes));
    }

    void nothing_seen(int64_t tile) {
        if (task_.folds) return;
        for (int64_t row = 0; row < num_rows_; ++row) mark_unseen(record(row, tile));
    }

    float* record(int64_t row, int64_t tile) const { return records_[row] + (tile - task_.first_tile) * plan_.num_heads * plan_.record_floats(); }
    static void mark_unseen(float* record) {
        record[0] = MINUS_INFINITY;
        record[1] = 0.0f;
    }

    template <bool AHEAD>
    void run_rows(int64_t tile, int64_t first, int64_t count, int64_t first_block, int64_t end_block) {
        const int64_t start = tile * TILE;
        // rows ascend by position within a unit, but not over units: each has its own bounds
        int64_t low[MAX_ROWS], high[MAX_ROWS];
        bool whole = end_block - first_block == BLOCKS_OF_TILE, any = false;
        for (int64_t r = 0; r < count; ++r) {
            const int64_t position = positions_[first + r];
            low[r] = std::max<int64_t>(0, plan_.first_seen(position) - start);
            high[r] = std::min(TILE, position + 1 - start);
            whole = whole && low[r] == 0 && high[r] == TILE;
            any = any || low[r] < high[r];
        }
        if (!any) {
            if (!task_.folds)
                for (int64_t r = 0; r < count; ++r) mark_unseen(record(first + r, tile));
            return;
        }
        const Element* q = queries_ + first * head_dim_;
        const int64_t num_steps = head_dim_ / Kind::WIDTH;
        with_constant<MAX_ROWS>(count, [&](auto rows) {
            for (int64_t b = first_block; b < end_block; b += MAX_COLUMNS) {
                with_constant<MAX_COLUMNS>(std::min<int64_t>(MAX_COLUMNS, end_block - b), [&](auto columns) {
                    score<Kind, AHEAD, rows(), columns()>(q, head_dim_, k_ + b, k_ahead_ + b, num_steps, scores_ + b * BLOCK);
                });
            }
        });
        alignas(64) float m[16], l[16], keep[16], take[16];
        for (int i = 0; i < 16; ++i) m[i] = MINUS_INFINITY, l[i] = 0.0f;
        for (int64_t r = 0; r < count; ++r) {
            if (whole) {
                soften<true>(r, 0, BLOCKS_OF_TILE, 0, TILE, m[r], l[r]);
            } else {
                soften<false>(r, first_block, end_block, low[r], high[r], m[r], l[r]);
            }
        }
        float* targets[MAX_ROWS];
        if (task_.folds) {
            alignas(64) float before[16], sum[16];
            for (int i = 0; i < 16; ++i) before[i] = 0.0f, sum[i] = 0.0f;
            for (int64_t r = 0; r < count; ++r) before[r] = largest_[first + r], sum[r] = sums_[first + r];
            merge_factors(before, sum, m, l, factor_, keep, take);
            for (int64_t r = 0; r < count; ++r) {
                largest_[first + r] = before[r];
                sums_[first + r] = sum[r];
                targets[r] = values_ + (first + r) * head_dim_;
            }
        } else {
            for (int64_t r = 0; r < count; ++r) {
                float* kept = record(first + r, tile);
                kept[0] = m[r];
                kept[1] = l[r];
                targets[r] = kept + 16;
            }
        }
        const float* kept = task_.folds ? keep : nullptr;
        with_constant<MAX_ROWS>(count, [&](auto rows) {
            for (int64_t d = 0; d < head_dim_; d += 16 * MAX_COLUMNS) {
                with_constant<MAX_COLUMNS>(std::min<int64_t>(MAX_COLUMNS, (head_dim_ - d) / 16), [&](auto columns) {
                    weigh<Kind, AHEAD, rows(), columns()>(weights_ + first_block * BLOCK, v_ + first_block, v_ahead_ + first_block, end_block - first_block, head_dim_ * 4, d * 4,
                                                          targets, d, kept, take);
                });
            }
        });
    }

    // Softmax of one row over the tile: its largest score, the sum of exponentials, the exponentials as the product with V reads them.
    template <bool WHOLE>
    void soften(int64_t r, int64_t first_block, int64_t end_block, int64_t low, int64_t high, float& m, float& l) {
        const float* s = scores_ + r * TILE;
        Element* p = weights_ + r * TILE;
        const Vec nothing = fill(MINUS_INFINITY), zero = fill(0.0f);
        if (!WHOLE && low >= high) {
            for (int64_t b = first_block; b < end_block; ++b) Kind::keep(p + b * BLOCK, zero);
            return;
        }
        Vec x[BLOCKS_OF_TILE];
#pragma GCC unroll 4
        for (int64_t b = 0; b < BLOCKS_OF_TILE; ++b) {
            if (!WHOLE && (b < first_block || b >= end_block)) {
                x[b] = nothing;
                continue;
            }
            x[b] = load(s + b * BLOCK);
            if constexpr (TYPE == KvType::int8) x[b] = mul(x[b], load(k_scales_[b]));
            if constexpr (!WHOLE) x[b] = within(x[b], low - b * BLOCK, high - b * BLOCK, nothing);
        }
        m = largest(max(max(x[0], x[1]), max(x[2], x[3])));
        const Vec shift = fill(m), factor = fill(factor_);
#pragma GCC unroll 4
        for (int64_t b = 0; b < BLOCKS_OF_TILE; ++b) {
            if (!WHOLE && (b < first_block || b >= end_block)) {
                x[b] = zero;
                continue;
            }
            x[b] = power_of_two<TYPE == KvType::f32>(mul(sub(x[b], shift), factor));
            if constexpr (!WHOLE) x[b] = within(x[b], low - b * BLOCK, high - b * BLOCK, zero);
            Vec weight = x[b];
            if constexpr (TYPE == KvType::int8) {
                weight = mul(weight, load(v_scales_[b]));
                if constexpr (!WHOLE) weight = within(weight, low - b * BLOCK, high - b * BLOCK, zero);
            }
            Kind::keep(p + b * BLOCK, weight);
        }
        l = sum(add(add(x[0], x[1]), add(x[2], x[3])));
    }

    void finish() {
        int64_t row = 0;
        for (int64_t i = 0; i < task_.num_members; ++i) {
            const int64_t index = plan_.members[static_cast<size_t>(task_.first_member + i)].unit;
            const Impl::Unit& described = unit(i);
            if (task_.direct) {
                for (int64_t token = 0; token < described.num_tokens; ++token)
                    for (int64_t head = 0; head < group_; ++head, ++row) write_out(call_, described.first_token + token, kv_head_ * group_ + head, values_ + row * head_dim_, sums_[row]);
                continue;
            }
            const int64_t rows = described.num_tokens * group_;
            if (task_.folds) {
                for (int64_t r = row; r < row + rows; ++r) {
                    records_[r][0] = largest_[r];
                    records_[r][1] = sums_[r];
                    std::memcpy(records_[r] + 16, values_ + r * head_dim_, static_cast<size_t>(head_dim_ * 4));
                }
            }
            row += rows;
            auto& left = plan_.left[static_cast<size_t>(index * plan_.layout.num_kv_heads + kv_head_)];
            if (left.fetch_sub(1, std::memory_order_acq_rel) == 1) {
                left.store(described.num_parts, std::memory_order_relaxed);  // for the next layer
                merge(described);
            }
        }
    }

    // All records of a unit, by ascending tiles.
    void merge(const Impl::Unit& described) {
        const int64_t floats = plan_.record_floats(), stride = plan_.num_heads * floats;
        alignas(64) float values[16 * 256];
        for (int64_t token = 0; token < described.num_tokens; ++token) {
            for (int64_t first = kv_head_ * group_; first < (kv_head_ + 1) * group_; first += 16) {
                const int64_t count = std::min<int64_t>(16, (kv_head_ + 1) * group_ - first);
                alignas(64) float largest_so_far[16], sum[16], m[16], l[16], keep[16], take[16];
                for (int i = 0; i < 16; ++i) largest_so_far[i] = MINUS_INFINITY, sum[i] = 0.0f, m[i] = MINUS_INFINITY, l[i] = 0.0f;
                std::memset(values, 0, static_cast<size_t>(count * head_dim_ * 4));
                for (int32_t j = 0; j < described.num_parts; ++j) {
                    const Impl::Part& kept = plan_.parts[static_cast<size_t>(described.first_part + j)];
                    for (int64_t i = 0; i < kept.num_records; ++i) {
                        const float* record = call_.records + (kept.record + token * kept.num_records + i) * stride + first * floats;
                        for (int64_t h = 0; h < count; ++h) m[h] = record[h * floats], l[h] = record[h * floats + 1];
                        merge_factors(largest_so_far, sum, m, l, factor_, keep, take);
                        for (int64_t h = 0; h < count; ++h) {
                            if (m[h] == MINUS_INFINITY && l[h] == 0.0f) continue;  // it has no values
                            float* target = values + h * head_dim_;
                            const Vec kept_share = fill(keep[h]), taken_share = fill(take[h]);
                            for (int64_t d = 0; d < head_dim_; d += 16)
                                store(target + d, fma(load(record + h * floats + 16 + d), taken_share, mul(load(target + d), kept_share)));
                        }
                    }
                }
                for (int64_t h = 0; h < count; ++h) write_out(call_, described.first_token + token, first + h, values + h * head_dim_, sum[h]);
            }
        }
    }

    const AttendCall& call_;
    Impl& plan_;
    const Impl::Task& task_;
    const int64_t kv_head_, head_dim_, group_;
    const float factor_;  // scale * log2(e)
    int64_t num_rows_ = 0, first_position_ = 0, last_position_ = 0;
    Element* queries_ = nullptr;    // [rows, head_dim]
    float* values_ = nullptr;       // [rows, head_dim], the running fold
    float* largest_ = nullptr;      // [rows]
    float* sums_ = nullptr;         // [rows]
    int64_t* positions_ = nullptr;  // [rows]
    float** records_ = nullptr;     // [rows]
    float* scores_ = nullptr;       // [MAX_ROWS, TILE]
    Element* weights_ = nullptr;    // [MAX_ROWS, TILE]
    uint8_t* clean_ = nullptr;      // V of one block
    uint8_t* expanded_ = nullptr;   // K, then V, of one tile
    const uint8_t* k_[BLOCKS_OF_TILE] = {};
    const uint8_t* v_[BLOCKS_OF_TILE] = {};
    int64_t k_ahead_[BLOCKS_OF_TILE] = {}, v_ahead_[BLOCKS_OF_TILE] = {};
    const float* k_scales_[BLOCKS_OF_TILE] = {};
    const float* v_scales_[BLOCKS_OF_TILE] = {};
};

void run_task(const AttendCall& call, int64_t task, int64_t kv_head) {
    switch (call.plan->layout.type) {
        case KvType::f32: return Task<KvType::f32>(call, task, kv_head).run();
        case KvType::bf16: return Task<KvType::bf16>(call, task, kv_head).run();
        case KvType::int8: return Task<KvType::int8>(call, task, kv_head).run();
    }
}

// ---- writing --------------------------------------------------------------------------------------------------------------------------------

// One head of K (or V) of one position, quantised symmetrically; returns the scale. A value that is not finite makes the scale NaN, so that whoever
// attends to the position sees it.
inline float quantise(const float* x, int64_t head_dim, int8_t (&codes)[256]) {
    float largest = 0.0f;
    bool finite = true;
    for (int64_t d = 0; d < head_dim; ++d) {
        const float size = std::fabs(x[d]);
        finite = finite && size <= std::numeric_limits<float>::max();
        largest = size > largest ? size : largest;
    }
    const float inverse = 127.0f / largest;
    if (!finite || !(inverse <= std::numeric_limits<float>::max())) {  // all zero, or too small to be told from it
        std::memset(codes, 0, sizeof codes);
        return finite ? 0.0f : std::numeric_limits<float>::quiet_NaN();
    }
    for (int64_t d = 0; d < head_dim; ++d) codes[d] = static_cast<int8_t>(std::nearbyintf(x[d] * inverse));
    return largest / 127.0f;
}

template <class Value>
inline void scatter_k(const Value* x, int64_t head_dim, int64_t offset, Value* k) {
    for (int64_t d = 0; d < head_dim; d += 2) {
        k[(d / 2 * BLOCK + offset) * 2] = x[d];
        k[(d / 2 * BLOCK + offset) * 2 + 1] = x[d + 1];
    }
}

template <class Value>
inline void scatter_v(const Value* x, int64_t head_dim, int64_t offset, Value* v) {
    for (int64_t d = 0; d < head_dim; ++d) v[(offset / 2 * head_dim + d) * 2 + offset % 2] = x[d];
}

void write_token(const KvLayout& layout, uint8_t* k_plane, uint8_t* v_plane, int64_t offset, const float* k, const float* v) {
    const int64_t head_dim = layout.head_dim;
    for (int64_t head = 0; head < layout.num_kv_heads; ++head, k += head_dim, v += head_dim) {
        const int64_t first = head * BLOCK * head_dim;
        if (layout.type == KvType::f32) {
            float* k_head = reinterpret_cast<float*>(k_plane) + first;
            for (int64_t d = 0; d < head_dim; ++d) k_head[d * BLOCK + offset] = k[d];
            std::memcpy(reinterpret_cast<float*>(v_plane) + first + offset * head_dim, v, static_cast<size_t>(head_dim * 4));
        } else if (layout.type == KvType::bf16) {
            bf16 values[256];
            for (int64_t d = 0; d < head_dim; d += 16) store_bf16(values + d, load(k + d));
            scatter_k(values, head_dim, offset, reinterpret_cast<bf16*>(k_plane) + first);
            for (int64_t d = 0; d < head_dim; d += 16) store_bf16(values + d, load(v + d));
            scatter_v(values, head_dim, offset, reinterpret_cast<bf16*>(v_plane) + first);
        } else {
            int8_t codes[256];
            const int64_t scale = layout.num_kv_heads * BLOCK * head_dim + (head * BLOCK + offset) * 4;
            *reinterpret_cast<float*>(k_plane + scale) = quantise(k, head_dim, codes);
            scatter_k(codes, head_dim, offset, reinterpret_cast<int8_t*>(k_plane) + first);
            *reinterpret_cast<float*>(v_plane + scale) = quantise(v, head_dim, codes);
            scatter_v(codes, head_dim, offset, reinterpret_cast<int8_t*>(v_plane) + first);
        }
    }
}

void write_tokens(const WriteCall& call, int64_t first_token, int64_t end_token) {
    const StepShape& shape = *call.shape;
    const KvLayout& layout = *call.layout;
    // the row of the first token: the last one that begins at or before it
    int64_t row = 0, above = shape.num_rows;
    while (above - row > 1) {
        const int64_t middle = (row + above) / 2;
        (shape.starts[middle] <= first_token ? row : above) = middle;
    }
    for (int64_t token = first_token; token < end_token; ++token) {
        while (token >= shape.starts[row + 1]) ++row;
        const int64_t position = shape.num_computed[row] + token - shape.starts[row];
        const int64_t block = shape.block_tables[row * shape.table_stride + position / BLOCK];
        uint8_t* k_plane = call.pool_rows + block * layout.row_bytes() + call.layer * 2 * layout.plane_bytes();
        write_token(layout, k_plane, k_plane + layout.plane_bytes(), position % BLOCK, call.k + token * call.ld, call.v + token * call.ld);
    }
}

}  // namespace

const AttentionTable attention_table = {run_task, write_tokens};

}  // namespace KVD_ISA
}  // namespace kvd
