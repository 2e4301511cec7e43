// Repacking into panels, and reading single rows back. Portable; runs at load time and for embedding look-ups.
#include "layout.h"
#include "decode.h"

namespace foredraft {

float half_to_float(uint16_t h) {
    uint32_t sign = static_cast<uint32_t>(h & 0x8000u) << 16, exponent = (h >> 10) & 31u, mantissa = h & 1023u, bits;
    if (exponent == 31) {
        bits = sign | 0x7F800000u | (mantissa << 13);
    } else if (exponent != 0) {
        bits = sign | ((exponent + 112) << 23) | (mantissa << 13);
    } else {
        float value = static_cast<float>(mantissa) * 5.9604644775390625e-08f;  // 2^-24
        bits = sign | load<uint32_t>(&value);
    }
    return load<float>(&bits);
}

namespace {

// Bytes of one source row.
size_t row_bytes(int source, long in);

void put_half(uint8_t* base, int lane, const uint8_t* half) { std::memcpy(base + 2 * lane, half, 2); }

void put_bits(uint8_t* words, int word, int lane, uint32_t bits) {
    uint8_t* at = words + 32 * word + 4 * lane;
    uint32_t v = load<uint32_t>(at) | bits;
    std::memcpy(at, &v, 4);
}

void put_nibble(uint8_t* words, int k, int lane, uint32_t q) { put_bits(words, nibble_word(k), lane, q << nibble_shift(k)); }

// Each writer below moves one source block of one output row into its lane of a zeroed panel group.
void write_f32(const uint8_t* src, long count, uint8_t* dst, int lane) {
    for (long k = 0; k < count; ++k) std::memcpy(dst + 32 * k + 4 * lane, src + 4 * k, 4);
}

void write_bf16(const uint8_t* src, long count, uint8_t* dst, int lane) {
    for (long k = 0; k < count; ++k) std::memcpy(dst + 32 * (k / 2) + 4 * lane + 2 * (k & 1), src + 2 * k, 2);
}

void write_q8_0(const uint8_t* src, uint8_t* dst, int lane) {
    put_half(dst, lane, src);
    for (int k = 0; k < 32; ++k) dst[16 + 32 * (q8_byte(k) / 4) + 4 * lane + q8_byte(k) % 4] = src[2 + k];
}

void write_q4(const uint8_t* quants, uint8_t* words, int lane) {
    for (int k = 0; k < 16; ++k) {
        put_nibble(words, k, lane, quants[k] & 15u);
        put_nibble(words, k + 16, lane, quants[k] >> 4);
    }
}

void write_q4_0(const uint8_t* src, uint8_t* dst, int lane) {
    put_half(dst, lane, src);
    write_q4(src + 2, dst + 16, lane);
}

void write_q4_1(const uint8_t* src, uint8_t* dst, int lane) {
    put_half(dst, lane, src);
    put_half(dst + 16, lane, src + 2);
    write_q4(src + 4, dst + 32, lane);
}

// Q5_0 becomes Q8: d*(q-16) with the same d, nothing is lost.
void write_q5_0(const uint8_t* src, uint8_t* dst, int lane) {
    put_half(dst, lane, src);
    uint32_t high = load<uint32_t>(src + 2);
    for (int k = 0; k < 32; ++k) {
        int low = k < 16 ? src[6 + k] & 15 : src[6 + k - 16] >> 4;
        int q = (low | static_cast<int>((high >> k) & 1u) << 4) - 16;
        dst[16 + 32 * (q8_byte(k) / 4) + 4 * lane + q8_byte(k) % 4] = static_cast<uint8_t>(q);
    }
}

void write_q4_k(const uint8_t* src, uint8_t* dst, int lane) {
    put_half(dst, lane, src);
    put_half(dst + 16, lane, src + 2);
    const uint8_t *packed = src + 4, *quants = src + 16;
    for (int g = 0; g < 8; ++g) {
        uint8_t* group = dst + 32 + 144 * g;
        // Six-bit scales and minima: the first four groups are whole, the last four split into 4 + 2 bits.
        group[lane] = g < 4 ? packed[g] & 63 : static_cast<uint8_t>((packed[g + 4] & 15) | (packed[g - 4] >> 6 << 4));
        group[8 + lane] = g < 4 ? packed[g + 4] & 63 : static_cast<uint8_t>((packed[g + 4] >> 4) | (packed[g] >> 6 << 4));
        for (int k = 0; k < 32; ++k) {
            uint8_t byte = quants[32 * (g / 2) + k];
            put_nibble(group + 16, k, lane, g % 2 ? byte >> 4 : byte & 15u);
        }
    }
}

void write_q6_k(const uint8_t* src, uint8_t* dst, int lane) {
    put_half(dst, lane, src + 208);
    for (int g = 0; g < 8; ++g) {
        uint8_t* group = dst + 16 + 208 * g;
        group[lane] = src[192 + 2 * g];
        group[8 + lane] = src[192 + 2 * g + 1];
        const uint8_t *low = src + 64 * (g / 4) + 32 * (g % 2), *high = src + 128 + 32 * (g / 4);
        for (int k = 0; k < 32; ++k) {
            put_nibble(group + 16, k, lane, g % 4 < 2 ? low[k] & 15u : low[k] >> 4);
            put_bits(group + 144, crumb_word(k), lane, ((high[k] >> (2 * (g % 4))) & 3u) << crumb_shift(k));
        }
    }
}

}  // namespace

// Source types of fd_pack, in the order of kernels/formats.py.
enum Source : int { kSrcF32, kSrcBF16, kSrcQ8_0, kSrcQ4_0, kSrcQ4_1, kSrcQ4_K, kSrcQ6_K, kSrcQ5_0, kSources };

constexpr int kSourceBlock[kSources] = {1, 1, 32, 32, 32, 256, 256, 32};
constexpr int kSourceBytes[kSources] = {4, 2, 34, 18, 20, 144, 210, 22};
constexpr int kSourceFormat[kSources] = {kF32, kBF16, kQ8, kQ4, kQ4M, kQ4K, kQ6K, kQ8};

namespace {

size_t row_bytes(int source, long in) { return static_cast<size_t>(in / kSourceBlock[source]) * kSourceBytes[source]; }

void write_block(int source, const uint8_t* src, long count, uint8_t* dst, int lane) {
    switch (source) {
        case kSrcF32: return write_f32(src, count, dst, lane);
        case kSrcBF16: return write_bf16(src, count, dst, lane);
        case kSrcQ8_0: return write_q8_0(src, dst, lane);
        case kSrcQ4_0: return write_q4_0(src, dst, lane);
        case kSrcQ4_1: return write_q4_1(src, dst, lane);
        case kSrcQ4_K: return write_q4_k(src, dst, lane);
        case kSrcQ6_K: return write_q6_k(src, dst, lane);
        default: return write_q5_0(src, dst, lane);
    }
}

void pack_panel(int source, const uint8_t* src, long out, long in, long panel, uint8_t* dst) {
    const Layout layout = kLayout[kSourceFormat[source]];
    const long count = groups(kSourceFormat[source], in);
    std::memset(dst, 0, static_cast<size_t>(count) * layout.bytes);
    for (int lane = 0; lane < kLanes && panel * kLanes + lane < out; ++lane) {
        const uint8_t* row = src + static_cast<size_t>(panel * kLanes + lane) * row_bytes(source, in);
        for (long g = 0; g < count; ++g) {
            const long first = g * layout.group, left = in - first < layout.group ? in - first : layout.group;
            const uint8_t* block = row + static_cast<size_t>(first / kSourceBlock[source]) * kSourceBytes[source];
            write_block(source, block, left, dst + g * layout.bytes, lane);
        }
    }
}

}  // namespace
}  // namespace foredraft

