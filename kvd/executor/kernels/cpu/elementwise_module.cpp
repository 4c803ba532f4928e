// The small operations over a pool of threads, and for Python.
#include <nanobind/ndarray.h>
#include <nanobind/stl/optional.h>

#include <algorithm>
#include <optional>
#include <stdexcept>

#include "dispatch.h"
#include "elementwise.h"
#include "elementwise_table.h"
#include "module.h"

namespace nb = nanobind;

namespace kvd {
namespace {

// Elements below which a thread is not worth waking: about ten microseconds of one core.
constexpr int64_t FEW_NORMED = 1 << 15;
constexpr int64_t FEW_EXPONENTIALS = 1 << 13;

// Calls rows(first, count) for all rows, on the caller when there is little to do.
template <class Rows>
void in_pieces(Pool& pool, int64_t num_rows, int64_t row_elements, int64_t few, const Rows& rows) {
    if (num_rows == 1 || num_rows * row_elements <= few) return rows(0, num_rows);
    const int64_t rows_of_piece = std::max<int64_t>(1, few / 2 / row_elements);
    pool.run((num_rows + rows_of_piece - 1) / rows_of_piece, [&](int64_t piece, int) {
        const int64_t first = piece * rows_of_piece;
        rows(first, std::min(rows_of_piece, num_rows - first));
    });
}

void* advance(void* rows, int64_t elements, Compute compute) {
    return static_cast<uint8_t*>(rows) + elements * (compute == Compute::bf16 ? sizeof(bf16) : sizeof(float));
}

}  // namespace

void rms_norm(Pool& pool, const float* x, int64_t ldx, int64_t num_rows, int64_t size, const float* weight, float eps, Compute compute, void* out,
              int64_t ldo) {
    const ElementwiseTable& table = KVD_CHOOSE(elementwise_table);
    in_pieces(pool, num_rows, size, FEW_NORMED, [&](int64_t first, int64_t count) {
        table.rms_norm(x + first * ldx, ldx, count, size, weight, eps, compute, advance(out, first * ldo, compute), ldo);
    });
}

void norm_and_rotate(Pool& pool, float* heads, int64_t ld, int64_t num_tokens, int64_t num_rotated_heads, int64_t head_dim, const float* norm_weights,
                     float eps, const int64_t* positions, const float* cosines, const float* sines) {
    const ElementwiseTable& table = KVD_CHOOSE(elementwise_table);
    in_pieces(pool, num_tokens, num_rotated_heads * head_dim, FEW_NORMED, [&](int64_t first, int64_t count) {
        table.norm_and_rotate(heads + first * ld, ld, count, num_rotated_heads, head_dim, norm_weights, eps, positions + first, cosines, sines);
    });
}

void silu_mul(Pool& pool, const float* gate_up, int64_t ld, int64_t num_rows, int64_t size, Compute compute, void* out, int64_t ldo) {
    const ElementwiseTable& table = KVD_CHOOSE(elementwise_table);
    in_pieces(pool, num_rows, size, FEW_EXPONENTIALS, [&](int64_t first, int64_t count) {
        table.silu_mul(gate_up + first * ld, ld, count, size, compute, advance(out, first * ldo, compute), ldo);
    });
}

void finite_rows(Pool& pool, const float* x, int64_t num_rows, int64_t size, bool* finite) {
    const ElementwiseTable& table = KVD_CHOOSE(elementwise_table);
    in_pieces(pool, num_rows, size, FEW_NORMED, [&](int64_t first, int64_t count) {
        for (int64_t r = first; r < first + count; ++r) finite[r] = table.is_finite(x + r * size, size);
    });
}

void largest_of_rows(Pool& pool, const float* x, int64_t num_rows, int64_t size, int64_t* places, bool* finite) {
    const ElementwiseTable& table = KVD_CHOOSE(elementwise_table);
    in_pieces(pool, num_rows, size, FEW_NORMED, [&](int64_t first, int64_t count) {
        for (int64_t r = first; r < first + count; ++r) {
            finite[r] = table.is_finite(x + r * size, size);
            places[r] = finite[r] ? table.largest(x + r * size, size) : 0;
        }
    });
}

void draw_rows(Pool& pool, const float* logits, int64_t num_rows, int64_t size, const float* temperatures, const uint64_t* keys, const bool* finite,
               int64_t* places) {
    const ElementwiseTable& table = KVD_CHOOSE(elementwise_table);
    pool.run(num_rows, [&](int64_t r, int) {
        if (temperatures[r] > 0 && (finite == nullptr || finite[r])) places[r] = table.drawn(logits + r * size, size, temperatures[r], keys[r]);
    });
}

namespace {

using Rows = nb::ndarray<const float, nb::ndim<2>, nb::c_contig, nb::device::cpu>;
using Vector = nb::ndarray<const float, nb::ndim<1>, nb::c_contig, nb::device::cpu>;
using Positions = nb::ndarray<const int64_t, nb::ndim<1>, nb::c_contig, nb::device::cpu>;

// Results of the compute type go to `out` as bytes, so that bfloat16, which numpy lacks, needs no type of its own here.
Compute compute_of(size_t out_bytes, size_t elements) {
    if (out_bytes == elements * sizeof(float)) return Compute::f32;
    if (out_bytes == elements * sizeof(bf16)) return Compute::bf16;
    throw std::invalid_argument("out must hold float32 or bfloat16, as bytes");
}
using Bytes = nb::ndarray<uint8_t, nb::ndim<2>, nb::c_contig, nb::device::cpu>;

void require(bool fits, const char* message) {
    if (!fits) throw std::invalid_argument(message);
}

}  // namespace

void register_elementwise(nb::module_& m) {
    m.def(
        "rms_norm",
        [](Pool& pool, const Rows& x, const Vector& weight, float eps, const Bytes& out) {
            const auto rows = static_cast<int64_t>(x.shape(0)), size = static_cast<int64_t>(x.shape(1));
            require(weight.shape(0) == x.shape(1) && out.shape(0) == x.shape(0), "x [rows, size], weight [size], out [rows, size]");
            const Compute compute = compute_of(out.nbytes(), x.size());
            nb::gil_scoped_release released;
            rms_norm(pool, x.data(), size, rows, size, weight.data(), eps, compute, out.data(), size);
        },
        nb::arg("pool"), nb::arg("x"), nb::arg("weight"), nb::arg("eps"), nb::arg("out").noconvert());
    m.def(
        "norm_and_rotate",
        [](Pool& pool, const nb::ndarray<float, nb::ndim<3>, nb::c_contig, nb::device::cpu>& heads, int64_t num_rotated_heads,
           const std::optional<Rows>& norm_weights, float eps, const Positions& positions, const Rows& cosines, const Rows& sines) {
            const auto head_dim = static_cast<int64_t>(heads.shape(2));
            require(positions.shape(0) == heads.shape(0) && num_rotated_heads <= static_cast<int64_t>(heads.shape(1)), "heads [tokens, heads, head_dim]");
            require(static_cast<int64_t>(cosines.shape(1)) == head_dim / 2 && sines.shape(1) == cosines.shape(1), "cosines, sines [positions, head_dim / 2]");
            require(!norm_weights || static_cast<int64_t>(norm_weights->size()) == num_rotated_heads * head_dim, "norm_weights [rotated heads, head_dim]");
            nb::gil_scoped_release released;
            norm_and_rotate(pool, heads.data(), static_cast<int64_t>(heads.shape(1)) * head_dim, static_cast<int64_t>(heads.shape(0)), num_rotated_heads,
                            head_dim, norm_weights ? norm_weights->data() : nullptr, eps, positions.data(), cosines.data(), sines.data());
        },
        nb::arg("pool"), nb::arg("heads").noconvert(), nb::arg("num_rotated_heads"), nb::arg("norm_weights").none(), nb::arg("eps"), nb::arg("positions"),
        nb::arg("cosines"), nb::arg("sines"));
    m.def(
        "silu_mul",
        [](Pool& pool, const Rows& gate_up, const Bytes& out) {
            const auto rows = static_cast<int64_t>(gate_up.shape(0)), size = static_cast<int64_t>(gate_up.shape(1)) / 2;
            require(out.shape(0) == gate_up.shape(0), "gate_up [rows, 2 * size], out [rows, size]");
            const Compute compute = compute_of(out.nbytes(), gate_up.size() / 2);
            nb::gil_scoped_release released;
            silu_mul(pool, gate_up.data(), 2 * size, rows, size, compute, out.data(), size);
        },
        nb::arg("pool"), nb::arg("gate_up"), nb::arg("out").noconvert());
    m.def(
        "largest",
        [](Pool& pool, const Rows& x, const nb::ndarray<int64_t, nb::ndim<1>, nb::c_contig, nb::device::cpu>& places,
           const nb::ndarray<bool, nb::ndim<1>, nb::c_contig, nb::device::cpu>& finite) {
            require(places.shape(0) == x.shape(0) && finite.shape(0) == x.shape(0), "x [rows, size], places [rows], finite [rows]");
            nb::gil_scoped_release released;
            largest_of_rows(pool, x.data(), static_cast<int64_t>(x.shape(0)), static_cast<int64_t>(x.shape(1)), places.data(), finite.data());
        },
        nb::arg("pool"), nb::arg("x"), nb::arg("places").noconvert(), nb::arg("finite").noconvert(),
        "The first place of each row's largest element, and whether all of the row's elements are finite (the place is 0 where they are not).");
    m.def(
        "draw",
        [](Pool& pool, const Rows& logits, const nb::ndarray<const float, nb::ndim<1>, nb::c_contig, nb::device::cpu>& temperatures,
           const nb::ndarray<const uint64_t, nb::ndim<1>, nb::c_contig, nb::device::cpu>& keys,
           const nb::ndarray<int64_t, nb::ndim<1>, nb::c_contig, nb::device::cpu>& places) {
            const auto rows = static_cast<int64_t>(logits.shape(0)), size = static_cast<int64_t>(logits.shape(1));
            require(temperatures.shape(0) == logits.shape(0) && keys.shape(0) == logits.shape(0) && places.shape(0) == logits.shape(0),
                    "logits [rows, size], temperatures [rows], keys [rows], places [rows]");
            nb::gil_scoped_release released;
            draw_rows(pool, logits.data(), rows, size, temperatures.data(), keys.data(), nullptr, places.data());
        },
        nb::arg("pool"), nb::arg("logits"), nb::arg("temperatures"), nb::arg("keys"), nb::arg("places").noconvert(),
        "A draw of each row from the softmax of logits / temperature, by the noise streams `keys` (kvd.executor.sampling.noise).");
}

}  // namespace kvd
