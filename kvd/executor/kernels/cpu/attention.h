// Attention straight from the block-major pool. One pool row (a block of 16 positions, all layers) holds, for each layer, K then V:
//   K [kv_head][head_dim / 2][16 positions][2]        (f32: [kv_head][head_dim][16 positions])
//   V [kv_head][16 positions / 2][head_dim][2]        (f32: [kv_head][16 positions][head_dim])
// so that one 64-byte load feeds 16 lanes without any shuffling; int8 uses the orders of bf16 and is followed, per layer and K or V, by
// float32 scales [kv_head][16 positions].
//
// Numbers: the context is cut into tiles of 64 positions at fixed absolute places. A tile gives a partial (max, sum, weighted values) that
// depends on query and tile alone; partials are merged in ascending order of tiles. Hence a shared run, attended once for many queries,
// gives each of them the very partials that it would have computed alone.
#pragma once

#include <cstdint>
#include <memory>
#include <string>

#include "pool.h"
#include "types.h"

namespace kvd {

constexpr int64_t BLOCK = 16;  // positions of a block
constexpr int64_t TILE = 64;   // positions of a tile

struct KvLayout {
    KvType type;
    int64_t num_layers, num_kv_heads, head_dim;

    int64_t plane_bytes() const;  // K or V of one layer of one block, scales included
    int64_t row_bytes() const { return num_layers * 2 * plane_bytes(); }
};

// A step's rows, as the executor lays them out; all arrays stay valid while the plan lives.
struct StepShape {
    int64_t num_rows, num_tokens;
    const int64_t* starts;          // [num_rows + 1] into the flat tokens
    const int64_t* num_computed;    // [num_rows] positions that have KV before this step
    const int32_t* block_tables;    // [num_rows, table_stride]
    int64_t table_stride;
    // Shared runs: run i covers positions [run_start[i], run_end[i]) (multiples of BLOCK) of the rows run_rows[run_offsets[i] : run_offsets[i+1]],
    // which hold the same blocks there, all computed before this step. Runs of one row are disjoint. The plan rounds to whole tiles inward.
    int64_t num_runs;
    const int64_t* run_start;
    const int64_t* run_end;
    const int64_t* run_offsets;     // [num_runs + 1]
    const int64_t* run_rows;
};

// What is the same for all layers with one window: pieces of work and where their partials go. Made once a step for each distinct window.
class AttentionPlan {
public:
    AttentionPlan(const KvLayout& layout, const StepShape& shape, int64_t num_heads, int64_t window, int num_threads);
    ~AttentionPlan();
    struct Impl;
    Impl& impl() const { return *impl_; }
private:
    std::unique_ptr<Impl> impl_;
};

// Keeps K and V (float32, [num_tokens, num_kv_heads, head_dim] with row stride ld) of all tokens in the pool.
void write_kv(Pool& pool, const KvLayout& layout, uint8_t* pool_rows, int64_t layer, const StepShape& shape, const float* k, const float* v, int64_t ld);

// q: float32 [num_tokens, num_heads, head_dim], row stride ldq, rotated, not scaled. out: `compute` type [num_tokens, num_heads * head_dim].
void attend(Pool& pool, const AttentionPlan& plan, const uint8_t* pool_rows, int64_t layer, float scale, const float* q, int64_t ldq, Compute compute, void* out);

}  // namespace kvd
