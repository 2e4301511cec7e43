// Included once for each instruction set, inside a namespace, after V8, VW and FD_FMA(a, b, c) = a*b + c (one rounding) on
// both. VW is the widest vector, V8 again or twice that: numbers that do not meet may share it. Sums run over eight lanes
// everywhere, and their trees and order are spelled out, so all instruction sets give the same bits.

constexpr long kWide = sizeof(VW) / sizeof(float);

template <class V>
FD_OP V splat(float v) {
    return v - V{};  // not v + 0, which would lose the sign of a zero
}

template <class V>
FD_OP V read(const float* p) {
    return load<V>(p);
}
template <class V>
FD_OP V read(const uint16_t* p) {
    using Ints = decltype(V{} < V{});
    uint16_t half __attribute__((vector_size(sizeof(V) / 2)));
    std::memcpy(&half, p, sizeof half);
    return (V)(__builtin_convertvector(half, Ints) << 16);
}
template <class V>
FD_OP void write(float* p, V v) {
    std::memcpy(p, &v, sizeof v);
}

// ((0+4)+(2+6)) + ((1+5)+(3+7))
FD_OP float sum8(V8 v) { return ((v[0] + v[4]) + (v[2] + v[6])) + ((v[1] + v[5]) + (v[3] + v[7])); }

// e^x to about one unit in the last place; 0 below -87.3, infinity above 88.7, NaN stays. n = round(x / ln 2), then a
// polynomial of degree six in the rest.
template <class V>
FD_OP V exponential(V x) {
    using Ints = decltype(x < x);
    const V low = splat<V>(-87.3f), high = splat<V>(88.7f);
    const V bounded = x < low ? low : x > high ? high : x;
    const V magic = splat<V>(12582912.0f);  // 1.5 * 2^23: adding it rounds to an integer
    const V n = FD_FMA(bounded, splat<V>(1.44269504f), magic) - magic;
    V r = FD_FMA(n, splat<V>(-0.693145752f), bounded);
    r = FD_FMA(n, splat<V>(-1.42860677e-6f), r);
    V p = splat<V>(1.0f / 720);
    p = FD_FMA(p, r, splat<V>(1.0f / 120));
    p = FD_FMA(p, r, splat<V>(1.0f / 24));
    p = FD_FMA(p, r, splat<V>(1.0f / 6));
    p = FD_FMA(p, r, splat<V>(0.5f));
    p = FD_FMA(p, r, splat<V>(1.0f));
    p = FD_FMA(p, r, splat<V>(1.0f));
    const Ints power = (__builtin_convertvector(n == n ? n : splat<V>(0.0f), Ints) + 127) << 23;
    const V result = p * (V)power;
    return x != x ? x : x < low ? splat<V>(0.0f) : x > high ? splat<V>(HUGE_VALF) : result;
}

FD_OP VW tanh(VW x) {
    const VW size = x < splat<VW>(0.0f) ? -x : x;
    const VW t = splat<VW>(1.0f) - splat<VW>(2.0f) / (exponential(size + size) + splat<VW>(1.0f));
    return x < splat<VW>(0.0f) ? -t : t;
}

// Runs f on VW's numbers at a time; the last ones are padded with zeros.
template <class F>
FD_OP void each(const float* a, const float* b, long n, float* y, F f) {
    long i = 0;
    for (; i + kWide <= n; i += kWide) write(y + i, f(read<VW>(a + i), read<VW>(b + i)));
    if (i < n) {
        float u[kWide] = {}, v[kWide] = {}, w[kWide];
        std::memcpy(u, a + i, (n - i) * sizeof(float));
        std::memcpy(v, b + i, (n - i) * sizeof(float));
        write(w, f(read<VW>(u), read<VW>(v)));
        std::memcpy(y + i, w, (n - i) * sizeof(float));
    }
}

void rms_norm(const float* x, const float* weight, float eps, long n, float* y) {
    V8 squares = splat<V8>(0.0f);
    long i = 0;
    for (; i + 8 <= n; i += 8) squares = FD_FMA(read<V8>(x + i), read<V8>(x + i), squares);
    if (i < n) {
        float tail[8] = {};
        std::memcpy(tail, x + i, (n - i) * sizeof(float));
        squares = FD_FMA(read<V8>(tail), read<V8>(tail), squares);
    }
    const VW factor = splat<VW>(1.0f / std::sqrt(sum8(squares) / static_cast<float>(n) + eps));
    each(x, weight, n, y, [&](VW a, VW w) FD_HERE { return a * factor * w; });
}

void gate(const float* gates, const float* up, long n, bool tanh_gelu, float* y) {
    if (tanh_gelu) {
        each(gates, up, n, y, [&](VW g, VW u) FD_HERE {
            const VW inner = g * FD_FMA(g * g, splat<VW>(0.7978845608f * 0.044715f), splat<VW>(0.7978845608f));
            return splat<VW>(0.5f) * g * (splat<VW>(1.0f) + tanh(inner)) * u;
        });
    } else {
        each(gates, up, n, y, [&](VW g, VW u) FD_HERE { return g / (splat<VW>(1.0f) + exponential(-g)) * u; });
    }
}

void softcap(float* x, long n, float cap) {
    const VW c = splat<VW>(cap);
    each(x, x, n, x, [&](VW a, VW) FD_HERE { return c * tanh(a / c); });
}

void rope(float* x, long heads, long head_dim, const float* cosine, const float* sine) {
    const long half = head_dim / 2;
    for (long h = 0; h < heads; ++h, x += head_dim) {
        for (long i = 0; i < half; ++i) {
            const float a = x[i], b = x[i + half], c = cosine[i], s = sine[i];
            const float bs = b * s, as = a * s;
            x[i] = a * c - bs;
            x[i + half] = b * c + as;
        }
    }
}

void store(const float* x, long n, int cache_type, void* target, long offset) {
    if (cache_type == kCacheF32) {
        std::memcpy(static_cast<float*>(target) + offset, x, n * sizeof(float));
        return;
    }
    uint16_t* y = static_cast<uint16_t*>(target) + offset;
    for (long i = 0; i < n; ++i) {
        const uint32_t bits = load<uint32_t>(x + i);
        const bool nan = (bits & 0x7FFFFFFFu) > 0x7F800000u;
        y[i] = static_cast<uint16_t>(nan ? 0x7FC0u : (bits + 0x7FFFu + ((bits >> 16) & 1u)) >> 16);
    }
}

#include FD_SCORES
#include "attend_body.h"

const Ops kOps = {rms_norm, gate, rope, store, attend, attend_blocks, merge, softcap};
