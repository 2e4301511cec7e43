// Scores by vectors of sixteen lanes, for attend_body.h: eight lanes of one key beside eight of the next, so that the
// lanes of every sum are those of scores8.h.

constexpr int kMixVectors[4] = {4, 4, 4, 4};

// Eight numbers of two keys, from `d` on.
FD_OP VW pair(const float* a, const float* b, long d, long) {
    return _mm512_insertf32x8(_mm512_castps256_ps512(_mm256_loadu_ps(a + d)), _mm256_loadu_ps(b + d), 1);
}
// A bfloat16 is the upper half of a float. One instruction takes eight of either key out of 32, of which no more than
// `left` are the keys' own.
FD_OP VW pair(const uint16_t* a, const uint16_t* b, long d, long left) {
    alignas(64) static constexpr int16_t kFrom[4][32] = {
#define FD_ROW(p) {0, p, 0, p + 1, 0, p + 2, 0, p + 3, 0, p + 4, 0, p + 5, 0, p + 6, 0, p + 7, 0, p + 32, 0, p + 33, 0, p + 34, 0, p + 35, 0, p + 36, 0, p + 37, 0, p + 38, 0, p + 39}
        FD_ROW(0), FD_ROW(8), FD_ROW(16), FD_ROW(24)
#undef FD_ROW
    };
    const long whole = d / 32 * 32;
    const __mmask32 own = left >= 32 ? ~0u : (1u << left) - 1;
    const __m512i x = _mm512_maskz_loadu_epi16(own, a + whole), y = _mm512_maskz_loadu_epi16(own, b + whole);
    return _mm512_castsi512_ps(_mm512_maskz_permutex2var_epi16(0xAAAAAAAAu, x, _mm512_load_si512(kFrom[d % 32 / 8]), y));
}

// Sums, by sum8's tree, of four pairs of keys of one query, all but the last step: two lanes a key.
FD_OP VW sums2(const VW (&a)[4]) {
    VW b[2];  // four lanes of keys 4i … 4i + 3
    FD_UNROLL
    for (int i = 0; i < 2; ++i) {
        b[i] = _mm512_shuffle_f32x4(a[2 * i], a[2 * i + 1], 0x88) + _mm512_shuffle_f32x4(a[2 * i], a[2 * i + 1], 0xDD);
    }
    return _mm512_shuffle_ps(b[0], b[1], 0x44) + _mm512_shuffle_ps(b[0], b[1], 0xEE);
}

// The last step for two queries: eight sums of the first, then eight of the second.
FD_OP VW sums16(VW a, VW b) {
    const __m512i order = _mm512_setr_epi32(0, 4, 8, 12, 1, 5, 9, 13, 2, 6, 10, 14, 3, 7, 11, 15);
    return _mm512_permutexvar_ps(order, _mm512_shuffle_ps(a, b, 0x88) + _mm512_shuffle_ps(a, b, 0xDD));
}

// Dot products of Q queries with eight keys, of which only `count` exist, as sums2 leaves them.
template <int Q, class T>
FD_OP void dots16(const float* const* q, const T* keys, long dim, long count, VW (&dots)[Q]) {
    VW acc[Q][4];
    const T* key[8];
    FD_UNROLL
    for (int i = 0; i < 8; ++i) key[i] = keys + (i < count ? i : count - 1) * dim;
    FD_UNROLL
    for (int r = 0; r < Q; ++r) {
        FD_UNROLL
        for (int i = 0; i < 4; ++i) acc[r][i] = _mm512_setzero_ps();
    }
    const auto add = [&](long d, long left) FD_HERE {
        VW k[4];
        FD_UNROLL
        for (int i = 0; i < 4; ++i) k[i] = pair(key[2 * i], key[2 * i + 1], d, left);
        FD_UNROLL
        for (int r = 0; r < Q; ++r) {
            const VW a = _mm512_broadcast_f32x8(_mm256_loadu_ps(q[r] + d));
            FD_UNROLL
            for (int i = 0; i < 4; ++i) acc[r][i] = _mm512_fmadd_ps(a, k[i], acc[r][i]);
        }
    };
    long d = 0;
    for (; d + 32 <= dim; d += 32) {
        FD_UNROLL
        for (int part = 0; part < 4; ++part) add(d + 8 * part, 32);
    }
    for (const long left = dim - d; d < dim; d += 8) add(d, left);
    FD_UNROLL
    for (int r = 0; r < Q; ++r) dots[r] = sums2(acc[r]);
}

struct Queries {
    static constexpr long kAtOnce = 6;
    const std::vector<const float*>& q;
    long dim;

    Queries(const std::vector<const float*>& query, long d) : q(query), dim(d) {}

    // to[i * step + j] = scale * (query first + i . key j) for up to kAtOnce queries and eight keys, of which `count` exist.
    template <class T>
    void scores(long first, long n, const T* keys, long count, float scale, float* to, long step) const {
        switch (n) {
            case 1: return some<1>(first, keys, count, scale, to, step);
            case 2: return some<2>(first, keys, count, scale, to, step);
            case 3: return some<3>(first, keys, count, scale, to, step);
            case 4: return some<4>(first, keys, count, scale, to, step);
            case 5: return some<5>(first, keys, count, scale, to, step);
            default: return some<6>(first, keys, count, scale, to, step);
        }
    }

  private:
    template <int Q, class T>
    void some(long first, const T* keys, long count, float scale, float* to, long step) const {
        VW dots[Q];
        dots16<Q>(q.data() + first, keys, dim, count, dots);
        FD_UNROLL
        for (int r = 0; r < Q; r += 2) {
            const VW scaled = sums16(dots[r], dots[r + 1 < Q ? r + 1 : r]) * splat<VW>(scale);
            _mm256_storeu_ps(to + r * step, _mm512_castps512_ps256(scaled));
            if (r + 1 < Q) _mm256_storeu_ps(to + (r + 1) * step, _mm512_extractf32x8_ps(scaled, 1));
        }
    }
};
