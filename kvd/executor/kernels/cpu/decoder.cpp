// A whole step of the decoder in one call, and the class for Python.
#include "decoder.h"

#include <nanobind/ndarray.h>
#include <nanobind/stl/optional.h>
#include <nanobind/stl/shared_ptr.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/tuple.h>
#include <nanobind/stl/vector.h>

#include <algorithm>
#include <chrono>
#include <cstdlib>
#include <cstring>
#include <map>
#include <new>
#include <optional>
#include <stdexcept>
#include <tuple>
#include <utility>

#include "elementwise.h"
#include "module.h"

namespace nb = nanobind;

namespace kvd {
namespace {

constexpr int64_t EMBEDDINGS_OF_PIECE = 8;  // rows looked up by one piece of work

[[noreturn]] void out_of_range(const char* what, int64_t value, int64_t bound) {
    throw std::out_of_range(std::string(what) + " " + std::to_string(value) + " of " + std::to_string(bound));
}

int64_t bytes_of(Compute compute) { return compute == Compute::bf16 ? sizeof(bf16) : sizeof(float); }

int64_t rows_of(const Parts& parts) {
    int64_t rows = 0;
    for (const auto& part : parts) rows += part->n();
    return rows;
}

void require(bool fits, const char* message) {
    if (!fits) throw std::invalid_argument(message);
}

void require_parts(const Parts& parts, int64_t n, int64_t k, const char* message) {
    require(rows_of(parts) == n, message);
    for (const auto& part : parts) require(part->k() == k, message);
}

}  // namespace

void Decoder::Free::operator()(uint8_t* data) const { std::free(data); }

// Adds the time of its life to a part.
class Decoder::Timer {
public:
    Timer(Decoder& decoder, Part part) : seconds_(decoder.measured_ ? &decoder.times_[part] : nullptr) {
        if (seconds_ != nullptr) began_ = std::chrono::steady_clock::now();
    }
    ~Timer() {
        if (seconds_ != nullptr) *seconds_ += std::chrono::duration<double>(std::chrono::steady_clock::now() - began_).count();
    }
    Timer(const Timer&) = delete;
    Timer& operator=(const Timer&) = delete;

private:
    double* seconds_;
    std::chrono::steady_clock::time_point began_;
};

Decoder::Decoder(std::shared_ptr<Pool> pool, const DecoderShape& shape, std::shared_ptr<Matrix> embedding, Parts head, std::vector<float> final_norm,
                 std::vector<float> cosines, std::vector<float> sines)
    : pool_(std::move(pool)),
      shape_(shape),
      embedding_(std::move(embedding)),
      head_(std::move(head)),
      final_norm_(std::move(final_norm)),
      cosines_(std::move(cosines)),
      sines_(std::move(sines)) {
    const auto table = static_cast<size_t>(shape.max_positions * shape.head_dim / 2);
    require(embedding_->k() == shape.hidden_size, "embedding: [vocab, hidden]");
    require_parts(head_, embedding_->n(), shape.hidden_size, "head: [vocab, hidden]");
    require(final_norm_.size() == static_cast<size_t>(shape.hidden_size), "final_norm: [hidden]");
    require(cosines_.size() == table && sines_.size() == table, "cosines, sines: [max_positions, head_dim / 2]");
}

void Decoder::add_layer(DecoderLayer layer) {
    const auto hidden = static_cast<size_t>(shape_.hidden_size);
    require(layer.attention_norm.size() == hidden && layer.feed_forward_norm.size() == hidden, "norms: [hidden]");
    require_parts(layer.qkv, shape_.qkv_size(), shape_.hidden_size, "qkv: [(heads + 2 kv_heads) * head_dim, hidden]");
    require(layer.qkv_bias.empty() || layer.qkv_bias.size() == static_cast<size_t>(shape_.qkv_size()), "qkv_bias: [rows of qkv]");
    require(layer.qk_norm.empty() || layer.qk_norm.size() == static_cast<size_t>(shape_.num_rotated_heads() * shape_.head_dim),
            "qk_norm: [heads + kv_heads, head_dim]");
    require_parts(layer.output, shape_.hidden_size, shape_.num_heads * shape_.head_dim, "output: [hidden, heads * head_dim]");
    require_parts(layer.gate_up, 2 * shape_.intermediate_size, shape_.hidden_size, "gate_up: [2 * intermediate, hidden]");
    require_parts(layer.down, shape_.hidden_size, shape_.intermediate_size, "down: [hidden, intermediate]");
    layers_.push_back(std::move(layer));
}

void Decoder::fill(Adapter& adapter, int64_t layer, Site site, LowRank low_rank) const {
    const int64_t hidden = shape_.hidden_size, context = shape_.num_heads * shape_.head_dim, inner = shape_.intermediate_size;
    const std::pair<int64_t, int64_t> outputs_and_inputs[NUM_SITES] = {{shape_.qkv_size(), hidden}, {hidden, context}, {2 * inner, hidden}, {hidden, inner}};
    const auto& [num_outputs, num_inputs] = outputs_and_inputs[static_cast<int>(site)];
    adapter.set(layer, site, std::move(low_rank), num_outputs, num_inputs, shape_.compute);
}

const std::vector<std::string>& Decoder::part_names() {
    static const std::vector<std::string> names = {"embed", "plan",    "norm", "qkv",  "rotate", "write_kv", "attend",
                                                   "output", "gate_up", "silu", "down", "adapt", "finite", "head", "sample"};
    return names;
}

std::vector<double> Decoder::take_times() {
    std::vector<double> times(times_.begin(), times_.end());
    times_.fill(0.0);
    return times;
}

// Everything that would read or write outside of an array is refused here, before the first byte of the pool changes.
void Decoder::check(const StepInput& input) const {
    const StepShape& shape = input.shape;
    for (int64_t t = 0; t < shape.num_tokens; ++t) {
        if (static_cast<uint64_t>(input.token_ids[t]) >= static_cast<uint64_t>(vocab_size())) out_of_range("token id", input.token_ids[t], vocab_size());
        if (static_cast<uint64_t>(input.positions[t]) >= static_cast<uint64_t>(shape_.max_positions)) {
            out_of_range("position", input.positions[t], shape_.max_positions);
        }
    }
    for (int64_t r = 0; r < shape.num_rows; ++r) {
        if (shape.starts[r] >= shape.starts[r + 1]) throw std::out_of_range("a row of a step has at least one token");
        if (shape.num_computed[r] < 0) out_of_range("number of computed positions", shape.num_computed[r], shape_.max_positions);
        const int64_t num_blocks = (shape.num_computed[r] + shape.starts[r + 1] - shape.starts[r] + BLOCK - 1) / BLOCK;
        if (num_blocks > shape.table_stride) out_of_range("block of a table", num_blocks - 1, shape.table_stride);
        const int32_t* table = shape.block_tables + r * shape.table_stride;
        for (int64_t b = 0; b < num_blocks; ++b) {
            if (static_cast<uint32_t>(table[b]) >= static_cast<uint64_t>(input.num_blocks)) out_of_range("block id", table[b], input.num_blocks);
        }
    }
    for (int64_t r = 0; input.adapters != nullptr && r < shape.num_rows; ++r) {
        if (input.adapters[r] != nullptr && input.adapters[r]->num_layers() != num_layers()) throw std::out_of_range("an adapter of another model");
    }
    for (int64_t run = 0; run < shape.num_runs; ++run) {
        if (shape.run_start[run] < 0 || shape.run_offsets[run] > shape.run_offsets[run + 1] || shape.run_offsets[run + 1] > shape.run_offsets[shape.num_runs]) {
            throw std::out_of_range("a shared run begins before the first position, or its rows are out of order");
        }
        for (int64_t i = shape.run_offsets[run]; i < shape.run_offsets[run + 1]; ++i) {
            const int64_t row = shape.run_rows[i];
            if (static_cast<uint64_t>(row) >= static_cast<uint64_t>(shape.num_rows)) out_of_range("row of a run", row, shape.num_rows);
            if (shape.run_end[run] > shape.num_computed[row]) out_of_range("end of a run", shape.run_end[run], shape.num_computed[row] + 1);
        }
    }
}

void Decoder::reserve(int64_t num_tokens) {
    if (num_tokens <= capacity_) return;
    const int64_t capacity = (num_tokens + 63) / 64 * 64;
    const auto allocate = [capacity](auto& array, int64_t elements, int64_t element_bytes) {
        array.data.reset();
        const int64_t bytes = (capacity * elements * element_bytes + 63) / 64 * 64;
        array.data.reset(static_cast<uint8_t*>(std::aligned_alloc(64, static_cast<size_t>(bytes))));
        if (array.data == nullptr) throw std::bad_alloc();
        std::memset(array.data.get(), 0, static_cast<size_t>(bytes));
    };
    capacity_ = 0;
    const int64_t compute_bytes = bytes_of(shape_.compute);
    allocate(hidden_, shape_.hidden_size, sizeof(float));
    allocate(heads_, shape_.qkv_size(), sizeof(float));
    allocate(gate_up_, 2 * shape_.intermediate_size, sizeof(float));
    allocate(normed_, std::max(shape_.hidden_size, shape_.num_heads * shape_.head_dim), compute_bytes);
    allocate(activated_, shape_.intermediate_size, compute_bytes);
    capacity_ = capacity;
}

void Decoder::greedy(const int64_t* tokens, int64_t num_rows, float* logits_out, int64_t* token_ids, bool* finite) {
    logits(tokens, num_rows, logits_out);
    Timer timer(*this, SAMPLE);
    largest_of_rows(*pool_, logits_out, num_rows, vocab_size(), token_ids, finite);
}

// `next` is what is multiplied after these; null: nothing soon.
void Decoder::multiply_parts(const Parts& parts, const void* x, int64_t ldx, int64_t num_rows, float* out, int64_t ldo, const float* bias, bool accumulate,
                             const Parts* next) {
    int64_t first = 0;
    for (size_t i = 0; i < parts.size(); ++i) {
        const auto& part = parts[i];
        Product product{};
        product.matrix = part.get();
        product.next = i + 1 < parts.size() ? parts[i + 1].get() : next == nullptr ? nullptr : next->front().get();
        product.compute = shape_.compute;
        product.x = x;
        product.ldx = ldx;
        product.num_rows = num_rows;
        product.out = out + first;
        product.ldo = ldo;
        product.bias = bias == nullptr ? nullptr : bias + first;
        product.accumulate = accumulate;
        multiply(*pool_, product);
        first += part->n();
    }
}

void Decoder::adapt(int64_t layer, Site site, const void* x, int64_t ldx, float* out, int64_t ldo) {
    if (adapter_plan_.empty()) return;
    Timer timer(*this, ADAPT);
    adapter_plan_.add(*pool_, layer, site, shape_.compute, x, ldx, out, ldo);
}

void Decoder::forward(const StepInput& input, bool* finite) {
    check(input);
    const int64_t num_tokens = input.shape.num_tokens, hidden = shape_.hidden_size;
    num_tokens_ = 0;
    reserve(num_tokens);
    {
        Timer timer(*this, EMBED);
        const int64_t num_pieces = (num_tokens + EMBEDDINGS_OF_PIECE - 1) / EMBEDDINGS_OF_PIECE;
        const auto look_up = [&](int64_t piece, int) {
            const int64_t last = std::min(num_tokens, (piece + 1) * EMBEDDINGS_OF_PIECE);
            for (int64_t t = piece * EMBEDDINGS_OF_PIECE; t < last; ++t) embedding_->unpack_row(input.token_ids[t], hidden_.get() + t * hidden);
        };
        pool_->run(num_pieces, look_up);
    }
    const KvLayout layout{input.kv_type, static_cast<int64_t>(layers_.size()), shape_.num_kv_heads, shape_.head_dim};
    std::map<int64_t, AttentionPlan> plans;
    {
        Timer timer(*this, PLAN);
        for (const auto& layer : layers_) plans.try_emplace(layer.window, layout, input.shape, shape_.num_heads, layer.window, pool_->num_threads());
    }
    adapter_plan_.clear();
    if (input.adapters != nullptr) adapter_plan_.lay_out(input.adapters, input.shape.starts, input.shape.num_rows, pool_->num_threads());
    for (size_t index = 0; index < layers_.size(); ++index) {
        run_layer(layers_[index], static_cast<int64_t>(index), input, layout, plans.at(layers_[index].window));
    }
    {
        Timer timer(*this, FINITE);
        finite_rows(*pool_, hidden_.get(), num_tokens, hidden, finite);
    }
    num_tokens_ = num_tokens;
}

void Decoder::run_layer(const DecoderLayer& layer, int64_t index, const StepInput& input, const KvLayout& layout, const AttentionPlan& plan) {
    const int64_t num_tokens = input.shape.num_tokens, hidden = shape_.hidden_size, qkv = shape_.qkv_size(), inner = shape_.intermediate_size;
    const int64_t num_rotated = shape_.num_rotated_heads(), context = shape_.num_heads * shape_.head_dim;
    const Compute compute = shape_.compute;
    float* const heads = heads_.get();
    {
        Timer timer(*this, NORM);
        rms_norm(*pool_, hidden_.get(), hidden, num_tokens, hidden, layer.attention_norm.data(), shape_.eps, compute, normed_.get(), hidden);
    }
    {
        Timer timer(*this, QKV);
        multiply_parts(layer.qkv, normed_.get(), hidden, num_tokens, heads, qkv, layer.qkv_bias.empty() ? nullptr : layer.qkv_bias.data(), false,
                       &layer.output);
    }
    adapt(index, Site::qkv, normed_.get(), hidden, heads, qkv);
    {
        Timer timer(*this, ROTATE);
        norm_and_rotate(*pool_, heads, qkv, num_tokens, num_rotated, shape_.head_dim, layer.qk_norm.empty() ? nullptr : layer.qk_norm.data(), shape_.eps,
                        input.positions, cosines_.data(), sines_.data());
    }
    {
        Timer timer(*this, WRITE_KV);
        write_kv(*pool_, layout, input.kv_rows, index, input.shape, heads + shape_.num_heads * shape_.head_dim, heads + num_rotated * shape_.head_dim, qkv);
    }
    {
        Timer timer(*this, ATTEND);
        attend(*pool_, plan, input.kv_rows, index, shape_.attention_scale, heads, qkv, compute, normed_.get());
    }
    {
        Timer timer(*this, OUTPUT);
        multiply_parts(layer.output, normed_.get(), context, num_tokens, hidden_.get(), hidden, nullptr, true, &layer.gate_up);
    }
    adapt(index, Site::output, normed_.get(), context, hidden_.get(), hidden);
    {
        Timer timer(*this, NORM);
        rms_norm(*pool_, hidden_.get(), hidden, num_tokens, hidden, layer.feed_forward_norm.data(), shape_.eps, compute, normed_.get(), hidden);
    }
    {
        Timer timer(*this, GATE_UP);
        multiply_parts(layer.gate_up, normed_.get(), hidden, num_tokens, gate_up_.get(), 2 * inner, nullptr, false, &layer.down);
    }
    adapt(index, Site::gate_up, normed_.get(), hidden, gate_up_.get(), 2 * inner);
    {
        Timer timer(*this, SILU);
        silu_mul(*pool_, gate_up_.get(), 2 * inner, num_tokens, inner, compute, activated_.get(), inner);
    }
    {
        Timer timer(*this, DOWN);
        multiply_parts(layer.down, activated_.get(), inner, num_tokens, hidden_.get(), hidden, nullptr, true,
                       index + 1 < num_layers() ? &layers_[static_cast<size_t>(index) + 1].qkv : &head_);
    }
    adapt(index, Site::down, activated_.get(), inner, hidden_.get(), hidden);
}

void Decoder::logits(const int64_t* tokens, int64_t num_rows, float* out) {
    const int64_t hidden = shape_.hidden_size;
    for (int64_t r = 0; r < num_rows; ++r) {
        if (static_cast<uint64_t>(tokens[r]) >= static_cast<uint64_t>(num_tokens_)) out_of_range("token", tokens[r], num_tokens_);
    }
    if (num_rows > capacity_) {
        // more rows than the step had tokens (one token asked for many times): in runs that fit
        logits(tokens, capacity_, out);
        return logits(tokens + capacity_, num_rows - capacity_, out + capacity_ * vocab_size());
    }
    {
        Timer timer(*this, NORM);
        for (int64_t r = 0; r < num_rows; ++r) {
            rms_norm(*pool_, hidden_.get() + tokens[r] * hidden, hidden, 1, hidden, final_norm_.data(), shape_.eps, shape_.compute,
                     normed_.get() + r * hidden * bytes_of(shape_.compute), hidden);
        }
    }
    Timer timer(*this, HEAD);
    multiply_parts(head_, normed_.get(), hidden, num_rows, out, vocab_size(), nullptr, false, nullptr);
}

namespace {

template <class T, int NDIM>
using Array = nb::ndarray<const T, nb::ndim<NDIM>, nb::c_contig, nb::device::cpu>;
using Ids = nb::ndarray<int64_t, nb::ndim<1>, nb::c_contig, nb::device::cpu>;
using Flags = nb::ndarray<bool, nb::ndim<1>, nb::c_contig, nb::device::cpu>;

Site site_of(const std::string& name) {
    const char* names[NUM_SITES] = {"qkv", "output", "gate_up", "down"};
    for (int i = 0; i < NUM_SITES; ++i)
        if (name == names[i]) return static_cast<Site>(i);
    throw std::invalid_argument("no such product of a layer: " + name);
}

std::vector<float> values_of(const nb::ndarray<const float, nb::c_contig, nb::device::cpu>& array) { return {array.data(), array.data() + array.size()}; }

std::vector<float> values_of(const std::optional<nb::ndarray<const float, nb::c_contig, nb::device::cpu>>& array) {
    return array ? values_of(*array) : std::vector<float>();
}

}  // namespace

void register_decoder(nb::module_& m) {
    using Floats = nb::ndarray<const float, nb::c_contig, nb::device::cpu>;
    nb::class_<Adapter>(m, "Adapter", "A low-rank adapter of a decoder; kvd/executor/native_adapters.py fills it.")
        .def("__init__", [](Adapter* self, const Decoder& decoder) { new (self) Adapter(decoder.num_layers()); }, nb::arg("decoder"))
        .def(
            "set",
            [](Adapter& self, const Decoder& decoder, int64_t layer, const std::string& part, std::shared_ptr<Matrix> down,
               const std::vector<std::tuple<int64_t, int64_t, std::shared_ptr<Matrix>>>& up) {
                LowRank low_rank{std::move(down), {}};
                for (const auto& [first_output, first_rank, matrix] : up) low_rank.up.push_back({first_output, first_rank, matrix});
                decoder.fill(self, layer, site_of(part), std::move(low_rank));
            },
            nb::arg("decoder"), nb::arg("layer"), nb::arg("part"), nb::arg("down"), nb::arg("up"),
            "What is added to a product, `part` qkv, output, gate_up or down: A as a matrix [ranks, inputs] of the compute type, and of each B (first output, "
            "first of its ranks, matrix f32 [outputs, rank] times the scale). Before the first step that uses it.");
    nb::class_<Decoder>(m, "Decoder", "A decoder over packed weights; kvd/executor/native_model.py drives it. One caller at a time.")
        .def(
            "__init__",
            [](Decoder* self, std::shared_ptr<Pool> pool, int64_t hidden_size, int64_t intermediate_size, int64_t num_heads, int64_t num_kv_heads,
               int64_t head_dim, float eps, float attention_scale, const std::string& compute, std::shared_ptr<Matrix> embedding, Parts head,
               const Floats& final_norm, const Array<float, 2>& cosines, const Array<float, 2>& sines) {
                const DecoderShape shape{hidden_size,
                                         intermediate_size,
                                         num_heads,
                                         num_kv_heads,
                                         head_dim,
                                         static_cast<int64_t>(cosines.shape(0)),
                                         eps,
                                         attention_scale,
                                         compute_of(compute)};
                new (self) Decoder(std::move(pool), shape, std::move(embedding), std::move(head), values_of(final_norm),
                                   {cosines.data(), cosines.data() + cosines.size()}, {sines.data(), sines.data() + sines.size()});
            },
            nb::kw_only(), nb::arg("pool"), nb::arg("hidden_size"), nb::arg("intermediate_size"), nb::arg("num_heads"), nb::arg("num_kv_heads"),
            nb::arg("head_dim"), nb::arg("eps"), nb::arg("attention_scale"), nb::arg("compute"), nb::arg("embedding"), nb::arg("head"),
            nb::arg("final_norm"), nb::arg("cosines"), nb::arg("sines"))
        .def(
            "add_layer",
            [](Decoder& self, int64_t window, const Floats& attention_norm, Parts qkv, const std::optional<Floats>& qkv_bias,
               const std::optional<Floats>& qk_norm, Parts output, const Floats& feed_forward_norm, Parts gate_up, Parts down) {
                self.add_layer({window, values_of(attention_norm), std::move(qkv), values_of(qkv_bias), values_of(qk_norm), std::move(output),
                                values_of(feed_forward_norm), std::move(gate_up), std::move(down)});
            },
            nb::kw_only(), nb::arg("window"), nb::arg("attention_norm"), nb::arg("qkv"), nb::arg("qkv_bias").none(), nb::arg("qk_norm").none(),
            nb::arg("output"), nb::arg("feed_forward_norm"), nb::arg("gate_up"), nb::arg("down"))
        .def(
            "forward",
            [](Decoder& self, uintptr_t kv_address, const std::string& kv_type, int64_t num_blocks, const Array<int64_t, 1>& token_ids,
               const Array<int64_t, 1>& positions, const Array<int64_t, 1>& starts, const Array<int64_t, 1>& num_computed,
               const Array<int32_t, 2>& block_tables, const Array<int64_t, 1>& run_start, const Array<int64_t, 1>& run_end,
               const Array<int64_t, 1>& run_offsets, const Array<int64_t, 1>& run_rows,
               const Flags& finite, const std::vector<std::shared_ptr<Adapter>>& adapters,
               const std::optional<Array<int64_t, 1>>& adapter_of_row) {
                const auto num_rows = static_cast<int64_t>(num_computed.shape(0)), num_tokens = static_cast<int64_t>(token_ids.shape(0));
                const auto num_runs = static_cast<int64_t>(run_start.shape(0));
                require(static_cast<int64_t>(starts.shape(0)) == num_rows + 1 && static_cast<int64_t>(block_tables.shape(0)) == num_rows, "rows");
                require(static_cast<int64_t>(positions.shape(0)) == num_tokens && static_cast<int64_t>(finite.shape(0)) == num_tokens, "tokens");
                require(num_rows > 0 && starts.data()[0] == 0 && starts.data()[num_rows] == num_tokens, "starts");
                require(static_cast<int64_t>(run_end.shape(0)) == num_runs && static_cast<int64_t>(run_offsets.shape(0)) == num_runs + 1, "runs");
                require(run_offsets.data()[0] == 0 && run_offsets.data()[num_runs] == static_cast<int64_t>(run_rows.shape(0)), "rows of runs");
                require(adapters.empty() || (adapter_of_row && static_cast<int64_t>(adapter_of_row->shape(0)) == num_rows), "adapter_of_row");
                const std::vector<const Adapter*> of_rows = adapters.empty() ? std::vector<const Adapter*>() : adapters_of_rows(adapters, adapter_of_row->data(), num_rows);
                const StepInput input{{num_rows, num_tokens, starts.data(), num_computed.data(), block_tables.data(),
                                       static_cast<int64_t>(block_tables.shape(1)), num_runs, run_start.data(), run_end.data(), run_offsets.data(),
                                       run_rows.data()},
                                      token_ids.data(),
                                      positions.data(),
                                      kv_type_of(kv_type),
                                      reinterpret_cast<uint8_t*>(kv_address),
                                      num_blocks,
                                      of_rows.empty() ? nullptr : of_rows.data()};
                nb::gil_scoped_release released;
                self.forward(input, finite.data());
            },
            nb::arg("kv_address"), nb::arg("kv_type"), nb::arg("num_blocks"), nb::arg("token_ids"), nb::arg("positions"), nb::arg("starts"),
            nb::arg("num_computed"), nb::arg("block_tables"), nb::arg("run_start"), nb::arg("run_end"), nb::arg("run_offsets"), nb::arg("run_rows"),
            nb::arg("finite").noconvert(), nb::arg("adapters") = std::vector<std::shared_ptr<Adapter>>(),
            nb::arg("adapter_of_row") = nb::none(),
            "Run a step; `finite` is filled: whether a token's hidden states are. Row r runs with `adapters[adapter_of_row[r]]`, below 0 with none; no adapters: nobody "
            "looks at `adapter_of_row`. Raises IndexError for a token, position or block out of range.")
        .def(
            "logits",
            [](Decoder& self, const Array<int64_t, 1>& tokens, uintptr_t out_address) {
                nb::gil_scoped_release released;
                self.logits(tokens.data(), static_cast<int64_t>(tokens.shape(0)), reinterpret_cast<float*>(out_address));
            },
            nb::arg("tokens"), nb::arg("out_address"), "Float32 [len(tokens), vocab] of flat tokens of the last step, to `out_address`.")
        .def(
            "greedy",
            [](Decoder& self, const Array<int64_t, 1>& tokens, uintptr_t logits_address,
               const Ids& token_ids, const Flags& finite) {
                require(token_ids.shape(0) == tokens.shape(0) && finite.shape(0) == tokens.shape(0), "tokens, token_ids, finite: one length");
                nb::gil_scoped_release released;
                self.greedy(tokens.data(), static_cast<int64_t>(tokens.shape(0)), reinterpret_cast<float*>(logits_address), token_ids.data(), finite.data());
            },
            nb::arg("tokens"), nb::arg("logits_address"), nb::arg("token_ids").noconvert(), nb::arg("finite").noconvert(),
            "As logits; then the place of each row's largest, the first among equals, and whether all of the row are finite.")
        .def("reserve", &Decoder::reserve, nb::arg("num_tokens"), "Touch the memory of a step of so many tokens.")
        .def_prop_ro("vocab_size", &Decoder::vocab_size)
        .def("measure", &Decoder::measure, nb::arg("on"), "Count the seconds of each part of a step from now on, or no longer.")
        .def("take_times", [](Decoder& self) {
            nb::dict times;
            const std::vector<double> seconds = self.take_times();
            for (size_t part = 0; part < seconds.size(); ++part) times[Decoder::part_names()[part].c_str()] = seconds[part];
            return times;
        }, "Seconds of each part since the last call.");
}

}  // namespace kvd
