// Panels of quantised matrices: the file's codes and scales, bit for bit, in an order for vectors (Q4_K's 6-bit scales take a byte each: 148 bytes
// for the file's 144; every other format takes what the file takes).
//
// A panel of 64 outputs is a run of super-blocks of k; a super-block is a header with the scales of the 64 outputs, then its blocks (the k that
// share a scale), each as four groups of 16 outputs. Every 32-bit lane of a group's 64-byte lines belongs to one output:
//   Q8_0          lane l of a half line: k, k + 1 as two of its four bytes ([pair][16 outputs][2])
//   Q4_0, Q4_1, Q4_K   a line holds 8 k: nibble i of the low (high) 16 bits is k = 2 i (2 i + 1)
//   Q6_K          two such lines with the low four bits, then one with the high two: bits 2 i of the low (high) 16 bits are k = 2 i (2 i + 1)
// Headers, arrays over the 64 outputs:
//   Q8_0, Q4_0: half d[64].  Q4_1: half d[64], m[64].  Q4_K: half d[64], dmin[64]; uint8 sc[8][64], m[8][64].  Q6_K: half d[64]; int8 sc[16][64].
#pragma once

#include <cstdint>

#include "matrix.h"
#include "pool.h"
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

constexpr bool is_quantized(Format format) { return format != Format::f32 && format != Format::bf16; }

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
            return {1, 1, 0, 0, 0, false};
    }
}

inline int64_t quantized_panel_bytes(Format format, int64_t k) { return k / panel_format(format).super_k * panel_format(format).super_bytes(); }

// Put one row of W, the file's blocks of k values, into its place in a panel. Rows come in any order; a row's bytes are its own.
void quantized_pack_row(Format format, uint8_t* panel, int64_t row_in_panel, const void* file_blocks, int64_t k);

// The row as float32 [k], the very values of ggml's dequantisation.
void quantized_unpack_row(Format format, const uint8_t* panel, int64_t row_in_panel, int64_t k, float* out);

// How GGUF files store the values of a tensor.
enum class Storage : int { f32, f16, bf16, q8_0, q4_0, q4_1, q4_k, q5_k, q6_k };

// Bytes of a row of k values.
int64_t stored_row_bytes(Storage storage, int64_t k);

// A stored row as float32 [k].
void dequantize_row(Storage storage, const void* row, int64_t k, float* out);

float half_to_float(uint16_t half);

struct QuantizedTable {
    void (*multiply)(Pool& pool, const Product& product);
};

#if defined(KVD_HAS_avx512) || defined(KVD_ISA_avx512)
namespace avx512 { extern const QuantizedTable quantized_table; }
namespace avx2 { extern const QuantizedTable quantized_table; }
#endif
namespace portable { extern const QuantizedTable quantized_table; }

}  // namespace kvd
