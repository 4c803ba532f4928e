// The small operations between the products, for one instruction set. A row's numbers depend on that row alone: few rows run on the caller,
// because waking a thread costs more than they do; many are cut into pieces of whole rows.
#include "elementwise_table.h"

#include <algorithm>
#include <cmath>
#include <cstring>

#if defined(KVD_ISA_avx512) || defined(KVD_ISA_avx2)
#if defined(__GNUC__) && !defined(__clang__)
#pragma GCC diagnostic ignored "-Wuninitialized"  // GCC 12's own header, in _mm512_reduce_* (GCC bug 105593)
#endif
#include <immintrin.h>
#endif

namespace kvd {
namespace KVD_ISA {
namespace {

// One vector of the set: load, store and the few operations that the kernels below are written in. `tail` lanes beyond the end read as zero and are
// not written, so that any size works.
#if defined(KVD_ISA_avx512)

struct Vec {
    static constexpr int64_t LANES = 16;
    __m512 v;

    static Vec set(float x) { return {_mm512_set1_ps(x)}; }
    static Vec load(const float* p) { return {_mm512_loadu_ps(p)}; }
    static Vec load(const float* p, int64_t n) { return {_mm512_maskz_loadu_ps(mask(n), p)}; }
    void store(float* p) const { _mm512_storeu_ps(p, v); }
    void store(float* p, int64_t n) const { _mm512_mask_storeu_ps(p, mask(n), v); }
    void store(bf16* p) const { _mm256_storeu_si256(reinterpret_cast<__m256i*>(p), (__m256i)_mm512_cvtneps_pbh(v)); }
    void store(bf16* p, int64_t n) const { _mm256_mask_storeu_epi16(p, mask(n), (__m256i)_mm512_cvtneps_pbh(v)); }
    float sum() const { return _mm512_reduce_add_ps(v); }

private:
    static __mmask16 mask(int64_t n) { return static_cast<__mmask16>((1u << n) - 1); }
};
inline Vec operator+(Vec a, Vec b) { return {_mm512_add_ps(a.v, b.v)}; }
inline Vec operator-(Vec a, Vec b) { return {_mm512_sub_ps(a.v, b.v)}; }
inline Vec operator*(Vec a, Vec b) { return {_mm512_mul_ps(a.v, b.v)}; }
inline Vec operator/(Vec a, Vec b) { return {_mm512_div_ps(a.v, b.v)}; }
inline Vec fma(Vec a, Vec b, Vec c) { return {_mm512_fmadd_ps(a.v, b.v, c.v)}; }
// A NaN in x stays one: the instructions return their second operand then.
inline Vec clamp(Vec x, float low, float high) { return {_mm512_max_ps(_mm512_set1_ps(low), _mm512_min_ps(_mm512_set1_ps(high), x.v))}; }
inline Vec round(Vec x) { return {_mm512_roundscale_ps(x.v, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC)}; }
inline Vec times_power_of_two(Vec x, Vec n) { return {_mm512_scalef_ps(x.v, n.v)}; }
inline Vec where_zero(Vec x, Vec then, Vec otherwise) {
    return {_mm512_mask_blend_ps(_mm512_cmp_ps_mask(x.v, _mm512_setzero_ps(), _CMP_EQ_OQ), otherwise.v, then.v)};
}
// x > 0 as m * 2^e, m in [sqrt(1/2), sqrt(2)).
inline Vec split(Vec x, Vec& e) {
    const __m512 mantissa = _mm512_getmant_ps(x.v, _MM_MANT_NORM_1_2, _MM_MANT_SIGN_zero);
    const __mmask16 large = _mm512_cmp_ps_mask(mantissa, _mm512_set1_ps(1.41421356f), _CMP_GE_OQ);
    const __m512 exponent = _mm512_getexp_ps(x.v);
    e.v = _mm512_mask_add_ps(exponent, large, exponent, _mm512_set1_ps(1.0f));
    return {_mm512_mask_mul_ps(mantissa, large, mantissa, _mm512_set1_ps(0.5f))};
}

#elif defined(KVD_ISA_avx2)

struct Vec {
    static constexpr int64_t LANES = 8;
    __m256 v;

