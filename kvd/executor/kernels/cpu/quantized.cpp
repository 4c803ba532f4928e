// Products with quantised matrices (panels: quantized.h). A row's sum has one order of operations, whatever the number of rows:
//   for each block of k that shares a scale: part = sum over its k, ascending, of x * code (code: a small integer, exact in bf16);
//   then total = fma(part, scale, total), and for formats with minima total = fma(sum of the block's x, minimum, total).
// AVX-512 multiplies bf16 rows in pairs of k (vdpbf16ps), codes expanded in registers, anew for each group of rows: that takes ports which the products
// leave idle, and storing what is expanded would take more. All else expands codes to float32 in scratch memory and takes k one by one.
#include "quantized.h"

#include <algorithm>
#include <array>
#include <bit>
#include <cstring>

#include "gguf_blocks.h"

#if defined(KVD_ISA_avx512) || defined(KVD_ISA_avx2)
#include <immintrin.h>
#endif

namespace kvd {
namespace KVD_ISA {
namespace {

#if defined(KVD_ISA_avx512)
using Vec = __m512;
inline Vec load(const float* p) { return _mm512_loadu_ps(p); }
inline void store(float* p, Vec v) { _mm512_storeu_ps(p, v); }
inline Vec set1(float x) { return _mm512_set1_ps(x); }
inline Vec multiply_add(Vec a, Vec b, Vec c) { return _mm512_fmadd_ps(a, b, c); }
inline void halves(const uint8_t* from, float* to) {
    for (int i = 0; i < PANEL; i += 16) store(to + i, _mm512_cvtph_ps(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(from + 2 * i))));
}
#elif defined(KVD_ISA_avx2)
using Vec = __m256;
inline Vec load(const float* p) { return _mm256_loadu_ps(p); }
inline void store(float* p, Vec v) { _mm256_storeu_ps(p, v); }
inline Vec set1(float x) { return _mm256_set1_ps(x); }
inline Vec multiply_add(Vec a, Vec b, Vec c) { return _mm256_fmadd_ps(a, b, c); }
inline void halves(const uint8_t* from, float* to) {
    for (int i = 0; i < PANEL; i += 8) store(to + i, _mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i*>(from + 2 * i))));
}
#else
typedef float Vec __attribute__((vector_size(16)));
inline Vec load(const float* p) {
    Vec v;
    std::memcpy(&v, p, sizeof(v));
    return v;
}
inline void store(float* p, Vec v) { std::memcpy(p, &v, sizeof(v)); }
inline Vec set1(float x) { return Vec{x, x, x, x}; }
inline Vec multiply_add(Vec a, Vec b, Vec c) { return a * b + c; }
inline void halves(const uint8_t* from, float* to) {
    for (int i = 0; i < PANEL; ++i) {
        uint16_t half;
        std::memcpy(&half, from + 2 * i, 2);
        to[i] = half_to_float(half);
    }
}
#endif
constexpr int64_t LANES = sizeof(Vec) / 4;

// Where a panel's block begins.
template <Format FORMAT>
struct Place {
    static constexpr PanelFormat SHAPE = panel_format(FORMAT);
    const uint8_t* header;
    const uint8_t* codes;  // group g at g * SHAPE.group_bytes
    int64_t index;         // of the block in its super-block

    Place(const uint8_t* panel, int64_t block) {
        header = panel + block / SHAPE.blocks() * SHAPE.super_bytes();
        index = block % SHAPE.blocks();
        codes = header + SHAPE.header_bytes + index * SHAPE.block_bytes();
    }
};

// Writes the rows' totals, float [num_rows][64], to where they are wanted.
void finish(const PanelWork& work, int64_t first_row, int64_t num_rows, const float* totals) {
    for (int64_t r = 0; r < num_rows; ++r) {
        float* out = work.out + (first_row + r) * work.ldo;
        const float* total = totals + r * PANEL;
        for (int64_t i = 0; i < work.num_outputs; ++i) {
            float value = total[i];
            if (work.bias) value += work.bias[i];
            if (work.accumulate) value += out[i];
            out[i] = value;
        }
    }
}

