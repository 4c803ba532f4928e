// The attention kernels for Python: tests and measurements; the decoder calls them from C++.
#include <nanobind/ndarray.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/unique_ptr.h>

#include <memory>
#include <stdexcept>
#include <string>

#include "attention_plan.h"
#include "module.h"

namespace nb = nanobind;

namespace kvd {
namespace {

template <class T, int DIMS>
using Array = nb::ndarray<const T, nb::ndim<DIMS>, nb::c_contig, nb::device::cpu>;

// A step's rows over one pool, with the arrays that they stand in.
class PagedAttention {
public:
    PagedAttention(const std::string& kv_type, int64_t num_layers, int64_t num_kv_heads, int64_t head_dim, uintptr_t address, Array<int64_t, 1> starts,
                   Array<int64_t, 1> num_computed, Array<int32_t, 2> block_tables, Array<int64_t, 1> run_start, Array<int64_t, 1> run_end,
                   Array<int64_t, 1> run_offsets, Array<int64_t, 1> run_rows)
        : layout_{kv_type_of(kv_type), num_layers, num_kv_heads, head_dim}, rows_(reinterpret_cast<uint8_t*>(address)), starts_(starts),
          num_computed_(num_computed), block_tables_(block_tables), run_start_(run_start), run_end_(run_end), run_offsets_(run_offsets), run_rows_(run_rows) {
        const size_t num_rows = num_computed.shape(0);
        if (starts.shape(0) != num_rows + 1 || block_tables.shape(0) != num_rows) throw std::invalid_argument("starts, num_computed and block_tables disagree about the rows");
        if (run_end.shape(0) != run_start.shape(0) || run_offsets.shape(0) != run_start.shape(0) + 1) throw std::invalid_argument("the columns of the runs differ in length");
        shape_ = {static_cast<int64_t>(num_rows), starts.data()[num_rows], starts.data(), num_computed.data(), block_tables.data(),
                  static_cast<int64_t>(block_tables.shape(1)), static_cast<int64_t>(run_start.shape(0)), run_start.data(), run_end.data(), run_offsets.data(), run_rows.data()};
    }

    void write(Pool& pool, int64_t layer, const Array<float, 3>& k, const Array<float, 3>& v) {
        check(k, layout_.num_kv_heads, layer);
        check(v, layout_.num_kv_heads, layer);
        const nb::gil_scoped_release released;
        write_kv(pool, layout_, rows_, layer, shape_, k.data(), v.data(), layout_.num_kv_heads * layout_.head_dim);
    }

    std::unique_ptr<AttentionPlan> plan(int64_t num_heads, int64_t window, int num_threads) const {
        const nb::gil_scoped_release released;
        return std::make_unique<AttentionPlan>(layout_, shape_, num_heads, window, num_threads);
    }

    void attend(Pool& pool, const AttentionPlan& plan, int64_t layer, float scale, const Array<float, 3>& q, const std::string& compute,
                const nb::ndarray<nb::ndim<3>, nb::c_contig, nb::device::cpu>& out) const {
        const int64_t num_heads = plan.impl().num_heads;
        check(q, num_heads, layer);
        const Compute type = compute_of(compute);
        if (out.nbytes() != q.size() * (type == Compute::f32 ? 4 : 2)) throw std::invalid_argument("out has another size");
        const nb::gil_scoped_release released;
        ::kvd::attend(pool, plan, rows_, layer, scale, q.data(), num_heads * layout_.head_dim, type, out.data());
    }

private:
    void check(const Array<float, 3>& x, int64_t num_heads, int64_t layer) const {
        if (layer < 0 || layer >= layout_.num_layers) throw std::out_of_range("no such layer");
        if (static_cast<int64_t>(x.shape(0)) != shape_.num_tokens || static_cast<int64_t>(x.shape(1)) != num_heads || static_cast<int64_t>(x.shape(2)) != layout_.head_dim)
            throw std::invalid_argument("an array is not [num_tokens, heads, head_dim]");
    }

    KvLayout layout_;
    uint8_t* rows_;
    Array<int64_t, 1> starts_, num_computed_;
    Array<int32_t, 2> block_tables_;
    Array<int64_t, 1> run_start_, run_end_, run_offsets_, run_rows_;
    StepShape shape_;
};

}  // namespace

void register_attention(nb::module_& m) {
    nb::class_<AttentionPlan>(m, "AttentionPlan")
        .def_prop_ro("num_tasks", [](const AttentionPlan& plan) { return plan.impl().tasks.size(); }, "Pieces of work for each KV head.")
        .def_prop_ro(
            "num_shared_tasks",
            [](const AttentionPlan& plan) {
                size_t count = 0;
                for (const auto& task : plan.impl().tasks) count += task.num_members > 1;
                return count;
            },
            "Of them, those that serve the queries of several rows.");
    nb::class_<PagedAttention>(m, "PagedAttention")
        .def(nb::init<const std::string&, int64_t, int64_t, int64_t, uintptr_t, Array<int64_t, 1>, Array<int64_t, 1>, Array<int32_t, 2>, Array<int64_t, 1>,
                      Array<int64_t, 1>, Array<int64_t, 1>, Array<int64_t, 1>>(),
             nb::arg("kv_type"), nb::arg("num_layers"), nb::arg("num_kv_heads"), nb::arg("head_dim"), nb::arg("address"), nb::arg("starts"),
             nb::arg("num_computed"), nb::arg("block_tables"), nb::arg("run_start"), nb::arg("run_end"), nb::arg("run_offsets"), nb::arg("run_rows"))
        .def("write", &PagedAttention::write, nb::arg("pool"), nb::arg("layer"), nb::arg("k"), nb::arg("v"))
        .def("plan", &PagedAttention::plan, nb::arg("num_heads"), nb::arg("window"), nb::arg("num_threads"), nb::keep_alive<0, 1>())
        .def("attend", &PagedAttention::attend, nb::arg("pool"), nb::arg("plan"), nb::arg("layer"), nb::arg("scale"), nb::arg("q"), nb::arg("compute"),
             nb::arg("out").noconvert());
    m.def(
        "kv_row_bytes",
        [](const std::string& kv_type, int64_t num_layers, int64_t num_kv_heads, int64_t head_dim) {
            return KvLayout{kv_type_of(kv_type), num_layers, num_kv_heads, head_dim}.row_bytes();
        },
        nb::arg("kv_type"), nb::arg("num_layers"), nb::arg("num_kv_heads"), nb::arg("head_dim"), "Bytes of one block over all layers.");
}

}  // namespace kvd
