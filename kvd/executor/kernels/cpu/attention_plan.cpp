// What a step's attention is cut into, and the calls that hand it to the pool of threads.
//
// Shared runs: ChunkAttention (Ye et al. 2024) and Hydragen (Juravsky et al. 2024) attend to a shared prefix once for all of its queries, as a
// matrix product instead of repeated vector products; FlashInfer's cascade (Ye et al. 2025) does so on several levels and merges by log-sum-exp.
// Splitting one long context over threads is Flash-Decoding (Dao et al. 2023). Here all of them merge the same tiles in the same order.
#include "attention_plan.h"

#include <pthread.h>

#include <algorithm>
#include <mutex>
#include <stdexcept>
#include <utility>

#include "dispatch.h"

namespace kvd {

KvType kv_type_of(const std::string& name) {
    if (name == "float32") return KvType::f32;
    if (name == "bfloat16") return KvType::bf16;
    if (name == "int8") return KvType::int8;
    throw std::invalid_argument("KV is kept as float32, bfloat16 or int8, not " + name);
}

Compute compute_of(const std::string& name) {
    if (name == "float32") return Compute::f32;
    if (name == "bfloat16") return Compute::bf16;
    throw std::invalid_argument("kvd computes in float32 or bfloat16, not " + name);
}

int64_t KvLayout::plane_bytes() const {
    const int64_t elements = num_kv_heads * BLOCK * head_dim;
    if (type == KvType::f32) return elements * 4;
    if (type == KvType::bf16) return elements * 2;
    return elements + num_kv_heads * BLOCK * static_cast<int64_t>(sizeof(float));
}

namespace {

constexpr int64_t UNIT_ROWS = 96;   // query rows (queries x heads of a KV head) whose accumulators fit beside K and V of a tile in the cache
constexpr int64_t FEWEST_ROWS = 24;  // below that, reading K and V costs more than the products

// Rough costs in microseconds on one core of 2023: they decide on pieces, never on results.
struct Costs {
    double tile_read;    // K and V of one tile and KV head from memory
    double row_tile;     // one query row against one tile
    double row_record;   // writing one record and reading it again, both past the nearest cache: a tenth of tile_read
    static constexpr double TASK = 0.3;

    explicit Costs(const KvLayout& layout) {
        const double dims = static_cast<double>(layout.head_dim) / 64;
        tile_read = dims * (layout.type == KvType::f32 ? 3.2 : layout.type == KvType::bf16 ? 1.6 : 1.2);
        row_tile = dims * (layout.type == KvType::f32 ? 0.2 : 0.1);
        row_record = static_cast<double>(layout.head_dim + 16) * 8 / 4000;
    }
    double tile(int64_t rows) const { return std::max(tile_read, static_cast<double>(rows) * row_tile); }
};

// Memory for records outlives the plans, as long as it is not much: fresh pages for every step would cost more than the merging.
class RecordMemory {
public:
    static std::vector<float> take(size_t size) {
        std::vector<float> memory;
        {
            const std::lock_guard lock(mutex());
            if (!kept().empty()) {
                memory = std::move(kept().back());
                kept().pop_back();
            }
        }
        if (memory.size() < size) {
            memory = {};  // its contents need no copy
            memory.resize(size);
        }
        return memory;
    }
    static void give_back(std::vector<float> memory) {
        if (memory.size() > MOST_FLOATS) return;
        const std::lock_guard lock(mutex());
        if (kept().size() < MOST_KEPT) kept().push_back(std::move(memory));
    }

private:
    static constexpr size_t MOST_KEPT = 2, MOST_FLOATS = size_t{8} << 20;  // two of 32 MiB: a model has at most two windows

    static std::mutex& mutex() {
        static std::mutex mutex;
        // Whoever else holds it is not in a forked child, which could wait for it for ever.
        static const int watched = pthread_atfork([] { RecordMemory::mutex().lock(); }, [] { RecordMemory::mutex().unlock(); }, [] { RecordMemory::mutex().unlock(); });
        (void)watched;
        return mutex;
    }
    static std::vector<std::vector<float>>& kept() {
        static auto* kept = new std::vector<std::vector<float>>;
        return *kept;
    }
};

// A task before it is split over tiles.
struct Draft {
    int64_t first_tile, end_tile;
    int32_t first_unit, num_units;  // into draft_units
    double cost;
};

class Planner {
public:
    Planner(AttentionPlan::Impl& plan, int num_threads)
        : plan_(plan), costs_(plan.layout), num_threads_(num_threads), num_kv_heads_(plan.layout.num_kv_heads), group_(plan.group()) {}