// k of a panel that are expanded at once: a few rows read them from L1, many from L2.
template <Format FORMAT>
int64_t expanded_k(int64_t num_rows) {
    return num_rows <= 32 ? std::max<int64_t>(panel_format(FORMAT).super_k, 128) : EXPANDED_K;
}

// The minima and scales of a block, float [64] each.
template <Format FORMAT>
void expand_scales(const Place<FORMAT>& at, float* scales, float* mins) {
    alignas(64) float d[PANEL];
    halves(at.header, d);
    if constexpr (FORMAT == Format::q4_k) {
        for (int i = 0; i < PANEL; ++i) scales[i] = d[i] * static_cast<float>(at.header[256 + at.index * PANEL + i]);
        halves(at.header + 128, d);
        for (int i = 0; i < PANEL; ++i) mins[i] = -(d[i] * static_cast<float>(at.header[768 + at.index * PANEL + i]));
    } else if constexpr (FORMAT == Format::q6_k) {
        for (int i = 0; i < PANEL; ++i) scales[i] = d[i] * static_cast<float>(static_cast<int8_t>(at.header[128 + at.index * PANEL + i]));
    } else {
        std::memcpy(scales, d, sizeof(d));
        if constexpr (FORMAT == Format::q4_1) halves(at.header + 128, mins);
    }
}

// The codes of a block as float [block_k][64].
template <Format FORMAT>
void expand_codes(const Place<FORMAT>& at, float* out) {
    constexpr PanelFormat SHAPE = panel_format(FORMAT);
    for (int g = 0; g < 4; ++g) {
        const uint8_t* group = at.codes + g * SHAPE.group_bytes;
        float* to = out + g * 16;
        if constexpr (FORMAT == Format::q8_0) {
            for (int pair = 0; pair < 16; ++pair)
                for (int l = 0; l < 16; ++l) {
                    to[2 * pair * PANEL + l] = static_cast<float>(static_cast<int8_t>(group[pair * 32 + 2 * l]));
                    to[(2 * pair + 1) * PANEL + l] = static_cast<float>(static_cast<int8_t>(group[pair * 32 + 2 * l + 1]));
                }
        } else {
            constexpr int OFFSET = FORMAT == Format::q4_0 ? 8 : FORMAT == Format::q6_k ? 32 : 0;
            uint32_t low[16], high[16];
            if constexpr (FORMAT == Format::q6_k) std::memcpy(high, group + 128, 64);
            for (int pair = 0; pair < SHAPE.block_k / 2; ++pair) {
                if (pair % 4 == 0) std::memcpy(low, group + pair / 4 * 64, 64);
                const int shift = pair % 4 * 4;
                for (int l = 0; l < 16; ++l) {
                    uint32_t even = low[l] >> shift & 15, odd = low[l] >> (16 + shift) & 15;
                    if constexpr (FORMAT == Format::q6_k) {
                        even |= (high[l] >> (2 * pair) & 3) << 4;
                        odd |= (high[l] >> (16 + 2 * pair) & 3) << 4;
                    }
                    to[2 * pair * PANEL + l] = static_cast<float>(static_cast<int>(even) - OFFSET);
                    to[(2 * pair + 1) * PANEL + l] = static_cast<float>(static_cast<int>(odd) - OFFSET);
                }
            }
        }
    }
}

