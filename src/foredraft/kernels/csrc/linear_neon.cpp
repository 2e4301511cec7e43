// NEON kernels for 64-bit ARM with byte dot products (Armv8.2 "dotprod": server and desktop cores since about 2018).
// The same sums as the portable kernels in the same order, so the same bits. Only called after has_neon().
#include "layout.h"

#if defined(__aarch64__) && defined(__GNUC__) && defined(__linux__)
#if defined(__clang__)
#pragma clang attribute push(__attribute__((target("dotprod"))), apply_to = function)
#else
#pragma GCC push_options
#pragma GCC target("arch=armv8.2-a+dotprod")
#endif
#include <arm_neon.h>
#include <sys/auxv.h>

#define FD_INLINE inline __attribute__((always_inline))
#define FD_HERE __attribute__((always_inline))
#define FD_UNROLL _Pragma("GCC unroll 32")

namespace foredraft {
namespace {

// A panel's eight lanes.
struct F8 {
    float32x4_t v[2];
};
struct I8 {
    int32x4_t v[2];
};

FD_INLINE uint32x4_t bits(const uint8_t* p) { return vreinterpretq_u32_u8(vld1q_u8(p)); }
template <int N>
FD_INLINE uint32x4_t right(uint32x4_t v) {
    if constexpr (N == 0) return v;
    else return vshrq_n_u32(v, N);
}
FD_INLINE F8 halves(const uint8_t* p) {
    const float16x8_t h = vreinterpretq_f16_u8(vld1q_u8(p));
    return {{vcvt_f32_f16(vget_low_f16(h)), vcvt_f32_f16(vget_high_f16(h))}};
}
FD_INLINE F8 unsigned_bytes(const uint8_t* p) {
    const uint16x8_t w = vmovl_u8(vld1_u8(p));
    return {{vcvtq_f32_u32(vmovl_u16(vget_low_u16(w))), vcvtq_f32_u32(vmovl_u16(vget_high_u16(w)))}};
}
FD_INLINE F8 signed_bytes(const uint8_t* p) {
    const int16x8_t w = vmovl_s8(vreinterpret_s8_u8(vld1_u8(p)));
    return {{vcvtq_f32_s32(vmovl_s16(vget_low_s16(w))), vcvtq_f32_s32(vmovl_s16(vget_high_s16(w)))}};
}
FD_INLINE F8 times(F8 a, F8 b) { return {{vmulq_f32(a.v[0], b.v[0]), vmulq_f32(a.v[1], b.v[1])}}; }
FD_INLINE F8 minus(F8 a) { return {{vnegq_f32(a.v[0]), vnegq_f32(a.v[1])}}; }
FD_INLINE F8 nothing() { return {{vdupq_n_f32(0), vdupq_n_f32(0)}}; }

// A decoder reads one step of a panel: `kStep` inputs, `kSubs` steps a group. get<K>(from) gives input from + K as floats,
// where from is a multiple of kTurn and K below it; pair<S>(from, i) gives inputs 2(from + S) and the next as int16 of half
// a panel, from a multiple of kPairs; quad<S>(from, i) four inputs in kByteOrder as bytes, from a multiple of kQuads. Shifts
// are constants that way. Integers come without the offset that kOffset names.
struct F32 {
    static constexpr int kFormat = kF32, kStep = 8, kTurn = 8, kSubs = 1;
    const uint8_t* p;
    FD_INLINE void open(const uint8_t* group, int) { p = group; }
    template <int K>
    FD_INLINE F8 get(int from) const {
        return {{vreinterpretq_f32_u32(bits(p + 32 * (from + K))), vreinterpretq_f32_u32(bits(p + 32 * (from + K) + 16))}};
    }
};

struct BF16 {
    static constexpr int kFormat = kBF16, kStep = 16, kTurn = 16, kSubs = 1;
    const uint8_t* p;
    FD_INLINE void open(const uint8_t* group, int) { p = group; }
    template <int K>
    FD_INLINE F8 get(int from) const {
        F8 y;
        for (int i = 0; i < 2; ++i) {
            const uint32x4_t v = bits(p + 32 * (from / 2 + K / 2) + 16 * i);
            y.v[i] = vreinterpretq_f32_u32(K & 1 ? vandq_u32(v, vdupq_n_u32(0xFFFF0000u)) : vshlq_n_u32(v, 16));
        }
        return y;
    }
};

struct Q8 {
    static constexpr int kFormat = kQ8, kStep = 32, kTurn = 8, kPairs = 2, kSubs = 1, kOffset = 0;
    static constexpr bool kAdd = false, kSplit = false;
    const uint8_t* p;
    F8 d;
    FD_INLINE void open(const uint8_t* group, int) {
        p = group + 16;
        d = halves(group);
    }
    template <int K>
    FD_INLINE F8 get(int from) const {
        constexpr int left = 24 - 8 * (K % 4 == 1 ? 2 : K % 4 == 2 ? 1 : K % 4);  // as q8_byte says
        F8 y;
        for (int i = 0; i < 2; ++i) {
            const int32x4_t v = vreinterpretq_s32_u32(bits(p + 32 * (from / 4 + K / 4) + 16 * i));
            y.v[i] = vmulq_f32(d.v[i], vcvtq_f32_s32(vshrq_n_s32(vshlq_n_s32(v, left), 24)));
        }
        return y;
    }
    template <int S>
    FD_INLINE int16x8_t pair(int from, int i) const {
        const int16x8_t v = vreinterpretq_s16_u32(bits(p + 32 * (from / 2 + S / 2) + 16 * i));
        return vshrq_n_s16(S & 1 ? v : vshlq_n_s16(v, 8), 8);
    }
    FD_INLINE F8 scale(int) const { return d; }
    FD_INLINE F8 add() const { return nothing(); }
};

struct Nibbles {
    static constexpr int kStep = 32, kTurn = 8, kPairs = 4, kQuads = 2;
    static constexpr bool kSplit = false;
    const uint8_t* p;
    F8 d, m;
    template <int K>
    FD_INLINE F8 get(int from) const {
        constexpr int shift = 4 * ((K % 8) / 2) + 16 * (K & 1);  // as nibble_shift says
        F8 y;
        for (int i = 0; i < 2; ++i) {
            const uint32x4_t q = vandq_u32(right<shift>(bits(p + 32 * (from / 8 + K / 8) + 16 * i)), vdupq_n_u32(15));
            y.v[i] = vfmaq_f32(m.v[i], d.v[i], vcvtq_f32_u32(q));
        }
        return y;
    }
    template <int S>
    FD_INLINE int16x8_t pair(int from, int i) const {
        const uint32x4_t v = right<4 * (S % 4)>(bits(p + 32 * (from / 4 + S / 4) + 16 * i));
        return vreinterpretq_s16_u32(vandq_u32(v, vdupq_n_u32(0x000F000Fu)));
    }
    template <int S>
    FD_INLINE int8x16_t quad(int from, int i) const {
        const uint32x4_t v = right<4 * (S % 2)>(bits(p + 32 * (from / 2 + S / 2) + 16 * i));
        return vreinterpretq_s8_u32(vandq_u32(v, vdupq_n_u32(0x0F0F0F0Fu)));
    }
    FD_INLINE F8 scale(int) const { return d; }
    FD_INLINE F8 add() const { return m; }
};

struct Q4 : Nibbles {
    static constexpr int kFormat = kQ4, kSubs = 1, kOffset = 8;
    static constexpr bool kAdd = false;
    FD_INLINE void open(const uint8_t* group, int) {
        p = group + 16;
        d = halves(group);
        m = {{vmulq_n_f32(d.v[0], -8.0f), vmulq_n_f32(d.v[1], -8.0f)}};
    }
};

struct Q4M : Nibbles {
    static constexpr int kFormat = kQ4M, kSubs = 1, kOffset = 0;
    static constexpr bool kAdd = true;
    FD_INLINE void open(const uint8_t* group, int) {
        p = group + 32;
        d = halves(group);
        m = halves(group + 16);
    }
};

struct Q4K : Nibbles {
    static constexpr int kFormat = kQ4K, kSubs = 8, kOffset = 0;
    static constexpr bool kAdd = true;
    FD_INLINE void open(const uint8_t* group, int sub) {
        const uint8_t* part = group + 32 + 144 * sub;
        p = part + 16;
        d = times(halves(group), unsigned_bytes(part));
        m = minus(times(halves(group + 16), unsigned_bytes(part + 8)));
    }
};

struct Q6K {
    static constexpr int kFormat = kQ6K, kStep = 32, kTurn = 16, kPairs = 8, kSubs = 8, kOffset = 32;
    static constexpr bool kAdd = false, kSplit = true;
    const uint8_t* p;
    F8 d0, d1;
    FD_INLINE void open(const uint8_t* group, int sub) {
        const uint8_t* part = group + 16 + 208 * sub;
        p = part + 16;
        d0 = times(halves(group), signed_bytes(part));
        d1 = times(halves(group), signed_bytes(part + 8));
    }
    template <int K>
    FD_INLINE F8 get(int from) const {
        constexpr int low = 4 * ((K % 8) / 2) + 16 * (K & 1), high = 2 * ((K % 16) / 2) + 16 * (K & 1);
        F8 y;
        for (int i = 0; i < 2; ++i) {
            const uint32x4_t a = vandq_u32(right<low>(bits(p + 32 * (from / 8 + K / 8) + 16 * i)), vdupq_n_u32(15));
            const uint32x4_t b = vandq_u32(right<high>(bits(p + 128 + 32 * (from / 16) + 16 * i)), vdupq_n_u32(3));
            const int32x4_t q = vsubq_s32(vreinterpretq_s32_u32(vorrq_u32(a, vshlq_n_u32(b, 4))), vdupq_n_s32(32));
            y.v[i] = vmulq_f32((from == 0 ? d0 : d1).v[i], vcvtq_f32_s32(q));
        }
        return y;
    }
    template <int S>
    FD_INLINE int16x8_t pair(int from, int i) const {
        const uint32x4_t low = vandq_u32(right<4 * (S % 4)>(bits(p + 32 * (from / 4 + S / 4) + 16 * i)), vdupq_n_u32(0x000F000Fu));
        const uint32x4_t high = vandq_u32(right<2 * (S % 8)>(bits(p + 128 + 32 * (from / 8) + 16 * i)), vdupq_n_u32(0x00030003u));
        return vreinterpretq_s16_u32(vorrq_u32(low, vshlq_n_u32(high, 4)));
    }
    FD_INLINE F8 scale(int half) const { return half ? d1 : d0; }
    FD_INLINE F8 add() const { return nothing(); }
};

// Calls f with Begin, Begin + 1, … as constants, for shifts must be known when compiling.
template <int N>
struct Number {
    static constexpr int value = N;
};
template <int Begin, int End, class F>
FD_INLINE void each(F f) {
    if constexpr (Begin < End) {
        f(Number<Begin>{});
        each<Begin + 1, End>(f);
    }
}

template <int R, int P>
FD_INLINE void clear(F8 (&acc)[R][P]) {
    FD_UNROLL
    for (int r = 0; r < R; ++r) {
        FD_UNROLL
        for (int p = 0; p < P; ++p) acc[r][p] = nothing();
    }
}

template <int R, int P>
FD_INLINE void store(const F8 (&acc)[R][P], float* out) {
    FD_UNROLL
    for (int r = 0; r < R; ++r) {
        FD_UNROLL
        for (int p = 0; p < P; ++p) {
            vst1q_f32(out + 32 * r + 8 * p, acc[r][p].v[0]);
            vst1q_f32(out + 32 * r + 8 * p + 4, acc[r][p].v[1]);
        }
    }
}

template <int R, int P>
FD_INLINE void multiply(const F8 (&w)[P], const float* x, long ldx, F8 (&acc)[R][P]) {
    FD_UNROLL
    for (int r = 0; r < R; ++r) {
        FD_UNROLL
        for (int p = 0; p < P; ++p) {
            for (int i = 0; i < 2; ++i) acc[r][p].v[i] = vfmaq_n_f32(acc[r][p].v[i], w[p].v[i], x[r * ldx]);
        }
    }
}

template <class D, int R, int P>
void float_tile(const uint8_t* w, size_t stride, const float* x, long ldx, long in, float* out) {
    constexpr int kBytes = kLayout[D::kFormat].bytes;
    F8 acc[R][P];
    clear(acc);
    D d[P];
    const auto add = [&](auto k, int from, const float* at) FD_HERE {
        F8 v[P];
        FD_UNROLL
        for (int p = 0; p < P; ++p) v[p] = d[p].template get<decltype(k)::value>(from);
        multiply<R, P>(v, at + decltype(k)::value, ldx, acc);
    };
    const long steps = in / D::kStep;
    for (long step = 0; step < steps; ++step, x += D::kStep) {
        FD_UNROLL
        for (int p = 0; p < P; ++p) d[p].open(w + p * stride + (step / D::kSubs) * kBytes, static_cast<int>(step % D::kSubs));
        for (int from = 0; from < D::kStep; from += D::kTurn) each<0, D::kTurn>([&](auto k) FD_HERE { add(k, from, x + from); });
    }
    if constexpr (kLayout[D::kFormat].padded) {
        const int left = static_cast<int>(in - steps * D::kStep);
        FD_UNROLL
        for (int p = 0; p < P; ++p) d[p].p = w + p * stride + steps * kBytes;
        each<0, D::kStep>([&](auto k) FD_HERE {
            if (decltype(k)::value < left) add(k, 0, x);
        });
    }
    store<R, P>(acc, out);
}

template <class D, class T>
constexpr int turn_of() {
    if constexpr (sizeof(T) == 1) return D::kQuads;
    else return D::kPairs;
}

template <class D, class T, int R, int P>
void int_tile(const uint8_t* w, size_t stride, const Quantised& x, long row, float* out) {
    constexpr int kBytes = kLayout[D::kFormat].bytes, kHalves = D::kSplit ? 2 : 1;
    constexpr int kCount = (sizeof(T) == 1 ? 8 : 16) / kHalves, kEach = 4 / sizeof(T);
    F8 acc[R][P];
    clear(acc);
    for (long b = 0; b < x.in / 32; ++b) {
        const long first = b * x.n + row;
        const T* q = static_cast<const T*>(x.q) + 32 * first;
        D d[P];
        FD_UNROLL
        for (int p = 0; p < P; ++p) d[p].open(w + p * stride + (b / D::kSubs) * kBytes, static_cast<int>(b % D::kSubs));
        for (int half = 0; half < kHalves; ++half) {
            I8 sum[R][P];
            FD_UNROLL
            for (int r = 0; r < R; ++r) {
                const int32_t* s = x.sums + 2 * (first + r);
                const int taken = D::kOffset == 0 ? 0 : kHalves == 2 ? s[half] : s[0] + s[1];
                FD_UNROLL
                for (int p = 0; p < P; ++p) sum[r][p].v[0] = sum[r][p].v[1] = vdupq_n_s32(-D::kOffset * taken);
            }
            constexpr int turn = turn_of<D, T>();
            for (int from = half * kCount; from < (half + 1) * kCount; from += turn) each<0, turn>([&](auto at) FD_HERE {
                constexpr int s = decltype(at)::value;
                FD_UNROLL
                for (int p = 0; p < P; ++p) {
                    for (int i = 0; i < 2; ++i) {
                        if constexpr (sizeof(T) == 1) {
                            const int8x16_t v = d[p].template quad<s>(from, i);
                            FD_UNROLL
                            for (int r = 0; r < R; ++r) {
                                const int8x16_t four = vreinterpretq_s8_s32(vdupq_n_s32(load<int32_t>(q + 32 * r + kEach * (from + s))));
                                sum[r][p].v[i] = vdotq_s32(sum[r][p].v[i], v, four);
                            }
                        } else {
                            const int16x8_t v = d[p].template pair<s>(from, i);
                            const int32x4_t even = vshrq_n_s32(vshlq_n_s32(vreinterpretq_s32_s16(v), 16), 16);
                            const int32x4_t odd = vshrq_n_s32(vreinterpretq_s32_s16(v), 16);
                            FD_UNROLL
                            for (int r = 0; r < R; ++r) {
                                const T* two = q + 32 * r + kEach * (from + s);
                                sum[r][p].v[i] = vmlaq_n_s32(vmlaq_n_s32(sum[r][p].v[i], even, two[0]), odd, two[1]);
                            }
                        }
                    }
                }
            });
            FD_UNROLL
            for (int r = 0; r < R; ++r) {
                FD_UNROLL
                for (int p = 0; p < P; ++p) {
                    for (int i = 0; i < 2; ++i) {
                        const float32x4_t factor = vmulq_n_f32(d[p].scale(half).v[i], x.scale[first + r]);
                        acc[r][p].v[i] = vfmaq_f32(acc[r][p].v[i], vcvtq_f32_s32(sum[r][p].v[i]), factor);
                        if constexpr (D::kAdd) acc[r][p].v[i] = vfmaq_n_f32(acc[r][p].v[i], d[p].add().v[i], x.scaled_sum[first + r]);
                    }
                }
            }
        }
    }
    store<R, P>(acc, out);
}

// Few rows leave registers for several panels at once.
constexpr int panels_at_once(int rows) { return rows <= 2 ? 4 : rows <= 4 ? 2 : 1; }

template <class D, int R>
void float_rows(const Tile& t, float* out) {
    constexpr int P = panels_at_once(R);
    int p = 0;
    for (; p + P <= t.count; p += P) float_tile<D, R, P>(t.weights + p * t.stride, t.stride, t.x, t.ldx, t.in, out + 8 * p);
    if constexpr (P > 1) {
        for (; p < t.count; ++p) float_tile<D, R, 1>(t.weights + p * t.stride, t.stride, t.x, t.ldx, t.in, out + 8 * p);
    }
}

template <class D, class T, int R>
void int_rows(const Tile& t, const Quantised& x, float* out) {
    constexpr int P = panels_at_once(R);
    int p = 0;
    for (; p + P <= t.count; p += P) int_tile<D, T, R, P>(t.weights + p * t.stride, t.stride, x, t.first_row, out + 8 * p);
    if constexpr (P > 1) {
        for (; p < t.count; ++p) int_tile<D, T, R, 1>(t.weights + p * t.stride, t.stride, x, t.first_row, out + 8 * p);
    }
}

// Eight, four, two rows and one are compiled; others are made of them.
template <class F>
FD_INLINE void by_rows(const Tile& t, float* out, F f) {
    Tile part = t;
    const auto take = [&](auto rows) FD_HERE {
        constexpr int R = decltype(rows)::value;
        for (int left = t.rows - (part.first_row - t.first_row); left >= R; left -= R) {
            f(rows, part, out + 32 * (part.first_row - t.first_row));
            part.first_row += R;
            part.x += R * t.ldx;
        }
    };
    take(Number<8>{});
    take(Number<4>{});
    take(Number<2>{});
    take(Number<1>{});
}

template <class D>
void linear(const Tile& t, float* out) {
    by_rows(t, out, [](auto rows, const Tile& part, float* y) FD_HERE { float_rows<D, decltype(rows)::value>(part, y); });
}

template <class D, class T>
void integer(const Tile& t, const Quantised& x, float* out) {
    by_rows(t, out, [&](auto rows, const Tile& part, float* y) FD_HERE { int_rows<D, T, decltype(rows)::value>(part, x, y); });
}

void quantise16(const float* x, long blocks, long step, void* q, float* scale, float* scaled_sum, int32_t* sums) {
    kPortable.quantise16(x, blocks, step, q, scale, scaled_sum, sums);
}
void quantise8(const float* x, long blocks, long step, void* q, float* scale, float* scaled_sum, int32_t* sums) {
    kPortable.quantise8(x, blocks, step, q, scale, scaled_sum, sums);
}

}  // namespace

const Kernels kNeon = {
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
bool has_neon() {
    constexpr unsigned long kDotProducts = 1ul << 20;  // HWCAP_ASIMDDP
    return (getauxval(AT_HWCAP) & kDotProducts) != 0;
}
}  // namespace foredraft
#else
namespace foredraft {
const Kernels kNeon = kPortable;
bool has_neon() { return false; }
}  // namespace foredraft
#endif