    void make() {
        make_units();
        share_runs();
        make_private();
        split();
        place_records();
    }

private:
    using Unit = AttentionPlan::Impl::Unit;
    struct Shared {
        int32_t unit;
        int64_t first_tile, end_tile;
    };
    // One task's share of a unit.
    struct Share {
        int32_t unit, task, member;
        int64_t first_tile;
    };

    void make_units() {
        const StepShape& shape = plan_.shape;
        int64_t tokens = std::max<int64_t>(1, UNIT_ROWS / group_);
        const auto num_units = [&] {
            int64_t sum = 0;
            for (int64_t row = 0; row < shape.num_rows; ++row) sum += (shape.starts[row + 1] - shape.starts[row] + tokens - 1) / tokens;
            return sum;
        };
        while (num_threads_ > 1 && tokens > 1 && tokens * group_ > FEWEST_ROWS && num_units() * num_kv_heads_ < 4 * num_threads_) tokens = (tokens + 1) / 2;
        first_units_.reserve(static_cast<size_t>(shape.num_rows + 1));
        for (int64_t row = 0; row < shape.num_rows; ++row) {
            first_units_.push_back(static_cast<int32_t>(plan_.units.size()));
            for (int64_t token = shape.starts[row]; token < shape.starts[row + 1]; token += tokens) {
                const int64_t count = std::min(tokens, shape.starts[row + 1] - token);
                const int64_t position = shape.num_computed[row] + token - shape.starts[row];
                plan_.units.push_back({row, token, count, position, plan_.first_seen(position) / TILE, (position + count - 1) / TILE + 1, 0, 0});
            }
        }
        first_units_.push_back(static_cast<int32_t>(plan_.units.size()));
        cut_.assign(plan_.units.size(), 0);
    }

    int64_t rows_of(int32_t unit) const { return plan_.units[static_cast<size_t>(unit)].num_tokens * group_; }

    void share_runs() {
        const StepShape& shape = plan_.shape;
        std::vector<int32_t> units;
        for (int64_t run = 0; run < shape.num_runs; ++run) {
            int64_t first_tile = (shape.run_start[run] + TILE - 1) / TILE;
            const int64_t end_tile = shape.run_end[run] / TILE;
            if (first_tile >= end_tile) continue;
            units.clear();
            int64_t begin = end_tile, rows = 0, uncut = 0, tail = 0;
            bool folds = true;
            double alone = 0;
            for (int64_t i = shape.run_offsets[run]; i < shape.run_offsets[run + 1]; ++i) {
                const int64_t row = shape.run_rows[i];
                for (int32_t unit = first_units_[static_cast<size_t>(row)]; unit < first_units_[static_cast<size_t>(row) + 1]; ++unit) {
                    const Unit& described = plan_.units[static_cast<size_t>(unit)];
                    // a unit of many queries is a matrix product by itself
                    if (described.first_tile >= end_tile || 2 * rows_of(unit) >= UNIT_ROWS) continue;
                    units.push_back(unit);
                    const int64_t own = std::max(first_tile, described.first_tile);
                    begin = std::min(begin, own);
                    rows += rows_of(unit);
                    if (!cut_[static_cast<size_t>(unit)]) {
                        uncut += rows_of(unit);
                        tail += rows_of(unit) * (described.end_tile - end_tile);
                    }
                    folds = folds && first_tile <= described.first_tile;
                    alone += static_cast<double>(end_tile - own) * costs_.tile(rows_of(unit));
                }
            }
            if (units.size() < 2) continue;
            first_tile = begin;
            int64_t num_parts = (rows + UNIT_ROWS - 1) / UNIT_ROWS;
            while (num_threads_ > 1 && num_parts * num_kv_heads_ < 2 * num_threads_ && rows / (num_parts + 1) >= FEWEST_ROWS) ++num_parts;
            num_parts = std::min(num_parts, static_cast<int64_t>(units.size()));
            const double tiles = static_cast<double>(end_tile - first_tile);
            // A unit that is in no run leaves no record. The first run that is taken costs it one for each tile of its own, too: its fold can not be
            // continued behind what others compute.
            const double num_records = static_cast<double>(uncut) * (folds ? 1 : tiles) + static_cast<double>(tail);
            const double records = num_records * costs_.row_record + static_cast<double>(units.size()) * Costs::TASK;
            if (static_cast<double>(num_parts) * tiles * costs_.tile(rows / num_parts) + records >= alone) continue;
            const int64_t size = static_cast<int64_t>(units.size());
            for (int64_t part = 0; part < num_parts; ++part) {
                const int64_t first = size * part / num_parts, end = size * (part + 1) / num_parts;
                add_draft(first_tile, end_tile, units.data() + first, end - first);
            }
            for (const int32_t unit : units) {
                shared_.push_back({unit, first_tile, end_tile});
                cut_[static_cast<size_t>(unit)] = 1;
            }
        }
        std::sort(shared_.begin(), shared_.end(), [](const Shared& a, const Shared& b) { return a.unit != b.unit ? a.unit < b.unit : a.first_tile < b.first_tile; });
    }