// ROWS rows against expanded blocks, VECS vectors of outputs at a time.
template <Format FORMAT, class X, int ROWS, int VECS>
void multiply_f32(int64_t num_blocks, const float* codes, const float* scales, const float* mins, const X* x, int64_t ldx, const float* sums, int64_t ld_sums,
                  float* totals) {
    constexpr int64_t BLOCK_K = panel_format(FORMAT).block_k;
    for (int64_t column = 0; column < PANEL; column += VECS * LANES) {
        for (int64_t b = 0; b < num_blocks; ++b) {
            Vec part[ROWS][VECS];
            for (int r = 0; r < ROWS; ++r)
                for (int v = 0; v < VECS; ++v) part[r][v] = set1(0.0f);
            for (int64_t k = b * BLOCK_K; k < (b + 1) * BLOCK_K; ++k) {
                Vec w[VECS];
                for (int v = 0; v < VECS; ++v) w[v] = load(codes + k * PANEL + column + v * LANES);
                for (int r = 0; r < ROWS; ++r) {
                    Vec value;
                    if constexpr (sizeof(X) == 4) value = set1(x[r * ldx + k]);
                    else value = set1(to_float(x[r * ldx + k]));
                    for (int v = 0; v < VECS; ++v) part[r][v] = multiply_add(value, w[v], part[r][v]);
                }
            }
            for (int r = 0; r < ROWS; ++r)
                for (int v = 0; v < VECS; ++v) {
                    const int64_t i = column + v * LANES;
                    Vec total = multiply_add(part[r][v], load(scales + b * PANEL + i), load(totals + r * PANEL + i));
                    if constexpr (panel_format(FORMAT).has_min) total = multiply_add(set1(sums[r * ld_sums + b]), load(mins + b * PANEL + i), total);
                    store(totals + r * PANEL + i, total);
                }
        }
    }
}

template <Format FORMAT, class X>
void panel_f32(const PanelWork& work) {
    constexpr PanelFormat SHAPE = panel_format(FORMAT);
    constexpr int VECS = LANES == 16 ? 4 : 2;
    constexpr auto multiply_4 = multiply_f32<FORMAT, X, 4, VECS>;
    constexpr auto multiply_1 = multiply_f32<FORMAT, X, 1, VECS>;
    float* const codes = reinterpret_cast<float*>(work.scratch);
    float* const scales = codes + EXPANDED_K * PANEL;
    float* const mins = scales + EXPANDED_K / 16 * PANEL;
    float* const totals = mins + EXPANDED_K / 16 * PANEL;
    const int64_t num_blocks = work.k / SHAPE.block_k, ld_sums = work.k / 32;
    const int64_t step = expanded_k<FORMAT>(work.num_rows) / SHAPE.block_k;
    for (int64_t first = 0; first < work.num_rows; first += ROWS_AT_ONCE) {
        const int64_t num_rows = std::min(ROWS_AT_ONCE, work.num_rows - first);
        const X* x = static_cast<const X*>(work.x) + first * work.ldx;
        std::memset(totals, 0, static_cast<size_t>(num_rows) * PANEL * 4);
        for (int64_t begin = 0; begin < num_blocks; begin += step) {
            const int64_t num = std::min(step, num_blocks - begin);
            for (int64_t b = 0; b < num; ++b) {
                const Place<FORMAT> at(work.panel, begin + b);
                expand_codes(at, codes + b * SHAPE.block_k * PANEL);
                expand_scales(at, scales + b * PANEL, mins + b * PANEL);
            }
            for (int64_t r = 0; r < num_rows;) {
                const bool four = num_rows - r >= 4;
                const float* sums = SHAPE.has_min ? work.prepared + (first + r) * ld_sums + begin : nullptr;
                (four ? multiply_4 : multiply_1)(num, codes, scales, mins, x + r * work.ldx + begin * SHAPE.block_k, work.ldx, sums, ld_sums, totals + r * PANEL);
                r += four ? 4 : 1;
            }
        }
        finish(work, first, num_rows, totals);
    }
}

template <class X>
float sum_of_32(const X* x) {
    float lanes[8] = {};
    for (int i = 0; i < 32; i += 8)
        for (int l = 0; l < 8; ++l) {
            if constexpr (sizeof(X) == 4) lanes[l] += x[i + l];
            else lanes[l] += to_float(x[i + l]);
        }
    return ((lanes[0] + lanes[4]) + (lanes[2] + lanes[6])) + ((lanes[1] + lanes[5]) + (lanes[3] + lanes[7]));
}

#if defined(KVD_ISA_avx512)

constexpr uint16_t bf16_bits(int value) { return static_cast<uint16_t>(std::bit_cast<uint32_t>(static_cast<float>(value)) >> 16); }

