// Included once for each instruction set, inside a namespace, after FD_FMA(a, b, c) = a*b + c (one rounding) on V8.
// Lanes, trees and order of every sum are spelled out, so all instruction sets give the same bits.

using I8 = int32_t __attribute__((vector_size(32)));

FD_OP V8 splat8(float v) { return V8{v, v, v, v, v, v, v, v}; }
FD_OP V8 load8(const float* p) { return load<V8>(p); }
FD_OP V8 load8(const uint16_t* p) {
    using H8 = uint16_t __attribute__((vector_size(16)));
    return (V8)(__builtin_convertvector(load<H8>(p), I8) << 16);
}
FD_OP void store8(float* p, V8 v) { std::memcpy(p, &v, sizeof v); }

// ((0+4)+(2+6)) + ((1+5)+(3+7))
FD_OP float sum8(V8 v) { return ((v[0] + v[4]) + (v[2] + v[6])) + ((v[1] + v[5]) + (v[3] + v[7])); }

// sum8 of eight vectors at once.
FD_OP V8 sums8(const V8 (&a)[8]) {
    V8 b[4], c[2];
    for (int i = 0; i < 4; ++i) {
        b[i] = __builtin_shufflevector(a[i], a[i + 4], 0, 1, 2, 3, 8, 9, 10, 11) +
               __builtin_shufflevector(a[i], a[i + 4], 4, 5, 6, 7, 12, 13, 14, 15);
    }
    for (int i = 0; i < 2; ++i) {
        c[i] = __builtin_shufflevector(b[i], b[i + 2], 0, 1, 8, 9, 4, 5, 12, 13) +
               __builtin_shufflevector(b[i], b[i + 2], 2, 3, 10, 11, 6, 7, 14, 15);
    }
    return __builtin_shufflevector(c[0], c[1], 0, 8, 2, 10, 4, 12, 6, 14) +
           __builtin_shufflevector(c[0], c[1], 1, 9, 3, 11, 5, 13, 7, 15);
}

// e^x to about one unit in the last place; 0 below -87.3, infinity above 88.7, NaN stays. n = round(x / ln 2), then a
// polynomial of degree six in the rest.
FD_OP V8 exp8(V8 x) {
    const V8 low = splat8(-87.3f), high = splat8(88.7f);
    const V8 bounded = x < low ? low : x > high ? high : x;
    const V8 magic = splat8(12582912.0f);  // 1.5 * 2^23: adding it rounds to an integer
    const V8 n = FD_FMA(bounded, splat8(1.44269504f), magic) - magic;
    V8 r = FD_FMA(n, splat8(-0.693145752f), bounded);
    r = FD_FMA(n, splat8(-1.42860677e-6f), r);
    V8 p = splat8(1.0f / 720);
    p = FD_FMA(p, r, splat8(1.0f / 120));
    p = FD_FMA(p, r, splat8(1.0f / 24));
    p = FD_FMA(p, r, splat8(1.0f / 6));
    p = FD_FMA(p, r, splat8(0.5f));
    p = FD_FMA(p, r, splat8(1.0f));
    p = FD_FMA(p, r, splat8(1.0f));
    const I8 power = (__builtin_convertvector(n == n ? n : splat8(0.0f), I8) + 127) << 23;
    const V8 result = p * (V8)power;
    return x != x ? x : x < low ? splat8(0.0f) : x > high ? splat8(HUGE_VALF) : result;
}

FD_OP V8 tanh8(V8 x) {
    const V8 size = x < splat8(0.0f) ? -x : x;
    const V8 t = splat8(1.0f) - splat8(2.0f) / (exp8(size + size) + splat8(1.0f));
    return x < splat8(0.0f) ? -t : t;
}

// Runs f on eight numbers at a time; the last ones are padded with zeros.
template <class F>
FD_OP void each8(const float* a, const float* b, long n, float* y, F f) {
    long i = 0;
    for (; i + 8 <= n; i += 8) store8(y + i, f(load8(a + i), load8(b + i)));
    if (i < n) {
        float u[8] = {}, v[8] = {}, w[8];
        std::memcpy(u, a + i, (n - i) * sizeof(float));
        std::memcpy(v, b + i, (n - i) * sizeof(float));
        store8(w, f(load8(u), load8(v)));
        std::memcpy(y + i, w, (n - i) * sizeof(float));
    }
}

