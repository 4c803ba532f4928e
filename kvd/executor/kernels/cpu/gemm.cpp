// Products of rows with bf16 and f32 panels ([k / 2][64][2] and [k][64]). A tile of some rows by 64 outputs (by 32 with AVX2) is kept in registers
// while k ascends; how many rows share a tile changes no row's sum.
#include "gemm.h"

#if defined(KVD_ISA_avx512) || defined(KVD_ISA_avx2)
#include <immintrin.h>
#endif

namespace kvd {
namespace KVD_ISA {

namespace {

#if defined(KVD_ISA_avx512)

constexpr int MAX_ROWS = 6;  // 24 sums, 4 weights and 1 broadcast value fit into 32 registers, and 24 independent sums hide the latency of the FMA
constexpr int TILE_OUTPUTS = 64;
using Vector = __m512;
constexpr int LANES = 16;

inline void keep(float* to, Vector value, int64_t count, const float* bias, bool accumulate) {
    const __mmask16 mask = count >= LANES ? 0xffff : static_cast<__mmask16>((1u << count) - 1);
    if (bias) value = _mm512_add_ps(value, _mm512_maskz_loadu_ps(mask, bias));
    if (accumulate) value = _mm512_add_ps(_mm512_maskz_loadu_ps(mask, to), value);
    _mm512_mask_storeu_ps(to, mask, value);
}

struct Bf16 {
    using Input = uint16_t;
    static constexpr int STEP = 2;

    struct Step {
        __m512bh weights[4];
        Step(const uint8_t* panel) {
#pragma GCC unroll 4
            for (int j = 0; j < 4; ++j) weights[j] = (__m512bh)_mm512_load_si512(panel + 64 * j);
        }
        void row(Vector* sums, const Input* x, int64_t i, bool whole) const {
            uint32_t pair;
            if (whole) __builtin_memcpy(&pair, x + i, 4);
            else pair = x[i];
            const auto values = (__m512bh)_mm512_set1_epi32(static_cast<int>(pair));
#pragma GCC unroll 4
            for (int j = 0; j < 4; ++j) sums[j] = _mm512_dpbf16_ps(sums[j], weights[j], values);
        }
    };
};

struct F32 {
    using Input = float;
    static constexpr int STEP = 1;

    struct Step {
        __m512 weights[4];
        Step(const uint8_t* panel) {
#pragma GCC unroll 4
            for (int j = 0; j < 4; ++j) weights[j] = _mm512_load_ps(panel + 64 * j);
        }
        void row(Vector* sums, const Input* x, int64_t i, bool) const {
            const __m512 value = _mm512_set1_ps(x[i]);
#pragma GCC unroll 4
            for (int j = 0; j < 4; ++j) sums[j] = _mm512_fmadd_ps(weights[j], value, sums[j]);
        }
    };
};

#elif defined(KVD_ISA_avx2)

constexpr int MAX_ROWS = 3;
constexpr int TILE_OUTPUTS = 32;
using Vector = __m256;
constexpr int LANES = 8;

inline void keep(float* to, Vector value, int64_t count, const float* bias, bool accumulate) {
    if (count >= LANES) {
        if (bias) value = _mm256_add_ps(value, _mm256_loadu_ps(bias));
        if (accumulate) value = _mm256_add_ps(_mm256_loadu_ps(to), value);
        _mm256_storeu_ps(to, value);
        return;
    }
    alignas(32) float values[LANES];
    _mm256_store_ps(values, value);
    for (int64_t o = 0; o < count; ++o) {
        const float sum = bias ? values[o] + bias[o] : values[o];
        to[o] = accumulate ? to[o] + sum : sum;
    }
}

struct Bf16 {
    using Input = uint16_t;
    static constexpr int STEP = 2;

