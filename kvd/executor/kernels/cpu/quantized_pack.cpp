// Quantised rows into panels and back, and what the formats bring to matrix.cpp. The order within a panel is described in quantized.h.
#include <cstring>
#include <stdexcept>
#include <string>

#include "dispatch.h"
#include "formats.h"
#include "gguf_blocks.h"
#include "quantized.h"

namespace kvd {

namespace {

// The codes of a file's block, one in a byte (Q8_0's as their bits), in ascending k.
template <Format FORMAT>
void read_codes(const uint8_t* block, uint8_t* codes) {
    if constexpr (FORMAT == Format::q8_0) {
        std::memcpy(codes, block + 2, 32);
    } else if constexpr (FORMAT == Format::q4_0 || FORMAT == Format::q4_1) {
        const uint8_t* from = block + (FORMAT == Format::q4_0 ? 2 : 4);
        for (int i = 0; i < 16; ++i) {
            codes[i] = from[i] & 15;
            codes[i + 16] = from[i] >> 4;
        }
    } else if constexpr (FORMAT == Format::q4_k) {
        for (int pair = 0; pair < 4; ++pair)
            for (int i = 0; i < 32; ++i) {
                codes[pair * 64 + i] = block[16 + pair * 32 + i] & 15;
                codes[pair * 64 + 32 + i] = block[16 + pair * 32 + i] >> 4;
            }
    } else {
        for (int half = 0; half < 2; ++half) {
            const uint8_t* low = block + half * 64;
            const uint8_t* high = block + 128 + half * 32;
            uint8_t* to = codes + half * 128;
            for (int i = 0; i < 32; ++i) {
                to[i] = static_cast<uint8_t>((low[i] & 15) | (high[i] & 3) << 4);
                to[i + 32] = static_cast<uint8_t>((low[i + 32] & 15) | (high[i] >> 2 & 3) << 4);
                to[i + 64] = static_cast<uint8_t>(low[i] >> 4 | (high[i] >> 4 & 3) << 4);
                to[i + 96] = static_cast<uint8_t>(low[i + 32] >> 4 | high[i] >> 6 << 4);
            }
        }
    }
}

// The lane of eight codes (their low four bits) in a line of nibbles, and back.
uint32_t nibbles(const uint8_t* codes) {
    uint32_t lane = 0;
    for (int i = 0; i < 4; ++i) lane |= (codes[2 * i] & 15u) << (4 * i) | (codes[2 * i + 1] & 15u) << (16 + 4 * i);
    return lane;
}

void write_32(uint8_t* to, uint32_t value) { std::memcpy(to, &value, 4); }

uint32_t read_32(const uint8_t* from) {
    uint32_t value;
    std::memcpy(&value, from, 4);
    return value;
}

// `group` is where the block's group of 16 outputs begins; `lane` is the output in it.
template <Format FORMAT>
void write_block(uint8_t* group, int64_t lane, const uint8_t* codes) {
    if constexpr (FORMAT == Format::q8_0) {
        for (int pair = 0; pair < 16; ++pair) std::memcpy(group + pair * 32 + lane * 2, codes + 2 * pair, 2);
    } else if constexpr (FORMAT == Format::q6_k) {
        uint32_t high = 0;
        for (int i = 0; i < 8; ++i) high |= static_cast<uint32_t>(codes[2 * i] >> 4) << (2 * i) | static_cast<uint32_t>(codes[2 * i + 1] >> 4) << (16 + 2 * i);
        write_32(group + lane * 4, nibbles(codes));
        write_32(group + 64 + lane * 4, nibbles(codes + 8));
        write_32(group + 128 + lane * 4, high);
    } else {
        for (int line = 0; line < 4; ++line) write_32(group + line * 64 + lane * 4, nibbles(codes + 8 * line));
    }
}

template <Format FORMAT>
void read_block(const uint8_t* group, int64_t lane, uint8_t* codes) {
    if constexpr (FORMAT == Format::q8_0) {
        for (int pair = 0; pair < 16; ++pair) std::memcpy(codes + 2 * pair, group + pair * 32 + lane * 2, 2);
    } else {
        for (int i = 0; i < panel_format(FORMAT).block_k; ++i) codes[i] = read_32(group + i / 8 * 64 + lane * 4) >> (i % 2 * 16 + i % 8 / 2 * 4) & 15;
        if constexpr (FORMAT == Format::q6_k) {
            const uint32_t high = read_32(group + 128 + lane * 4);
            for (int i = 0; i < 16; ++i) codes[i] = static_cast<uint8_t>(codes[i] | (high >> (i % 2 * 16 + i / 2 * 2) & 3) << 4);
        }
    }
}

template <Format FORMAT>
void write_header(uint8_t* header, int64_t output, const uint8_t* block) {
    if constexpr (FORMAT == Format::q6_k) {
        std::memcpy(header + output * 2, block + 208, 2);
        for (int i = 0; i < 16; ++i) header[128 + i * PANEL + output] = block[192 + i];
    } else {
        std::memcpy(header + output * 2, block, 2);
        if constexpr (panel_format(FORMAT).has_min) std::memcpy(header + 128 + output * 2, block + 2, 2);
        if constexpr (FORMAT == Format::q4_k)
            for (int i = 0; i < 8; ++i) scale_and_min(block + 4, i, header[256 + i * PANEL + output], header[768 + i * PANEL + output]);
    }
}

float half_at(const uint8_t* halves, int64_t output) {
    uint16_t half;
    std::memcpy(&half, halves + output * 2, 2);
    return half_to_float(half);
}

// The block's values from its codes, in ggml's order of operations.
template <Format FORMAT>
void values(const uint8_t* header, int64_t output, int block, const uint8_t* codes, float* out) {
    float d = half_at(header, output), m = 0;
    if constexpr (FORMAT == Format::q6_k) d *= static_cast<float>(static_cast<int8_t>(header[128 + block * PANEL + output]));
    if constexpr (panel_format(FORMAT).has_min) m = half_at(header + 128, output);
    if constexpr (FORMAT == Format::q4_k) {
        d *= static_cast<float>(header[256 + block * PANEL + output]);
        m *= -static_cast<float>(header[768 + block * PANEL + output]);
    }
    for (int i = 0; i < panel_format(FORMAT).block_k; ++i) {
        int code = codes[i];
        if constexpr (FORMAT == Format::q8_0) code = static_cast<int8_t>(codes[i]);
        if constexpr (FORMAT == Format::q4_0) code -= 8;
        if constexpr (FORMAT == Format::q6_k) code -= 32;
        out[i] = d * static_cast<float>(code);
        if constexpr (panel_format(FORMAT).has_min) out[i] += m;
    }
}

template <Format FORMAT>
struct Quantized {
    static constexpr PanelFormat SHAPE = panel_format(FORMAT);