    // The tiles of each unit that no shared task covers.
    void make_private() {
        size_t next = 0;
        for (int32_t unit = 0; unit < static_cast<int32_t>(plan_.units.size()); ++unit) {
            const Unit described = plan_.units[static_cast<size_t>(unit)];
            int64_t tile = described.first_tile;
            for (; next < shared_.size() && shared_[next].unit == unit; ++next) {
                if (shared_[next].first_tile > tile) add_draft(tile, shared_[next].first_tile, &unit, 1);
                tile = std::max(tile, shared_[next].end_tile);
            }
            if (tile < described.end_tile) add_draft(tile, described.end_tile, &unit, 1);
        }
    }

    void add_draft(int64_t first_tile, int64_t end_tile, const int32_t* units, int64_t num_units) {
        int64_t rows = 0;
        for (int64_t i = 0; i < num_units; ++i) rows += rows_of(units[i]);
        const double cost = Costs::TASK + static_cast<double>(end_tile - first_tile) * costs_.tile(rows);
        drafts_.push_back({first_tile, end_tile, static_cast<int32_t>(draft_units_.size()), static_cast<int32_t>(num_units), cost});
        draft_units_.insert(draft_units_.end(), units, units + num_units);
        total_cost_ += cost;
    }

    // Over tiles, what would keep one thread busy while the others have nothing left.
    void split() {
        const double of_thread = total_cost_ * static_cast<double>(num_kv_heads_) / num_threads_;
        const double wanted = std::max(of_thread / 4, 3.0);
        for (const Draft& draft : drafts_) {
            const int64_t tiles = draft.end_tile - draft.first_tile;
            int64_t pieces = 1;
            if (num_threads_ > 1 && draft.cost > of_thread / 2 && draft.cost > 1.5 * wanted) pieces = std::min(tiles, static_cast<int64_t>(draft.cost / wanted) + 1);
            for (int64_t piece = 0; piece < pieces; ++piece) add_task(draft, draft.first_tile + tiles * piece / pieces, draft.first_tile + tiles * (piece + 1) / pieces);
        }
    }

    void add_task(const Draft& draft, int64_t first_tile, int64_t end_tile) {
        const auto task = static_cast<int32_t>(plan_.tasks.size());
        const auto first_member = static_cast<int32_t>(plan_.members.size());
        bool folds = true;
        for (int32_t i = 0; i < draft.num_units; ++i) {
            const int32_t unit = draft_units_[static_cast<size_t>(draft.first_unit + i)];
            folds = folds && first_tile <= plan_.units[static_cast<size_t>(unit)].first_tile;
            shares_.push_back({unit, task, first_member + i, first_tile});
            plan_.members.push_back({unit, 0});
        }
        const double part = static_cast<double>(end_tile - first_tile) / static_cast<double>(draft.end_tile - draft.first_tile);
        plan_.tasks.push_back({first_tile, end_tile, first_member, draft.num_units, folds, false, static_cast<float>(draft.cost * part)});
    }

