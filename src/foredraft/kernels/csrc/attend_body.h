// Attention of one tile of queries: rows of a segment times the query heads that read the same keys. Part of ops_body.h,
// after the vectors and, for the instruction set at hand, `Queries` with scores() of eight keys. A query's bits are its
// own: whoever shares a reading of keys and values with it, its sums run over its own keys, in ascending order, block by
// block of places in the slot, and then over the blocks. So threads can share a long text, whose blocks they do not change.

constexpr long kTogether = 4;   // queries that use a key or value while it is in registers
constexpr long kAhead = 16;     // how many keys ahead they are fetched into the second-level cache
constexpr long kMixBlock = 32;  // keys whose values stay in the first-level cache while all queries use them

// Which keys a row sees: [low, stop) of the slot, and for a tree its own ancestors and itself as well. Those count as the
// places from `stop` on: where they would be if its path were all there is.
struct Seen {
    long low, stop;
    std::vector<long> own;  // keys after the committed ones, ascending
    long end() const { return stop + static_cast<long>(own.size()); }
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

// Turns scores into e^(score - largest), in place; returns their sum, and the largest in `top`.
inline float soften(float* s, long n, float* top) {
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
    *top = largest;
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

// What a query sees of the block at hand: places [from, to) of the slot, then its own keys [own, own_stop), of which the
// first stands at `to`. Their weights stand together, from `weights` on.
struct Window {
    long from, to, own, own_stop;
    float* weights;
    long count() const { return to - from + own_stop - own; }
};

// A tile's queries, what they see, and memory that serves the next tile.
struct QueryTile {
    static constexpr long kWidth = kKeyBlock + 8;  // from the weights of one query to those of the next
    std::vector<Seen> rows;
    std::vector<const Seen*> seen;  // [queries], as the next four
    std::vector<const float*> query;
    std::vector<Window> window;
    std::vector<float*> out;
    std::vector<float> scores, tree_scores;
    std::vector<float> top, sum, mixed;
    long low, end, dim;  // of all: the first place seen, one past the last, and numbers a head
    long slot_end;       // one past the last key
    long queries() const { return static_cast<long>(seen.size()); }
};

// Values of the committed keys of a block, in parts that stay near while all queries use them. Where some of four see keys
// that others do not, they go alone.
template <class T>
void mix_committed(QueryTile& t, const T* values, long first, long last) {
    for (long j = first; j < last; j += kMixBlock) {
        for (long i = 0; i < t.queries(); i += kTogether) {
            const long n = std::min(kTogether, t.queries() - i);
            const auto from = [&](long q) { return std::max(j, t.window[q].from); };
            const auto stop = [&](long q) { return std::min(j + kMixBlock, t.window[q].to); };
            const auto some = [&](long at, long count, long a, long b) {
                if (a >= b) return;
                const float* weights = t.window[at].weights + a - t.window[at].from;
                mix_queries(count, weights, t.kWidth, values + a * t.dim, t.dim, b - a, t.out.data() + at);
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

// Scores of the keys [first, last) for a few queries at a time of which one needs them: those of query i from i * step on.
template <class T, class F>
void score(const AttentionShape& a, const QueryTile& t, const Queries& all, const View& view, long first, long last, F needs,
           float* to, long step) {
    const T *keys = static_cast<const T*>(view.keys), *values = static_cast<const T*>(view.values);
    const long dim = t.dim, n = t.queries();
    for (long j = first; j < last; j += 8) {
        const T* later = j + kAhead < last ? keys + (j + kAhead) * dim : values + (first + (j - first) % kAhead) * dim;
        for (long i = 0; i < 8 * dim; i += 64 / sizeof(T)) fetch(later + i);
        for (long i = 0; i < n; i += Queries::kAtOnce) {
            const long count = std::min(Queries::kAtOnce, n - i);
            bool needed = false;
            for (long k = i; k < i + count; ++k) needed |= needs(*t.seen[k], j);
            if (needed) all.scores(i, count, keys + j * dim, std::min(8L, last - j), a.scale, to + i * step + j - first, step);
        }
    }
}

inline void room(std::vector<float>& v, long n) {
    if (static_cast<long>(v.size()) < n) v.resize(n);
}

inline QueryTile& open(const AttentionShape& a, const Segment& s, const int64_t* positions, long first, long last, const float* q,
                long q_step) {
    static thread_local QueryTile t;
    const long dim = a.head_dim, group = a.heads / a.kv_heads, first_row = first / group, stop_row = (last - 1) / group + 1;
    t.rows.clear(), t.seen.clear(), t.query.clear();
    t.low = t.slot_end = s.start + stop_row, t.end = 0, t.dim = dim;
    for (long row = first_row; row < stop_row; ++row) {
        t.rows.push_back(seen(a, s, positions, row));
        t.low = std::min(t.low, t.rows.back().low);
        t.end = std::max(t.end, t.rows.back().end());
    }
    for (long i = first; i < last; ++i) {
        t.seen.push_back(&t.rows[i / group - first_row]);
        t.query.push_back(q + i / group * q_step + i % group * dim);
    }
    room(t.scores, t.kWidth * (last - first));
    return t;
}

// What queries [first, last) see of blocks [block, stop): largest scores, sums of weights, weighed values.
template <class T>
void run_blocks(const AttentionShape& a, const Segment& s, const View& view, QueryTile& t, long first, long block, long stop,
                const Blocks& to) {
    const T* values = static_cast<const T*>(view.values);
    const Queries all(t.query, t.dim);
    const long n = t.queries(), tree = s.parents ? (t.slot_end - s.start + 7) / 8 * 8 : 0;
    if (tree) {
        room(t.tree_scores, tree * n);
        const auto always = [](const Seen&, long) FD_HERE { return true; };
        score<T>(a, t, all, view, s.start, t.slot_end, always, t.tree_scores.data(), tree);
    }
    for (; block < stop; ++block) {
        const long low = block * kKeyBlock, high = low + kKeyBlock, base = std::max(low, t.low);
        long end = base;
        t.window.clear(), t.out.clear();
        for (long i = 0; i < n; ++i) {
            const Seen& v = *t.seen[i];
            const long from = std::max(low, v.low), until = std::max(from, std::min(high, v.stop));
            const long own = std::max(0L, low - v.stop), own_stop = std::max(own, std::min(high, v.end()) - v.stop);
            t.window.push_back({from, until, own, own_stop, t.scores.data() + i * t.kWidth + from - base});
            t.out.push_back(to.mixed + ((first + i) * to.count + block - to.first) * t.dim);
            end = std::max(end, until);
        }
        const auto sees = [](const Seen& v, long j) FD_HERE { return j < v.stop; };
        score<T>(a, t, all, view, base, end, sees, t.scores.data(), t.kWidth);
        for (long i = 0; i < n; ++i) {
            const Window& w = t.window[i];
            const long at = (first + i) * to.count + block - to.first, count = w.count();
            float* next = w.weights + w.to - w.from;
            // A tree's row has the scores of its own keys behind the committed ones: its sums have no gaps.
            for (long k = w.own; k < w.own_stop; ++k) *next++ = t.tree_scores[i * tree + t.seen[i]->own[k] - s.start];
            to.top[at] = -HUGE_VALF, to.sum[at] = 0.0f;
            std::memset(t.out[i], 0, t.dim * sizeof(float));
            if (count == 0) continue;
            if (a.softcap > 0) softcap(w.weights, count, a.softcap);
            to.sum[at] = soften(w.weights, count, &to.top[at]);
        }
        mix_committed(t, values, base, end);
        for (long i = 0; i < n; ++i) {
            const Window& w = t.window[i];
            const float* weights = w.weights + w.to - w.from - w.own;
            for (long k = w.own; k < w.own_stop; ++k) {
                mix_queries(1, weights + k, 0, values + t.seen[i]->own[k] * t.dim, t.dim, 1, &t.out[i]);
            }
        }
    }
}

// The blocks of one query put together, in their order.
void merge(const Blocks& from, long query, long dim, float* out) {
    const float *top = from.top + query * from.count, *sum = from.sum + query * from.count;
    const float* mixed = from.mixed + query * from.count * dim;
    float largest = top[0];
    for (long b = 1; b < from.count; ++b) largest = top[b] > largest ? top[b] : largest;
    V8 total = splat<V8>(0.0f);
    std::memset(out, 0, dim * sizeof(float));
    for (long b = 0; b < from.count; ++b, mixed += dim) {
        const V8 factor = exponential(splat<V8>(top[b]) - splat<V8>(largest));
        total = FD_FMA(factor, splat<V8>(sum[b]), total);
        for (long d = 0; d < dim; d += 8) write(out + d, FD_FMA(factor, read<V8>(mixed + d), read<V8>(out + d)));
    }
    const V8 by = splat<V8>(1.0f) / total;
    for (long d = 0; d < dim; d += 8) write(out + d, read<V8>(out + d) * by);
}

template <class T>
void attend_typed(const AttentionShape& a, const Segment& s, const View& view, const int64_t* positions, long first, long last,
                  const float* q, long q_step, float* out, long out_step) {
    QueryTile& t = open(a, s, positions, first, last, q, q_step);
    const long n = last - first, block = t.low / kKeyBlock, stop = (t.end + kKeyBlock - 1) / kKeyBlock, count = stop - block;
    const long group = a.heads / a.kv_heads;
    room(t.top, n * count), room(t.sum, n * count), room(t.mixed, n * count * t.dim);
    const Blocks parts{t.top.data(), t.sum.data(), t.mixed.data(), count, block};
    run_blocks<T>(a, s, view, t, 0, block, stop, parts);
    for (long i = 0; i < n; ++i) merge(parts, i, t.dim, out + (first + i) / group * out_step + (first + i) % group * t.dim);
}

void attend(const AttentionShape& a, const Segment& s, const View& view, const int64_t* positions, long first, long last,
            const float* q, long q_step, float* out, long out_step) {
    if (a.cache_type == kCacheF32) {
        attend_typed<float>(a, s, view, positions, first, last, q, q_step, out, out_step);
    } else {
        attend_typed<uint16_t>(a, s, view, positions, first, last, q, q_step, out, out_step);
    }
}

void attend_blocks(const AttentionShape& a, const Segment& s, const View& view, const int64_t* positions, long first, long last,
                   const float* q, long q_step, long block, long stop, const Blocks& to) {
    if (a.cache_type == kCacheF32) {
        run_blocks<float>(a, s, view, open(a, s, positions, first, last, q, q_step), first, block, stop, to);
    } else {
        run_blocks<uint16_t>(a, s, view, open(a, s, positions, first, last, q, q_step), first, block, stop, to);
    }
}
