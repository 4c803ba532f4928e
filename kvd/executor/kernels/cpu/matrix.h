// A weight matrix W [n outputs, k inputs], packed once at load into panels of 64 outputs, so that one pass over memory in order computes
// x . W^T for any number of rows x. A row's sum has one order, k ascending, whatever the number of rows beside it.
#pragma once

#include <cstdint>
#include <memory>

#include "pool.h"
#include "types.h"

namespace kvd {

// Storage of a packed matrix. The quantised ones keep their codes and scales as the file has them, in another order.
enum class Format : int { f32, bf16, q8_0, q4_0, q4_1, q4_k, q6_k };

constexpr int64_t PANEL = 64;  // outputs of a panel; the last panel is padded with zeros

class Matrix {
public:
    // An empty matrix to be filled by pack_rows; 64-byte aligned, pages touched by the packing threads.
    Matrix(Format format, int64_t n, int64_t k);

    // Pack `num_rows` rows of W beginning at `first_row`. For f32 and bf16 formats `rows` holds values of type `source` (row-major, k each);
    // for quantised formats it holds the file's own blocks of those rows (`source` is ignored). Rows of one panel may come in several calls.
    void pack_rows(Pool& pool, int64_t first_row, int64_t num_rows, const void* rows, Compute source);

    Format format() const { return format_; }
    int64_t n() const { return n_; }
    int64_t k() const { return k_; }
    int64_t num_panels() const { return (n_ + PANEL - 1) / PANEL; }
    int64_t panel_bytes() const { return panel_bytes_; }
    const uint8_t* panel(int64_t index) const { return data_.get() + index * panel_bytes_; }
    uint8_t* writable_panel(int64_t index) { return data_.get() + index * panel_bytes_; }
    int64_t bytes() const { return num_panels() * panel_bytes_; }

    // Row `row` of W as float32 [k]: the lookup of an embedding that is also the head.
    void unpack_row(int64_t row, float* out) const;

private:
    struct Free {
        std::shared_ptr<void> memory;  // what the matrix lies in, with others
        void operator()(uint8_t*) const {}
    };
    Format format_;
    int64_t n_, k_, panel_bytes_;
    std::unique_ptr<uint8_t[], Free> data_;
};

// out[r, 0:n] (+)= x[r, 0:k] . W^T (+ bias), for r in [0, num_rows); out and bias are float32, `ldx`/`ldo` are row strides in elements.
// x is float32 for Compute::f32 and bf16 for Compute::bf16; a bf16 matrix wants bf16 rows, an f32 matrix f32 rows, a quantised one takes either.
struct Product {
    const Matrix* matrix;
    Compute compute;
    const void* x;
    int64_t ldx;
    int64_t num_rows;
    float* out;
    int64_t ldo;
    const float* bias = nullptr;  // [n]
    bool accumulate = false;      // add to what `out` holds: the residual stream
    const Matrix* next = nullptr; // what is multiplied after this: it begins to be fetched while the last panels of this are computed
};
void multiply(Pool& pool, const Product& product);

}  // namespace kvd