void rms_norm(const float* x, const float* weight, float eps, long n, float* y) {
    V8 squares = splat8(0.0f);
    long i = 0;
    for (; i + 8 <= n; i += 8) squares = FD_FMA(load8(x + i), load8(x + i), squares);
    if (i < n) {
        float tail[8] = {};
        std::memcpy(tail, x + i, (n - i) * sizeof(float));
        squares = FD_FMA(load8(tail), load8(tail), squares);
    }
    const V8 factor = splat8(1.0f / std::sqrt(sum8(squares) / static_cast<float>(n) + eps));
    each8(x, weight, n, y, [&](V8 a, V8 w) FD_HERE { return a * factor * w; });
}

void gate(const float* gates, const float* up, long n, bool tanh_gelu, float* y) {
    if (tanh_gelu) {
        each8(gates, up, n, y, [&](V8 g, V8 u) FD_HERE {
            const V8 inner = g * FD_FMA(g * g, splat8(0.7978845608f * 0.044715f), splat8(0.7978845608f));
            return splat8(0.5f) * g * (splat8(1.0f) + tanh8(inner)) * u;
        });
    } else {
        each8(gates, up, n, y, [&](V8 g, V8 u) FD_HERE { return g / (splat8(1.0f) + exp8(-g)) * u; });
    }
}

