// Included once for each instruction set, inside a namespace, after FD_FMA(a, b, c) = a*b + c (one rounding) and
// FD_BITS(mask) = one bit a lane, on V8, and FD_PACK(bits, i, v, to_i, to_v), which writes eight ids and values, those
// whose bit is set first. FD_EXP16(x, s, f, p, q), if defined, is exp8((x[0…7] - s) * f) and that of the next eight at
// once. Lanes and order of every sum are spelled out, so all give the same bits. No
// templates of the standard library here: the linker might share them with processors that lack the instructions.

using I8 = int32_t __attribute__((vector_size(32)));
using D4 = double __attribute__((vector_size(32)));
using V4 = float __attribute__((vector_size(16)));

constexpr long kBlock = 512;  // so many are summed in float32

FD_OP V8 splat8(float v) { return V8{v, v, v, v, v, v, v, v}; }
FD_OP V8 load8(const float* p) { return load<V8>(p); }
FD_OP V8 part8(const float* p, long n, float rest) {
    float v[8] = {rest, rest, rest, rest, rest, rest, rest, rest};
    std::memcpy(v, p, n * sizeof(float));
    return load<V8>(v);
}
FD_OP void store8(float* p, V8 v) { std::memcpy(p, &v, sizeof v); }
FD_OP D4 wide4(const float* p) { return __builtin_convertvector(load<V4>(p), D4); }
FD_OP D4 low4(V8 v) { return __builtin_convertvector(__builtin_shufflevector(v, v, 0, 1, 2, 3), D4); }
FD_OP D4 high4(V8 v) { return __builtin_convertvector(__builtin_shufflevector(v, v, 4, 5, 6, 7), D4); }
FD_OP double sum4(D4 v) { return (v[0] + v[2]) + (v[1] + v[3]); }
FD_OP V8 larger(V8 a, V8 b) { return a > b ? a : b; }  // b where a is NaN
FD_OP V8 smaller(V8 a, V8 b) { return a < b ? a : b; }
FD_OP float largest(V8 v) {
    float best = v[0];
    for (int i = 1; i < 8; ++i) best = v[i] > best ? v[i] : best;
    return best;
}

template <class V>
FD_OP V splat(float v) {
    return v - V{};  // not v + 0, which would lose the sign of a zero
}

// e^x for x <= 0 to about one unit in the last place; 0 below -86.6, where float32 runs out of normal numbers.
template <class V>
FD_OP V exponential(V x) {
    using I = decltype(x < x);
    const V low = splat<V>(-86.6f);
    const V bounded = x > low ? x : low;  // low where x is NaN
    const V magic = splat<V>(12582912.0f);  // 1.5 * 2^23: adding it rounds to an integer, in the last bits
    const V t = FD_FMA(bounded, splat<V>(1.44269504f), magic);
    const V n = t - magic;
    V r = FD_FMA(n, splat<V>(-0.693145752f), bounded);
    r = FD_FMA(n, splat<V>(-1.42860677e-6f), r);
    V p = splat<V>(1.0f / 720);
    p = FD_FMA(p, r, splat<V>(1.0f / 120));
    p = FD_FMA(p, r, splat<V>(1.0f / 24));
    p = FD_FMA(p, r, splat<V>(1.0f / 6));
    p = FD_FMA(p, r, splat<V>(0.5f));
    p = FD_FMA(p, r, splat<V>(1.0f));
    p = FD_FMA(p, r, splat<V>(1.0f));
    const V result = (V)((I)p + ((I)t << 23));
    return x < low ? splat<V>(0.0f) : result;
}
FD_OP V8 exp8(V8 x) { return exponential(x); }

#ifndef FD_EXP16
#define FD_EXP16(x, s, f, p, q) p = exp8((load8(x) - s) * f), q = exp8((load8((x) + 8) - s) * f)
#endif

// The largest of n numbers, from `best` on; false if one is NaN.
FD_OP bool top_of(const float* x, long n, float* best) {
    V8 a = splat8(*best), b = a, c = a, d = a;
    I8 nan = a != a;
    long i = 0;
    for (; i + 32 <= n; i += 32) {
        __builtin_prefetch(x + i + 1024), __builtin_prefetch(x + i + 1040);  // scores come from memory
        const V8 p = load8(x + i), q = load8(x + i + 8), r = load8(x + i + 16), s = load8(x + i + 24);
        nan |= ((p != p) | (q != q)) | ((r != r) | (s != s));
        a = larger(p, a), b = larger(q, b), c = larger(r, c), d = larger(s, d);
    }
    for (; i < n; i += 8) {
        const V8 p = i + 8 <= n ? load8(x + i) : part8(x + i, n - i, *best);
        nan |= p != p;
        a = larger(p, a);
    }
    *best = largest(larger(larger(a, b), larger(c, d)));
    return FD_BITS(nan) == 0;
}

bool top(const float* x, long n, float* best) {
    *best = -HUGE_VALF;
    return top_of(x, n, best);
}

