// Element types that cross the module's boundary.
#pragma once

#include <bit>
#include <cstdint>
#include <string>

namespace kvd {

struct bf16 {
    uint16_t bits;
};

// Always inlined: a copy out of line, compiled for one instruction set, could be linked in for all of them.
[[gnu::always_inline]] inline float to_float(bf16 value) { return std::bit_cast<float>(static_cast<uint32_t>(value.bits) << 16); }

// Round to nearest even; NaN stays NaN.
[[gnu::always_inline]] inline bf16 to_bf16(float value) {
    const auto bits = std::bit_cast<uint32_t>(value);
    if ((bits & 0x7fffffffu) > 0x7f800000u) return {static_cast<uint16_t>((bits >> 16) | 0x0040u)};
    return {static_cast<uint16_t>((bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16)};
}

// What activations and plain weights are computed in. Sums are always float32.
enum class Compute : int { f32 = 0, bf16 = 1 };

// How KV is kept in the pool.
enum class KvType : int { f32 = 0, bf16 = 1, int8 = 2 };

// "float32" or "bfloat16"; "float32", "bfloat16" or "int8". Throw std::invalid_argument otherwise.
Compute compute_of(const std::string& name);
KvType kv_type_of(const std::string& name);

}  // namespace kvd
