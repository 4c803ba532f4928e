#include "step_queue.h"

#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>
#include <nanobind/stl/optional.h>
#include <nanobind/stl/pair.h>
#include <nanobind/stl/shared_ptr.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>
#include <pthread.h>
#include <signal.h>

#include <algorithm>
#include <chrono>
#include <cstring>
#include <stdexcept>
#include <utility>

#include "elementwise.h"
#include "module.h"

namespace kvd {

namespace {

constexpr int64_t WARM_ROWS = 16;  // whose logits have memory from the start: fresh pages take longer than the product that fills them

void check_ids(const std::vector<int64_t>& ids, int64_t end, const char* what) {
    for (const int64_t id : ids) {
        if (static_cast<uint64_t>(id) >= static_cast<uint64_t>(end)) throw std::out_of_range(std::string(what) + " " + std::to_string(id) + " of " + std::to_string(end));
    }
}

double now_s() { return std::chrono::duration<double>(std::chrono::steady_clock::now().time_since_epoch()).count(); }

}  // namespace

StepQueue::StepQueue(std::shared_ptr<Decoder> decoder, int64_t max_rows)
    : decoder_(std::move(decoder)), failed_(static_cast<size_t>(max_rows)), sampled_(static_cast<size_t>(max_rows)) {
    logits_.resize(static_cast<size_t>(std::min<int64_t>(max_rows, WARM_ROWS) * decoder_->vocab_size()));
    sigset_t all, before;  // signals go to the threads of the interpreter
    sigfillset(&all);
    pthread_sigmask(SIG_SETMASK, &all, &before);
    try {
        thread_ = std::thread([this] { work(); });
    } catch (...) {
        pthread_sigmask(SIG_SETMASK, &before, nullptr);
        throw;
    }
    pthread_sigmask(SIG_SETMASK, &before, nullptr);
}

StepQueue::~StepQueue() {
    {
        const std::lock_guard lock(mutex_);
        stopping_ = true;
        for (const auto& step : steps_)
            if (step->shaping) step->shaping->abandon();
    }
    launched_.notify_all();
    thread_.join();
}

void StepQueue::launch(std::shared_ptr<QueuedStep> step) {
    check_ids(step->rows, static_cast<int64_t>(failed_.size()), "row");
    check_ids(step->copy_sources, step->num_blocks, "block");
    check_ids(step->copy_targets, step->num_blocks, "block");
    check_ids(step->cleared, step->num_blocks, "block");
    check_ids(step->sampling, static_cast<int64_t>(step->rows.size()), "row of the step");
    if (step->shaping) step->shaping->check(static_cast<int64_t>(step->sampling.size()), decoder_->vocab_size());
    step->failed = std::make_unique<bool[]>(step->rows.size());
    step->sampled.assign(step->sampling.size(), 0);
    {
        const std::lock_guard lock(mutex_);
        if (steps_.size() >= MAX_STEPS) throw std::length_error("too many steps are under way");
        steps_.push_back(std::move(step));
    }
    launched_.notify_one();
}

void StepQueue::wait(const QueuedStep& step) {
    std::vector<std::shared_ptr<QueuedStep>> dropped;
    {
        std::unique_lock lock(mutex_);
        ended_.wait(lock, [&] { return step.done.load(std::memory_order_relaxed); });
        dropped.swap(done_);
    }
    if (step.error) std::rethrow_exception(step.error);
}

void StepQueue::wait_idle() {
    std::vector<std::shared_ptr<QueuedStep>> dropped;
    std::unique_lock lock(mutex_);
    ended_.wait(lock, [&] { return steps_.empty(); });
    dropped.swap(done_);
}

void StepQueue::set_failed(const int64_t* rows, const bool* failed, int64_t num_rows) {
    wait_idle();
    for (int64_t i = 0; i < num_rows; ++i) {
        if (static_cast<uint64_t>(rows[i]) >= failed_.size()) throw std::out_of_range("row " + std::to_string(rows[i]));
        failed_[static_cast<size_t>(rows[i])] = failed[i];
    }
}

void StepQueue::work() {
    pthread_setname_np(pthread_self(), "kvd-cpu-0");
    std::unique_lock lock(mutex_);
    for (;;) {
        launched_.wait(lock, [&] { return stopping_ || !steps_.empty(); });
        if (steps_.empty()) return;
        const std::shared_ptr<QueuedStep> step = steps_.front();
        lock.unlock();
        if (!error_) {
            step->began_s = now_s();
            try {
                run(*step);
            } catch (...) {
                error_ = std::current_exception();
            }
        }
        step->ended_s = now_s();
        step->error = error_;
        lock.lock();
        step->done.store(true, std::memory_order_release);
        done_.push_back(std::move(steps_.front()));
        steps_.pop_front();
        ended_.notify_all();
    }
}

void StepQueue::run(QueuedStep& step) {
    std::vector<uint8_t> copied(step.copy_sources.size() * static_cast<size_t>(step.row_bytes));
    const auto row_bytes = static_cast<size_t>(step.row_bytes);
    for (size_t i = 0; i < step.copy_sources.size(); ++i) std::memcpy(copied.data() + i * row_bytes, step.kv_rows + step.copy_sources[i] * step.row_bytes, row_bytes);
    for (size_t i = 0; i < step.copy_targets.size(); ++i) std::memcpy(step.kv_rows + step.copy_targets[i] * step.row_bytes, copied.data() + i * row_bytes, row_bytes);
    for (const int64_t block : step.cleared) std::memset(step.kv_rows + block * step.row_bytes, 0, row_bytes);
    const auto num_rows = static_cast<int64_t>(step.rows.size()), num_tokens = static_cast<int64_t>(step.token_ids.size());
    if (num_rows == 0) return;

    for (int64_t r = 0; r < num_rows; ++r) {
        const auto row = static_cast<size_t>(step.rows[static_cast<size_t>(r)]);
        if (step.begins[static_cast<size_t>(r)]) failed_[row] = 0;
        for (int64_t t = step.starts[static_cast<size_t>(r)]; t < step.starts[static_cast<size_t>(r) + 1]; ++t) {
            if (step.token_ids[static_cast<size_t>(t)] == QueuedStep::ON_DEVICE) step.token_ids[static_cast<size_t>(t)] = sampled_[row];
        }
    }
    const auto num_sampling = static_cast<int64_t>(step.sampling.size());
    if (finite_size_ < num_tokens + num_sampling) {
        finite_size_ = num_tokens + num_sampling;
        finite_ = std::make_unique<bool[]>(static_cast<size_t>(finite_size_));
    }
    const StepInput input{{num_rows, num_tokens, step.starts.data(), step.num_computed.data(), step.block_tables.data(), step.table_stride,
                           static_cast<int64_t>(step.run_start.size()), step.run_start.data(), step.run_end.data(), step.run_offsets.data(), step.run_rows.data()},
                          step.token_ids.data(),
                          step.positions.data(),
                          step.kv_type,
                          step.kv_rows,
                          step.num_blocks,
                          step.adapter_of_row.empty() ? nullptr : step.adapter_of_row.data()};
    decoder_->forward(input, finite_.get());
    for (int64_t r = 0; r < num_rows; ++r) {
        uint8_t& failed = failed_[static_cast<size_t>(step.rows[static_cast<size_t>(r)])];
        const bool* finite = finite_.get();
        failed |= !std::all_of(finite + step.starts[static_cast<size_t>(r)], finite + step.starts[static_cast<size_t>(r) + 1], [](bool each) { return each; });
    }
    if (num_sampling > 0) {
        const auto needed = static_cast<size_t>(num_sampling * decoder_->vocab_size());
        if (logits_.size() < needed) logits_.resize(needed);
        std::vector<int64_t> tokens;
        for (const int64_t r : step.sampling) tokens.push_back(step.starts[static_cast<size_t>(r) + 1] - 1);
        bool* finite = finite_.get() + num_tokens;
        if (step.shaping) {
            const bool draws = !step.keys.empty();
            decoder_->logits(tokens.data(), num_sampling, logits_.data());
            step.shaping->run(decoder_->pool(), logits_.data(), decoder_->vocab_size(), draws ? step.temperatures.data() : nullptr, draws ? step.keys.data() : nullptr,
                              finite, step.sampled.data());
        } else {
            decoder_->greedy(tokens.data(), num_sampling, logits_.data(), step.sampled.data(), finite);
        }
        if (!step.shaping && !step.keys.empty()) {
            draw_rows(decoder_->pool(), logits_.data(), num_sampling, decoder_->vocab_size(), step.temperatures.data(), step.keys.data(), finite, step.sampled.data());
        }
        for (int64_t i = 0; i < num_sampling; ++i) {
            const auto row = static_cast<size_t>(step.rows[static_cast<size_t>(step.sampling[static_cast<size_t>(i)])]);
            failed_[row] |= !finite[i];
            if (step.shaping && step.shaping->is_stuck(i)) {
                if (failed_[row]) step.shaping->forget_stuck(i);
                failed_[row] = 1;
            }
            if (failed_[row]) step.sampled[static_cast<size_t>(i)] = 0;  // any token that exists
            sampled_[row] = step.sampled[static_cast<size_t>(i)];
        }
    }
    for (int64_t r = 0; r < num_rows; ++r) step.failed[static_cast<size_t>(r)] = failed_[static_cast<size_t>(step.rows[static_cast<size_t>(r)])] != 0;
}

namespace nb = nanobind;

namespace {

template <class T, int NDIM>
using Array = nb::ndarray<const T, nb::ndim<NDIM>, nb::c_contig, nb::device::cpu>;

template <class A>
auto values_of(const A& array) {
    return std::vector<std::remove_cv_t<typename A::Scalar>>(array.data(), array.data() + array.size());
}

void require(bool holds, const char* what) {
    if (!holds) throw std::invalid_argument(std::string("arrays of a step do not fit together: ") + what);
}

nb::list list_of(const std::vector<int64_t>& values) {
    nb::list list;
    for (const int64_t value : values) list.append(value);
    return list;
}

}  // namespace

void register_step_queue(nb::module_& m) {
    using Ints = Array<int64_t, 1>;
    nb::class_<QueuedStep>(m, "QueuedStep", "A step that was launched.")
        .def("done", [](const QueuedStep& self) { return self.done.load(std::memory_order_acquire); }, "Whether it has ended.")
        .def_prop_ro("times_s", [](const QueuedStep& self) { return std::make_pair(self.began_s, self.ended_s); }, "When it began and ended, on the monotonic clock.")
        .def_prop_ro("sampled", [](const QueuedStep& self) { return list_of(self.sampled); }, "Token ids of the sampling rows, once it has ended.")
        .def_prop_ro(
            "failed",
            [](const QueuedStep& self) {
                nb::list list;
                for (size_t r = 0; r < self.rows.size(); ++r)
                    if (self.failed[r]) list.append(r);
                return list;
            },
            "Indices of the step's rows that have failed since they began, once it has ended.");
    nb::class_<StepQueue>(m, "StepQueue", "Runs a decoder's steps one after another on a thread of its own; kvd/executor/native_runner.py drives it.")
        .def(nb::init<std::shared_ptr<Decoder>, int64_t>(), nb::arg("decoder"), nb::arg("max_rows"))
        .def(
            "launch",
            [](StepQueue& self, uintptr_t kv_address, const std::string& kv_type, int64_t num_blocks, int64_t row_bytes, const Ints& copy_sources,
               const Ints& copy_targets, const Ints& cleared, const Ints& rows, const Array<bool, 1>& begins, const Ints& token_ids, const Ints& positions,
               const Ints& starts, const Ints& num_computed, const Array<int32_t, 2>& block_tables, const Ints& run_start, const Ints& run_end,
               const Ints& run_offsets, const Ints& run_rows, const Ints& sampling,
               const Array<float, 1>& temperatures, const Array<uint64_t, 1>& keys, std::vector<std::shared_ptr<Adapter>> adapters,
               const std::optional<Ints>& adapter_of_row, std::shared_ptr<Shaping> shaping) {
                const size_t num_rows = rows.shape(0), num_tokens = token_ids.shape(0), num_runs = run_start.shape(0);
                require(copy_sources.shape(0) == copy_targets.shape(0), "copies");
                require(begins.shape(0) == num_rows && starts.shape(0) == num_rows + 1 && num_computed.shape(0) == num_rows && block_tables.shape(0) == num_rows, "rows");
                require(positions.shape(0) == num_tokens && starts.data()[0] == 0 && starts.data()[num_rows] == static_cast<int64_t>(num_tokens), "tokens");
                require(std::is_sorted(starts.data(), starts.data() + num_rows + 1), "starts");
                require(run_end.shape(0) == num_runs && run_offsets.shape(0) == num_runs + 1 && run_offsets.data()[0] == 0 &&
                            run_offsets.data()[num_runs] == static_cast<int64_t>(run_rows.shape(0)),
                        "runs");
                require(temperatures.shape(0) == keys.shape(0) && (keys.shape(0) == 0 || keys.shape(0) == sampling.shape(0)), "draws");
                require(adapters.empty() || (adapter_of_row && adapter_of_row->shape(0) == num_rows), "adapters");
                auto step = std::make_shared<QueuedStep>();
                step->kv_rows = reinterpret_cast<uint8_t*>(kv_address);
                step->kv_type = kv_type_of(kv_type);
                step->num_blocks = num_blocks;
                step->row_bytes = row_bytes;
                step->copy_sources = values_of(copy_sources);
                step->copy_targets = values_of(copy_targets);
                step->cleared = values_of(cleared);
                step->rows = values_of(rows);
                step->begins.assign(begins.data(), begins.data() + num_rows);
                step->token_ids = values_of(token_ids);
                step->positions = values_of(positions);
                step->starts = values_of(starts);
                step->num_computed = values_of(num_computed);
                step->block_tables = values_of(block_tables);
                step->table_stride = static_cast<int64_t>(block_tables.shape(1));
                step->run_start = values_of(run_start);
                step->run_end = values_of(run_end);
                step->run_offsets = values_of(run_offsets);
                step->run_rows = values_of(run_rows);
                step->sampling = values_of(sampling);
                step->temperatures = values_of(temperatures);
                step->keys = values_of(keys);
                step->shaping = std::move(shaping);
                if (!adapters.empty()) step->adapter_of_row = adapters_of_rows(adapters, adapter_of_row->data(), static_cast<int64_t>(num_rows));
                step->adapters = std::move(adapters);
                self.launch(step);
                return step;
            },
            nb::arg("kv_address"), nb::arg("kv_type"), nb::arg("num_blocks"), nb::arg("row_bytes"), nb::arg("copy_sources"), nb::arg("copy_targets"),
            nb::arg("cleared"), nb::arg("rows"), nb::arg("begins"), nb::arg("token_ids"), nb::arg("positions"), nb::arg("starts"), nb::arg("num_computed"),
            nb::arg("block_tables"), nb::arg("run_start"), nb::arg("run_end"), nb::arg("run_offsets"), nb::arg("run_rows"), nb::arg("sampling"),
            nb::arg("temperatures"), nb::arg("keys"), nb::arg("adapters") = std::vector<std::shared_ptr<Adapter>>(), nb::arg("adapter_of_row") = nb::none(),
            nb::arg("shaping").none() = nb::none(),
            "Queue a step: copy and clear blocks, run it, and take a token for the rows with indices `sampling`: by the largest logit, or a draw, of what `shaping` leaves. "
            "Returns at once; the arrays are copied.")
        .def("wait", &StepQueue::wait, nb::arg("step"), nb::call_guard<nb::gil_scoped_release>(),
             "Sleep until the step has ended. Raises what went wrong in it or in an earlier one; IndexError for a token, position or block out of range.")
        .def("wait_idle", &StepQueue::wait_idle, nb::call_guard<nb::gil_scoped_release>(), "Sleep until every launched step has ended.")
        .def(
            "set_failed",
            [](StepQueue& self, const Ints& rows, const Array<bool, 1>& failed) {
                require(rows.shape(0) == failed.shape(0), "rows");
                self.set_failed(rows.data(), failed.data(), static_cast<int64_t>(rows.shape(0)));
            },
            nb::arg("rows"), nb::arg("failed"), "Note which rows of the last step have failed, by the caller's own sampling; nothing may be under way.");
}

}  // namespace kvd