// The values of `COUNT` codes from `first` on, repeated over 64 entries: index bits above the code's own do not matter.
template <int COUNT>
constexpr std::array<uint16_t, 64> code_table(int first) {
    std::array<uint16_t, 64> table{};
    for (int i = 0; i < 64; ++i) table[static_cast<size_t>(i)] = bf16_bits(first + i % COUNT);
    return table;
}

template <Format FORMAT>
struct Table {
    alignas(64) static constexpr std::array<uint16_t, 64> values =
        FORMAT == Format::q6_k ? code_table<64>(-32) : code_table<16>(FORMAT == Format::q4_0 ? -8 : 0);
};

inline __m512i load_line(const uint8_t* from) { return _mm512_loadu_si512(from); }

// Codes of a pair of k of 16 outputs as bf16 [16][2]; `group` is their block's codes, `pair` a constant after unrolling.
template <Format FORMAT>
[[gnu::always_inline]] inline __m512bh expand_pair(const uint8_t* group, int pair) {
    if constexpr (FORMAT == Format::q8_0) {
        const auto* bytes = reinterpret_cast<const __m128i*>(group + pair * 32);
        const __m512 low = _mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(_mm_loadu_si128(bytes)));
        const __m512 high = _mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(_mm_loadu_si128(bytes + 1)));
        return _mm512_cvtne2ps_pbh(high, low);
    } else {
        const __m512i table = load_line(reinterpret_cast<const uint8_t*>(Table<FORMAT>::values.data()));
        const __m512i low = _mm512_srli_epi16(load_line(group + pair / 4 * 64), static_cast<unsigned>(pair % 4 * 4));
        if constexpr (FORMAT == Format::q6_k) {
            const __m512i line = load_line(group + 128);
            const __m512i high = pair < 2 ? _mm512_slli_epi16(line, static_cast<unsigned>(4 - 2 * pair)) : _mm512_srli_epi16(line, static_cast<unsigned>(2 * pair - 4));
            const __m512i index = _mm512_ternarylogic_epi32(_mm512_set1_epi16(15), low, high, 0xca);  // bits 0 to 3 of low, the others of high
            return (__m512bh)_mm512_permutex2var_epi16(table, index, load_line(reinterpret_cast<const uint8_t*>(Table<FORMAT>::values.data() + 32)));
        } else {
            return (__m512bh)_mm512_permutexvar_epi16(low, table);
        }
    }
}

template <Format FORMAT>
[[gnu::always_inline]] inline __m512 load_scale(const Place<FORMAT>& at, int g) {
    const __m512 d = _mm512_cvtph_ps(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(at.header + 32 * g)));
    const auto* small = reinterpret_cast<const __m128i*>(at.header + (FORMAT == Format::q4_k ? 256 : 128) + at.index * PANEL + 16 * g);
    if constexpr (FORMAT == Format::q4_k) return _mm512_mul_ps(d, _mm512_cvtepi32_ps(_mm512_cvtepu8_epi32(_mm_loadu_si128(small))));
    if constexpr (FORMAT == Format::q6_k) return _mm512_mul_ps(d, _mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(_mm_loadu_si128(small))));
    return d;
}

template <Format FORMAT>
[[gnu::always_inline]] inline __m512 load_min(const Place<FORMAT>& at, int g) {
    const __m512 m = _mm512_cvtph_ps(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(at.header + 128 + 32 * g)));
    if constexpr (FORMAT == Format::q4_1) return m;
    const auto* small = reinterpret_cast<const __m128i*>(at.header + 768 + at.index * PANEL + 16 * g);
    return _mm512_mul_ps(m, _mm512_sub_ps(_mm512_setzero_ps(), _mm512_cvtepi32_ps(_mm512_cvtepu8_epi32(_mm_loadu_si128(small)))));
}

[[gnu::always_inline]] inline __m512bh broadcast_pair(const bf16* x) {
    int pair;
    std::memcpy(&pair, x, 4);
    return (__m512bh)_mm512_set1_epi32(pair);
}

