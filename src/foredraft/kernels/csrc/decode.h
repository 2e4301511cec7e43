// Scalar decoding of one lane of one panel group: the definition of every format.
#pragma once
#include <cmath>

#include "layout.h"

namespace foredraft {

inline float bf16_to_float(uint16_t h) {
    uint32_t bits = static_cast<uint32_t>(h) << 16;
    return load<float>(&bits);
}

inline uint32_t nibble_at(const uint8_t* words, int lane, int k) {
    return (load<uint32_t>(words + 32 * nibble_word(k) + 4 * lane) >> nibble_shift(k)) & 15u;
}

inline uint32_t crumb_at(const uint8_t* words, int lane, int k) {
    return (load<uint32_t>(words + 32 * crumb_word(k) + 4 * lane) >> crumb_shift(k)) & 3u;
}

inline float half_at(const uint8_t* base, int lane) { return half_to_float(load<uint16_t>(base + 2 * lane)); }

// Integers and scales of 32 inputs: weight k = scale[k/16]*(q[k]) + add, one rounding (a fused multiply-add).
struct Sub {
    int q[32];
    float scale[2];
    float add;
    int offset;  // already taken off q; integer kernels take it off their sums
};

inline Sub decode_sub(int format, const uint8_t* group, int sub, int lane) {
    Sub s;
    s.add = 0.0f;
    s.offset = 0;
    if (format == kQ8) {
        s.scale[0] = s.scale[1] = half_at(group, lane);
        for (int k = 0; k < 32; ++k) {
            s.q[k] = static_cast<int8_t>(group[16 + 32 * (q8_byte(k) / 4) + 4 * lane + q8_byte(k) % 4]);
        }
        return s;
    }
    const uint8_t* words = nullptr;
    if (format == kQ4) {
        s.scale[0] = s.scale[1] = half_at(group, lane);
        s.offset = 8;
        words = group + 16;
    } else if (format == kQ4M) {
        s.scale[0] = s.scale[1] = half_at(group, lane);
        s.add = half_at(group + 16, lane);
        words = group + 32;
    } else if (format == kQ4K) {
        const uint8_t* part = group + 32 + 144 * sub;
        s.scale[0] = s.scale[1] = half_at(group, lane) * static_cast<float>(part[lane]);
        s.add = -(half_at(group + 16, lane) * static_cast<float>(part[8 + lane]));
        words = part + 16;
    } else {
        const uint8_t* part = group + 16 + 208 * sub;
        const float d = half_at(group, lane);
        s.scale[0] = d * static_cast<float>(static_cast<int8_t>(part[lane]));
        s.scale[1] = d * static_cast<float>(static_cast<int8_t>(part[8 + lane]));
        s.offset = 32;
        words = part + 16;
        for (int k = 0; k < 32; ++k) {
            s.q[k] = static_cast<int>(nibble_at(words, lane, k) | crumb_at(words + 128, lane, k) << 4) - s.offset;
        }
        return s;
    }
    for (int k = 0; k < 32; ++k) s.q[k] = static_cast<int>(nibble_at(words, lane, k)) - s.offset;
    return s;
}

// All weights of one lane of a group, kLayout[format].group floats.
inline void decode_lane(int format, const uint8_t* group, int lane, float* y) {
    if (format == kF32) {
        for (int k = 0; k < 8; ++k) y[k] = load<float>(group + 32 * k + 4 * lane);
    } else if (format == kBF16) {
        for (int k = 0; k < 16; ++k) y[k] = bf16_to_float(load<uint16_t>(group + 32 * (k / 2) + 4 * lane + 2 * (k & 1)));
    } else {
        for (int sub = 0; sub < kLayout[format].group / 32; ++sub) {
            const Sub s = decode_sub(format, group, sub, lane);
            for (int k = 0; k < 32; ++k) y[32 * sub + k] = std::fma(s.scale[k / 16], static_cast<float>(s.q[k]), s.add);
        }
    }
}

}  // namespace foredraft
