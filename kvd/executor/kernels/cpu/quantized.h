// Panels of quantised matrices: the file's codes and scales, bit for bit, in an order for vectors (Q4_K's 6-bit scales take a byte each: 148 bytes
// for the file's 144; every other format takes what the file takes).
//
// A panel of 64 outputs is a run of super-blocks of k; a super-block is a header with the scales of the 64 outputs, then its blocks (the k that
// share a scale), each as four groups of 16 outputs. Every 32-bit lane of a group's 64-byte lines belongs to one output:
//   Q8_0               a half of a lane is a pair of k: [pair][16 outputs][2]
//   Q4_0, Q4_1, Q4_K   a line holds 8 k: nibble i of the low (high) 16 bits is k = 2 i (2 i + 1)
//   Q6_K               two such lines with the low four bits, then one with the high two: bits 2 i, 2 i + 1 of the low (high) 16 bits are k = 2 i (2 i + 1)
// Headers, arrays over the 64 outputs:
//   Q8_0, Q4_0: half d[64].  Q4_1: half d[64], m[64].  Q4_K: half d[64], dmin[64]; uint8 sc[8][64], m[8][64].  Q6_K: half d[64]; int8 sc[16][64].
#pragma once

#include <cstdint>

#include "formats.h"
#include "matrix.h"
#include "types.h"

namespace kvd {

struct PanelFormat {
    int64_t super_k;       // k of a super-block, and of the file's block
    int64_t block_k;       // k that share a scale
    int64_t file_bytes;    // of the file's block of one output
    int64_t header_bytes;  // of a super-block of 64 outputs
    int64_t group_bytes;   // codes of a block of 16 outputs
    bool has_min;

    constexpr int64_t blocks() const { return super_k / block_k; }
    constexpr int64_t block_bytes() const { return 4 * group_bytes; }
    constexpr int64_t super_bytes() const { return header_bytes + blocks() * block_bytes(); }
};

constexpr PanelFormat panel_format(Format format) {
    switch (format) {
        case Format::q8_0:
            return {32, 32, 34, 128, 512, false};
        case Format::q4_0:
            return {32, 32, 18, 128, 256, false};
        case Format::q4_1:
            return {32, 32, 20, 256, 256, true};
        case Format::q4_k:
            return {256, 32, 144, 1280, 256, true};
        case Format::q6_k:
            return {256, 16, 210, 1152, 192, false};
        default:
            return {};
    }
}

// Many rows: a kernel expands so many k of a panel at once, with their scales, and keeps the totals of so many rows, in its scratch memory.
constexpr int64_t EXPANDED_K = 512;
constexpr int64_t ROWS_AT_ONCE = 256;
constexpr int64_t QUANTIZED_SCRATCH_BYTES = (EXPANDED_K + 2 * EXPANDED_K / 16 + ROWS_AT_ONCE) * PANEL * 4;

// The products of one instruction set.
struct QuantizedTable {
    PanelKernel (*kernel)(Format format, Compute compute);
    // Sums of x over each block of 32 k: out[r][k / 32], the same for a row whatever the rows beside it.
    void (*sum_blocks)(Compute compute, const void* x, int64_t ldx, int64_t num_rows, int64_t k, float* out);
};

namespace portable { extern const QuantizedTable quantized_table; }
namespace avx2 { extern const QuantizedTable quantized_table; }
namespace avx512 { extern const QuantizedTable quantized_table; }

}  // namespace kvd
