// Attention of one tile of queries: rows of a segment times the query heads that read the same keys. Part of ops_body.h,
// after the vectors and, for the instruction set at hand, `Queries` with scores() of eight keys. A query's bits are its
// own: whoever shares a reading of keys and values with it, its sums run over its own keys, in ascending order.

constexpr long kTogether = 4;   // queries that use a key or value while it is in registers
constexpr long kAhead = 16;     // how many keys ahead they are fetched into the second-level cache
constexpr long kMixBlock = 32;  // keys whose values stay in the first-level cache while all queries use them

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

// Reading past the end is harmless here.
FD_OP void fetch(const void* p) { __builtin_prefetch(p, 0, 2); }

FD_OP void add_eights(V8& total, V8 v) { total += v; }

// Turns scores into e^(score - largest), in place; returns their sum.
inline float soften(float* s, long n) {
    const long padded = (n + 7) / 8 * 8, wide = padded / kWide * kWide;
    for (long i = n; i < padded; ++i) s[i] = -HUGE_VALF;
    VW tops = splat<VW>(-HUGE_VALF);
    for (long i = 0; i < wide; i += kWide) {
        const VW v = read<VW>(s + i);
        tops = v > tops ? v : tops;
    }
    float largest = -HUGE_VALF;
    for (int i = 0; i < kWide; ++i) largest = tops[i] > largest ? tops[i] : largest;
    for (long i = wide; i < padded; ++i) largest = s[i] > largest ? s[i] : largest;
    V8 total = splat<V8>(0.0f);
    for (long i = 0; i < wide; i += kWide) {
        const VW e = exponential(read<VW>(s + i) - splat<VW>(largest));
        write(s + i, e);
        add_eights(total, e);
    }
    for (long i = wide; i < padded; i += 8) {
        const V8 e = exponential(read<V8>(s + i) - splat<V8>(largest));
        write(s + i, e);
        total += e;
    }
    return sum8(total);
}

// out[q][d] += sum of weights[q * width + j] * values[j][d] for Q queries and keys [0, n), N vectors of a head at a time.
template <class V, int Q, int N, class T>
FD_OP void mix(const float* weights, long width, const T* values, long step, long n, float* const* out, long from) {
    constexpr int kLanes = sizeof(V) / sizeof(float);
    V acc[Q][N];
    FD_UNROLL
    for (int q = 0; q < Q; ++q) {
        FD_UNROLL
        for (int i = 0; i < N; ++i) acc[q][i] = read<V>(out[q] + from + kLanes * i);
    }
    for (long j = 0; j < n; ++j) {
        const T* value = values + j * step + from;
        for (int i = 0; i < N * kLanes; i += 64 / sizeof(T)) fetch(value + kAhead * step + i);
        V v[N];
        FD_UNROLL
        for (int i = 0; i < N; ++i) v[i] = read<V>(value + kLanes * i);
        FD_UNROLL
        for (int q = 0; q < Q; ++q) {
            const V w = splat<V>(weights[q * width + j]);
            FD_UNROLL
            for (int i = 0; i < N; ++i) acc[q][i] = FD_FMA(w, v[i], acc[q][i]);
        }
    }
    FD_UNROLL
    for (int q = 0; q < Q; ++q) {
        FD_UNROLL
        for (int i = 0; i < N; ++i) write(out[q] + from + kLanes * i, acc[q][i]);
    }
}

template <int Q, class T>
void mix_heads(const float* weights, long width, const T* values, long dim, long n, float* const* out) {
    constexpr int kVectors = kMixVectors[Q - 1], kSpan = kVectors * kWide;
    long d = 0;
    for (; d + kSpan <= dim; d += kSpan) mix<VW, Q, kVectors>(weights, width, values, dim, n, out, d);
    for (; d + kWide <= dim; d += kWide) mix<VW, Q, 1>(weights, width, values, dim, n, out, d);
    if (d < dim) mix<V8, Q, 1>(weights, width, values, dim, n, out, d);
}

template <class T>
void mix_queries(long queries, const float* weights, long width, const T* values, long dim, long n, float* const* out) {
    switch (queries) {
        case 1: return mix_heads<1>(weights, width, values, dim, n, out);
        case 2: return mix_heads<2>(weights, width, values, dim, n, out);
        case 3: return mix_heads<3>(weights, width, values, dim, n, out);
        default: return mix_heads<4>(weights, width, values, dim, n, out);
    }
}

// A tile's queries, what they see, and their scores, `width` apart: key k of a query's row stands at k - low.
struct QueryTile {
    std::vector<Seen> rows;
    std::vector<const Seen*> seen;  // [queries], as the next three
    std::vector<const float*> query;
    std::vector<float*> out;
    std::vector<float> factor;  // [queries], one over the sum of the weights
    std::vector<float> scores, packed;
    long low, end, width, dim;
    long queries() const { return static_cast<long>(seen.size()); }
};

