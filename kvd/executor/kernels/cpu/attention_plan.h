// How a step's attention is cut into pieces of work, and the table of kernels that do them.
//
// A *unit* is a run of queries of one row. A *task* is what one piece computes: one KV head, one or more units, a range of tiles. A unit whose
// tiles all belong to one task goes straight to the output. Otherwise each task leaves *records* (max, sum, weighted values) for its units: the task
// that begins at a unit's first tile leaves the running fold of its tiles, any other one record a tile, since a fold can only be continued
// at its end; the task that ends last merges a unit's records in ascending order.
#pragma once

#include <atomic>
#include <cstdint>
#include <memory>
#include <vector>

#include "attention.h"

namespace kvd {

constexpr int64_t BLOCKS_OF_TILE = TILE / BLOCK;

struct AttentionPlan::Impl {
    struct Unit {
        int64_t row, first_token, num_tokens;  // flat tokens
        int64_t first_position;
        int64_t first_tile, end_tile;  // that any of its queries sees
        int32_t first_part, num_parts;
    };
    // The records of one unit from one task. Those of its query i begin at `record` + i * `num_records`.
    struct Part {
        int64_t record;
        int32_t num_records;
    };
    struct Member {
        int32_t unit;
        int32_t part;  // into parts
    };
    struct Task {
        int64_t first_tile, end_tile;
        int32_t first_member, num_members;
        bool folds;   // leaves the running fold: its range begins where all its units begin
        bool direct;  // all tiles of its only unit: writes the output
        float cost;
    };

    KvLayout layout;
    StepShape shape;
    int64_t num_heads, window;
    std::vector<Unit> units;
    std::vector<Part> parts;
    std::vector<Member> members;
    std::vector<Task> tasks;  // the costliest first
    std::vector<std::atomic<int32_t>> left;  // [units, num_kv_heads]: tasks of the unit that have not ended
    std::vector<float> records;

    int64_t group() const { return num_heads / layout.num_kv_heads; }
    int64_t record_floats() const { return layout.head_dim + 16; }  // m, l, padding, values
    // First position that a query at `position` sees.
    int64_t first_seen(int64_t position) const { return window > 0 && position >= window ? position - window + 1 : 0; }
};

struct AttendCall {
    AttentionPlan::Impl* plan;
    float* records;
    const uint8_t* pool_rows;
    int64_t layer;
    float scale;
    const float* q;
    int64_t ldq;
    Compute compute;
    void* out;
};

struct WriteCall {
    const KvLayout* layout;
    uint8_t* pool_rows;
    int64_t layer;
    const StepShape* shape;
    const float* k;
    const float* v;
    int64_t ld;
};

struct AttentionTable {
    void (*run_task)(const AttendCall& call, int64_t task, int64_t kv_head);
    void (*write_tokens)(const WriteCall& call, int64_t first_token, int64_t end_token);
};

namespace portable { extern const AttentionTable attention_table; }
namespace avx2 { extern const AttentionTable attention_table; }
namespace avx512 { extern const AttentionTable attention_table; }

}  // namespace kvd
