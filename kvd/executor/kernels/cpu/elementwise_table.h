// What elementwise.cpp exports for each instruction set: the row kernels, without threads.
#pragma once

#include <cstdint>
#include <utility>
#include <vector>

#include "types.h"

namespace kvd {

struct ElementwiseTable {
    void (*rms_norm)(const float* x, int64_t ldx, int64_t num_rows, int64_t size, const float* weight, float eps, Compute compute, void* out, int64_t ldo);
    void (*norm_and_rotate)(float* heads, int64_t ld, int64_t num_tokens, int64_t num_rotated_heads, int64_t head_dim, const float* norm_weights,
                            float eps, const int64_t* positions, const float* cosines, const float* sines);
    void (*silu_mul)(const float* gate_up, int64_t ld, int64_t num_rows, int64_t size, Compute compute, void* out, int64_t ldo);
    bool (*is_finite)(const float* x, int64_t size);
    int64_t (*largest)(const float* x, int64_t size);  // the first place of the largest element; x holds no NaN
    // The place of the largest logit / temperature + Gumbel noise of the stream `key` (a draw from the softmax); no NaN, some logit is finite.
    int64_t (*drawn)(const float* logits, int64_t size, float temperature, uint64_t key);
    // Minus infinity in the place of x[i] where bit i % 8 of octet i / 8 is 0.
    void (*forbid)(float* x, int64_t size, const uint8_t* octets);
    double (*sum_of_exponentials)(const float* x, int64_t size, float maximum);  // of e^(x - maximum)
    // The `count` largest as (place, value), the largest first, the lowest place first among equals; x holds no NaN.
    std::vector<std::pair<int64_t, float>> (*top)(const float* x, int64_t size, int64_t count);
};

namespace portable {
extern const ElementwiseTable elementwise_table;
}
#if defined(KVD_HAS_avx512)
namespace avx2 {
extern const ElementwiseTable elementwise_table;
}
namespace avx512 {
extern const ElementwiseTable elementwise_table;
}
#endif

}  // namespace kvd
