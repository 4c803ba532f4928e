// Low-rank adapters (LoRA, Hu et al. 2022) beside a decoder's products: y += scale * B (A x) for the tokens of the rows that run with one.
// A token's sums have one order whatever else is in the step, and tokens without an adapter are not touched.
#pragma once

#include <array>
#include <cstdint>
#include <memory>
#include <vector>

#include "matrix.h"
#include "pool.h"
#include "types.h"

namespace kvd {

// The products of a layer.
enum class Site : int { qkv = 0, output, gate_up, down };
constexpr int NUM_SITES = 4;

// What an adapter adds to one product. The A of all parts of a fused matrix lie below one another, each B has its own outputs.
struct LowRank {
    struct Part {
        int64_t first_output;            // of the product
        int64_t first_rank;              // row of `down`
        std::shared_ptr<Matrix> matrix;  // B times the scale, f32 [outputs, rank]
    };
    std::shared_ptr<Matrix> down;        // A, of the decoder's compute type [sum of ranks, inputs]; null: the product is left as it is
    std::vector<Part> up;
};

// All that one adapter adds, layer by layer. Filled once, then only read.
class Adapter {
public:
    explicit Adapter(int64_t num_layers) : layers_(static_cast<size_t>(num_layers)) {}

    int64_t num_layers() const { return static_cast<int64_t>(layers_.size()); }
    int64_t most_ranks() const { return most_ranks_; }  // rows of the largest `down`
    const LowRank& at(int64_t layer, Site site) const { return layers_[static_cast<size_t>(layer)][static_cast<size_t>(site)]; }

    // Throws std::invalid_argument where the parts do not fit `down` or a product of `num_outputs` outputs and `num_inputs` inputs.
    void set(int64_t layer, Site site, LowRank low_rank, int64_t num_outputs, int64_t num_inputs, Compute compute);

private:
    std::vector<std::array<LowRank, NUM_SITES>> layers_;
    int64_t most_ranks_ = 0;
};

// `adapters[indices[r]]` for each of `num_rows` rows, null where the index is below 0. Throws std::out_of_range for an index beyond them.
std::vector<const Adapter*> adapters_of_rows(const std::vector<std::shared_ptr<Adapter>>& adapters, const int64_t* indices, int64_t num_rows);

// The tokens of a step that run with adapters, in pieces of work of a few tokens of one adapter each.
class AdapterPlan {
public:
    // `adapters`: one for each of `num_rows` rows, or null. `starts` [num_rows + 1]: the rows' first tokens.
    void lay_out(const Adapter* const* adapters, const int64_t* starts, int64_t num_rows, int num_threads);
    void clear() { pieces_.clear(); }
    bool empty() const { return pieces_.empty(); }

    // out[t] += scale * B (A x[t]) for every token t of the plan. `x` holds rows of the compute type.
    void add(Pool& pool, int64_t layer, Site site, Compute compute, const void* x, int64_t ldx, float* out, int64_t ldo);

private:
    struct Span {
        int64_t first, count;  // tokens
    };
    struct Piece {
        const Adapter* adapter;
        size_t first_span, end_span;
    };
    std::vector<Span> spans_;
    std::vector<Piece> pieces_;
    std::vector<float> scratch_;  // A x of a piece's tokens, for each thread
    int64_t ranks_ = 0;           // floats of a token there
    int64_t piece_tokens_ = 0;    // most tokens of a piece
};

}  // namespace kvd
