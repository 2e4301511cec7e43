// How the AVX2 kernels read each format. Included by linear_avx2.cpp only, inside its target region and namespace.

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
FD_INLINE __m256i nibble_bytes(const uint8_t* w, int s) {
    return _mm256_and_si256(_mm256_srli_epi16(words(w + 32 * (s / 2)), 4 * (s % 2)), splat(0x0F0F0F0F));
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
