// AVX-512 kernels with byte dot products (VNNI). The whole file is compiled for that target and only called after
// has_avx512(). A vector holds the outputs of two neighbouring panels; panels that fill no tile are left to AVX2.
#include <cmath>

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

// The largest numbers of four vectors.
FD_INLINE __m128i largest(const __m512i (&v)[4]) {
    const auto pairs = [&](__m512i a, __m512i b) FD_HERE { return _mm512_max_epi32(_mm512_unpacklo_epi32(a, b), _mm512_unpackhi_epi32(a, b)); };
    const __m512i a = pairs(v[0], v[1]), b = pairs(v[2], v[3]);
    const __m512i four = _mm512_max_epi32(_mm512_unpacklo_epi64(a, b), _mm512_unpackhi_epi64(a, b));
    const __m256i two = _mm256_max_epi32(_mm512_castsi512_si256(four), _mm512_extracti64x4_epi64(four, 1));
    return _mm_max_epi32(_mm256_castsi256_si128(two), _mm256_extracti128_si256(two, 1));
}

// Sums of the low and of the high halves of four vectors.
FD_INLINE __m256i half_sums(const __m256i (&v)[4]) {
    return _mm256_hadd_epi32(_mm256_hadd_epi32(v[0], v[1]), _mm256_hadd_epi32(v[2], v[3]));
}

// Stores rounded inputs of a block; returns sums of theirs, those of the first 16 in the low half.
FD_INLINE __m256i store_block(int8_t* q, __m512i low, __m512i high) {
    const __m256i order = _mm256_broadcastsi128_si256(_mm_setr_epi8(0, 4, 1, 5, 2, 6, 3, 7, 8, 12, 9, 13, 10, 14, 11, 15));  // kByteOrder
    const __m256i plain = _mm256_inserti128_si256(_mm256_castsi128_si256(_mm512_cvtepi32_epi8(low)), _mm512_cvtepi32_epi8(high), 1);
    const __m256i bytes = _mm256_shuffle_epi8(plain, order);
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(q), bytes);
    return _mm256_dpbusd_epi32(_mm256_setzero_si256(), _mm256_set1_epi8(1), bytes);
}
FD_INLINE __m256i store_block(int16_t* q, __m512i low, __m512i high) {
    const __m256i first = _mm512_cvtepi32_epi16(low), last = _mm512_cvtepi32_epi16(high), one = _mm256_set1_epi16(1);
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(q), first);
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(q + 16), last);
    const __m256i a = _mm256_madd_epi16(first, one), b = _mm256_madd_epi16(last, one);
    return _mm256_add_epi32(_mm256_permute2x128_si256(a, b, 0x20), _mm256_permute2x128_si256(a, b, 0x31));
}

// As linear_avx2.cpp does it, four blocks at a time: what is found across a vector is found for all of them together.
template <class T>
void quantise(const float* x, long count, long step, void* target, float* scale, float* scaled_sum, int32_t* sums) {
    const __m128 top = _mm_set1_ps(sizeof(T) == 1 ? 127.0f : 32767.0f);
    const __m512i magnitude = splat(0x7FFFFFFF);
    T* q = static_cast<T*>(target);
    for (long done = 0; done < count; done += 4, x += 128) {
        const int blocks = static_cast<int>(count - done < 4 ? count - done : 4);
        __m512 v[4][2];
        __m512i sizes[4];
        for (int b = 0; b < 4; ++b) {
            const float* from = x + (b < blocks ? 32 * b : 0);
            v[b][0] = _mm512_loadu_ps(from);
            v[b][1] = _mm512_loadu_ps(from + 16);
            sizes[b] = _mm512_max_epi32(_mm512_and_si512(_mm512_castps_si512(v[b][0]), magnitude),
                                        _mm512_and_si512(_mm512_castps_si512(v[b][1]), magnitude));
        }
        const __m128i bits = largest(sizes);
        const __m128 size = _mm_castsi128_ps(bits);
        const __mmask8 finite = _mm_cmplt_epi32_mask(bits, _mm_set1_epi32(0x7F800000));
        const __mmask8 some = finite & _mm_cmp_ps_mask(size, _mm_set1_ps(1e-30f), _CMP_GT_OQ);
        const __m128 inverse = _mm_maskz_div_ps(some, top, size);
        const __m128 scales = _mm_mask_div_ps(_mm_set1_ps(NAN), finite, size, top);
        __m256i parts[4];
        for (int b = 0; b < 4; ++b) {
            const __mmask16 any = (some >> b) & 1 ? 0xFFFF : 0;
            const __m512 by = _mm512_broadcastss_ps(_mm_castsi128_ps(_mm_shuffle_epi8(_mm_castps_si128(inverse), _mm_set1_epi32(0x03020100 + 0x04040404 * b))));
            const __m512i low = _mm512_maskz_cvtps_epi32(any, _mm512_mul_ps(v[b][0], by));
            const __m512i high = _mm512_maskz_cvtps_epi32(any, _mm512_mul_ps(v[b][1], by));
            T spare[32];
            parts[b] = store_block(b < blocks ? q + 32 * step * (done + b) : spare, low, high);
        }
        const __m256i both = half_sums(parts);
        const __m128i low = _mm256_castsi256_si128(both), high = _mm256_extracti128_si256(both, 1);
        alignas(16) float of[4], scaled[4];
        alignas(16) int32_t first[4], last[4];
        _mm_store_ps(of, scales);
        _mm_store_ps(scaled, _mm_mul_ps(scales, _mm_cvtepi32_ps(_mm_add_epi32(low, high))));
        _mm_store_si128(reinterpret_cast<__m128i*>(first), low);
        _mm_store_si128(reinterpret_cast<__m128i*>(last), high);
        for (int b = 0; b < blocks; ++b) {
            const long at = (done + b) * step;
            scale[at] = of[b], scaled_sum[at] = scaled[b], sums[2 * at] = first[b], sums[2 * at + 1] = last[b];
        }
    }
}

}  // namespace

const Kernels kAvx512 = {
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
