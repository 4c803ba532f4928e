// What a step's draws want beside the largest logit or a draw from all of the distribution: biases, lists and masks of what may be drawn, and
// log-probabilities. kvd/executor/sampling says the same in torch; the outcome is the same, bit for bit.
#pragma once

#include <condition_variable>
#include <cstdint>
#include <mutex>
#include <utility>
#include <vector>

#include "pool.h"

namespace kvd {

// The log-probability of a logit is logit - maximum - log_sum.
struct Normaliser {
    float maximum;
    double log_sum;  // of the sum of e^(logit - maximum)

    float of(float logit) const { return static_cast<float>(static_cast<double>(logit - maximum) - log_sum); }
};

using Top = std::vector<std::pair<int64_t, float>>;  // (place, logit), the largest first, the lowest place first among equals

// Of each row of finite logits its normaliser and its counts[r] largest; a row with a count below 0 is left out.
void score_rows(Pool& pool, const float* logits, int64_t num_rows, int64_t size, const int64_t* counts, const bool* finite, Normaliser* normalisers, Top* tops);

class Shaping {
public:
    // (draw, token id) pairs in the order of the draws; the ids that one draw is biased for are distinct.
    struct Pairs {
        std::vector<int64_t> draws, ids;
        std::vector<int64_t> begins;  // [num_draws + 1] where each draw's pairs begin
    };

    // `masked_draws` get one mask each, by give_masks. `num_logprobs` [num_draws] or empty: how many of the most likely are told, below 0 for nothing.
    // Throws std::invalid_argument where the arrays do not fit together.
    Shaping(int64_t num_draws, Pairs bias, std::vector<float> bias_values, Pairs allowed, Pairs banned, std::vector<int64_t> masked_draws,
            std::vector<int64_t> num_logprobs);

    // Throws what does not fit a step with so many draws over such a vocabulary.
    void check(int64_t num_draws, int64_t vocab_size) const;

    // The masks, one after the other, bit j of byte b of each for token 8 b + j; once, by whichever thread, before or while the step runs.
    void give_masks(std::vector<uint8_t> octets);
    // They will never come: whoever waits for them goes on with an error.
    void abandon();

    // Draws from `logits` [num_draws, size], which are used up. Waits for the masks. finite[d] says whether all of a draw's logits are, the place is 0
    // where they are not. `temperatures` and `keys` as for draw_rows, or null: all take the largest.
    void run(Pool& pool, float* logits, int64_t size, const float* temperatures, const uint64_t* keys, bool* finite, int64_t* places);

    int64_t num_draws() const { return num_draws_; }
    // Once it has run. A draw is stuck for which nothing was left.
    bool is_stuck(int64_t draw) const { return stuck_[static_cast<size_t>(draw)] != 0; }
    void forget_stuck(int64_t draw) { stuck_[static_cast<size_t>(draw)] = 0; }

    struct Scored {
        int64_t draw;
        float own;
        std::vector<std::pair<int64_t, float>> top;  // log-probabilities
    };
    std::vector<Scored> scored() const;

private:
    const uint8_t* wait_for_masks(int64_t size);
    int64_t take(float* x, int64_t size, int64_t draw, const uint8_t* mask, float temperature, uint64_t key);

    int64_t num_draws_;
    Pairs bias_, allowed_, banned_;
    std::vector<float> bias_values_, bias_raw_;
    std::vector<int64_t> masked_draws_, mask_of_draw_, num_logprobs_;
    std::vector<uint8_t> stuck_;
    std::vector<Normaliser> normalisers_;
    std::vector<Top> tops_;
    std::vector<float> own_;

    std::mutex mutex_;
    std::condition_variable given_;
    std::vector<uint8_t> octets_;
    bool has_masks_ = false, is_abandoned_ = false;
};

}  // namespace kvd
