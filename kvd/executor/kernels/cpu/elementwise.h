// The small operations between the products. Rows in float32; results in the compute type where a product reads them next.
#pragma once

#include <cstdint>

#include "pool.h"
#include "types.h"

namespace kvd {

// out[r] = weight * x[r] / sqrt(mean(x[r]^2) + eps), r in [0, num_rows), `size` elements each (RMSNorm, Zhang and Sennrich 2019).
void rms_norm(Pool& pool, const float* x, int64_t ldx, int64_t num_rows, int64_t size, const float* weight, float eps, Compute compute, void* out, int64_t ldo);

// In place, for each token: optional RMSNorm of each head of q and k (weights [num_heads + num_kv_heads, head_dim] or null), then the rotation by
// halves with cosines and sines float32 [max_positions, head_dim / 2]. `heads` is [num_tokens, ld], q heads first, then k heads.
void norm_and_rotate(Pool& pool, float* heads, int64_t ld, int64_t num_tokens, int64_t num_rotated_heads, int64_t head_dim, const float* norm_weights,
                     float eps, const int64_t* positions, const float* cosines, const float* sines);

// out[r, i] = silu(gate_up[r, i]) * gate_up[r, size + i].
void silu_mul(Pool& pool, const float* gate_up, int64_t ld, int64_t num_rows, int64_t size, Compute compute, void* out, int64_t ldo);

// finite[r]: whether all `size` elements of row r are finite.
void finite_rows(Pool& pool, const float* x, int64_t num_rows, int64_t size, bool* finite);

// places[r]: the first place of the largest of row r's `size` elements, 0 where one of them is not finite (finite[r] says so).
void largest_of_rows(Pool& pool, const float* x, int64_t num_rows, int64_t size, int64_t* places, bool* finite);

// places[r]: a draw of row r from the softmax of its logits / temperatures[r] by the noise stream keys[r] (kvd.executor.sampling.noise). The places of
// rows of temperature 0 stay as they are, and those of rows that are not finite, where `finite` says which are (null: all).
void draw_rows(Pool& pool, const float* logits, int64_t num_rows, int64_t size, const float* temperatures, const uint64_t* keys, const bool* finite,
               int64_t* places);

}  // namespace kvd
