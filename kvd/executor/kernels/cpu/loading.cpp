// From a mapped weight file into packed matrices, by all threads, with no copy of a tensor in between.
#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>
#include <nanobind/stl/string.h>

#include <algorithm>
#include <cstring>
#include <memory>
#include <stdexcept>
#include <string>

#include "formats.h"
#include "gguf_blocks.h"
#include "matrix.h"
#include "module.h"

namespace kvd {

namespace nb = nanobind;

namespace {

constexpr const char* STORAGE_NAMES[] = {"F32", "F16", "BF16", "Q8_0", "Q4_0", "Q4_1", "Q4_K", "Q5_K", "Q6_K"};

Storage storage_of(const std::string& name) {
    for (int i = 0; i < 9; ++i)
        if (name == STORAGE_NAMES[i]) return static_cast<Storage>(i);
    throw std::invalid_argument("no such storage type: " + name);
}

// Whether a matrix of this format holds rows of the storage type as they are.
bool holds_as_stored(Format format, Storage storage) {
    switch (format) {
        case Format::f32:
            return storage == Storage::f32;
        case Format::bf16:
            return storage == Storage::bf16;
        case Format::q8_0:
            return storage == Storage::q8_0;
        case Format::q4_0:
            return storage == Storage::q4_0;
        case Format::q4_1:
            return storage == Storage::q4_1;
        case Format::q4_k:
            return storage == Storage::q4_k;
        case Format::q6_k:
            return storage == Storage::q6_k;
    }
    return false;
}

// The stored row that becomes row `row`. In GGUF's llama the rows of a head alternate between its two halves (rotary pairs side by side).
int64_t source_row(int64_t row, int64_t interleaved_head) {
    if (!interleaved_head) return row;
    const int64_t in_head = row % interleaved_head, half = interleaved_head / 2;
    return row - in_head + in_head % half * 2 + in_head / half;
}

void load_rows(Matrix& matrix, Pool& pool, int64_t first_row, int64_t num_rows, uintptr_t address, const std::string& stored_as, int64_t interleaved_head) {
    const Storage storage = storage_of(stored_as);
    const bool as_stored = holds_as_stored(matrix.format(), storage);
    const bool plain = matrix.format() == Format::f32 || matrix.format() == Format::bf16;
    if (!as_stored && !plain) throw std::invalid_argument("a quantised matrix holds one storage type, not " + stored_as);
    if (first_row < 0 || num_rows < 0 || first_row + num_rows > matrix.n()) throw std::invalid_argument("rows outside of the matrix");
    if (interleaved_head && (interleaved_head % 2 || num_rows % interleaved_head)) throw std::invalid_argument("rows are not whole heads");
    const int64_t k = matrix.k(), stored_bytes = stored_row_bytes(storage, k);
    const auto* from = reinterpret_cast<const uint8_t*>(address);
    const nb::gil_scoped_release release;
    if (as_stored && !interleaved_head) {
        matrix.pack_rows(pool, first_row, num_rows, from, storage == Storage::f32 ? Compute::f32 : Compute::bf16);
        return;
    }
    const FormatOps& ops = plain ? plain_ops(matrix.format()) : quantized_ops(matrix.format());
    const int64_t first_panel = first_row / PANEL, last_panel = (first_row + num_rows - 1) / PANEL;
    constexpr int64_t AT_ONCE = 16;  // rows that are brought together before they are packed
    const int64_t row_bytes = as_stored ? stored_bytes : k * 4, gathered_floats = (AT_ONCE * row_bytes + 3) / 4;
    const auto gathered = std::make_unique_for_overwrite<float[]>(static_cast<size_t>(gathered_floats * pool.num_threads()));
    pool.run(num_rows ? last_panel - first_panel + 1 : 0, [&](int64_t i, int worker) {
        const int64_t begin = std::max(first_row, (first_panel + i) * PANEL), end = std::min(first_row + num_rows, (first_panel + i + 1) * PANEL);
        auto* const rows = reinterpret_cast<uint8_t*>(gathered.get() + worker * gathered_floats);
        for (int64_t row = begin; row < end; row += AT_ONCE) {
            const int64_t num = std::min(AT_ONCE, end - row);
            for (int64_t r = 0; r < num; ++r) {
                const uint8_t* stored = from + source_row(row + r - first_row, interleaved_head) * stored_bytes;
                if (as_stored) std::memcpy(rows + r * row_bytes, stored, static_cast<size_t>(row_bytes));
                else dequantize_row(storage, stored, k, reinterpret_cast<float*>(rows + r * row_bytes));
            }
            const Compute type = as_stored && storage == Storage::bf16 ? Compute::bf16 : Compute::f32;
            ops.pack(matrix.writable_panel(first_panel + i), k, row % PANEL, num, rows, type);
        }
    });
}

}  // namespace

void register_loading(nanobind::module_& m) {
    m.def("load_rows", &load_rows, nb::arg("matrix"), nb::arg("pool"), nb::arg("first_row"), nb::arg("num_rows"), nb::arg("address"), nb::arg("storage"),
          nb::arg("interleaved_head") = 0,
          "Stored rows at `address` become rows from `first_row` on: as they are where the matrix holds their storage type, else converted. "
          "`interleaved_head`: the head dimension, if the rows of each head alternate between its halves.");
    m.def("load_values", [](uintptr_t address, const std::string& stored_as, const nb::ndarray<float, nb::ndim<1>, nb::c_contig, nb::device::cpu>& out) {
        const Storage storage = storage_of(stored_as);
        const auto num_values = static_cast<int64_t>(out.shape(0));
        stored_row_bytes(storage, num_values);  // refuses what does not fill blocks
        const nb::gil_scoped_release release;
        dequantize_row(storage, reinterpret_cast<const uint8_t*>(address), num_values, out.data());
    }, nb::arg("address"), nb::arg("storage"), nb::arg("out").noconvert(), "Stored values as float32.");
}

}  // namespace kvd