    struct Step {
        const uint8_t* panel;
        Step(const uint8_t* panel) : panel(panel) {}
        void row(Vector* sums, const Input* x, int64_t i, bool whole) const {
            const __m256 even = _mm256_castsi256_ps(_mm256_set1_epi32(static_cast<int>(static_cast<uint32_t>(x[i]) << 16)));
            const __m256 odd = _mm256_castsi256_ps(_mm256_set1_epi32(whole ? static_cast<int>(static_cast<uint32_t>(x[i + 1]) << 16) : 0));
#pragma GCC unroll 4
            for (int j = 0; j < 4; ++j) {
                const __m256i pairs = _mm256_load_si256(reinterpret_cast<const __m256i*>(panel + 32 * j));
                sums[j] = _mm256_fmadd_ps(_mm256_castsi256_ps(_mm256_slli_epi32(pairs, 16)), even, sums[j]);
                sums[j] = _mm256_fmadd_ps(_mm256_castsi256_ps(_mm256_and_si256(pairs, _mm256_set1_epi32(-65536))), odd, sums[j]);
            }
        }
    };
};

struct F32 {
    using Input = float;
    static constexpr int STEP = 1;

    struct Step {
        __m256 weights[4];
        Step(const uint8_t* panel) {
#pragma GCC unroll 4
            for (int j = 0; j < 4; ++j) weights[j] = _mm256_load_ps(reinterpret_cast<const float*>(panel + 32 * j));
        }
        void row(Vector* sums, const Input* x, int64_t i, bool) const {
            const __m256 value = _mm256_broadcast_ss(x + i);
#pragma GCC unroll 4
            for (int j = 0; j < 4; ++j) sums[j] = _mm256_fmadd_ps(weights[j], value, sums[j]);
        }
    };
};

#else

constexpr int MAX_ROWS = 1;
constexpr int TILE_OUTPUTS = 64;
constexpr int LANES = 16;
struct Vector {
    float lane[LANES];
};

inline void keep(float* to, const Vector& value, int64_t count, const float* bias, bool accumulate) {
    for (int64_t o = 0; o < count && o < LANES; ++o) {
        const float sum = bias ? value.lane[o] + bias[o] : value.lane[o];
        to[o] = accumulate ? to[o] + sum : sum;
    }
}

inline float widened(uint16_t bits) { return to_float(bf16{bits}); }

struct Bf16 {
    using Input = uint16_t;
    static constexpr int STEP = 2;

    struct Step {
        const uint16_t* panel;
        Step(const uint8_t* panel) : panel(reinterpret_cast<const uint16_t*>(panel)) {}
        void row(Vector* sums, const Input* x, int64_t i, bool whole) const {
            const float even = widened(x[i]);
            const float odd = whole ? widened(x[i + 1]) : 0.0f;
            for (int j = 0; j < 4; ++j)
                for (int o = 0; o < LANES; ++o) {
                    const uint16_t* pair = panel + 2 * (LANES * j + o);
                    sums[j].lane[o] += widened(pair[0]) * even;
                    sums[j].lane[o] += widened(pair[1]) * odd;
                }
        }
    };
};

struct F32 {
    using Input = float;
    static constexpr int STEP = 1;