    void place_records() {
        std::sort(shares_.begin(), shares_.end(), [](const Share& a, const Share& b) { return a.unit != b.unit ? a.unit < b.unit : a.first_tile < b.first_tile; });
        plan_.left = std::vector<std::atomic<int32_t>>(plan_.units.size() * static_cast<size_t>(num_kv_heads_));
        plan_.parts.reserve(shares_.size());
        int64_t records = 0;
        for (size_t i = 0; i < shares_.size();) {
            Unit& unit = plan_.units[static_cast<size_t>(shares_[i].unit)];
            size_t end = i;
            while (end < shares_.size() && shares_[end].unit == shares_[i].unit) ++end;
            unit.first_part = static_cast<int32_t>(plan_.parts.size());
            unit.num_parts = static_cast<int32_t>(end - i);
            for (int64_t head = 0; head < num_kv_heads_; ++head) plan_.left[static_cast<size_t>(shares_[i].unit * num_kv_heads_ + head)].store(unit.num_parts, std::memory_order_relaxed);
            for (; i < end; ++i) {
                auto& task = plan_.tasks[static_cast<size_t>(shares_[i].task)];
                task.direct = unit.num_parts == 1;
                const int64_t count = task.direct ? 0 : task.folds ? 1 : task.end_tile - task.first_tile;
                plan_.members[static_cast<size_t>(shares_[i].member)].part = static_cast<int32_t>(plan_.parts.size());
                plan_.parts.push_back({records, static_cast<int32_t>(count)});
                records += count * unit.num_tokens;
            }
        }
        if (records) plan_.records = RecordMemory::take(static_cast<size_t>(records * plan_.num_heads * plan_.record_floats() + 16));
        std::sort(plan_.tasks.begin(), plan_.tasks.end(), [](const auto& a, const auto& b) { return a.cost > b.cost; });
    }

    AttentionPlan::Impl& plan_;
    const Costs costs_;
    const int num_threads_;
    const int64_t num_kv_heads_, group_;
    std::vector<int32_t> first_units_, draft_units_;
    std::vector<char> cut_;  // [units]: in a run that is taken
    std::vector<Shared> shared_;
    std::vector<Draft> drafts_;
    std::vector<Share> shares_;
    double total_cost_ = 0;
};

}  // namespace

AttentionPlan::AttentionPlan(const KvLayout& layout, const StepShape& shape, int64_t num_heads, int64_t window, int num_threads) : impl_(new Impl) {
    if (layout.head_dim % 16 || layout.head_dim < 16 || layout.head_dim > 256) throw std::invalid_argument("head_dim is a multiple of 16, at most 256");
    if (layout.num_kv_heads < 1 || num_heads < 1 || num_heads % layout.num_kv_heads) throw std::invalid_argument("num_heads is a multiple of num_kv_heads");
    impl_->layout = layout;
    impl_->shape = shape;
    impl_->num_heads = num_heads;
    impl_->window = window;
    Planner(*impl_, num_threads).make();
}

AttentionPlan::~AttentionPlan() {
    if (!impl_->records.empty()) RecordMemory::give_back(std::move(impl_->records));
}

void write_kv(Pool& pool, const KvLayout& layout, uint8_t* pool_rows, int64_t layer, const StepShape& shape, const float* k, const float* v, int64_t ld) {
    const WriteCall call{&layout, pool_rows, layer, &shape, k, v, ld};
    const auto write = KVD_CHOOSE(attention_table).write_tokens;
    if (shape.num_tokens <= 4) return write(call, 0, shape.num_tokens);
    const int64_t size = shape.num_tokens <= 128 ? 4 : BLOCK;
    pool.run((shape.num_tokens + size - 1) / size, [&](int64_t piece, int) { write(call, piece * size, std::min(shape.num_tokens, (piece + 1) * size)); });
}

void attend(Pool& pool, const AttentionPlan& plan, const uint8_t* pool_rows, int64_t layer, float scale, const float* q, int64_t ldq, Compute compute, void* out) {
    AttentionPlan::Impl& impl = plan.impl();
    float* records = impl.records.data();
    records += (64 - reinterpret_cast<uintptr_t>(records) % 64) % 64 / sizeof(float);
    const AttendCall call{&impl, records, pool_rows, layer, scale, q, ldq, compute, out};
    const auto run_task = KVD_CHOOSE(attention_table).run_task;
    const int64_t heads = impl.layout.num_kv_heads;
    pool.run(static_cast<int64_t>(impl.tasks.size()) * heads, [&](int64_t piece, int) { run_task(call, piece / heads, piece % heads); });
}

}  // namespace kvd
