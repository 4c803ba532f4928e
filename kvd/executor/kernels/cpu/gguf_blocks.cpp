#include "gguf_blocks.h"

#include <bit>
#include <cstring>
#include <stdexcept>

#include "types.h"

namespace kvd {

namespace {

struct Shape {
    int64_t values, bytes;
};

Shape shape_of(Storage storage) {
    switch (storage) {
        case Storage::f32:
            return {1, 4};
        case Storage::f16:
        case Storage::bf16:
            return {1, 2};
        case Storage::q8_0:
            return {32, 34};
        case Storage::q4_0:
            return {32, 18};
        case Storage::q4_1:
            return {32, 20};
        case Storage::q4_k:
            return {256, 144};
        case Storage::q5_k:
            return {256, 176};
        case Storage::q6_k:
            return {256, 210};
    }
    throw std::invalid_argument("no such storage type");
}

uint16_t read_16(const uint8_t* from) {
    uint16_t value;
    std::memcpy(&value, from, 2);
    return value;
}

float read_half(const uint8_t* from) { return half_to_float(read_16(from)); }

// 256 values of Q4_K or Q5_K; `high` holds the fifth bits (null: none), 32 bytes whose bit s belongs to sub-block s.
void dequantize_5_bits(const uint8_t* block, const uint8_t* high, const uint8_t* codes, float* out) {
    const float d = read_half(block), dmin = read_half(block + 2);
    for (int sub = 0; sub < 8; ++sub) {
        uint8_t scale, min;
        scale_and_min(block + 4, sub, scale, min);
        const float step = d * static_cast<float>(scale), offset = dmin * static_cast<float>(min);
        for (int i = 0; i < 32; ++i) {
            int code = codes[sub / 2 * 32 + i] >> (sub % 2 * 4) & 15;
            if (high) code |= (high[i] >> sub & 1) << 4;
            out[sub * 32 + i] = step * static_cast<float>(code) - offset;
        }
    }
}

void dequantize_q6_k(const uint8_t* block, float* out) {
    const uint8_t* low = block;
    const uint8_t* high = block + 128;
    const auto* scales = reinterpret_cast<const int8_t*>(block + 192);
    const float d = read_half(block + 208);
    for (int i = 0; i < 256; ++i) {
        const int half = i / 128, quarter = i % 128 / 32, j = i % 32;
        const int code = (low[half * 64 + quarter % 2 * 32 + j] >> (quarter / 2 * 4) & 15) | (high[half * 32 + j] >> (quarter * 2) & 3) << 4;
        out[i] = d * static_cast<float>(scales[i / 16]) * static_cast<float>(code - 32);
    }
}

}  // namespace

float half_to_float(uint16_t half) {
    const uint32_t sign = static_cast<uint32_t>(half & 0x8000u) << 16, exponent = half >> 10 & 31u, mantissa = half & 1023u;
    if (exponent == 0) {
        const float value = static_cast<float>(mantissa) * 0x1p-24f;
        return sign ? -value : value;
    }
    if (exponent == 31) return std::bit_cast<float>(sign | 0x7f800000u | mantissa << 13);
    return std::bit_cast<float>(sign | (exponent + 112) << 23 | mantissa << 13);
}

void scale_and_min(const uint8_t* packed, int index, uint8_t& scale, uint8_t& min) {
    if (index < 4) {
        scale = packed[index] & 63;
        min = packed[index + 4] & 63;
    } else {
        scale = static_cast<uint8_t>((packed[index + 4] & 15) | packed[index - 4] >> 6 << 4);
        min = static_cast<uint8_t>(packed[index + 4] >> 4 | packed[index] >> 6 << 4);
    }
}

int64_t stored_row_bytes(Storage storage, int64_t k) {
    const Shape shape = shape_of(storage);
    if (k % shape.values) throw std::invalid_argument("a row does not fill its blocks");
    return k / shape.values * shape.bytes;
}

void dequantize_row(Storage storage, const uint8_t* row, int64_t k, float* out) {
    switch (storage) {
        case Storage::f32:
            std::memcpy(out, row, static_cast<size_t>(k) * 4);
            return;
        case Storage::f16:
            for (int64_t i = 0; i < k; ++i) out[i] = read_half(row + 2 * i);
            return;
        case Storage::bf16:
            for (int64_t i = 0; i < k; ++i) out[i] = to_float(bf16{read_16(row + 2 * i)});
            return;
        default:
            break;
    }
    const Shape shape = shape_of(storage);
    for (int64_t b = 0; b < k / shape.values; ++b, row += shape.bytes, out += shape.values) {
        switch (storage) {
            case Storage::q8_0: {
                const float d = read_half(row);
                for (int i = 0; i < 32; ++i) out[i] = d * static_cast<float>(static_cast<int8_t>(row[2 + i]));
                break;
            }
            case Storage::q4_0: {
                const float d = read_half(row);
                for (int i = 0; i < 16; ++i) {
                    out[i] = d * static_cast<float>((row[2 + i] & 15) - 8);
                    out[i + 16] = d * static_cast<float>((row[2 + i] >> 4) - 8);
                }
                break;
            }
            case Storage::q4_1: {
                const float d = read_half(row), m = read_half(row + 2);
                for (int i = 0; i < 16; ++i) {
                    out[i] = d * static_cast<float>(row[4 + i] & 15) + m;
                    out[i + 16] = d * static_cast<float>(row[4 + i] >> 4) + m;
                }
                break;
            }
            case Storage::q4_k:
                dequantize_5_bits(row, nullptr, row + 16, out);
                break;
            case Storage::q5_k:
                dequantize_5_bits(row, row + 16, row + 48, out);
                break;
            default:
                dequantize_q6_k(row, out);
                break;
        }
    }
}

}  // namespace kvd