// Adds a block to the totals of ROWS rows by GROUPS groups of outputs.
template <Format FORMAT, int ROWS, int GROUPS>
[[gnu::always_inline]] inline void add_block(__m512 (&total)[ROWS][GROUPS], const __m512 (&part)[ROWS][GROUPS], const __m512 (&scale)[GROUPS],
                                             const __m512 (&min)[GROUPS], const float* sums, int64_t ld_sums) {
    for (int r = 0; r < ROWS; ++r) {
        for (int g = 0; g < GROUPS; ++g) total[r][g] = _mm512_fmadd_ps(part[r][g], scale[g], total[r][g]);
        if constexpr (panel_format(FORMAT).has_min) {
            const __m512 sum = _mm512_set1_ps(sums[r * ld_sums]);
            for (int g = 0; g < GROUPS; ++g) total[r][g] = _mm512_fmadd_ps(sum, min[g], total[r][g]);
        }
    }
}

// Asks for what this thread reads next, a few lines with each block: what is left of the panel, then the next one. Into the second-level cache:
// memory answers too late for the few misses that the first level can have under way.
class Ahead {
public:
    Ahead(const PanelWork& work, int64_t panel_bytes)
        : line_(work.panel + DISTANCE), end_(work.panel + panel_bytes), next_(work.next_panel ? work.next_panel : work.panel) {
        turn();
    }

    template <int LINES>
    [[gnu::always_inline]] void ask() {
#pragma GCC unroll 40
        for (int i = 0; i < LINES; ++i) _mm_prefetch(reinterpret_cast<const char*>(line_ + 64 * i), _MM_HINT_T1);
        line_ += 64 * LINES;
        turn();
    }

private:
    static constexpr int64_t DISTANCE = 32 << 10;

    void turn() {
        if (line_ < end_) return;
        line_ = next_;
        end_ = next_ + (int64_t{1} << 40);
    }

    const uint8_t *line_, *end_, *next_;
};

// ROWS rows against a whole panel, GROUPS groups of outputs at a time; codes are expanded in registers, sums and totals stay there.
template <Format FORMAT, int ROWS, int GROUPS>
void multiply_rows(const PanelWork& work, int64_t first, float* totals) {
    constexpr PanelFormat SHAPE = panel_format(FORMAT);
    constexpr int LINES = static_cast<int>((SHAPE.super_bytes() / SHAPE.blocks() + 63) / 64);  // of a block, with its share of the header
    Ahead ahead(work, work.k / SHAPE.super_k * SHAPE.super_bytes());
    const int64_t ld_sums = work.k / 32, ldx = work.ldx;
    const bf16* const x = static_cast<const bf16*>(work.x) + first * ldx;
    const float* const sums = SHAPE.has_min ? work.prepared + first * ld_sums : nullptr;
    for (int column = 0; column < 4; column += GROUPS) {
        __m512 total[ROWS][GROUPS];
        for (int r = 0; r < ROWS; ++r)
            for (int g = 0; g < GROUPS; ++g) total[r][g] = _mm512_setzero_ps();
        const bf16* value_pairs = x;
        for (int64_t b = 0; b < work.k / SHAPE.block_k; ++b, value_pairs += SHAPE.block_k) {
            const Place<FORMAT> at(work.panel, b);
            const uint8_t* const codes = at.codes + column * SHAPE.group_bytes;
            if (column == 0) ahead.ask<LINES>();
            __m512 part[ROWS][GROUPS];
            for (int r = 0; r < ROWS; ++r)
                for (int g = 0; g < GROUPS; ++g) part[r][g] = _mm512_setzero_ps();
#pragma GCC unroll 16
            for (int pair = 0; pair < SHAPE.block_k / 2; ++pair) {
                __m512bh w[GROUPS];
                for (int g = 0; g < GROUPS; ++g) w[g] = expand_pair<FORMAT>(codes + g * SHAPE.group_bytes, pair);
                for (int r = 0; r < ROWS; ++r) {
                    const __m512bh value = broadcast_pair(value_pairs + r * ldx + 2 * pair);
                    for (int g = 0; g < GROUPS; ++g) part[r][g] = _mm512_dpbf16_ps(part[r][g], value, w[g]);
                }
            }
            __m512 scale[GROUPS], min[GROUPS];
            for (int g = 0; g < GROUPS; ++g) {
                scale[g] = load_scale(at, column + g);
                if constexpr (SHAPE.has_min) min[g] = load_min(at, column + g);
                else min[g] = _mm512_setzero_ps();
            }
            add_block<FORMAT>(total, part, scale, min, sums + b, ld_sums);
        }
        for (int r = 0; r < ROWS; ++r)
            for (int g = 0; g < GROUPS; ++g) _mm512_store_ps(totals + r * PANEL + (column + g) * 16, total[r][g]);
    }
}

