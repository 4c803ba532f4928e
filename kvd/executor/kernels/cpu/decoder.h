// A whole step of the decoder: a pre-norm transformer with grouped-query attention, rotary positions and SwiGLU, shaped by its weights
// (kvd/executor/models/decoder.py says the same in torch). The residual stream is float32; what a product reads is of the compute type.
#pragma once

#include <array>
#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "adapter.h"
#include "attention.h"
#include "matrix.h"
#include "pool.h"
#include "types.h"

namespace kvd {

struct DecoderShape {
    int64_t hidden_size, intermediate_size, num_heads, num_kv_heads, head_dim;
    int64_t max_positions;  // rows of cosines and sines
    float eps;              // of every RMSNorm
    float attention_scale;
    Compute compute;

    int64_t num_rotated_heads() const { return num_heads + num_kv_heads; }
    int64_t qkv_size() const { return (num_heads + 2 * num_kv_heads) * head_dim; }
};

// A matrix whose rows may be kept in several packed parts, one below the other: the parts of a fused matrix can have different formats.
using Parts = std::vector<std::shared_ptr<Matrix>>;

struct DecoderLayer {
    int64_t window;                 // positions that a query sees, its own included; 0: all before it
    std::vector<float> attention_norm;
    Parts qkv;                      // queries, keys, values
    std::vector<float> qkv_bias;    // empty: none
    std::vector<float> qk_norm;     // [num_heads + num_kv_heads, head_dim]; empty: none
    Parts output;
    std::vector<float> feed_forward_norm;
    Parts gate_up;                  // gate, up
    Parts down;
};

// A step's input besides its shape; the pool's rows stand at `kv_rows`, blocks have ids in [0, num_blocks).
struct StepInput {
    StepShape shape;
    const int64_t* token_ids;   // [num_tokens]
    const int64_t* positions;   // [num_tokens]
    KvType kv_type;
    uint8_t* kv_rows;
    int64_t num_blocks;
    const Adapter* const* adapters = nullptr;  // [num_rows], null for a row without one; null: no row has one
};

class Decoder {
public:
    // `cosines`, `sines`: [max_positions, head_dim / 2]. A tied head is the embedding once more.
    Decoder(std::shared_ptr<Pool> pool, const DecoderShape& shape, std::shared_ptr<Matrix> embedding, Parts head, std::vector<float> final_norm,
            std::vector<float> cosines, std::vector<float> sines);

    void add_layer(DecoderLayer layer);

    // Throws std::invalid_argument where the matrices do not fit the layer's product.
    void fill(Adapter& adapter, int64_t layer, Site site, LowRank low_rank) const;
    int64_t num_layers() const { return static_cast<int64_t>(layers_.size()); }

    // Runs every layer; the hidden states stay until the next call. finite[t] says whether all of token t's are finite.
    // Throws std::out_of_range for a token, a position or a block that does not exist; nothing is computed then.
    void forward(const StepInput& input, bool* finite);

    // out [num_rows, vocab] of the tokens' hidden states. Throws std::out_of_range for a token that the last step did not have.
    void logits(const int64_t* tokens, int64_t num_rows, float* out);

    // The logits, and of each row the first place of the largest and whether all are finite (largest_of_rows).
    void greedy(const int64_t* tokens, int64_t num_rows, float* logits_out, int64_t* token_ids, bool* finite);

    // Allocates and touches the memory of a step of so many tokens; longer steps do so when they come.
    void reserve(int64_t num_tokens);

    int64_t vocab_size() const { return embedding_->n(); }
    Pool& pool() const { return *pool_; }

    // Seconds that each part took since the last call, in the order of part_names(); counted while it is switched on.
    static const std::vector<std::string>& part_names();
    std::vector<double> take_times();
    void measure(bool on) { measured_ = on; }

private:
    enum Part { EMBED, PLAN, NORM, QKV, ROTATE, WRITE_KV, ATTEND, OUTPUT, GATE_UP, SILU, DOWN, ADAPT, FINITE, HEAD, SAMPLE, NUM_PARTS };
    class Timer;
    struct Buffer;

    void check(const StepInput& input) const;
    void run_layer(const DecoderLayer& layer, int64_t index, const StepInput& input, const KvLayout& layout, const AttentionPlan& plan);
    void multiply_parts(const Parts& parts, const void* x, int64_t ldx, int64_t num_rows, float* out, int64_t ldo, const float* bias, bool accumulate,
                        const Parts* next);
    void adapt(int64_t layer, Site site, const void* x, int64_t ldx, float* out, int64_t ldo);

    std::shared_ptr<Pool> pool_;
    DecoderShape shape_;
    std::shared_ptr<Matrix> embedding_;
    Parts head_;
    std::vector<float> final_norm_, cosines_, sines_;
    std::vector<DecoderLayer> layers_;

    // Scratch memory of a step, kept for the next one; `normed_` and `activated_` hold the compute type.
    struct Free {
        void operator()(uint8_t* data) const;
    };
    template <class T>
    struct Array {
        std::unique_ptr<uint8_t[], Free> data;
        T* get() const { return reinterpret_cast<T*>(data.get()); }
    };
    int64_t capacity_ = 0, num_tokens_ = 0;
    Array<float> hidden_, heads_, gate_up_;
    Array<uint8_t> normed_, activated_;
    AdapterPlan adapter_plan_;  // of the running step; empty: no row has an adapter

    bool measured_ = false;
    std::array<double, NUM_PARTS> times_{};
};

}  // namespace kvd