    static Vec set(float x) { return {_mm256_set1_ps(x)}; }
    static Vec load(const float* p) { return {_mm256_loadu_ps(p)}; }
    static Vec load(const float* p, int64_t n) { return {_mm256_maskload_ps(p, mask(n))}; }
    void store(float* p) const { _mm256_storeu_ps(p, v); }
    void store(float* p, int64_t n) const { _mm256_maskstore_ps(p, mask(n), v); }
    void store(bf16* p) const { _mm_storeu_si128(reinterpret_cast<__m128i*>(p), rounded()); }
    void store(bf16* p, int64_t n) const {
        alignas(16) bf16 values[LANES];
        _mm_store_si128(reinterpret_cast<__m128i*>(values), rounded());
        std::memcpy(p, values, static_cast<size_t>(n) * sizeof(bf16));
    }
    float sum() const {
        const __m128 four = _mm_add_ps(_mm256_castps256_ps128(v), _mm256_extractf128_ps(v, 1));
        const __m128 two = _mm_add_ps(four, _mm_movehl_ps(four, four));
        return _mm_cvtss_f32(_mm_add_ss(two, _mm_movehdup_ps(two)));
    }

private:
    static __m256i mask(int64_t n) { return _mm256_cmpgt_epi32(_mm256_set1_epi32(static_cast<int>(n)), _mm256_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7)); }
    // Round to nearest even; NaN stays NaN.
    __m128i rounded() const {
        const __m256i bits = _mm256_castps_si256(v);
        const __m256i odd = _mm256_and_si256(_mm256_srli_epi32(bits, 16), _mm256_set1_epi32(1));
        const __m256i nearest = _mm256_srli_epi32(_mm256_add_epi32(bits, _mm256_add_epi32(odd, _mm256_set1_epi32(0x7fff))), 16);
        const __m256i quiet = _mm256_or_si256(_mm256_srli_epi32(bits, 16), _mm256_set1_epi32(0x40));
        const __m256 nan = _mm256_cmp_ps(v, v, _CMP_UNORD_Q);
        const __m256i chosen = _mm256_blendv_epi8(nearest, quiet, _mm256_castps_si256(nan));
        return _mm_packus_epi32(_mm256_castsi256_si128(chosen), _mm256_extracti128_si256(chosen, 1));
    }
};
inline Vec operator+(Vec a, Vec b) { return {_mm256_add_ps(a.v, b.v)}; }
inline Vec operator-(Vec a, Vec b) { return {_mm256_sub_ps(a.v, b.v)}; }
inline Vec operator*(Vec a, Vec b) { return {_mm256_mul_ps(a.v, b.v)}; }
inline Vec operator/(Vec a, Vec b) { return {_mm256_div_ps(a.v, b.v)}; }
inline Vec fma(Vec a, Vec b, Vec c) { return {_mm256_fmadd_ps(a.v, b.v, c.v)}; }
// A NaN in x stays one: the instructions return their second operand then.
inline Vec clamp(Vec x, float low, float high) { return {_mm256_max_ps(_mm256_set1_ps(low), _mm256_min_ps(_mm256_set1_ps(high), x.v))}; }
inline Vec round(Vec x) { return {_mm256_round_ps(x.v, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC)}; }
inline Vec times_power_of_two(Vec x, Vec n) {
    const __m256i exponent = _mm256_slli_epi32(_mm256_add_epi32(_mm256_cvtps_epi32(n.v), _mm256_set1_epi32(127)), 23);
    return {_mm256_mul_ps(x.v, _mm256_castsi256_ps(exponent))};
}
inline Vec where_zero(Vec x, Vec then, Vec otherwise) {
    return {_mm256_blendv_ps(otherwise.v, then.v, _mm256_cmp_ps(x.v, _mm256_setzero_ps(), _CMP_EQ_OQ))};
}
// x > 0 as m * 2^e, m in [sqrt(1/2), sqrt(2)).
inline Vec split(Vec x, Vec& e) {
    const __m256i bits = _mm256_castps_si256(x.v);
    const __m256 mantissa = _mm256_castsi256_ps(_mm256_or_si256(_mm256_and_si256(bits, _mm256_set1_epi32(0x007fffff)), _mm256_set1_epi32(0x3f800000)));
    const __m256 large = _mm256_cmp_ps(mantissa, _mm256_set1_ps(1.41421356f), _CMP_GE_OQ);
    const __m256 exponent = _mm256_cvtepi32_ps(_mm256_sub_epi32(_mm256_srli_epi32(bits, 23), _mm256_set1_epi32(127)));
    e.v = _mm256_add_ps(exponent, _mm256_and_ps(large, _mm256_set1_ps(1.0f)));
    return {_mm256_blendv_ps(mantissa, _mm256_mul_ps(mantissa, _mm256_set1_ps(0.5f)), large)};
}

#else

struct Vec {
    static constexpr int64_t LANES = 4;
    float v[LANES];

