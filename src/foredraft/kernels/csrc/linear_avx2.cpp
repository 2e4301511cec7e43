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
#define FD_UNROLL _Pragma("GCC unroll 32")
// Keeps a value in a register and its sum in written order: left alone, the compiler regroups integer sums across
// steps and spills the decoded weights.
#define FD_PIN(v) asm("" : "+x"(v))

namespace foredraft {
namespace {

FD_INLINE __m256i words(const uint8_t* p) { return _mm256_loadu_si256(reinterpret_cast<const __m256i*>(p)); }
FD_INLINE __m256 floats(const uint8_t* p) { return _mm256_loadu_ps(reinterpret_cast<const float*>(p)); }
FD_INLINE __m256 halves(const uint8_t* p) { return _mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p))); }
FD_INLINE __m256 unsigned_bytes(const uint8_t* p) {
    return _mm256_cvtepi32_ps(_mm256_cvtepu8_epi32(_mm_loadl_epi64(reinterpret_cast<const __m128i*>(p))));
}
FD_INLINE __m256 signed_bytes(const uint8_t* p) {
    return _mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(_mm_loadl_epi64(reinterpret_cast<const __m128i*>(p))));
}
FD_INLINE __m256i splat(int v) { return _mm256_set1_epi32(v); }
FD_INLINE __m256 nibble(const uint8_t* w, int k) {
    const __m256i v = _mm256_srli_epi32(words(w + 32 * nibble_word(k)), nibble_shift(k));
    return _mm256_cvtepi32_ps(_mm256_and_si256(v, splat(15)));
}
FD_INLINE __m256i nibble_pair(const uint8_t* w, int s) {
    return _mm256_and_si256(_mm256_srli_epi32(words(w + 32 * (s / 4)), 4 * (s % 4)), splat(0x000F000F));
}

// A decoder reads one step of a panel: `kStep` inputs, `kSubs` steps a group. get(k) gives input k of the step as
// floats (one a lane); pair(s) gives inputs 2s and 2s+1 as int16, without the offset that kOffset names.
struct F32 {
    static constexpr int kFormat = kF32, kStep = 8, kSubs = 1;
    const uint8_t* p;
    FD_INLINE void open(const uint8_t* group, int) { p = group; }
    FD_INLINE __m256 get(int k) const { return floats(p + 32 * k); }
};

struct BF16 {
    static constexpr int kFormat = kBF16, kStep = 16, kSubs = 1;
    const uint8_t* p;
    FD_INLINE void open(const uint8_t* group, int) { p = group; }
    FD_INLINE __m256 get(int k) const {
        const __m256i v = words(p + 32 * (k / 2));
        return _mm256_castsi256_ps(k & 1 ? _mm256_and_si256(v, splat(static_cast<int>(0xFFFF0000u))) : _mm256_slli_epi32(v, 16));
    }
};

struct Q8 {
    static constexpr int kFormat = kQ8, kStep = 32, kSubs = 1, kOffset = 0;
    static constexpr bool kAdd = false, kSplit = false;
    const uint8_t* p;
    __m256 d;
    FD_INLINE void open(const uint8_t* group, int) {
        p = group + 16;
        d = halves(group);
    }
    FD_INLINE __m256 get(int k) const {
        const __m256i v = words(p + 32 * (k / 4));
        const __m256i q = _mm256_srai_epi32(_mm256_slli_epi32(v, 24 - 8 * (q8_byte(k) % 4)), 24);
        return _mm256_mul_ps(d, _mm256_cvtepi32_ps(q));
    }
    FD_INLINE __m256i pair(int s) const {
        const __m256i v = words(p + 32 * (s / 2));
        return _mm256_srai_epi16(s & 1 ? v : _mm256_slli_epi16(v, 8), 8);
    }
    FD_INLINE __m256 scale(int) const { return d; }
    FD_INLINE __m256 add() const { return _mm256_setzero_ps(); }
};

struct Q4 {
    static constexpr int kFormat = kQ4, kStep = 32, kSubs = 1, kOffset = 8;
    static constexpr bool kAdd = false, kSplit = false;
    const uint8_t* p;
    __m256 d, zero;
    FD_INLINE void open(const uint8_t* group, int) {
        p = group + 16;
        d = halves(group);
        zero = _mm256_mul_ps(d, _mm256_set1_ps(-8.0f));
    }
    FD_INLINE __m256 get(int k) const { return _mm256_fmadd_ps(d, nibble(p, k), zero); }
    FD_INLINE __m256i pair(int s) const { return nibble_pair(p, s); }
    FD_INLINE __m256 scale(int) const { return d; }
    FD_INLINE __m256 add() const { return _mm256_setzero_ps(); }
};