long argmax(const float* x, long n) {
    float best = -HUGE_VALF;
    long at = 0;
    for (long first = 0; first < n; first += kBlock) {
        float here = best;
        if (!top_of(x + first, n - first < kBlock ? n - first : kBlock, &here)) return -1;
        if (here > best) {
            best = here;
            at = first;
        }
    }
    if (!(best > -HUGE_VALF && best < HUGE_VALF)) return -1;
    while (x[at] != best) ++at;
    return at;
}

void tops(const float* x, long n, float* best) {
    for (long first = 0; first < n; first += kTops) {
        float here = -HUGE_VALF;
        top_of(x + first, n - first < kTops ? n - first : kTops, &here);
        best[first / kTops] = here;
    }
}

float weight(float x, float shift, float factor) { return exp8(splat8((x - shift) * factor))[0]; }

template <bool kStore>
FD_OP double weigh_row(const float* x, long n, float shift, float factor, float* e) {
    const V8 s = splat8(shift), f = splat8(factor), none = splat8(0.0f);
    D4 low = low4(none), high = low;
    long i = 0;
    while (i < n) {
        V8 a = none, b = none;
        const long end = i + kBlock < n ? i + kBlock : n;
        for (; i + 16 <= end; i += 16) {
            V8 p, q;
            FD_EXP16(x + i, s, f, p, q);
            if (kStore) store8(e + i, p), store8(e + i + 8, q);
            a += p, b += q;
        }
        for (; i < end; i += 8) {
            const long m = end - i < 8 ? end - i : 8;
            const V8 p = exp8((part8(x + i, m, -HUGE_VALF) - s) * f);
            if (kStore) std::memcpy(e + i, &p, m * sizeof(float));
            a += p;
        }
        i = end;
        a += b;
        low += low4(a), high += high4(a);
    }
    return sum4(low + high);
}

double weigh(const float* x, long n, float shift, float factor, float* e) {
    return e ? weigh_row<true>(x, n, shift, factor, e) : weigh_row<false>(x, n, shift, factor, e);
}

void scale(float* e, long n, float by) {
    const V8 f = splat8(by);
    long i = 0;
    for (; i + 8 <= n; i += 8) store8(e + i, load8(e + i) * f);
    for (; i < n; ++i) e[i] *= by;
}

long above(const float* e, long n, float by, float least, int32_t* ids, float* p) {
    const V8 f = splat8(by), bound = splat8(least), none = splat8(0.0f);
    const I8 lanes = {0, 1, 2, 3, 4, 5, 6, 7};
    long count = 0;
    for (long i = 0; i < n; i += 8) {
        const V8 v = (n - i < 8 ? part8(e + i, n - i, 0.0f) : load8(e + i)) * f;
        const int hits = FD_BITS((v >= bound) & (v > none));
        if (!hits) continue;
        FD_PACK(hits, lanes + static_cast<int32_t>(i), v, ids + count, p + count);
        count += __builtin_popcount(hits);
    }
    return count;
}

void mass(const float* p, long n, double* sum, float* least) {
    const V8 none = splat8(0.0f);
    D4 left = low4(none), right = left;
    V8 low = splat8(HUGE_VALF), also = low;
    long i = 0;
    while (i < n) {
        V8 a = none, b = none, c = none, d = none;
        const long end = i + kBlock < n ? i + kBlock : n;
        for (; i + 32 <= end; i += 32) {
            const V8 v = load8(p + i), w = load8(p + i + 8), x = load8(p + i + 16), y = load8(p + i + 24);
            a += v, b += w, c += x, d += y;
            low = smaller(smaller(v, w), low), also = smaller(smaller(x, y), also);
        }
        for (; i < end; i += 8) {
            const long m = end - i < 8 ? end - i : 8;
            a += part8(p + i, m, 0.0f);
            low = smaller(part8(p + i, m, HUGE_VALF), low);
        }
        i = end;
        a = (a + b) + (c + d);
        left += low4(a), right += high4(a);
    }
    *sum = sum4(left + right);
    *least = -largest(-smaller(low, also));
}

double excess(const float* p, const float* q, long n, double wp, double wq) {
    const D4 none = {}, x = none + wp, y = none + wq;
    D4 lanes[4] = {none, none, none, none};
    long i = 0;
    if (q) {
        for (; i + 16 <= n; i += 16) {
            for (int l = 0; l < 4; ++l) {
                const D4 rest = x * wide4(p + i + 4 * l) - y * wide4(q + i + 4 * l);
                lanes[l] += rest > none ? rest : none;
            }
        }
    } else {
        for (; i + 16 <= n; i += 16) {
            for (int l = 0; l < 4; ++l) lanes[l] += x * wide4(p + i + 4 * l);
        }
    }
    double sum = sum4((lanes[0] + lanes[2]) + (lanes[1] + lanes[3]));
    for (; i < n; ++i) {
        const double rest = wp * static_cast<double>(p[i]) - (q ? wq * static_cast<double>(q[i]) : 0.0);
        sum += !q || rest > 0.0 ? rest : 0.0;
    }
    return sum;
}

const RowKernels kRows = {top, argmax, tops, weigh, weight, scale, above, mass, excess};