    static Vec set(float x) { return {{x, x, x, x}}; }
    static Vec load(const float* p) { return load(p, LANES); }
    static Vec load(const float* p, int64_t n) {
        Vec out = set(0.0f);
        std::memcpy(out.v, p, static_cast<size_t>(n) * sizeof(float));
        return out;
    }
    void store(float* p) const { store(p, LANES); }
    void store(float* p, int64_t n) const { std::memcpy(p, v, static_cast<size_t>(n) * sizeof(float)); }
    void store(bf16* p) const { store(p, LANES); }
    void store(bf16* p, int64_t n) const {
        for (int64_t i = 0; i < n; ++i) p[i] = to_bf16(v[i]);
    }
    float sum() const { return (v[0] + v[2]) + (v[1] + v[3]); }
};
template <class Operation>
inline Vec each(const Operation& operation) {
    Vec out;
    for (int i = 0; i < Vec::LANES; ++i) out.v[i] = operation(i);
    return out;
}
inline Vec operator+(Vec a, Vec b) { return each([&](int i) { return a.v[i] + b.v[i]; }); }
inline Vec operator-(Vec a, Vec b) { return each([&](int i) { return a.v[i] - b.v[i]; }); }
inline Vec operator*(Vec a, Vec b) { return each([&](int i) { return a.v[i] * b.v[i]; }); }
inline Vec operator/(Vec a, Vec b) { return each([&](int i) { return a.v[i] / b.v[i]; }); }
inline Vec fma(Vec a, Vec b, Vec c) { return each([&](int i) { return a.v[i] * b.v[i] + c.v[i]; }); }
inline Vec clamp(Vec x, float low, float high) { return each([&](int i) { return x.v[i] < low ? low : x.v[i] > high ? high : x.v[i]; }); }
inline Vec round(Vec x) { return each([&](int i) { return std::nearbyint(x.v[i]); }); }
inline Vec times_power_of_two(Vec x, Vec n) {
    return each([&](int i) { return std::isnan(n.v[i]) ? x.v[i] : std::ldexp(x.v[i], static_cast<int>(n.v[i])); });
}
inline Vec where_zero(Vec x, Vec then, Vec otherwise) {
    return each([&](int i) { return x.v[i] == 0.0f ? then.v[i] : otherwise.v[i]; });
}
// x > 0 as m * 2^e, m in [sqrt(1/2), sqrt(2)).
inline Vec split(Vec x, Vec& e) {
    return each([&](int i) {
        int exponent;
        float mantissa = std::frexp(x.v[i], &exponent);
        if (mantissa < 0.70710678f) mantissa *= 2.0f, --exponent;
        e.v[i] = static_cast<float>(exponent);
        return mantissa;
    });
}

#endif

// e^x to within 1.5 units in the last place: x = n ln 2 + r with |r| <= ln 2 / 2, and a polynomial in r (Cephes' expf, S. Moshier).
// Beyond +-87 the result stays that of the bound.
inline Vec exp(Vec x) {
    x = clamp(x, -87.0f, 87.0f);
    const Vec n = round(x * Vec::set(1.44269504088896341f));
    Vec r = fma(n, Vec::set(-0.693359375f), x);
    r = fma(n, Vec::set(2.12194440e-4f), r);
    Vec p = fma(Vec::set(1.9875691500e-4f), r, Vec::set(1.3981999507e-3f));
    p = fma(p, r, Vec::set(8.3334519073e-3f));
    p = fma(p, r, Vec::set(4.1665795894e-2f));
    p = fma(p, r, Vec::set(1.6666665459e-1f));
    p = fma(p, r, Vec::set(5.0000001201e-1f));
    return times_power_of_two(fma(p, r * r, r + Vec::set(1.0f)), n);
}

// Logarithm of a positive number that is not subnormal (Cephes' logf, S. Moshier).
inline Vec log(Vec x) {
    Vec e;
    const Vec m = split(x, e) - Vec::set(1.0f);
    const Vec square = m * m;
    Vec p = fma(Vec::set(7.0376836292e-2f), m, Vec::set(-1.1514610310e-1f));
    p = fma(p, m, Vec::set(1.1676998740e-1f));
    p = fma(p, m, Vec::set(-1.2420140846e-1f));
    p = fma(p, m, Vec::set(1.4249322787e-1f));
    p = fma(p, m, Vec::set(-1.6668057665e-1f));
    p = fma(p, m, Vec::set(2.0000714765e-1f));
    p = fma(p, m, Vec::set(-2.4999993993e-1f));
    p = fma(p, m, Vec::set(3.3333331174e-1f));
    p = p * m * square;
    p = fma(e, Vec::set(-2.12194440e-4f), p);
    p = fma(square, Vec::set(-0.5f), p);
    return fma(e, Vec::set(0.693359375f), m + p);
}

// -log(-log(1 - u)) for u in (0, 1): log(1 - u) as W. Kahan takes it, so that a small u, which decides who wins, keeps its precision.
inline Vec gumbel(Vec u) {
    const Vec rest = Vec::set(1.0f) - u, taken = Vec::set(1.0f) - rest;
    const Vec exponential = where_zero(taken, u, (Vec::set(0.0f) - log(rest)) * u / where_zero(taken, Vec::set(1.0f), taken));
    return Vec::set(0.0f) - log(exponential);
}

// Calls step(i, n) for every vector of `size` elements; n is LANES but in the last one.
template <class Step>
inline void vectors(int64_t size, const Step& step) {
    int64_t i = 0;
    for (; i + Vec::LANES <= size; i += Vec::LANES) step(i, std::bool_constant<true>{}, Vec::LANES);
    if (i < size) step(i, std::bool_constant<false>{}, size - i);
}
template <class Whole>
inline Vec load(const float* p, Whole, int64_t n) {
    if constexpr (Whole::value) return Vec::load(p);
    else return Vec::load(p, n);
}
template <class Out, class Whole>
inline void store(Vec x, Out* p, Whole, int64_t n) {
    if constexpr (Whole::value) x.store(p);
    else x.store(p, n);
}

inline float inverse_root_mean_square(const float* x, int64_t size, float eps) {
    Vec sums[4] = {Vec::set(0.0f), Vec::set(0.0f), Vec::set(0.0f), Vec::set(0.0f)};
    int64_t i = 0;
    for (; i + 4 * Vec::LANES <= size; i += 4 * Vec::LANES) {
        for (int j = 0; j < 4; ++j) {
            const Vec v = Vec::load(x + i + j * Vec::LANES);
            sums[j] = fma(v, v, sums[j]);
        }
    }
    vectors(size - i, [&](int64_t at, auto whole, int64_t n) {
        const Vec v = load(x + i + at, whole, n);
        sums[0] = fma(v, v, sums[0]);
    });
    const float mean = ((sums[0] + sums[1]) + (sums[2] + sums[3])).sum() / static_cast<float>(size);
    return 1.0f / std::sqrt(mean + eps);
}

template <class Out>
void norm_row(const float* x, int64_t size, const float* weight, float eps, Out* out) {
    const Vec scale = Vec::set(inverse_root_mean_square(x, size, eps));
    vectors(size, [&](int64_t i, auto whole, int64_t n) {
        store(load(x + i, whole, n) * scale * load(weight + i, whole, n), out + i, whole, n);
    });
}

void rms_norm_rows(const float* x, int64_t ldx, int64_t num_rows, int64_t size, const float* weight, float eps, Compute compute, void* out, int64_t ldo) {
    for (int64_t r = 0; r < num_rows; ++r) {
        if (compute == Compute::bf16) norm_row(x + r * ldx, size, weight, eps, static_cast<bf16*>(out) + r * ldo);
        else norm_row(x + r * ldx, size, weight, eps, static_cast<float*>(out) + r * ldo);
    }
}

void norm_and_rotate_rows(float* heads, int64_t ld, int64_t num_tokens, int64_t num_rotated_heads, int64_t head_dim, const float* norm_weights, float eps,
                          const int64_t* positions, const float* cosines, const float* sines) {
    const int64_t half = head_dim / 2;
    for (int64_t t = 0; t < num_tokens; ++t) {
        const float* cosine = cosines + positions[t] * half;
        const float* sine = sines + positions[t] * half;
        for (int64_t h = 0; h < num_rotated_heads; ++h) {
            float* head = heads + t * ld + h * head_dim;
            if (norm_weights != nullptr) norm_row(head, head_dim, norm_weights + h * head_dim, eps, head);
            vectors(half, [&](int64_t i, auto whole, int64_t n) {
                const Vec first = load(head + i, whole, n), second = load(head + half + i, whole, n);
                const Vec c = load(cosine + i, whole, n), s = load(sine + i, whole, n);
                store(first * c - second * s, head + i, whole, n);
                store(second * c + first * s, head + half + i, whole, n);
            });
        }
    }
}

template <class Out>
void silu_mul_row(const float* gate, const float* up, int64_t size, Out* out) {
    vectors(size, [&](int64_t i, auto whole, int64_t n) {
        const Vec g = load(gate + i, whole, n);
        const Vec sigmoid_inverse = Vec::set(1.0f) + exp(Vec::set(0.0f) - g);
        store(g / sigmoid_inverse * load(up + i, whole, n), out + i, whole, n);
    });
}

void silu_mul_rows(const float* gate_up, int64_t ld, int64_t num_rows, int64_t size, Compute compute, void* out, int64_t ldo) {
    for (int64_t r = 0; r < num_rows; ++r) {
        const float* gate = gate_up + r * ld;
        if (compute == Compute::bf16) silu_mul_row(gate, gate + size, size, static_cast<bf16*>(out) + r * ldo);
        else silu_mul_row(gate, gate + size, size, static_cast<float*>(out) + r * ldo);
    }
}

// x - x is zero for a finite x and NaN for every other.
bool is_finite(const float* x, int64_t size) {
    Vec sum = Vec::set(0.0f);
    vectors(size, [&](int64_t i, auto whole, int64_t n) {
        const Vec v = load(x + i, whole, n);
        sum = sum + (v - v);
    });
    return sum.sum() == 0.0f;
}

int64_t largest(const float* x, int64_t size) {
    // the largest of each kilobyte first: few places are looked at twice
    constexpr int64_t STRETCH = 1024;
    float best = -INFINITY;
    int64_t place = 0;
    for (int64_t first = 0; first < size; first += STRETCH) {
        const int64_t last = std::min(size, first + STRETCH);
        float most = -INFINITY;
#if defined(KVD_ISA_avx512)
        __m512 lanes = _mm512_set1_ps(-INFINITY);
        int64_t i = first;
        for (; i + 16 <= last; i += 16) lanes = _mm512_max_ps(lanes, _mm512_loadu_ps(x + i));
        most = _mm512_reduce_max_ps(lanes);
#else
        float lanes[8];
        std::fill(lanes, lanes + 8, -INFINITY);
        int64_t i = first;
        for (; i + 8 <= last; i += 8) {
            for (int64_t j = 0; j < 8; ++j) lanes[j] = lanes[j] > x[i + j] ? lanes[j] : x[i + j];
        }
        for (float lane : lanes) most = most > lane ? most : lane;
#endif
        for (; i < last; ++i) most = most > x[i] ? most : x[i];
        if (most > best) {
            best = most;
            place = std::find(x + first, x + last, most) - x;
        }
    }
    return place;
}

// kvd/executor/sampling/noise.py says what the stream is: SplitMix64's output number `token` of the state `key`.
inline float uniform(uint64_t key, int64_t token) {
    uint64_t bits = key + static_cast<uint64_t>(token + 1) * 0x9E3779B97F4A7C15u;
    bits = (bits ^ (bits >> 30)) * 0xBF58476D1CE4E5B9u;
    bits = (bits ^ (bits >> 27)) * 0x94D049BB133111EBu;
    bits ^= bits >> 31;
    const float value = (static_cast<float>(static_cast<uint32_t>(bits >> 32)) + 0.5f) * 0x1p-32f;
    return value < 1.0f - 0x1p-24f ? value : 1.0f - 0x1p-24f;
}

int64_t drawn(const float* logits, int64_t size, float temperature, uint64_t key) {
    constexpr int64_t STRETCH = 1024;
    alignas(64) float scores[STRETCH];
    float best = -INFINITY;
    int64_t place = 0;
    for (int64_t first = 0; first < size; first += STRETCH) {
        const int64_t count = std::min(size - first, STRETCH);
        for (int64_t i = 0; i < count; ++i) scores[i] = uniform(key, first + i);
        vectors(count, [&](int64_t i, auto whole, int64_t n) {
            store(load(logits + first + i, whole, n) / Vec::set(temperature) + gumbel(load(scores + i, whole, n)), scores + i, whole, n);
        });
        const int64_t most = largest(scores, count);
        if (scores[most] > best) {
            best = scores[most];
            place = first + most;
        }
    }
    return place;
}

void forbid(float* x, int64_t size, const uint8_t* octets) {
    int64_t i = 0;
#if defined(KVD_ISA_avx512)
    const __m512 nothing = _mm512_set1_ps(-INFINITY);
    for (; i + 16 <= size; i += 16) {
        uint16_t bits;
        std::memcpy(&bits, octets + i / 8, sizeof bits);
        if (bits != 0xffff) _mm512_mask_storeu_ps(x + i, static_cast<__mmask16>(~bits), nothing);
    }
#else
    for (; i + 8 <= size; i += 8) {
        const uint8_t bits = octets[i / 8];
        if (bits == 0xff) continue;
        if (bits == 0) {
            std::fill(x + i, x + i + 8, -INFINITY);
            continue;
        }
        for (int64_t j = 0; j < 8; ++j)
            if (!(bits >> j & 1)) x[i + j] = -INFINITY;
    }
#endif
    for (; i < size; ++i)
        if (!(octets[i / 8] >> i % 8 & 1)) x[i] = -INFINITY;
}

double sum_of_exponentials(const float* x, int64_t size, float maximum) {
    constexpr int64_t STRETCH = 1024;  // so many are summed as float32
    double total = 0.0;
    for (int64_t first = 0; first < size; first += STRETCH) {
        Vec sum = Vec::set(0.0f);
        vectors(std::min(size - first, STRETCH), [&](int64_t i, auto whole, int64_t n) {
            if constexpr (whole) {
                sum = sum + exp(Vec::load(x + first + i) - Vec::set(maximum));
            } else {
                for (int64_t j = 0; j < n; ++j) total += std::exp(static_cast<double>(x[first + i + j] - maximum));
            }
        });
        total += static_cast<double>(sum.sum());
    }
    return total;
}

std::vector<std::pair<int64_t, float>> top(const float* x, int64_t size, int64_t count) {
    using Entry = std::pair<int64_t, float>;
    std::vector<Entry> best;
    if (count <= 0) return best;
    const auto is_better = [](const Entry& a, const Entry& b) { return a.second > b.second || (a.second == b.second && a.first < b.first); };
    best.reserve(static_cast<size_t>(count));
    for (int64_t i = 0; i < count; ++i) best.emplace_back(i, x[i]);
    std::make_heap(best.begin(), best.end(), is_better);  // the worst of them in front
    constexpr int64_t STRETCH = 64;
    for (int64_t first = count; first < size; first += STRETCH) {
        const int64_t last = std::min(size, first + STRETCH);
        if (last == first + STRETCH) {
            float lanes[16];
            std::copy(x + first, x + first + 16, lanes);
            for (int64_t i = 16; i < STRETCH; i += 16) {
                for (int64_t j = 0; j < 16; ++j) lanes[j] = lanes[j] > x[first + i + j] ? lanes[j] : x[first + i + j];
            }
            bool any = false;
            for (float lane : lanes) any |= lane > best.front().second;
            if (!any) continue;
        }
        for (int64_t i = first; i < last; ++i) {
            if (!(x[i] > best.front().second)) continue;
            std::pop_heap(best.begin(), best.end(), is_better);
            best.back() = {i, x[i]};
            std::push_heap(best.begin(), best.end(), is_better);
        }
    }
    std::sort_heap(best.begin(), best.end(), is_better);
    return best;
}

}  // namespace

extern const ElementwiseTable elementwise_table;
const ElementwiseTable elementwise_table = {rms_norm_rows, norm_and_rotate_rows, silu_mul_rows, is_finite, largest, drawn,
                                            forbid, sum_of_exponentials, top};

}  // namespace KVD_ISA
}  // namespace kvd
