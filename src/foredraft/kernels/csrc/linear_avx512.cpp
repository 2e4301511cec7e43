// AVX-512 kernels with byte dot products (VNNI). The whole file is compiled for that target and only called after
// has_avx512(). A vector holds the outputs of two neighbouring panels; panels that fill no tile are left to AVX2.
#include "layout.h"

#if defined(__x86_64__) && defined(__GNUC__)
#if defined(__clang__)
#pragma clang attribute push(__attribute__((target("avx2,fma,f16c,avx512f,avx512bw,avx512dq,avx512vl,avx512vnni"))), apply_to = function)
#else
#pragma GCC push_options
#pragma GCC target("avx2,fma,f16c,avx512f,avx512bw,avx512dq,avx512vl,avx512vnni")
#endif
#include <immintrin.h>
#pragma GCC diagnostic ignored "-Wmaybe-uninitialized"  // GCC's own header, PR 105593

#define FD_INLINE inline __attribute__((always_inline))
#define FD_HERE __attribute__((always_inline))
#define FD_UNROLL _Pragma("GCC unroll 32")
// Keeps a value in a register and its sum in written order.
#define FD_PIN(v) asm("" : "+v"(v))

namespace foredraft {
namespace {

#include "decoders_avx512.h"

// See linear_avx2.cpp: what is fetched ahead near the end of a panel is the first panel of the next tile.
constexpr size_t kAhead = 4096;
template <int Bytes>
FD_INLINE void prefetch(const uint8_t* p) {
    FD_UNROLL
    for (int at = 0; at < Bytes; at += 64) _mm_prefetch(reinterpret_cast<const char*>(p + at), _MM_HINT_T0);
}

// Opens one step of P pairs of panels and fetches what will be read later.
template <class D, int P>
FD_INLINE void open(D (&d)[P], const uint8_t* w, size_t stride, long step, long last) {
    constexpr int kBytes = kLayout[D::kFormat].bytes, kPart = kBytes / D::kSubs;
    const size_t beyond = step < last ? 0 : (2 * P - 1) * stride;
    const int sub = static_cast<int>(step % D::kSubs);
    FD_UNROLL
    for (int p = 0; p < P; ++p) {
        const uint8_t* group = w + 2 * p * stride + (step / D::kSubs) * kBytes;
        d[p].open(group, group + stride, sub);
        prefetch<kPart>(group + sub * kPart + kAhead + beyond);
        prefetch<kPart>(group + stride + sub * kPart + kAhead + beyond);
    }
}

template <int R, int P>
FD_INLINE void store(const __m512 (&acc)[R][P], float* out) {
    FD_UNROLL
    for (int r = 0; r < R; ++r) {
        FD_UNROLL
        for (int p = 0; p < P; ++p) _mm512_storeu_ps(out + 32 * r + 16 * p, acc[r][p]);
    }
}

// R rows by P pairs of panels; each weight vector is decoded once and used for all rows.
template <class D, int R, int P>
void float_tile(const uint8_t* w, size_t stride, const float* x, long ldx, long in, float* out) {
    constexpr int kBytes = kLayout[D::kFormat].bytes, kPart = kBytes / D::kSubs;
    __m512 acc[R][P];
    FD_UNROLL
    for (int r = 0; r < R; ++r) {
        FD_UNROLL
        for (int p = 0; p < P; ++p) acc[r][p] = _mm512_setzero_ps();
    }
    const auto add = [&](const D(&d)[P], int from, int k, const float* at) FD_HERE {
        __m512 v[P];
        FD_UNROLL
        for (int p = 0; p < P; ++p) v[p] = d[p].get(from, k);
        FD_UNROLL
        for (int r = 0; r < R; ++r) {
            const __m512 b = _mm512_set1_ps(at[r * ldx]);
            FD_UNROLL
            for (int p = 0; p < P; ++p) {
                __m512 next = _mm512_fmadd_ps(v[p], b, acc[r][p]);
                FD_PIN(next);
                acc[r][p] = next;
            }
        }
    };
    const long steps = in / D::kStep, last = steps - static_cast<long>(kAhead / kPart);
    D d[P];
    for (long step = 0; step < steps; ++step) {
        open(d, w, stride, step, last);
        for (int from = 0; from < D::kStep; from += D::kTurn) {
            const float* at = x + step * D::kStep + from;
            FD_UNROLL
            for (int k = 0; k < D::kTurn; ++k) add(d, from, k, at + k);
        }
    }
    if constexpr (kLayout[D::kFormat].padded) {
        if (steps * D::kStep < in) {
            FD_UNROLL
            for (int p = 0; p < P; ++p) d[p].open(w + 2 * p * stride + steps * kBytes, w + (2 * p + 1) * stride + steps * kBytes, 0);
            for (int k = 0; k < in - steps * D::kStep; ++k) add(d, 0, k, x + steps * D::kStep + k);
        }
    }
    store<R, P>(acc, out);
}

// Exact sums of a block: four products an instruction and lane for bytes, two for int16.
template <class D, class T, int R, int P>
FD_INLINE void block_sums(const D (&d)[P], int half, const T* q, __m512i (&sum)[R][P]) {
    constexpr int kEach = 4 / sizeof(T), kCount = (D::kSplit ? 16 : 32) / kEach;
    FD_UNROLL
    for (int s = half * kCount; s < (half + 1) * kCount; ++s) {
        __m512i v[P];
        FD_UNROLL
        for (int p = 0; p < P; ++p) {
            if constexpr (sizeof(T) == 1) {
                v[p] = d[p].quad(s);
            } else {
                v[p] = d[p].pair(s);
            }
        }
        FD_UNROLL
        for (int r = 0; r < R; ++r) {
            const __m512i x = splat(load<int32_t>(q + 32 * r + kEach * s));
            FD_UNROLL
            for (int p = 0; p < P; ++p) {
                __m512i next = sizeof(T) == 1 ? _mm512_dpbusd_epi32(sum[r][p], v[p], x) : _mm512_dpwssd_epi32(sum[r][p], v[p], x);
                FD_PIN(next);
                sum[r][p] = next;
            }
        }
    }
}

// Integer activations (T is int16_t or int8_t): exact sums over 32 inputs (16 for Q6K), then one float step.
template <class D, class T, int R, int P>
void int_tile(const uint8_t* w, size_t stride, const Quantised& x, long row, float* out) {
    constexpr int kPart = kLayout[D::kFormat].bytes / D::kSubs, kHalves = D::kSplit ? 2 : 1;
    const long blocks = x.in / 32, last = blocks - static_cast<long>(kAhead / kPart);
    __m512 acc[R][P];
    FD_UNROLL
    for (int r = 0; r < R; ++r) {
        FD_UNROLL
        for (int p = 0; p < P; ++p) acc[r][p] = _mm512_setzero_ps();
    }
    for (long b = 0; b < blocks; ++b) {
        const long first = b * x.n + row;
        D d[P];
        open(d, w, stride, b, last);
        FD_UNROLL
        for (int half = 0; half < kHalves; ++half) {
            __m512i sum[R][P];
            FD_UNROLL
            for (int r = 0; r < R; ++r) {
                const int32_t* s = x.sums + 2 * (first + r);
                const int taken = D::kOffset == 0 ? 0 : kHalves == 2 ? s[half] : s[0] + s[1];
                FD_UNROLL
                for (int p = 0; p < P; ++p) sum[r][p] = splat(-D::kOffset * taken);
            }
            block_sums<D, T, R, P>(d, half, static_cast<const T*>(x.q) + 32 * first, sum);
            FD_UNROLL
            for (int r = 0; r < R; ++r) {
                const __m512 scale = _mm512_set1_ps(x.scale[first + r]), total = _mm512_set1_ps(x.scaled_sum[first + r]);
                FD_UNROLL
                for (int p = 0; p < P; ++p) {
                    const __m512 factor = _mm512_mul_ps(d[p].scale(half), scale);
                    acc[r][p] = _mm512_fmadd_ps(_mm512_cvtepi32_ps(sum[r][p]), factor, acc[r][p]);
                    if constexpr (D::kAdd) acc[r][p] = _mm512_fmadd_ps(d[p].add(), total, acc[r][p]);
                }
            }
        }
    }
    store<R, P>(acc, out);
}

template <class D>
void linear(const Tile& t, float* out) {
    if (t.count < kUnit) return kAvx2.linear[D::kFormat](t, out);
    switch (t.rows) {
        case 1: return float_tile<D, 1, kUnit / 2>(t.weights, t.stride, t.x, t.ldx, t.in, out);
        case 2: return float_tile<D, 2, kUnit / 2>(t.weights, t.stride, t.x, t.ldx, t.in, out);
        case 3: return float_tile<D, 3, kUnit / 2>(t.weights, t.stride, t.x, t.ldx, t.in, out);
        case 4: return float_tile<D, 4, kUnit / 2>(t.weights, t.stride, t.x, t.ldx, t.in, out);
        case 5: return float_tile<D, 5, kUnit / 2>(t.weights, t.stride, t.x, t.ldx, t.in, out);
        case 6: return float_tile<D, 6, kUnit / 2>(t.weights, t.stride, t.x, t.ldx, t.in, out);
        case 7: return float_tile<D, 7, kUnit / 2>(t.weights, t.stride, t.x, t.ldx, t.in, out);
        default: return float_tile<D, 8, kUnit / 2>(t.weights, t.stride, t.x, t.ldx, t.in, out);
    }
}

template <class D, class T>
void integer(const Tile& t, const Quantised& x, float* out) {
    if (t.count < kUnit) return (sizeof(T) == 1 ? kAvx2.int8 : kAvx2.int16)[D::kFormat](t, x, out);
    switch (t.rows) {
        case 1: return int_tile<D, T, 1, kUnit / 2>(t.weights, t.stride, x, t.first_row, out);
        case 2: return int_tile<D, T, 2, kUnit / 2>(t.weights, t.stride, x, t.first_row, out);
        case 3: return int_tile<D, T, 3, kUnit / 2>(t.weights, t.stride, x, t.first_row, out);
        case 4: return int_tile<D, T, 4, kUnit / 2>(t.weights, t.stride, x, t.first_row, out);
        case 5: return int_tile<D, T, 5, kUnit / 2>(t.weights, t.stride, x, t.first_row, out);
        case 6: return int_tile<D, T, 6, kUnit / 2>(t.weights, t.stride, x, t.first_row, out);
        case 7: return int_tile<D, T, 7, kUnit / 2>(t.weights, t.stride, x, t.first_row, out);
        default: return int_tile<D, T, 8, kUnit / 2>(t.weights, t.stride, x, t.first_row, out);
    }
}

void quantise16(const float* x, long blocks, long step, void* q, float* scale, float* scaled_sum, int32_t* sums) {
    kAvx2.quantise16(x, blocks, step, q, scale, scaled_sum, sums);
}
void quantise8(const float* x, long blocks, long step, void* q, float* scale, float* scaled_sum, int32_t* sums) {
    kAvx2.quantise8(x, blocks, step, q, scale, scaled_sum, sums);
}

}  // namespace

const Kernels kAvx512 = {
    {linear<F32>, linear<BF16>, linear<Q8>, linear<Q4>, linear<Q4M>, linear<Q4K>, linear<Q6K>},
    {nullptr, nullptr, integer<Q8, int16_t>, integer<Q4, int16_t>, integer<Q4M, int16_t>, integer<Q4K, int16_t>,
     integer<Q6K, int16_t>},
    {nullptr, nullptr, nullptr, integer<Q4, int8_t>, integer<Q4M, int8_t>, integer<Q4K, int8_t>, nullptr},
    quantise16,
    quantise8,
};

}  // namespace foredraft
#if defined(__clang__)
#pragma clang attribute pop
#else
#pragma GCC pop_options
#endif
namespace foredraft {
bool has_avx512() {
    return has_avx2() && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
           __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("avx512vnni");
}
}  // namespace foredraft
#else
namespace foredraft {
const Kernels kAvx512 = kPortable;
bool has_avx512() { return false; }
}  // namespace foredraft
#endif
