#include "adapter.h"

#include <algorithm>
#include <map>
#include <stdexcept>
#include <utility>

#include "formats.h"

namespace kvd {

namespace {

constexpr int64_t MOST_PIECE_TOKENS = 32;  // a piece reads its adapter's matrices once for each run of neighbours in it

PanelKernel kernel_for(const Matrix& matrix, Compute compute) { return plain_ops(matrix.format()).kernel(compute); }

// out[r, 0:n] (+)= x[r] . W^T, on this thread alone.
void product(const Matrix& matrix, PanelKernel kernel, const void* x, int64_t ldx, int64_t num_rows, float* out, int64_t ldo, bool accumulate) {
    for (int64_t p = 0; p < matrix.num_panels(); ++p) {
        PanelWork work{};
        work.panel = matrix.panel(p);
        work.k = matrix.k();
        work.num_outputs = std::min(PANEL, matrix.n() - p * PANEL);
        work.x = x;
        work.ldx = ldx;
        work.num_rows = num_rows;
        work.out = out + p * PANEL;
        work.ldo = ldo;
        work.accumulate = accumulate;
        kernel(work);
    }
}

}  // namespace

void Adapter::set(int64_t layer, Site site, LowRank low_rank, int64_t num_outputs, int64_t num_inputs, Compute compute) {
    if (layer < 0 || layer >= num_layers()) throw std::invalid_argument("an adapter of a layer that does not exist");
    if (!low_rank.down || low_rank.down->k() != num_inputs) throw std::invalid_argument("down: [ranks, inputs of the product]");
    if (low_rank.down->format() != (compute == Compute::f32 ? Format::f32 : Format::bf16)) throw std::invalid_argument("down: of the decoder's compute type");
    for (const auto& part : low_rank.up) {
        const bool fits = part.matrix && part.first_rank >= 0 && part.first_rank + part.matrix->k() <= low_rank.down->n() && part.first_output >= 0 &&
                          part.first_output + part.matrix->n() <= num_outputs && part.matrix->format() == Format::f32;
        if (!fits) throw std::invalid_argument("up: f32 [outputs, rank], within the product's outputs and the rows of down");
    }
    most_ranks_ = std::max(most_ranks_, low_rank.down->n());
    layers_[static_cast<size_t>(layer)][static_cast<size_t>(site)] = std::move(low_rank);
}

std::vector<const Adapter*> adapters_of_rows(const std::vector<std::shared_ptr<Adapter>>& adapters, const int64_t* indices, int64_t num_rows) {
    std::vector<const Adapter*> of_rows;
    for (int64_t r = 0; r < num_rows; ++r) {
        if (indices[r] >= static_cast<int64_t>(adapters.size())) throw std::out_of_range("an adapter that the step does not bring");
        of_rows.push_back(indices[r] < 0 ? nullptr : adapters[static_cast<size_t>(indices[r])].get());
    }
    return of_rows;
}

void AdapterPlan::lay_out(const Adapter* const* adapters, const int64_t* starts, int64_t num_rows, int num_threads) {
    spans_.clear();
    pieces_.clear();
    ranks_ = 0;
    std::map<const Adapter*, std::vector<int64_t>> rows_of;  // in the step's order
    int64_t num_tokens = 0;
    for (int64_t r = 0; r < num_rows; ++r) {
        if (adapters[r] == nullptr) continue;
        rows_of[adapters[r]].push_back(r);
        num_tokens += starts[r + 1] - starts[r];
        ranks_ = std::max(ranks_, adapters[r]->most_ranks());
    }
    piece_tokens_ = std::clamp<int64_t>((num_tokens + num_threads - 1) / num_threads, 1, MOST_PIECE_TOKENS);
    for (const auto& [adapter, rows] : rows_of) {
        int64_t room = 0;
        for (const int64_t row : rows) {
            for (int64_t first = starts[row]; first < starts[row + 1];) {
                if (room == 0) {
                    pieces_.push_back({adapter, spans_.size(), spans_.size()});
                    room = piece_tokens_;
                }
                const int64_t count = std::min(room, starts[row + 1] - first);
                Piece& piece = pieces_.back();
                if (piece.end_span > piece.first_span && spans_.back().first + spans_.back().count == first) {
                    spans_.back().count += count;
                } else {
                    spans_.push_back({first, count});
                    piece.end_span = spans_.size();
                }
                first += count;
                room -= count;
            }
        }
    }
    if (const auto size = static_cast<size_t>(num_threads * piece_tokens_ * ranks_); scratch_.size() < size) scratch_.resize(size);
}

void AdapterPlan::add(Pool& pool, int64_t layer, Site site, Compute compute, const void* x, int64_t ldx, float* out, int64_t ldo) {
    const int64_t element = compute == Compute::f32 ? 4 : 2;
    pool.run(static_cast<int64_t>(pieces_.size()), [&](int64_t i, int worker) {
        const Piece& piece = pieces_[static_cast<size_t>(i)];
        const LowRank& low_rank = piece.adapter->at(layer, site);
        if (!low_rank.down) return;
        float* const inner = scratch_.data() + worker * piece_tokens_ * ranks_;
        const PanelKernel down = kernel_for(*low_rank.down, compute);
        int64_t token = 0;
        for (size_t s = piece.first_span; s < piece.end_span; ++s) {
            const Span& span = spans_[s];
            product(*low_rank.down, down, static_cast<const uint8_t*>(x) + span.first * ldx * element, ldx, span.count, inner + token * ranks_, ranks_, false);
            token += span.count;
        }
        for (const auto& part : low_rank.up) {
            const PanelKernel up = kernel_for(*part.matrix, Compute::f32);
            token = 0;
            for (size_t s = piece.first_span; s < piece.end_span; ++s) {
                const Span& span = spans_[s];
                product(*part.matrix, up, inner + token * ranks_ + part.first_rank, ranks_, span.count, out + span.first * ldo + part.first_output, ldo, true);
                token += span.count;
            }
        }
    });
}

}  // namespace kvd
