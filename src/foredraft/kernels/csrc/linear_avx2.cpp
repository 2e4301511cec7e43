// AVX2 + FMA kernels. The whole file is compiled for that target and only called after has_avx2().
#include "layout.h"

#if defined(__x86_64__) && defined(__GNUC__)
#if defined(__clang__)
#pragma clang attribute push(__attribute__((target("avx2,fma,f16c"))), apply_to = function)
#else
#pragma GCC push_options
#pragma GCC target("avx2,fma,f16c")
#endif
#include <immintrin.h>

#include <cmath>

#define FD_INLINE inline __attribute__((always_inline))
#define FD_HERE __attribute__((always_inline))
#define FD_UNROLL _Pragma("GCC unroll 32")
// Keeps a value in a register and its sum in written order: left alone, the compiler regroups integer sums across
// steps and spills the decoded weights.
#define FD_PIN(v) asm("" : "+x"(v))

namespace foredraft {
namespace {

#include "decoders_avx2.h"

// Streams far ahead: the hardware prefetcher stops at page borders and panels are read side by side. Near a panel's end
// what comes next is not its neighbour, which is being read too, but the first panel of the next tile: a tile that had
// to wait for its first kilobytes would lose as much time as it takes to multiply several rows.
constexpr size_t kAhead = 8192;
template <int Bytes>
FD_INLINE void prefetch(const uint8_t* p) {
    FD_UNROLL
    for (int at = 0; at < Bytes; at += 64) _mm_prefetch(reinterpret_cast<const char*>(p + at), _MM_HINT_T0);
}

// Adds `Steps` inputs to R x P running sums; `v(k, p)` is the weight vector of input k in panel p.
template <int Steps, int R, int P, class V>
FD_INLINE void multiply(const float* const (&x)[R], __m256 (&acc)[R][P], V v) {
    FD_UNROLL
    for (int k = 0; k < Steps; ++k) {
        __m256 w[P];
        FD_UNROLL
        for (int p = 0; p < P; ++p) w[p] = v(k, p);
        FD_UNROLL
        for (int r = 0; r < R; ++r) {
            const __m256 b = _mm256_broadcast_ss(x[r] + k);
            FD_UNROLL
            for (int p = 0; p < P; ++p) {
                __m256 next = _mm256_fmadd_ps(w[p], b, acc[r][p]);
                FD_PIN(next);
                acc[r][p] = next;
            }
        }
    }
}

// R rows by P panels. Each weight vector is decoded once and used for all R rows: in a register where that takes one
// instruction, through a buffer in the first-level cache where decoding needs registers of its own.
template <class D, int R, int P>
void float_tile(const uint8_t* w, size_t stride, const float* x, long ldx, long in, float* out) {
    constexpr int kBytes = kLayout[D::kFormat].bytes, kPart = kBytes / D::kSubs;
    constexpr bool kBuffered = D::kStep == 32 && P > 1 && R > 3;
    alignas(32) float buffer[kBuffered ? P * 32 * 8 : 8];
    __m256 acc[R][P];
    const float* row[R];
    FD_UNROLL
    for (int r = 0; r < R; ++r) {
        row[r] = x + r * ldx;
        FD_UNROLL
        for (int p = 0; p < P; ++p) acc[r][p] = _mm256_setzero_ps();
    }
    const long steps = in / D::kStep;
    const long last = steps - static_cast<long>(kAhead / kPart);
    for (long step = 0; step < steps; ++step) {
        const size_t beyond = step < last ? 0 : (P - 1) * stride;
        const int sub = static_cast<int>(step % D::kSubs);
        D d[P];
        FD_UNROLL
        for (int p = 0; p < P; ++p) {
            const uint8_t* group = w + p * stride + (step / D::kSubs) * kBytes;
            d[p].open(group, sub);
            prefetch<kPart>(group + sub * kPart + kAhead + beyond);
            if constexpr (kBuffered) {
                FD_UNROLL
                for (int k = 0; k < 32; ++k) _mm256_store_ps(buffer + 256 * p + 8 * k, d[p].get(k));
            }
        }
        if constexpr (kBuffered) {
            asm volatile("" ::: "memory");  // or the compiler decodes in registers after all, and spills the sums
            for (int k = 0; k < 32; k += 8) {
                const float* at[R];
                FD_UNROLL
                for (int r = 0; r < R; ++r) at[r] = row[r] + k;
                multiply<8, R, P>(at, acc, [&](int j, int p) FD_HERE { return _mm256_load_ps(buffer + 256 * p + 8 * (k + j)); });
            }
        } else {
            multiply<D::kStep, R, P>(row, acc, [&](int k, int p) FD_HERE { return d[p].get(k); });
        }
        FD_UNROLL
        for (int r = 0; r < R; ++r) row[r] += D::kStep;
    }
    if constexpr (kLayout[D::kFormat].padded) {
        for (int k = 0; k < in - steps * D::kStep; ++k) {
            FD_UNROLL
            for (int p = 0; p < P; ++p) {
                D d;
                d.open(w + p * stride + steps * kBytes, 0);
                const __m256 v = d.get(k);
                FD_UNROLL
                for (int r = 0; r < R; ++r) acc[r][p] = _mm256_fmadd_ps(v, _mm256_broadcast_ss(row[r] + k), acc[r][p]);
            }
        }
    }
    FD_UNROLL
    for (int r = 0; r < R; ++r) {
        FD_UNROLL
        for (int p = 0; p < P; ++p) _mm256_storeu_ps(out + 32 * r + 8 * p, acc[r][p]);
    }
}

// One float step a block: running sum += integer sum * (weight scale * input scale).
template <class D, int R, int P>
FD_INLINE void scale_sums(const D (&d)[P], int half, const __m256i (&sum)[R][P], const float* scales, __m256 (&acc)[R][P]) {
    FD_UNROLL
    for (int r = 0; r < R; ++r) {
        const __m256 scale = _mm256_broadcast_ss(scales + r);
        FD_UNROLL
        for (int p = 0; p < P; ++p) {
            const __m256 factor = _mm256_mul_ps(d[p].scale(half), scale);
            acc[r][p] = _mm256_fmadd_ps(_mm256_cvtepi32_ps(sum[r][p]), factor, acc[r][p]);
        }
    }
}

// Exact sums of inputs 16*half … of one block in int16 pairs, two products an instruction and lane.
template <class D, int R, int P>
FD_INLINE void block_sums16(const D (&d)[P], int half, const int16_t* q, __m256i (&sum)[R][P]) {
    constexpr int kPairs = D::kSplit ? 8 : 16;
    FD_UNROLL
    for (int s = half * kPairs; s < (half + 1) * kPairs; ++s) {
        __m256i v[P];
        FD_UNROLL
        for (int p = 0; p < P; ++p) v[p] = d[p].pair(s);
        FD_UNROLL
        for (int r = 0; r < R; ++r) {
            const __m256i x = splat(load<int32_t>(q + 32 * r + 2 * s));
            FD_UNROLL
            for (int p = 0; p < P; ++p) {
                __m256i next = _mm256_add_epi32(sum[r][p], _mm256_madd_epi16(v[p], x));
                FD_PIN(next);
                sum[r][p] = next;
            }
        }
    }
}

// The same for nibbles times bytes, four products an instruction and lane: 8 * 2 * 15 * 127 still fits into int16.
template <class D, int R, int P>
FD_INLINE void block_sums8(const D (&d)[P], const int8_t* q, __m256i (&sum)[R][P]) {
    __m256i narrow[R][P];
    FD_UNROLL
    for (int s = 0; s < 8; ++s) {
        __m256i v[P];
        FD_UNROLL
        for (int p = 0; p < P; ++p) v[p] = nibble_bytes(d[p].p, s);
        FD_UNROLL
        for (int r = 0; r < R; ++r) {
            const __m256i x = splat(load<int32_t>(q + 32 * r + 4 * s));
            FD_UNROLL
            for (int p = 0; p < P; ++p) {
                __m256i next = _mm256_maddubs_epi16(v[p], x);
                if (s > 0) next = _mm256_add_epi16(narrow[r][p], next);
                FD_PIN(next);
                narrow[r][p] = next;
            }
        }
    }
    FD_UNROLL
    for (int r = 0; r < R; ++r) {
        FD_UNROLL
        for (int p = 0; p < P; ++p) {
            const __m256i wide = _mm256_madd_epi16(narrow[r][p], _mm256_set1_epi16(1));
            sum[r][p] = D::kOffset == 0 ? wide : _mm256_add_epi32(wide, sum[r][p]);
        }
    }
}

// Integer activations (T is int16_t or int8_t): exact sums over 32 inputs (16 for Q6K), then one float step.
template <class D, class T, int R, int P>
void int_tile(const uint8_t* w, size_t stride, const Quantised& x, long row, float* out) {
    constexpr int kBytes = kLayout[D::kFormat].bytes, kPart = kBytes / D::kSubs, kHalves = D::kSplit ? 2 : 1;
    const long blocks = x.in / 32;
    __m256 acc[R][P];
    FD_UNROLL
    for (int r = 0; r < R; ++r) {
        FD_UNROLL
        for (int p = 0; p < P; ++p) acc[r][p] = _mm256_setzero_ps();
    }
    const long last = blocks - static_cast<long>(kAhead / kPart);
    for (long b = 0; b < blocks; ++b) {
        const size_t beyond = b < last ? 0 : (P - 1) * stride;
        const long first = b * x.n + row;
        const int sub = static_cast<int>(b % D::kSubs);
        D d[P];
        FD_UNROLL
        for (int p = 0; p < P; ++p) {
            const uint8_t* group = w + p * stride + (b / D::kSubs) * kBytes;
            d[p].open(group, sub);
            prefetch<kPart>(group + sub * kPart + kAhead + beyond);
        }
        FD_UNROLL
        for (int half = 0; half < kHalves; ++half) {
            __m256i sum[R][P];
            FD_UNROLL
            for (int r = 0; r < R; ++r) {
                const int32_t* s = x.sums + 2 * (first + r);
                const int taken = D::kOffset == 0 ? 0 : kHalves == 2 ? s[half] : s[0] + s[1];
                FD_UNROLL
                for (int p = 0; p < P; ++p) sum[r][p] = splat(-D::kOffset * taken);
            }
            const T* q = static_cast<const T*>(x.q) + 32 * first;
            if constexpr (sizeof(T) == 1) {
                block_sums8<D, R, P>(d, q, sum);
            } else {
                block_sums16<D, R, P>(d, half, q, sum);
            }
            scale_sums<D, R, P>(d, half, sum, x.scale + first, acc);
        }
        if constexpr (D::kAdd) {
            FD_UNROLL
            for (int r = 0; r < R; ++r) {
                const __m256 total = _mm256_broadcast_ss(x.scaled_sum + first + r);
                FD_UNROLL
                for (int p = 0; p < P; ++p) acc[r][p] = _mm256_fmadd_ps(d[p].add(), total, acc[r][p]);
            }
        }
    }
    FD_UNROLL
    for (int r = 0; r < R; ++r) {
        FD_UNROLL
        for (int p = 0; p < P; ++p) _mm256_storeu_ps(out + 32 * r + 8 * p, acc[r][p]);
    }
}

// Few rows leave registers for several panels at once, which hides the latency of the running sums.
constexpr int float_panels(int rows, bool quantised) {
    return rows == 1 || (rows == 2 && !quantised) ? 4 : rows <= 6 ? 2 : 1;
}
constexpr int int_panels(int rows) { return rows <= 2 ? 4 : rows <= 5 ? 2 : 1; }

template <class D, int R>
void float_rows(const Tile& t, float* out) {
    constexpr int P = float_panels(R, D::kStep == 32);
    int p = 0;
    for (; p + P <= t.count; p += P) float_tile<D, R, P>(t.weights + p * t.stride, t.stride, t.x, t.ldx, t.in, out + 8 * p);
    if constexpr (P > 1) {
        for (; p < t.count; ++p) float_tile<D, R, 1>(t.weights + p * t.stride, t.stride, t.x, t.ldx, t.in, out + 8 * p);
    }
}

template <class D, class T, int R>
void int_rows(const Tile& t, const Quantised& x, float* out) {
    constexpr int P = int_panels(R);
    int p = 0;
    for (; p + P <= t.count; p += P) int_tile<D, T, R, P>(t.weights + p * t.stride, t.stride, x, t.first_row, out + 8 * p);
    if constexpr (P > 1) {
        for (; p < t.count; ++p) int_tile<D, T, R, 1>(t.weights + p * t.stride, t.stride, x, t.first_row, out + 8 * p);
    }
}

template <class D>
void linear(const Tile& t, float* out) {
    switch (t.rows) {
        case 1: return float_rows<D, 1>(t, out);
        case 2: return float_rows<D, 2>(t, out);
        case 3: return float_rows<D, 3>(t, out);
        case 4: return float_rows<D, 4>(t, out);
        case 5: return float_rows<D, 5>(t, out);
        case 6: return float_rows<D, 6>(t, out);
        case 7: return float_rows<D, 7>(t, out);
        default: return float_rows<D, 8>(t, out);
    }
}

template <class D, class T>
void integer(const Tile& t, const Quantised& x, float* out) {
    switch (t.rows) {
        case 1: return int_rows<D, T, 1>(t, x, out);
        case 2: return int_rows<D, T, 2>(t, x, out);
        case 3: return int_rows<D, T, 3>(t, x, out);
        case 4: return int_rows<D, T, 4>(t, x, out);
        case 5: return int_rows<D, T, 5>(t, x, out);
        case 6: return int_rows<D, T, 6>(t, x, out);
        case 7: return int_rows<D, T, 7>(t, x, out);
        default: return int_rows<D, T, 8>(t, x, out);
    }
}

FD_INLINE int32_t sum_lanes(__m256i v) {
    __m128i s = _mm_add_epi32(_mm256_castsi256_si128(v), _mm256_extracti128_si256(v, 1));
    s = _mm_add_epi32(s, _mm_shuffle_epi32(s, 0x4E));
    s = _mm_add_epi32(s, _mm_shuffle_epi32(s, 0xB1));
    return _mm_cvtsi128_si32(s);
}

FD_INLINE uint32_t max_lanes(__m256i v) {
    __m128i s = _mm_max_epi32(_mm256_castsi256_si128(v), _mm256_extracti128_si256(v, 1));
    s = _mm_max_epi32(s, _mm_shuffle_epi32(s, 0x4E));
    s = _mm_max_epi32(s, _mm_shuffle_epi32(s, 0xB1));
    return static_cast<uint32_t>(_mm_cvtsi128_si32(s));
}

FD_INLINE void store_block(int16_t* q, const __m256i (&n)[4]) {
    for (int i = 0; i < 2; ++i) {
        const __m256i both = _mm256_permute4x64_epi64(_mm256_packs_epi32(n[2 * i], n[2 * i + 1]), 0xD8);
        _mm256_storeu_si256(reinterpret_cast<__m256i*>(q + 16 * i), both);
    }
}

FD_INLINE void store_block(int8_t* q, const __m256i (&n)[4]) {
    const __m256i order = _mm256_setr_epi32(0, 4, 1, 5, 2, 6, 3, 7);  // kByteOrder, and also what undoes the packing
    __m256i m[4];
    for (int i = 0; i < 4; ++i) m[i] = _mm256_permutevar8x32_epi32(n[i], order);
    const __m256i bytes = _mm256_packs_epi16(_mm256_packs_epi32(m[0], m[1]), _mm256_packs_epi32(m[2], m[3]));
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(q), _mm256_permutevar8x32_epi32(bytes, order));
}

template <class T>
void quantise(const float* x, long count, long step, void* target, float* scale, float* scaled_sum, int32_t* sums) {
    constexpr float kTop = sizeof(T) == 1 ? 127.0f : 32767.0f;
    const __m256i magnitude = splat(0x7FFFFFFF);
    T* q = static_cast<T*>(target);
    for (long at = 0; at < count * step; at += step, x += 32, q += 32 * step) {
        __m256 v[4];
        __m256i top = _mm256_setzero_si256();
        for (int i = 0; i < 4; ++i) {
            v[i] = _mm256_loadu_ps(x + 8 * i);
            top = _mm256_max_epi32(top, _mm256_and_si256(_mm256_castps_si256(v[i]), magnitude));
        }
        const uint32_t bits = max_lanes(top);
        const bool finite = bits < 0x7F800000u;
        const float largest = load<float>(&bits);
        const float inverse = finite && largest > 1e-30f ? kTop / largest : 0.0f;
        __m256i n[4];
        for (int i = 0; i < 4; ++i) {
            n[i] = _mm256_cvtps_epi32(_mm256_mul_ps(v[i], _mm256_set1_ps(inverse)));
            if (inverse == 0.0f) n[i] = _mm256_setzero_si256();
        }
        store_block(q, n);
        sums[2 * at] = sum_lanes(_mm256_add_epi32(n[0], n[1]));
        sums[2 * at + 1] = sum_lanes(_mm256_add_epi32(n[2], n[3]));
        scale[at] = finite ? largest / kTop : NAN;
        scaled_sum[at] = scale[at] * static_cast<float>(sums[2 * at] + sums[2 * at + 1]);
    }
}

}  // namespace

const Kernels kAvx2 = {
    {linear<F32>, linear<BF16>, linear<Q8>, linear<Q4>, linear<Q4M>, linear<Q4K>, linear<Q6K>},
    {nullptr, nullptr, integer<Q8, int16_t>, integer<Q4, int16_t>, integer<Q4M, int16_t>, integer<Q4K, int16_t>,
     integer<Q6K, int16_t>},
    {nullptr, nullptr, nullptr, integer<Q4, int8_t>, integer<Q4M, int8_t>, integer<Q4K, int8_t>, nullptr},
    quantise<int16_t>,
    quantise<int8_t>,
};

}  // namespace foredraft
#if defined(__clang__)
#pragma clang attribute pop
#else
#pragma GCC pop_options
#endif
namespace foredraft {
bool has_avx2() {
    return __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") && __builtin_cpu_supports("f16c");
}
}  // namespace foredraft
#else
namespace foredraft {
const Kernels kAvx2 = kPortable;
bool has_avx2() { return false; }
}  // namespace foredraft
#endif
