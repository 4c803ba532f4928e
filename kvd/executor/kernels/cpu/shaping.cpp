#include "shaping.h"

#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>
#include <nanobind/stl/shared_ptr.h>

#include <algorithm>
#include <cmath>
#include <limits>
#include <stdexcept>
#include <string>

#include "dispatch.h"
#include "elementwise.h"
#include "elementwise_table.h"
#include "module.h"

namespace kvd {

namespace {

constexpr float NOTHING = -std::numeric_limits<float>::infinity();

void require(bool fits, const char* what) {
    if (!fits) throw std::invalid_argument(std::string("what a step's draws want does not fit together: ") + what);
}

void check_ids(const std::vector<int64_t>& ids, int64_t end, const char* what = "token") {
    for (const int64_t id : ids)
        if (static_cast<uint64_t>(id) >= static_cast<uint64_t>(end)) throw std::out_of_range(std::string(what) + " " + std::to_string(id) + " of " + std::to_string(end));
}

void index(Shaping::Pairs& pairs, int64_t num_draws) {
    require(pairs.draws.size() == pairs.ids.size() && std::is_sorted(pairs.draws.begin(), pairs.draws.end()), "pairs");
    require(pairs.draws.empty() || (pairs.draws.front() >= 0 && pairs.draws.back() < num_draws), "draws of pairs");
    for (int64_t draw = 0; draw <= num_draws; ++draw) {
        pairs.begins.push_back(std::lower_bound(pairs.draws.begin(), pairs.draws.end(), draw) - pairs.draws.begin());
    }
}

template <class Row>
void each_row(Pool& pool, int64_t num_rows, const Row& row) {
    if (num_rows == 1) return row(0);
    pool.run(num_rows, [&](int64_t r, int) { row(r); });
}

}  // namespace

void score_rows(Pool& pool, const float* logits, int64_t num_rows, int64_t size, const int64_t* counts, const bool* finite, Normaliser* normalisers, Top* tops) {
    const ElementwiseTable& table = KVD_CHOOSE(elementwise_table);
    each_row(pool, num_rows, [&](int64_t r) {
        if (counts[r] < 0 || (finite != nullptr && !finite[r])) return;
        const float* x = logits + r * size;
        normalisers[r].maximum = x[table.largest(x, size)];
        normalisers[r].log_sum = std::log(table.sum_of_exponentials(x, size, normalisers[r].maximum));
        tops[r] = table.top(x, size, std::min(counts[r], size));
    });
}

Shaping::Shaping(int64_t num_draws, Pairs bias, std::vector<float> bias_values, Pairs allowed, Pairs banned, std::vector<int64_t> masked_draws,
                 std::vector<int64_t> num_logprobs)
    : num_draws_(num_draws), bias_(std::move(bias)), allowed_(std::move(allowed)), banned_(std::move(banned)), bias_values_(std::move(bias_values)),
      masked_draws_(std::move(masked_draws)), num_logprobs_(std::move(num_logprobs)) {
    for (Pairs* pairs : {&bias_, &allowed_, &banned_}) index(*pairs, num_draws_);
    require(bias_values_.size() == bias_.ids.size(), "biases");
    require(num_logprobs_.empty() || static_cast<int64_t>(num_logprobs_.size()) == num_draws_, "log-probabilities");
    bias_raw_.resize(bias_values_.size());
    mask_of_draw_.assign(static_cast<size_t>(num_draws_), -1);
    for (size_t mask = 0; mask < masked_draws_.size(); ++mask) {
        require(static_cast<uint64_t>(masked_draws_[mask]) < static_cast<uint64_t>(num_draws_), "masks");
        mask_of_draw_[static_cast<size_t>(masked_draws_[mask])] = static_cast<int64_t>(mask);
    }
    stuck_.assign(static_cast<size_t>(num_draws_), 0);
    normalisers_.resize(num_logprobs_.size());
    tops_.resize(num_logprobs_.size());
    own_.resize(num_logprobs_.size());
}

void Shaping::check(int64_t num_draws, int64_t vocab_size) const {
    require(num_draws == num_draws_, "draws");
    for (const Pairs* pairs : {&bias_, &allowed_, &banned_}) check_ids(pairs->ids, vocab_size);
}

void Shaping::give_masks(std::vector<uint8_t> octets) {
    {
        const std::lock_guard lock(mutex_);
        octets_ = std::move(octets);
        has_masks_ = true;
    }
    given_.notify_all();
}

void Shaping::abandon() {
    {
        const std::lock_guard lock(mutex_);
        is_abandoned_ = true;
    }
    given_.notify_all();
}

const uint8_t* Shaping::wait_for_masks(int64_t size) {
    if (masked_draws_.empty()) return nullptr;
    std::unique_lock lock(mutex_);
    given_.wait(lock, [&] { return has_masks_ || is_abandoned_; });
    if (!has_masks_) throw std::runtime_error("the masks of a step were never given");
    require(octets_.size() % masked_draws_.size() == 0 && static_cast<int64_t>(octets_.size() / masked_draws_.size()) >= (size + 7) / 8, "octets of masks");
    return octets_.data();
}

void Shaping::run(Pool& pool, float* logits, int64_t size, const float* temperatures, const uint64_t* keys, bool* finite, int64_t* places) {
    finite_rows(pool, logits, num_draws_, size, finite);
    if (!num_logprobs_.empty()) score_rows(pool, logits, num_draws_, size, num_logprobs_.data(), finite, normalisers_.data(), tops_.data());
    const uint8_t* octets = wait_for_masks(size);
    const auto mask_octets = static_cast<int64_t>(masked_draws_.empty() ? 0 : octets_.size() / masked_draws_.size());
    each_row(pool, num_draws_, [&](int64_t d) {
        places[d] = 0;
        if (!finite[d]) return;
        const int64_t mask = mask_of_draw_[static_cast<size_t>(d)];
        places[d] = take(logits + d * size, size, d, mask < 0 ? nullptr : octets + mask * mask_octets, keys == nullptr ? 0.0f : temperatures[d],
                         keys == nullptr ? 0 : keys[d]);
    });
}

int64_t Shaping::take(float* x, int64_t size, int64_t draw, const uint8_t* mask, float temperature, uint64_t key) {
    const ElementwiseTable& table = KVD_CHOOSE(elementwise_table);
    const auto d = static_cast<size_t>(draw);
    const auto each = [&](const Pairs& pairs, const auto& work) {
        for (int64_t i = pairs.begins[d]; i < pairs.begins[d + 1]; ++i) work(static_cast<size_t>(i), x[pairs.ids[static_cast<size_t>(i)]]);
    };
    each(bias_, [&](size_t i, float& logit) {
        bias_raw_[i] = logit;
        logit += bias_values_[i];
    });
    const int64_t num_allowed = allowed_.begins[d + 1] - allowed_.begins[d];
    if (num_allowed > 0) {
        std::vector<float> kept;
        kept.reserve(static_cast<size_t>(num_allowed));
        each(allowed_, [&](size_t, float& logit) { kept.push_back(logit); });
        std::fill(x, x + size, NOTHING);
        size_t next = 0;
        each(allowed_, [&](size_t, float& logit) { logit = kept[next++]; });
    }
    each(banned_, [&](size_t, float& logit) { logit = NOTHING; });
    if (mask != nullptr) table.forbid(x, size, mask);
    int64_t place = table.largest(x, size);
    if (x[place] == NOTHING) {
        stuck_[d] = 1;
        return 0;
    }
    if (temperature > 0) place = table.drawn(x, size, temperature, key);
    if (!num_logprobs_.empty() && num_logprobs_[d] >= 0) {
        float raw = x[place];
        each(bias_, [&](size_t i, float&) {
            if (bias_.ids[i] == place) raw = bias_raw_[i];
        });
        own_[d] = normalisers_[d].of(raw);
    }
    return place;
}

std::vector<Shaping::Scored> Shaping::scored() const {
    std::vector<Scored> scored;
    for (size_t d = 0; d < num_logprobs_.size(); ++d) {
        if (num_logprobs_[d] < 0) continue;
        scored.push_back({static_cast<int64_t>(d), own_[d], tops_[d]});
        for (auto& [place, value] : scored.back().top) value = normalisers_[d].of(value);
    }
    return scored;
}

namespace nb = nanobind;

namespace {

template <class T>
using Column = nb::ndarray<const T, nb::ndim<1>, nb::c_contig, nb::device::cpu>;

template <class T>
std::vector<T> values_of(const Column<T>& column) {
    return {column.data(), column.data() + column.size()};
}

nb::tuple tuple_of(const Top& top) {
    nb::list pairs;
    for (const auto& [place, value] : top) pairs.append(nb::make_tuple(place, value));
    return nb::tuple(pairs);
}

}  // namespace

void register_shaping(nb::module_& m) {
    using Ints = Column<int64_t>;
    nb::class_<Shaping>(m, "Shaping", "What the draws of one queued step want beside a token; kvd/executor/native_runner.py makes it.")
        .def(
            "__init__",
            [](Shaping* self, int64_t num_draws, const Ints& bias_draw, const Ints& bias_id, const Column<float>& bias_value, const Ints& allowed_draw,
               const Ints& allowed_id, const Ints& banned_draw, const Ints& banned_id, const Ints& masked_draw, const Ints& num_logprobs) {
                new (self) Shaping(num_draws, {values_of(bias_draw), values_of(bias_id), {}}, values_of(bias_value), {values_of(allowed_draw), values_of(allowed_id), {}},
                                   {values_of(banned_draw), values_of(banned_id), {}}, values_of(masked_draw), values_of(num_logprobs));
            },
            nb::arg("num_draws"), nb::arg("bias_draw"), nb::arg("bias_id"), nb::arg("bias_value"), nb::arg("allowed_draw"), nb::arg("allowed_id"),
            nb::arg("banned_draw"), nb::arg("banned_id"), nb::arg("masked_draw"), nb::arg("num_logprobs"),
            "(draw, token id) pairs as in kvd.executor.sampling.rules.DrawRules; the draws that get a mask; of each draw how many log-probabilities are told, "
            "below 0 for nothing (empty: nobody's).")
        .def(
            "give_masks", [](Shaping& self, const Column<uint8_t>& octets) { self.give_masks(values_of(octets)); }, nb::arg("octets"),
            "The masks, one after the other; they are copied. The step waits for them before it draws.")
        .def_prop_ro(
            "stuck",
            [](const Shaping& self) {
                nb::list list;
                for (int64_t draw = 0; draw < self.num_draws(); ++draw)
                    if (self.is_stuck(draw)) list.append(draw);
                return list;
            },
            "Draws for which nothing was left, once the step has ended.")
        .def_prop_ro(
            "scored",
            [](const Shaping& self) {
                nb::list list;
                for (const Shaping::Scored& each : self.scored()) list.append(nb::make_tuple(each.draw, each.own, tuple_of(each.top)));
                return list;
            },
            "(draw, log-probability of its token, the most likely (token id, log-probability) pairs) of those who asked, once the step has ended.");
    m.def(
        "score",
        [](Pool& pool, const nb::ndarray<const float, nb::ndim<2>, nb::c_contig, nb::device::cpu>& logits, const Ints& counts, const Ints& places) {
            const auto num_rows = static_cast<int64_t>(logits.shape(0)), size = static_cast<int64_t>(logits.shape(1));
            if (counts.size() != logits.shape(0) || places.size() != logits.shape(0)) throw std::invalid_argument("logits [rows, size], counts [rows], places [rows]");
            check_ids(values_of(places), size);
            std::vector<Normaliser> normalisers(logits.shape(0));
            std::vector<Top> tops(logits.shape(0));
            {
                nb::gil_scoped_release released;
                score_rows(pool, logits.data(), num_rows, size, counts.data(), nullptr, normalisers.data(), tops.data());
            }
            nb::list list;
            for (int64_t r = 0; r < num_rows; ++r) {
                const Normaliser& normaliser = normalisers[static_cast<size_t>(r)];
                for (auto& [place, value] : tops[static_cast<size_t>(r)]) value = normaliser.of(value);
                list.append(nb::make_tuple(normaliser.of(logits.data()[r * size + places.data()[r]]), tuple_of(tops[static_cast<size_t>(r)])));
            }
            return list;
        },
        nb::arg("pool"), nb::arg("logits"), nb::arg("counts"), nb::arg("places"),
        "Of each row of finite logits the log-probability of the element at `places`, and the (place, log-probability) pairs of its `counts` largest, the lowest "
        "place first among equals.");
    m.def(
        "forbid",
        [](Pool& pool, const nb::ndarray<float, nb::ndim<2>, nb::c_contig, nb::device::cpu>& logits, const Ints& draws,
           const nb::ndarray<const uint8_t, nb::ndim<2>, nb::c_contig, nb::device::cpu>& octets) {
            const auto size = static_cast<int64_t>(logits.shape(1)), mask_octets = static_cast<int64_t>(octets.shape(1));
            if (octets.shape(0) != draws.size() || mask_octets * 8 < size) throw std::invalid_argument("logits [rows, size], draws [masks], octets [masks, size / 8 or more]");
            check_ids(values_of(draws), static_cast<int64_t>(logits.shape(0)), "draw");
            nb::gil_scoped_release released;
            const ElementwiseTable& table = KVD_CHOOSE(elementwise_table);
            each_row(pool, static_cast<int64_t>(draws.size()), [&](int64_t mask) {
                table.forbid(logits.data() + draws.data()[mask] * size, size, octets.data() + mask * mask_octets);
            });
        },
        nb::arg("pool"), nb::arg("logits").noconvert(), nb::arg("draws"), nb::arg("octets"),
        "Minus infinity in the rows `draws`, which are distinct, where bit j of byte b of a row's mask is 0: place 8 b + j.");
}

}  // namespace kvd
