// Scores by vectors of sixteen lanes, for attend_body.h: eight lanes of one query beside eight of the next, so that the
// lanes of every sum are those of scores8.h.

constexpr int kMixVectors[4] = {4, 4, 4, 4};

FD_OP VW twice(const float* p) { return _mm512_broadcast_f32x8(_mm256_loadu_ps(p)); }
FD_OP VW twice(const uint16_t* p) {
    const __m256i both = _mm256_broadcastsi128_si256(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p)));
    return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(both), 16));
}

// Sums, by sum8's tree, of both halves of eight vectors: eight of the first query, then eight of the second.
FD_OP VW sums16(const VW (&a)[8]) {
    VW b[4], c[2];
    FD_UNROLL
    for (int i = 0; i < 4; ++i) {  // four lanes of: key i first, key i second query, key i + 4 first, key i + 4 second
        b[i] = _mm512_shuffle_f32x4(a[i], a[i + 4], 0x88) + _mm512_shuffle_f32x4(a[i], a[i + 4], 0xDD);
    }
    FD_UNROLL
    for (int i = 0; i < 2; ++i) {  // two lanes of key 2i and two of key 2i + 1
        c[i] = _mm512_shuffle_ps(b[2 * i], b[2 * i + 1], 0x44) + _mm512_shuffle_ps(b[2 * i], b[2 * i + 1], 0xEE);
    }
    const VW sums = _mm512_shuffle_ps(c[0], c[1], 0x88) + _mm512_shuffle_ps(c[0], c[1], 0xDD);
    return _mm512_shuffle_f32x4(sums, sums, 0xD8);
}

// Dot products of P pairs of queries with eight keys, of which only `count` exist.
template <int P, class T>
FD_OP void dots16(const float* q, const T* keys, long dim, long count, VW (&dots)[P]) {
    VW acc[P][8];
    const T* key[8];
    FD_UNROLL
    for (int i = 0; i < 8; ++i) {
        key[i] = keys + (i < count ? i : count - 1) * dim;
        FD_UNROLL
        for (int p = 0; p < P; ++p) acc[p][i] = _mm512_setzero_ps();
    }
    for (long d = 0; d < dim; d += 8) {
        VW a[P];
        FD_UNROLL
        for (int p = 0; p < P; ++p) a[p] = _mm512_loadu_ps(q + 2 * (p * dim + d));
        FD_UNROLL
        for (int i = 0; i < 8; ++i) {
            const VW k = twice(key[i] + d);
            FD_UNROLL
            for (int p = 0; p < P; ++p) acc[p][i] = _mm512_fmadd_ps(a[p], k, acc[p][i]);
        }
    }
    FD_UNROLL
    for (int p = 0; p < P; ++p) dots[p] = sums16(acc[p]);
}

struct Queries {
    std::vector<float>& packed;  // pairs of queries, eight numbers of each in turn; the last may stand beside itself
    long dim;

    Queries(const std::vector<const float*>& q, long d, std::vector<float>& memory) : packed(memory), dim(d) {
        const size_t n = q.size(), whole = (n + 1) / 2 * 2;
        if (packed.size() < whole * dim) packed.resize(whole * dim);
        for (size_t i = 0; i < whole; ++i) {
            const float *from = q[std::min(i, n - 1)], *stop = from + dim;
            float* to = packed.data() + i / 2 * 2 * dim + i % 2 * 8;
            for (; from < stop; from += 8, to += 16) write(to, read<V8>(from));
        }
    }

    // to[i * step + j] = scale * (query first + i . key j) for up to four queries and eight keys, of which `count` exist.
    // `first` is even.
    template <class T>
    void scores(long first, long n, const T* keys, long count, float scale, float* to, long step) const {
        const float* q = packed.data() + first * dim;
        const auto put = [&](VW dots, long i) FD_HERE {
            const VW scaled = dots * splat<VW>(scale);
            _mm256_storeu_ps(to + i * step, _mm512_castps512_ps256(scaled));
            if (i + 1 < n) _mm256_storeu_ps(to + (i + 1) * step, _mm512_extractf32x8_ps(scaled, 1));
        };
        if (n > 2) {
            VW dots[2];
            dots16<2>(q, keys, dim, count, dots);
            put(dots[0], 0);
            put(dots[1], 2);
        } else {
            VW dots[1];
            dots16<1>(q, keys, dim, count, dots);
            put(dots[0], 0);
        }
    }
};
