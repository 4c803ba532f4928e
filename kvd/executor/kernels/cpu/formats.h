// What a storage format of matrices brings: matrix.cpp does the rest (memory, threads, pieces) for all of them.
#pragma once

#include "matrix.h"

namespace kvd {

// One panel against some rows: out[r, 0:num_outputs] (+)= x[r, 0:k] . panel^T (+ bias). Rows may be any number; a row's result must not depend on it.
struct PanelWork {
    const uint8_t* panel;
    const uint8_t* next_panel;  // what this thread is likely to read next, to be prefetched; null: nothing
    int64_t k;
    int64_t num_outputs;        // 1 to PANEL
    const void* x;              // the first of the rows, in the product's compute type
    int64_t ldx;
    int64_t num_rows;
    float* out;                 // at the panel's first output
    int64_t ldo;
    const float* bias;          // at the panel's first output, or null
    bool accumulate;
    uint8_t* scratch;           // scratch_bytes of this thread's own, 64-byte aligned
    const float* prepared;      // prepared_floats(k) for each row, if the format wants them
};
using PanelKernel = void (*)(const PanelWork&);

struct FormatOps {
    int64_t (*panel_bytes)(int64_t k);           // a multiple of 64; throws std::invalid_argument where the format can't have such rows
    int64_t (*row_bytes)(int64_t k);             // of one row of a file, for quantised formats; null for the plain ones
    int64_t scratch_bytes;                       // that a kernel wants for each thread
    // Packs `num_rows` rows (of k values of type `source`, or the file's own blocks) as outputs [first, first + num_rows) of a panel, zeros before.
    void (*pack)(uint8_t* panel, int64_t k, int64_t first, int64_t num_rows, const void* rows, Compute source);
    void (*unpack_row)(const uint8_t* panel, int64_t k, int64_t output, float* out);
    // The kernel of the active instruction set for rows of type `compute`; null where the format does not take them.
    PanelKernel (*kernel)(Compute compute);
    // What all panels need of the rows, made once a product: prepared_floats(k) for each row. Null: nothing.
    int64_t (*prepared_floats)(int64_t k) = nullptr;
    void (*prepare)(Compute compute, const void* x, int64_t ldx, int64_t num_rows, int64_t k, float* out) = nullptr;
};

const FormatOps& plain_ops(Format format);      // f32, bf16: matrix.cpp
const FormatOps& quantized_ops(Format format);  // the others: quantized_pack.cpp

}  // namespace kvd