// Sums, totals and expanded codes of a group of rows fill the registers: the more rows, the fewer outputs at a time.
constexpr int64_t MAX_ROWS = 12;

template <Format FORMAT>
void panel_bf16(const PanelWork& work) {
    constexpr void (*multiply[MAX_ROWS])(const PanelWork&, int64_t, float*) = {
        multiply_rows<FORMAT, 1, 4>, multiply_rows<FORMAT, 2, 4>, multiply_rows<FORMAT, 3, 2>,  multiply_rows<FORMAT, 4, 2>,
        multiply_rows<FORMAT, 5, 2>, multiply_rows<FORMAT, 6, 2>, multiply_rows<FORMAT, 7, 1>,  multiply_rows<FORMAT, 8, 1>,
        multiply_rows<FORMAT, 9, 1>, multiply_rows<FORMAT, 10, 1>, multiply_rows<FORMAT, 11, 1>, multiply_rows<FORMAT, 12, 1>};
    alignas(64) float totals[MAX_ROWS * PANEL];
    const int64_t num_groups = (work.num_rows + MAX_ROWS - 1) / MAX_ROWS;
    for (int64_t i = 0; i < num_groups; ++i) {  // groups as equal as can be
        const int64_t first = work.num_rows * i / num_groups, end = work.num_rows * (i + 1) / num_groups;
        multiply[end - first - 1](work, first, totals);
        finish(work, first, end - first, totals);
    }
}

float sum_of_32(const bf16* x) {
    const __m512bh ones = (__m512bh)_mm512_set1_epi16(0x3f80);
    return _mm512_reduce_add_ps(_mm512_dpbf16_ps(_mm512_setzero_ps(), ones, (__m512bh)_mm512_loadu_si512(x)));
}

template <Format FORMAT>
constexpr PanelKernel BF16_PANEL = panel_bf16<FORMAT>;
#else
template <Format FORMAT>
constexpr PanelKernel BF16_PANEL = panel_f32<FORMAT, bf16>;
#endif

template <class X>
void sum_rows(const X* x, int64_t ldx, int64_t num_rows, int64_t k, float* out) {
    for (int64_t r = 0; r < num_rows; ++r)
        for (int64_t b = 0; b < k / 32; ++b) *out++ = sum_of_32(x + r * ldx + b * 32);
}

void sum_blocks(Compute compute, const void* x, int64_t ldx, int64_t num_rows, int64_t k, float* out) {
    if (compute == Compute::f32) sum_rows(static_cast<const float*>(x), ldx, num_rows, k, out);
    else sum_rows(static_cast<const bf16*>(x), ldx, num_rows, k, out);
}

PanelKernel kernel(Format format, Compute compute) {
    const bool f32 = compute == Compute::f32;
    switch (format) {
        case Format::q8_0:
            return f32 ? panel_f32<Format::q8_0, float> : BF16_PANEL<Format::q8_0>;
        case Format::q4_0:
            return f32 ? panel_f32<Format::q4_0, float> : BF16_PANEL<Format::q4_0>;
        case Format::q4_1:
            return f32 ? panel_f32<Format::q4_1, float> : BF16_PANEL<Format::q4_1>;
        case Format::q4_k:
            return f32 ? panel_f32<Format::q4_k, float> : BF16_PANEL<Format::q4_k>;
        case Format::q6_k:
            return f32 ? panel_f32<Format::q6_k, float> : BF16_PANEL<Format::q6_k>;
        default:
            return nullptr;
    }
}

}  // namespace

extern const QuantizedTable quantized_table;
const QuantizedTable quantized_table = {kernel, sum_blocks};

}  // namespace KVD_ISA
}  // namespace kvd