    struct Step {
        const float* panel;
        Step(const uint8_t* panel) : panel(reinterpret_cast<const float*>(panel)) {}
        void row(Vector* sums, const Input* x, int64_t i, bool) const {
            for (int j = 0; j < 4; ++j)
                for (int o = 0; o < LANES; ++o) sums[j].lane[o] += panel[LANES * j + o] * x[i];
        }
    };
};

#endif

constexpr int64_t STEP_BYTES = 256;  // of a panel: 64 outputs by 2 bf16 or by 1 f32
constexpr int64_t LINE = 64;

// R rows from x on by the tile that begins at output `first`. PREFETCH lines of `ahead` are asked for at each step of k.
template <class Kind, int R, int PREFETCH>
void tile(const PanelWork& work, const typename Kind::Input* x, float* out, int64_t first, const uint8_t* ahead) {
    Vector sums[R][4] = {};
    const uint8_t* panel = work.panel + first * (STEP_BYTES / PANEL);
    const int64_t whole_end = work.k / Kind::STEP * Kind::STEP;
    const int64_t ldx = work.ldx;
    for (int64_t i = 0; i < whole_end; i += Kind::STEP) {
        const typename Kind::Step step(panel);
#pragma GCC unroll 6
        for (int r = 0; r < R; ++r) step.row(sums[r], x + r * ldx, i, true);
        panel += STEP_BYTES;
#pragma GCC unroll 4
        for (int line = 0; line < PREFETCH; ++line) __builtin_prefetch(ahead + LINE * line, 0, 2);
        ahead += LINE * PREFETCH;
    }
    if (whole_end < work.k) {  // the last input of an odd number has no partner
        const typename Kind::Step step(panel);
#pragma GCC unroll 6
        for (int r = 0; r < R; ++r) step.row(sums[r], x + r * ldx, whole_end, false);
    }
#pragma GCC unroll 6
    for (int r = 0; r < R; ++r)
        for (int j = 0; j < 4; ++j) {
            const int64_t output = first + j * LANES;
            if (output < work.num_outputs)
                keep(out + r * work.ldo + output, sums[r][j], work.num_outputs - output, work.bias ? work.bias + output : nullptr, work.accumulate);
        }
}

template <class Kind, int R>
void tile_ahead(const PanelWork& work, const typename Kind::Input* x, float* out, int64_t first, const uint8_t* ahead, int lines) {
    switch (lines) {
        case 4: return tile<Kind, R, 4>(work, x, out, first, ahead);
        case 2: return tile<Kind, R, 2>(work, x, out, first, ahead);
        case 1: return tile<Kind, R, 1>(work, x, out, first, ahead);
        default: return tile<Kind, R, 0>(work, x, out, first, ahead);
    }
}

template <class Kind>
void panel_product(const PanelWork& work) {
    const auto* x = static_cast<const typename Kind::Input*>(work.x);
    // Rows go in groups of about equal size. A single group that goes along whole panels reads as memory gives, and the processor fetches ahead of it by
    // itself: asking for more makes it slower. Otherwise the next panel, 4 lines for each step of k, is fetched while the groups are computed: of three
    // the last two, which find their own panel in the cache.
    const int64_t num_groups = (work.num_rows + MAX_ROWS - 1) / MAX_ROWS;
    const int lines_of_a_group = num_groups == 1 ? 4 : num_groups < 4 ? 2 : 1;
    const int64_t first_ahead = num_groups == 3 ? 1 : 0;
    int lines_left = work.next_panel && (num_groups > 1 || TILE_OUTPUTS < PANEL) ? 4 : 0;
    const uint8_t* ahead = work.next_panel;
    const int64_t steps = work.k / Kind::STEP;
    int64_t row = 0;
    for (int64_t group = 0; group < num_groups; ++group) {
        const int64_t end = work.num_rows * (group + 1) / num_groups;
        for (int64_t first = 0; first < PANEL && first < work.num_outputs; first += TILE_OUTPUTS) {
            const int lines = first == 0 && group >= first_ahead && lines_left > 0 ? lines_of_a_group : 0;
            const auto* from = x + row * work.ldx;
            float* out = work.out + row * work.ldo;
            switch (end - row) {
                case 1: tile_ahead<Kind, 1>(work, from, out, first, ahead, lines); break;
#if !defined(KVD_ISA_portable)
                case 2: tile_ahead<Kind, 2>(work, from, out, first, ahead, lines); break;
                case 3: tile_ahead<Kind, 3>(work, from, out, first, ahead, lines); break;
#endif
#if defined(KVD_ISA_avx512)
                case 4: tile_ahead<Kind, 4>(work, from, out, first, ahead, lines); break;
                case 5: tile_ahead<Kind, 5>(work, from, out, first, ahead, lines); break;
                case 6: tile_ahead<Kind, 6>(work, from, out, first, ahead, lines); break;
#endif
            }
            lines_left -= lines;
            ahead += lines * LINE * steps;
        }
        row = end;
    }
}

}  // namespace

const GemmTable gemm_table = {panel_product<Bf16>, panel_product<F32>};

}  // namespace KVD_ISA
}  // namespace kvd