// Committed keys in blocks; a block's values serve all queries. Where some of four see keys that others do not, they go
// alone.
template <class T>
void mix_committed(const QueryTile& t, const T* values) {
    for (long j = t.low; j < t.end; j += kMixBlock) {
        for (long i = 0; i < t.queries(); i += kTogether) {
            const long n = std::min(kTogether, t.queries() - i);
            const auto from = [&](long q) { return std::max(j, t.seen[q]->low); };
            const auto stop = [&](long q) { return std::min(j + kMixBlock, t.seen[q]->stop); };
            const auto some = [&](long first, long count, long a, long b) {
                if (a >= b) return;
                mix_queries(count, t.scores.data() + first * t.width + a - t.low, t.width, values + a * t.dim, t.dim, b - a,
                            t.out.data() + first);
            };
            long a = from(i), b = stop(i);
            for (long q = i + 1; q < i + n; ++q) a = std::max(a, from(q)), b = std::min(b, stop(q));
            if (a >= b) {
                for (long q = i; q < i + n; ++q) some(q, 1, from(q), stop(q));
                continue;
            }
            for (long q = i; q < i + n; ++q) some(q, 1, from(q), a);
            some(i, n, a, b);
            for (long q = i; q < i + n; ++q) some(q, 1, b, stop(q));
        }
    }
}

template <class T>
void attend_typed(const AttentionShape& a, const Segment& s, const View& view, const int64_t* positions, long first,
                  long last, const float* q, long q_step, float* out, long out_step) {
    static thread_local QueryTile t;  // its memory serves the next tile
    const long dim = a.head_dim, group = a.heads / a.kv_heads, n = last - first;
    const long first_row = first / group, stop_row = (last - 1) / group + 1, end = s.start + stop_row;
    const T *keys = static_cast<const T*>(view.keys), *values = static_cast<const T*>(view.values);
    t.rows.clear(), t.seen.clear(), t.query.clear(), t.out.clear(), t.factor.clear();
    t.low = t.end = end, t.dim = dim;
    for (long row = first_row; row < stop_row; ++row) {
        t.rows.push_back(seen(a, s, positions, row));
        t.low = std::min(t.low, t.rows.back().low);
    }
    for (long i = first; i < last; ++i) {
        t.seen.push_back(&t.rows[i / group - first_row]);
        t.query.push_back(q + i / group * q_step + i % group * dim);
        t.out.push_back(out + i / group * out_step + i % group * dim);
    }
    const long low = t.low, width = t.width = (end - low + 7) / 8 * 8 + 8;
    if (t.scores.size() < static_cast<size_t>(width * n)) t.scores.resize(width * n);
    float* scores = t.scores.data();
    const Queries all(t.query, dim, t.packed);
    for (long j = low; j < end; j += 8) {
        const T* later = j + kAhead < end ? keys + (j + kAhead) * dim : values + (low + (j - low) % kAhead) * dim;
        for (long i = 0; i < 8 * dim; i += 64 / sizeof(T)) fetch(later + i);
        for (long i = 0; i < n; i += kTogether) {
            const long count = std::min(kTogether, n - i);
            bool needed = false;
            for (long k = i; k < i + count; ++k) needed |= j < t.seen[k]->stop || !t.seen[k]->own.empty();
            if (!needed) continue;
            all.scores(i, count, keys + j * dim, std::min(8L, end - j), a.scale, scores + i * width + j - low, width);
        }
    }
    for (long i = 0; i < n; ++i) {
        const Seen& v = *t.seen[i];
        float *base = scores + i * width - low, *row = base + v.low, *next = base + v.stop;
        // A tree's row moves its own scores up behind the committed ones: its sums have no gaps, as if its path were all.
        for (size_t k = 0; k < v.own.size(); ++k) next[k] = base[v.own[k]];
        if (a.softcap > 0) softcap(row, v.count(), a.softcap);
        t.factor.push_back(1.0f / soften(row, v.count()));
        std::memset(t.out[i], 0, dim * sizeof(float));
    }
    mix_committed(t, values);
    for (long i = 0; i < n; ++i) {
        const Seen& v = *t.seen[i];
        for (size_t k = 0; k < v.own.size(); ++k) {
            mix_queries(1, scores + i * width + v.stop - low + k, 0, values + v.own[k] * dim, dim, 1, &t.out[i]);
        }
        for (long d = 0; d < dim; ++d) t.out[i][d] *= t.factor[i];
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