struct Q4M {
    static constexpr int kFormat = kQ4M, kStep = 32, kSubs = 1, kOffset = 0;
    static constexpr bool kAdd = true, kSplit = false;
    const uint8_t* p;
    __m256 d, m;
    FD_INLINE void open(const uint8_t* group, int) {
        p = group + 32;
        d = halves(group);
        m = halves(group + 16);
    }
    FD_INLINE __m256 get(int k) const { return _mm256_fmadd_ps(d, nibble(p, k), m); }
    FD_INLINE __m256i pair(int s) const { return nibble_pair(p, s); }
    FD_INLINE __m256 scale(int) const { return d; }
    FD_INLINE __m256 add() const { return m; }
};

struct Q4K {
    static constexpr int kFormat = kQ4K, kStep = 32, kSubs = 8, kOffset = 0;
    static constexpr bool kAdd = true, kSplit = false;
    const uint8_t* p;
    __m256 d, m;
    FD_INLINE void open(const uint8_t* group, int sub) {
        const uint8_t* part = group + 32 + 144 * sub;
        p = part + 16;
        d = _mm256_mul_ps(halves(group), unsigned_bytes(part));
        m = _mm256_xor_ps(_mm256_mul_ps(halves(group + 16), unsigned_bytes(part + 8)), _mm256_set1_ps(-0.0f));
    }
    FD_INLINE __m256 get(int k) const { return _mm256_fmadd_ps(d, nibble(p, k), m); }
    FD_INLINE __m256i pair(int s) const { return nibble_pair(p, s); }
    FD_INLINE __m256 scale(int) const { return d; }
    FD_INLINE __m256 add() const { return m; }
};

struct Q6K {
    static constexpr int kFormat = kQ6K, kStep = 32, kSubs = 8, kOffset = 32;
    static constexpr bool kAdd = false, kSplit = true;
    const uint8_t* p;
    __m256 d0, d1;
    FD_INLINE void open(const uint8_t* group, int sub) {
        const uint8_t* part = group + 16 + 208 * sub;
        p = part + 16;
        d0 = _mm256_mul_ps(halves(group), signed_bytes(part));
        d1 = _mm256_mul_ps(halves(group), signed_bytes(part + 8));
    }
    FD_INLINE __m256 get(int k) const {
        const __m256i low = _mm256_and_si256(_mm256_srli_epi32(words(p + 32 * nibble_word(k)), nibble_shift(k)), splat(15));
        const __m256i crumbs = words(p + 128 + 32 * crumb_word(k));
        const __m256i high = _mm256_and_si256(_mm256_srli_epi32(crumbs, crumb_shift(k)), splat(3));
        const __m256i q = _mm256_sub_epi32(_mm256_or_si256(low, _mm256_slli_epi32(high, 4)), splat(32));
        return _mm256_mul_ps(k < 16 ? d0 : d1, _mm256_cvtepi32_ps(q));
    }
    FD_INLINE __m256i pair(int s) const {
        const __m256i crumbs = _mm256_srli_epi32(words(p + 128 + 32 * (s / 8)), 2 * (s % 8));
        return _mm256_or_si256(nibble_pair(p, s), _mm256_slli_epi32(_mm256_and_si256(crumbs, splat(0x00030003)), 4));
    }
    FD_INLINE __m256 scale(int half) const { return half ? d1 : d0; }
    FD_INLINE __m256 add() const { return _mm256_setzero_ps(); }
};

// Streams far ahead: the hardware prefetcher stops at page borders and panels are read side by side.
constexpr int kAhead = 1024;
template <int Bytes>
FD_INLINE void prefetch(const uint8_t* p) {
    FD_UNROLL
    for (int at = 0; at < Bytes; at += 64) _mm_prefetch(reinterpret_cast<const char*>(p + kAhead + at), _MM_HINT_T0);
}