void softcap(float* x, long n, float cap) {
    const V8 c = splat8(cap);
    each8(x, x, n, x, [&](V8 a, V8) FD_HERE { return c * tanh8(a / c); });
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

// Which keys a row sees: [low, stop) of the slot, and for a tree its own ancestors and itself as well.
struct Seen {
    long low, stop;
    std::vector<long> own;  // keys after the committed ones, ascending
    long count() const { return stop - low + static_cast<long>(own.size()); }
};

inline Seen seen(const AttentionShape& a, const Segment& s, const int64_t* positions, long row) {
    const long position = positions[s.first + row];
    const long low = a.window > 0 && position + 1 > a.window ? position + 1 - a.window : 0;
    if (!s.parents) return {low, s.start + row + 1, {}};
    Seen result{std::min<long>(low, s.start), s.start, {}};
    for (long at = row; at >= 0; at = s.parents[at]) {
        if (positions[s.first + at] >= low) result.own.push_back(s.start + at);
    }
    std::reverse(result.own.begin(), result.own.end());
    return result;
}

// Turns scores into e^(score - largest), in place; returns their sum.
inline float soften(float* s, long n) {
    V8 top = splat8(-HUGE_VALF), total = splat8(0.0f);
    const long padded = (n + 7) / 8 * 8;
    for (long i = n; i < padded; ++i) s[i] = -HUGE_VALF;
    for (long i = 0; i < padded; i += 8) {
        const V8 v = load8(s + i);
        top = v > top ? v : top;
    }
    float largest = top[0];
    for (int i = 1; i < 8; ++i) largest = top[i] > largest ? top[i] : largest;
    for (long i = 0; i < padded; i += 8) {
        const V8 e = exp8(load8(s + i) - splat8(largest));
        store8(s + i, e);
        total += e;
    }
    return sum8(total);
}

// out[d] += sum of weights[j] * values[j][d] for keys [0, n), eight to 64 numbers of a head at a time.
template <int N, class T>
FD_OP void mix(const float* weights, const T* values, long step, long n, float* out) {
    V8 acc[N];
    for (int i = 0; i < N; ++i) acc[i] = load8(out + 8 * i);
    for (long j = 0; j < n; ++j) {
        const V8 w = splat8(weights[j]);
        for (int i = 0; i < N; ++i) acc[i] = FD_FMA(w, load8(values + j * step + 8 * i), acc[i]);
    }
    for (int i = 0; i < N; ++i) store8(out + 8 * i, acc[i]);
}

template <class T>
inline void mix_head(const float* weights, const T* values, long dim, long n, float* out) {
    long d = 0;
    for (; d + 64 <= dim; d += 64) mix<8>(weights, values + d, dim, n, out + d);
    for (; d < dim; d += 8) mix<1>(weights, values + d, dim, n, out + d);
}

// scores[j] = scale * (q . keys[j]) for eight keys, of which only `count` exist.
template <class T>
FD_OP V8 scores8(const float* q, const T* keys, long dim, long count) {
    V8 acc[8];
    const T* key[8];
    for (int i = 0; i < 8; ++i) {
        acc[i] = splat8(0.0f);
        key[i] = keys + (i < count ? i : count - 1) * dim;
    }
    for (long d = 0; d < dim; d += 8) {
        const V8 a = load8(q + d);
        for (int i = 0; i < 8; ++i) acc[i] = FD_FMA(a, load8(key[i] + d), acc[i]);
    }
    return sums8(acc);
}

constexpr long kMixBlock = 32;  // keys whose values stay in the first-level cache while all rows use them

template <class T>
void attend_typed(const AttentionShape& a, const Segment& s, const View& view, const int64_t* positions, long first,
                  long last, const float* q, long q_step, float* out, long out_step) {
    static thread_local std::vector<float> scratch;
    const long dim = a.head_dim, rows = last - first, end = s.start + last;
    const T *keys = static_cast<const T*>(view.keys), *values = static_cast<const T*>(view.values);
    std::vector<Seen> visible;
    long low = end;
    for (long r = 0; r < rows; ++r) {
        visible.push_back(seen(a, s, positions, first + r));
        low = std::min(low, visible.back().low);
    }
    const long width = (end - low + 7) / 8 * 8 + 8;
    if (scratch.size() < static_cast<size_t>(width * rows)) scratch.resize(width * rows);
    float* scores = scratch.data();
    for (long j = low; j < end; j += 8) {
        for (long r = 0; r < rows; ++r) {
            if (j >= visible[r].stop && visible[r].own.empty()) continue;
            const V8 dots = scores8(q + (first + r) * q_step, keys + j * dim, dim, std::min(8L, end - j));
            store8(scores + r * width + (j - low), dots * splat8(a.scale));
        }
    }
    std::vector<float> factor(rows);
    for (long r = 0; r < rows; ++r) {
        const Seen& v = visible[r];
        float *row = scores + r * width + (v.low - low), *next = row + (v.stop - v.low);
        // A tree's row moves its own scores up behind the committed ones: its sums have no gaps, as if its path were all.
        for (size_t i = 0; i < v.own.size(); ++i) next[i] = scores[r * width + v.own[i] - low];
        if (a.softcap > 0) softcap(row, v.count(), a.softcap);
        factor[r] = 1.0f / soften(row, v.count());
        std::memset(out + (first + r) * out_step, 0, dim * sizeof(float));
    }
    for (long j = low; j < end; j += kMixBlock) {
        for (long r = 0; r < rows; ++r) {
            const long from = std::max(j, visible[r].low), stop = std::min(visible[r].stop, j + kMixBlock);
            if (from >= stop) continue;
            mix_head(scores + r * width + from - low, values + from * dim, dim, stop - from, out + (first + r) * out_step);
        }
    }
    for (long r = 0; r < rows; ++r) {
        const Seen& v = visible[r];
        float* y = out + (first + r) * out_step;
        for (size_t i = 0; i < v.own.size(); ++i) {
            mix_head(scores + r * width + v.stop - low + i, values + v.own[i] * dim, dim, 1, y);
        }
        for (long d = 0; d < dim; ++d) y[d] *= factor[r];
    }
}

void attend(const AttentionShape& a, const Segment& s, const View& view, const int64_t* positions, long first, long last,
            const float* q, long q_step, float* out, long out_step) {
    if (a.cache_type == kCacheF32) {
        attend_typed<float>(a, s, view, positions, first, last, q, q_step, out, out_step);
    } else {
        attend_typed<uint16_t>(a, s, view, positions, first, last, q, q_step, out, out_step);
    }
}

const Ops kOps = {rms_norm, gate, rope, store, attend, softcap};