    static int64_t num_supers(int64_t k) {
        if (k % SHAPE.super_k) throw std::invalid_argument("rows of " + std::to_string(k) + " inputs do not fill blocks of " + std::to_string(SHAPE.super_k));
        return k / SHAPE.super_k;
    }
    static int64_t panel_bytes(int64_t k) { return num_supers(k) * SHAPE.super_bytes(); }
    static int64_t row_bytes(int64_t k) { return num_supers(k) * SHAPE.file_bytes; }

    static void pack(uint8_t* panel, int64_t k, int64_t first, int64_t num_rows, const void* rows, Compute) {
        const int64_t num = num_supers(k);
        for (int64_t s = 0; s < num; ++s, panel += SHAPE.super_bytes())
            for (int64_t r = 0; r < num_rows; ++r) {
                const uint8_t* block = static_cast<const uint8_t*>(rows) + (r * num + s) * SHAPE.file_bytes;
                const int64_t output = first + r;
                uint8_t codes[SHAPE.super_k];
                read_codes<FORMAT>(block, codes);
                write_header<FORMAT>(panel, output, block);
                uint8_t* group = panel + SHAPE.header_bytes + output / 16 * SHAPE.group_bytes;
                for (int64_t b = 0; b < SHAPE.blocks(); ++b) write_block<FORMAT>(group + b * SHAPE.block_bytes(), output % 16, codes + b * SHAPE.block_k);
            }
    }

    static void unpack_row(const uint8_t* panel, int64_t k, int64_t output, float* out) {
        for (int64_t s = 0; s < k / SHAPE.super_k; ++s, panel += SHAPE.super_bytes())
            for (int b = 0; b < SHAPE.blocks(); ++b, out += SHAPE.block_k) {
                uint8_t codes[SHAPE.block_k];
                read_block<FORMAT>(panel + SHAPE.header_bytes + b * SHAPE.block_bytes() + output / 16 * SHAPE.group_bytes, output % 16, codes);
                values<FORMAT>(panel, output, b, codes, out);
            }
    }

    static PanelKernel kernel(Compute compute) { return KVD_CHOOSE(quantized_table).kernel(FORMAT, compute); }

    static int64_t prepared_floats(int64_t k) { return k / 32; }
    static void prepare(Compute compute, const void* x, int64_t ldx, int64_t num_rows, int64_t k, float* out) {
        KVD_CHOOSE(quantized_table).sum_blocks(compute, x, ldx, num_rows, k, out);
    }
};

template <Format FORMAT>
constexpr FormatOps make_ops() {
    using Q = Quantized<FORMAT>;
    FormatOps ops{Q::panel_bytes, Q::row_bytes, QUANTIZED_SCRATCH_BYTES, Q::pack, Q::unpack_row, Q::kernel};
    if (panel_format(FORMAT).has_min) {
        ops.prepared_floats = Q::prepared_floats;
        ops.prepare = Q::prepare;
    }
    return ops;
}

}  // namespace

const FormatOps& quantized_ops(Format format) {
    static const FormatOps q8_0 = make_ops<Format::q8_0>(), q4_0 = make_ops<Format::q4_0>(), q4_1 = make_ops<Format::q4_1>(), q4_k = make_ops<Format::q4_k>(),
                           q6_k = make_ops<Format::q6_k>();
    switch (format) {
        case Format::q8_0:
            return q8_0;
        case Format::q4_0:
            return q4_0;
        case Format::q4_1:
            return q4_1;
        case Format::q4_k:
            return q4_k;
        case Format::q6_k:
            return q6_k;
        default:
            throw std::invalid_argument("not a quantised format");
    }
}

}  // namespace kvd