// R rows by P panels. Each weight vector is decoded once and used for all R rows.
template <class D, int R, int P>
void float_tile(const uint8_t* w, size_t stride, const float* x, long ldx, long in, float* out) {
    constexpr int kBytes = kLayout[D::kFormat].bytes;
    __m256 acc[R][P];
    FD_UNROLL
    for (int r = 0; r < R; ++r) {
        FD_UNROLL
        for (int p = 0; p < P; ++p) acc[r][p] = _mm256_setzero_ps();
    }
    const long steps = in / D::kStep;
    for (long step = 0; step < steps; ++step, x += D::kStep) {
        D d[P];
        FD_UNROLL
        for (int p = 0; p < P; ++p) {
            const uint8_t* group = w + p * stride + (step / D::kSubs) * kBytes;
            d[p].open(group, static_cast<int>(step % D::kSubs));
            prefetch<kBytes / D::kSubs>(group + (step % D::kSubs) * (kBytes / D::kSubs));
        }
        FD_UNROLL
        for (int k = 0; k < D::kStep; ++k) {
            __m256 v[P];
            FD_UNROLL
            for (int p = 0; p < P; ++p) v[p] = d[p].get(k);
            FD_UNROLL
            for (int r = 0; r < R; ++r) {
                const __m256 b = _mm256_broadcast_ss(x + r * ldx + k);
                FD_UNROLL
                for (int p = 0; p < P; ++p) acc[r][p] = _mm256_fmadd_ps(v[p], b, acc[r][p]);
            }
        }
    }
    if constexpr (kLayout[D::kFormat].padded) {
        for (int k = 0; k < in - steps * D::kStep; ++k) {
            FD_UNROLL
            for (int p = 0; p < P; ++p) {
                D d;
                d.open(w + p * stride + steps * kBytes, 0);
                const __m256 v = d.get(k);
                FD_UNROLL
                for (int r = 0; r < R; ++r) acc[r][p] = _mm256_fmadd_ps(v, _mm256_broadcast_ss(x + r * ldx + k), acc[r][p]);
            }
        }
    }
    FD_UNROLL
    for (int r = 0; r < R; ++r) {
        FD_UNROLL
        for (int p = 0; p < P; ++p) _mm256_storeu_ps(out + 32 * r + 8 * p, acc[r][p]);
    }
}