using namespace foredraft;

extern "C" {

// Bytes of a packed matrix, or 0 if the source type or the shape is refused.
size_t fd_packed_bytes(int source, long out, long in) {
    if (source < 0 || source >= kSources || out < 1 || in < 1) return 0;
    const int format = kSourceFormat[source];
    if (!kLayout[format].padded && in % kLayout[format].group != 0) return 0;
    return static_cast<size_t>(panels(out)) * panel_bytes(format, in);
}

int fd_format(int source) { return source < 0 || source >= kSources ? -1 : kSourceFormat[source]; }

void fd_pack(int source, const uint8_t* src, long out, long in, uint8_t* dst) {
    const size_t stride = panel_bytes(kSourceFormat[source], in);
    const long count = panels(out);
    for (long panel = 0; panel < count; ++panel) pack_panel(source, src, out, in, panel, dst + panel * stride);
}

// y[i] = row ids[i] of the matrix, in float32: the weights exactly as every kernel multiplies them.
void fd_rows(int format, const uint8_t* packed, long in, const int64_t* ids, long n, float* y) {
    const Layout layout = kLayout[format];
    const size_t stride = panel_bytes(format, in);
    const long count = groups(format, in);
    float block[256];
    for (long i = 0; i < n; ++i) {
        const uint8_t* panel = packed + static_cast<size_t>(ids[i] / kLanes) * stride;
        for (long g = 0; g < count; ++g) {
            const long first = g * layout.group, left = in - first < layout.group ? in - first : layout.group;
            decode_lane(format, panel + g * layout.bytes, static_cast<int>(ids[i] % kLanes), block);
            std::memcpy(y + i * in + first, block, static_cast<size_t>(left) * sizeof(float));
        }
    }
}

}  // extern "C"
