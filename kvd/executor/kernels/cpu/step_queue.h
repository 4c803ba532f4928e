// Steps one after another on a thread of their own, so that no interpreter stands between two of them: what a row has sampled stays here and is
// its next input, as on an accelerator. A step begins when the one before it has ended, whoever may be reading that one's result.
#pragma once

#include <atomic>
#include <condition_variable>
#include <cstdint>
#include <deque>
#include <exception>
#include <memory>
#include <mutex>
#include <string>
#include <thread>
#include <vector>

#include "decoder.h"
#include "shaping.h"

namespace kvd {

// One step: what it reads, copied when it was launched, and what came out.
struct QueuedStep {
    // The pool, and what is done to its rows before the step: copies (every source is read before a target is written), then blocks to be cleared.
    uint8_t* kv_rows;
    KvType kv_type;
    int64_t num_blocks, row_bytes;
    std::vector<int64_t> copy_sources, copy_targets, cleared;

    std::vector<int64_t> rows;          // [num_rows] the scheduler's numbers
    std::vector<uint8_t> begins;        // [num_rows] the row begins in this step: it has sampled nothing and has not failed
    std::vector<int64_t> token_ids;     // [num_tokens]; ON_DEVICE: what the row sampled last
    std::vector<int64_t> positions, starts, num_computed;
    std::vector<int32_t> block_tables;  // [num_rows, table_stride]
    int64_t table_stride;
    std::vector<int64_t> run_start, run_end, run_offsets, run_rows;
    std::vector<std::shared_ptr<Adapter>> adapters;  // kept alive by the step that uses them
    std::vector<const Adapter*> adapter_of_row;      // [num_rows], or empty: no row has one
    std::vector<int64_t> sampling;      // indices of the rows that take a token after their last one; empty: the caller samples
    // [sampling], or empty: all take the largest logit. Those of a temperature above 0 draw from all of their distribution by a noise stream.
    std::vector<float> temperatures;
    std::vector<uint64_t> keys;
    std::shared_ptr<Shaping> shaping;  // what the draws want besides; null: nothing

    static constexpr int64_t ON_DEVICE = -1;

    std::unique_ptr<bool[]> failed;       // [num_rows] the row has had a hidden state or a logit that is not finite since it began, or was stuck
    std::vector<int64_t> sampled;         // [sampling]; 0 where the row has failed or is stuck
    double began_s = 0, ended_s = 0;      // of the monotonic clock
    std::exception_ptr error;
    std::atomic<bool> done{false};
};

class StepQueue {
public:
    // Rows have numbers in [0, max_rows). Nobody else runs steps of `decoder` while the queue has some.
    StepQueue(std::shared_ptr<Decoder> decoder, int64_t max_rows);
    ~StepQueue();  // after the steps that were launched
    StepQueue(const StepQueue&) = delete;
    StepQueue& operator=(const StepQueue&) = delete;

    // Throws std::out_of_range for a row or a block that does not exist, std::length_error with MAX_STEPS under way.
    void launch(std::shared_ptr<QueuedStep> step);
    // Sleeps until the step has ended; rethrows what went wrong in it, or in an earlier one.
    void wait(const QueuedStep& step);
    // Sleeps until every launched step has ended.
    void wait_idle();
    // What the caller found out about rows of the last step, while nothing is under way.
    void set_failed(const int64_t* rows, const bool* failed, int64_t num_rows);

    static constexpr size_t MAX_STEPS = 64;

private:
    void work();
    void run(QueuedStep& step);

    std::shared_ptr<Decoder> decoder_;
    std::vector<uint8_t> failed_;     // [max_rows]
    std::vector<int64_t> sampled_;    // [max_rows]
    std::vector<float> logits_;
    std::unique_ptr<bool[]> finite_;  // of tokens, then of logits
    int64_t finite_size_ = 0;
    std::exception_ptr error_;        // the first: the pool's state is unknown from then on

    std::mutex mutex_;
    std::condition_variable launched_, ended_;
    std::deque<std::shared_ptr<QueuedStep>> steps_;  // the first is under way
    // Those that have ended, until somebody waits: what a step holds may be the interpreter's, whose lock the queue's thread must never wait for.
    std::vector<std::shared_ptr<QueuedStep>> done_;
    bool stopping_ = false;
    std::thread thread_;
};

}  // namespace kvd
