// How GGUF files store values (ggml-common.h of the ggml project), and what they stand for.
#pragma once

#include <cstdint>

namespace kvd {

enum class Storage : int { f32, f16, bf16, q8_0, q4_0, q4_1, q4_k, q5_k, q6_k };

// Bytes of a stored row of k values. Throws std::invalid_argument when k does not fill the type's blocks.
int64_t stored_row_bytes(Storage storage, int64_t k);

// A stored row as float32 [k]: the very values of ggml's dequantisation.
void dequantize_row(Storage storage, const uint8_t* row, int64_t k, float* out);

float half_to_float(uint16_t half);

// Scale and minimum of sub-block `index` in the twelve bytes that Q4_K and Q5_K pack eight pairs of six bits into.
void scale_and_min(const uint8_t* packed, int index, uint8_t& scale, uint8_t& min);

}  // namespace kvd
