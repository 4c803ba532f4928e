// Products with bf16 and f32 panels.
#include "gemm.h"

namespace kvd {
namespace KVD_ISA {

namespace {

float widen(float value) { return value; }
float widen(bf16 value) { return to_float(value); }

// Panel [k/STEP][64][STEP] against one row after another: the order of sums that a compiler vectorises over the outputs.
template <class T, int STEP>
void panel_plain(const PanelWork& work) {
    const T* panel = reinterpret_cast<const T*>(work.panel);
    for (int64_t r = 0; r < work.num_rows; ++r) {
        const T* x = static_cast<const T*>(work.x) + r * work.ldx;
        float sums[PANEL] = {};
        for (int64_t i = 0; i < work.k; ++i) {
            const float value = widen(x[i]);
            const T* weights = panel + (i / STEP) * PANEL * STEP + i % STEP;
            for (int64_t o = 0; o < PANEL; ++o) sums[o] += value * widen(weights[o * STEP]);
        }
        float* out = work.out + r * work.ldo;
        for (int64_t o = 0; o < work.num_outputs; ++o) {
            float sum = sums[o];
            if (work.bias) sum += work.bias[o];
            out[o] = work.accumulate ? out[o] + sum : sum;
        }
    }
}

}  // namespace

const GemmTable gemm_table = {panel_plain<bf16, 2>, panel_plain<float, 1>};

}  // namespace KVD_ISA
}  // namespace kvd
