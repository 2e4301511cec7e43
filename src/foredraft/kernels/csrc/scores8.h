// Scores by vectors of eight lanes, for attend_body.h.

constexpr int kMixVectors[4] = {8, 4, 2, 2};  // what sixteen registers hold beside weights and values

// Sums, by sum8's tree, of eight vectors at once.
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

// Dot products of Q queries with 8 / Q keys, of which only `count` exist; the first query's come first.
template <int Q, class T>
FD_OP V8 dots8(const float* const* q, const T* keys, long dim, long count) {
    constexpr int kKeys = 8 / Q;
    V8 acc[8];
    const T* key[kKeys];
    for (int i = 0; i < 8; ++i) acc[i] = splat<V8>(0.0f);
    for (int i = 0; i < kKeys; ++i) key[i] = keys + (i < count ? i : count - 1) * dim;
    for (long d = 0; d < dim; d += 8) {
        V8 a[Q];
        for (int r = 0; r < Q; ++r) a[r] = read<V8>(q[r] + d);
        for (int i = 0; i < kKeys; ++i) {
            const V8 k = read<V8>(key[i] + d);
            for (int r = 0; r < Q; ++r) acc[r * kKeys + i] = FD_FMA(a[r], k, acc[r * kKeys + i]);
        }
    }
    return sums8(acc);
}

struct Queries {
    static constexpr long kAtOnce = 4;
    const std::vector<const float*>& q;
    long dim;

    Queries(const std::vector<const float*>& query, long d) : q(query), dim(d) {}

    // to[i * step + j] = scale * (query first + i . key j) for up to kAtOnce queries and eight keys, of which `count` exist.
    template <class T>
    void scores(long first, long n, const T* keys, long count, float scale, float* to, long step) const {
        long i = 0;
        for (; i + 2 <= n; i += 2) {
            for (long j = 0; j < 8; j += 4) {
                const V8 dots = dots8<2>(q.data() + first + i, keys + std::min(j, count - 1) * dim, dim, std::max(1L, count - j));
                const V8 scaled = dots * splat<V8>(scale);
                std::memcpy(to + i * step + j, &scaled, 16);
                std::memcpy(to + (i + 1) * step + j, reinterpret_cast<const char*>(&scaled) + 16, 16);
            }
        }
        if (i < n) write(to + i * step, dots8<1>(q.data() + first + i, keys, dim, count) * splat<V8>(scale));
    }
};