// The same with int16 activations: exact integer sums over 32 inputs (16 for Q6K), then one float step.
template <class D, int R, int P>
void int_tile(const uint8_t* w, size_t stride, const Quantised& x, long row, float* out) {
    constexpr int kBytes = kLayout[D::kFormat].bytes, kHalves = D::kSplit ? 2 : 1, kPairs = 16 / kHalves;
    const long blocks = x.in / 32;
    __m256 acc[R][P];
    FD_UNROLL
    for (int r = 0; r < R; ++r) {
        FD_UNROLL
        for (int p = 0; p < P; ++p) acc[r][p] = _mm256_setzero_ps();
    }
    for (long b = 0; b < blocks; ++b) {
        D d[P];
        FD_UNROLL
        for (int p = 0; p < P; ++p) {
            const uint8_t* group = w + p * stride + (b / D::kSubs) * kBytes;
            d[p].open(group, static_cast<int>(b % D::kSubs));
            prefetch<kBytes / D::kSubs>(group + (b % D::kSubs) * (kBytes / D::kSubs));
        }
        const long first = row * blocks + b;
        FD_UNROLL
        for (int half = 0; half < kHalves; ++half) {
            __m256i sum[R][P];
            FD_UNROLL
            for (int r = 0; r < R; ++r) {
                const int32_t* s = x.sums + 2 * (first + r * blocks);
                const int taken = D::kOffset == 0 ? 0 : kHalves == 2 ? s[half] : s[0] + s[1];
                FD_UNROLL
                for (int p = 0; p < P; ++p) sum[r][p] = splat(-D::kOffset * taken);
            }
            FD_UNROLL
            for (int s = half * kPairs; s < (half + 1) * kPairs; ++s) {
                __m256i v[P];
                FD_UNROLL
                for (int p = 0; p < P; ++p) v[p] = d[p].pair(s);
                FD_UNROLL
                for (int r = 0; r < R; ++r) {
                    const __m256i q = splat(load<int32_t>(x.q + 32 * (first + r * blocks) + 2 * s));
                    FD_UNROLL
                    for (int p = 0; p < P; ++p) {
                        __m256i next = _mm256_add_epi32(sum[r][p], _mm256_madd_epi16(v[p], q));
                        FD_PIN(next);
                        sum[r][p] = next;
                    }
                }
            }
            FD_UNROLL
            for (int r = 0; r < R; ++r) {
                const __m256 scale = _mm256_broadcast_ss(x.scale + first + r * blocks);
                FD_UNROLL
                for (int p = 0; p < P; ++p) {
                    const __m256 factor = _mm256_mul_ps(d[p].scale(half), scale);
                    acc[r][p] = _mm256_fmadd_ps(_mm256_cvtepi32_ps(sum[r][p]), factor, acc[r][p]);
                }
            }
        }
        if constexpr (D::kAdd) {
            FD_UNROLL
            for (int r = 0; r < R; ++r) {
                const __m256 total = _mm256_broadcast_ss(x.scaled_sum + first + r * blocks);
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
constexpr int float_panels(int rows) { return rows <= 2 ? 4 : rows <= 4 ? 2 : 1; }
constexpr int int_panels(int rows) { return rows <= 4 ? 2 : 1; }

template <class D, int R>
void float_rows(const Tile& t, float* out) {
    constexpr int P = float_panels(R);
    int p = 0;
    for (; p + P <= t.count; p += P) float_tile<D, R, P>(t.weights + p * t.stride, t.stride, t.x, t.ldx, t.in, out + 8 * p);
    if constexpr (P > 1) {
        for (; p < t.count; ++p) float_tile<D, R, 1>(t.weights + p * t.stride, t.stride, t.x, t.ldx, t.in, out + 8 * p);
    }
}

template <class D, int R>
void int_rows(const Tile& t, const Quantised& x, float* out) {
    constexpr int P = int_panels(R);
    int p = 0;
    for (; p + P <= t.count; p += P) int_tile<D, R, P>(t.weights + p * t.stride, t.stride, x, t.first_row, out + 8 * p);
    if constexpr (P > 1) {
        for (; p < t.count; ++p) int_tile<D, R, 1>(t.weights + p * t.stride, t.stride, x, t.first_row, out + 8 * p);
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

template <class D>
void integer(const Tile& t, const Quantised& x, float* out) {
    switch (t.rows) {
        case 1: return int_rows<D, 1>(t, x, out);
        case 2: return int_rows<D, 2>(t, x, out);
        case 3: return int_rows<D, 3>(t, x, out);
        case 4: return int_rows<D, 4>(t, x, out);
        case 5: return int_rows<D, 5>(t, x, out);
        case 6: return int_rows<D, 6>(t, x, out);
        case 7: return int_rows<D, 7>(t, x, out);
        default: return int_rows<D, 8>(t, x, out);
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

void quantise(const float* x, long count, int16_t* q, float* scale, float* scaled_sum, int32_t* sums) {
    const __m256i magnitude = splat(0x7FFFFFFF);
    for (long b = 0; b < count; ++b, x += 32, q += 32) {
        __m256 v[4];
        __m256i top = _mm256_setzero_si256();
        for (int i = 0; i < 4; ++i) {
            v[i] = _mm256_loadu_ps(x + 8 * i);
            top = _mm256_max_epi32(top, _mm256_and_si256(_mm256_castps_si256(v[i]), magnitude));
        }
        const uint32_t bits = max_lanes(top);
        const bool finite = bits < 0x7F800000u;
        const float largest = load<float>(&bits);
        const float inverse = finite && largest > 1e-30f ? 32767.0f / largest : 0.0f;
        __m256i n[4];
        for (int i = 0; i < 4; ++i) {
            n[i] = _mm256_cvtps_epi32(_mm256_mul_ps(v[i], _mm256_set1_ps(inverse)));
            if (inverse == 0.0f) n[i] = _mm256_setzero_si256();
        }
        for (int i = 0; i < 2; ++i) {
            const __m256i both = _mm256_permute4x64_epi64(_mm256_packs_epi32(n[2 * i], n[2 * i + 1]), 0xD8);
            _mm256_storeu_si256(reinterpret_cast<__m256i*>(q + 16 * i), both);
            sums[2 * b + i] = sum_lanes(_mm256_add_epi32(n[2 * i], n[2 * i + 1]));
        }
        scale[b] = finite ? largest / 32767.0f : NAN;
        scaled_sum[b] = scale[b] * static_cast<float>(sums[2 * b] + sums[2 * b + 1]);
    }
}

}  // namespace

const Kernels kAvx2 = {
    {linear<F32>, linear<BF16>, linear<Q8>, linear<Q4>, linear<Q4M>, linear<Q4K>, linear<Q6K>},
    {nullptr, nullptr, integer<Q8>, integer<Q4>, integer<Q4M>, integer<Q4K>, integer<Q6K>},
    quantise,
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
