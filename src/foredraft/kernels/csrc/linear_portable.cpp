// The same sums as the AVX2 kernels, in the same order and with the same roundings, for any CPU.
#include "decode.h"

namespace foredraft {
namespace {

template <int F>
void linear(const Tile& t, float* out) {
    constexpr Layout layout = kLayout[F];
    float w[256];
    for (int p = 0; p < t.count; ++p) {
        for (int r = 0; r < t.rows; ++r) std::memset(out + 32 * r + 8 * p, 0, 8 * sizeof(float));
        for (long g = 0; g < groups(F, t.in); ++g) {
            const long first = g * layout.group, left = t.in - first < layout.group ? t.in - first : layout.group;
            for (int lane = 0; lane < kLanes; ++lane) {
                decode_lane(F, t.weights + p * t.stride + g * layout.bytes, lane, w);
                for (int r = 0; r < t.rows; ++r) {
                    float sum = out[32 * r + 8 * p + lane];
                    const float* x = t.x + r * t.ldx + first;
                    for (long k = 0; k < left; ++k) sum = std::fma(w[k], x[k], sum);
                    out[32 * r + 8 * p + lane] = sum;
                }
            }
        }
    }
}

// One lane of 32 inputs: exact integer sums, then at most three float roundings.
template <class T>
float integer_step(int format, const Sub& s, const T* x, float scale, float scaled_sum, float sum) {
    int32_t part[2] = {0, 0};
    for (int k = 0; k < 32; ++k) part[k / 16] += s.q[sizeof(T) == 1 ? k / 8 * 8 + kByteOrder[k % 8] : k] * x[k];
    if (format == kQ6K) {
        sum = std::fma(static_cast<float>(part[0]), s.scale[0] * scale, sum);
        return std::fma(static_cast<float>(part[1]), s.scale[1] * scale, sum);
    }
    sum = std::fma(static_cast<float>(part[0] + part[1]), s.scale[0] * scale, sum);
    return format == kQ4M || format == kQ4K ? std::fma(s.add, scaled_sum, sum) : sum;
}

template <int F, class T>
void integer(const Tile& t, const Quantised& x, float* out) {
    constexpr Layout layout = kLayout[F];
    const long blocks = t.in / 32;
    for (int p = 0; p < t.count; ++p) {
        for (int r = 0; r < t.rows; ++r) std::memset(out + 32 * r + 8 * p, 0, 8 * sizeof(float));
        for (long b = 0; b < blocks; ++b) {
            const long g = b / (layout.group / 32);
            for (int lane = 0; lane < kLanes; ++lane) {
                const uint8_t* group = t.weights + p * t.stride + g * layout.bytes;
                const Sub s = decode_sub(F, group, static_cast<int>(b % (layout.group / 32)), lane);
                for (int r = 0; r < t.rows; ++r) {
                    const long at = b * x.n + t.first_row + r;
                    float& sum = out[32 * r + 8 * p + lane];
                    sum = integer_step(F, s, static_cast<const T*>(x.q) + at * 32, x.scale[at], x.scaled_sum[at], sum);
                }
            }
        }
    }
}

template <class T>
void quantise(const float* x, long count, long step, void* target, float* scale, float* scaled_sum, int32_t* sums) {
    constexpr float kTop = sizeof(T) == 1 ? 127.0f : 32767.0f;
    T* q = static_cast<T*>(target);
    for (long at = 0; at < count * step; at += step, x += 32, q += 32 * step) {
        uint32_t top = 0;
        for (int k = 0; k < 32; ++k) {
            const uint32_t bits = load<uint32_t>(x + k) & 0x7FFFFFFFu;
            top = bits > top ? bits : top;
        }
        const bool finite = top < 0x7F800000u;
        const float largest = load<float>(&top);
        const float inverse = finite && largest > 1e-30f ? kTop / largest : 0.0f;
        int32_t part[2] = {0, 0};
        for (int k = 0; k < 32; ++k) {
            const int from = sizeof(T) == 1 ? k / 8 * 8 + kByteOrder[k % 8] : k;
            q[k] = inverse == 0.0f ? 0 : static_cast<T>(std::nearbyint(x[from] * inverse));
            part[k / 16] += q[k];
        }
        scale[at] = finite ? largest / kTop : NAN;  // a NaN or infinity makes the whole output row NaN
        scaled_sum[at] = scale[at] * static_cast<float>(part[0] + part[1]);
        sums[2 * at] = part[0];
        sums[2 * at + 1] = part[1];
    }
}

}  // namespace

const Kernels kPortable = {
    {linear<kF32>, linear<kBF16>, linear<kQ8>, linear<kQ4>, linear<kQ4M>, linear<kQ4K>, linear<kQ6K>},
    {nullptr, nullptr, integer<kQ8, int16_t>, integer<kQ4, int16_t>, integer<kQ4M, int16_t>, integer<kQ4K, int16_t>,
     integer<kQ6K, int16_t>},
    {nullptr, nullptr, nullptr, integer<kQ4, int8_t>, integer<kQ4M, int8_t>, integer<kQ4K, int8_t>, nullptr},
    quantise<int16_t>,
    quantise<int8_t>,
};

}  // namespace foredraft
