// How the AVX-512 kernels read each format: two neighbouring panels at once, 16 outputs a vector. Included by
// linear_avx512.cpp only, inside its target region and namespace. Every weight has the bits that decode.h gives it.

FD_INLINE __m512i both(const uint8_t* a, const uint8_t* b) {
    const __m256i low = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(a));
    return _mm512_inserti64x4(_mm512_castsi256_si512(low), _mm256_loadu_si256(reinterpret_cast<const __m256i*>(b)), 1);
}
FD_INLINE __m512 both_halves(const uint8_t* a, const uint8_t* b) {
    const __m128i low = _mm_loadu_si128(reinterpret_cast<const __m128i*>(a));
    const __m128i high = _mm_loadu_si128(reinterpret_cast<const __m128i*>(b));
    return _mm512_cvtph_ps(_mm256_inserti128_si256(_mm256_castsi128_si256(low), high, 1));
}
FD_INLINE __m128i both_bytes(const uint8_t* a, const uint8_t* b) {
    return _mm_unpacklo_epi64(_mm_loadl_epi64(reinterpret_cast<const __m128i*>(a)),
                              _mm_loadl_epi64(reinterpret_cast<const __m128i*>(b)));
}
FD_INLINE __m512i splat(int v) { return _mm512_set1_epi32(v); }
FD_INLINE __m512i shifted(__m512i v, int bits) { return bits == 0 ? v : _mm512_srli_epi32(v, bits); }

// A permutation reads the low four bits of a lane only: as a table of 0 … 15 it masks and converts at once.
FD_INLINE __m512 nibble_floats(__m512i v) {
    const __m512 table = _mm512_setr_ps(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15);
    return _mm512_permutexvar_ps(v, table);
}

// A decoder reads one step of two panels: `kStep` inputs, `kSubs` steps a group. get(from, k) gives input from + k of the
// step as floats, where from is a multiple of kTurn and k below it: shifts depend on k alone, so that a short loop serves.
// pair(s) gives inputs 2s and 2s+1 as int16 and quad(s) four inputs in kByteOrder as bytes, both without kOffset.
struct F32 {
    static constexpr int kFormat = kF32, kStep = 8, kTurn = 8, kSubs = 1;
    const uint8_t *a, *b;
    FD_INLINE void open(const uint8_t* first, const uint8_t* second, int) { a = first, b = second; }
    FD_INLINE __m512 get(int from, int k) const { return _mm512_castsi512_ps(both(a + 32 * (from + k), b + 32 * (from + k))); }
};

struct BF16 {
    static constexpr int kFormat = kBF16, kStep = 16, kTurn = 16, kSubs = 1;
    const uint8_t *a, *b;
    FD_INLINE void open(const uint8_t* first, const uint8_t* second, int) { a = first, b = second; }
    FD_INLINE __m512 get(int from, int k) const {
        const __m512i v = both(a + 32 * (from / 2 + k / 2), b + 32 * (from / 2 + k / 2));
        return _mm512_castsi512_ps(k & 1 ? _mm512_and_si512(v, splat(static_cast<int>(0xFFFF0000u))) : _mm512_slli_epi32(v, 16));
    }
};

struct Q8 {
    static constexpr int kFormat = kQ8, kStep = 32, kTurn = 8, kSubs = 1, kOffset = 0;
    static constexpr bool kAdd = false, kSplit = false;
    const uint8_t *a, *b;
    __m512 d;
    FD_INLINE void open(const uint8_t* first, const uint8_t* second, int) {
        a = first + 16, b = second + 16;
        d = both_halves(first, second);
    }
    FD_INLINE __m512 get(int from, int k) const {
        const int left = 24 - 8 * (q8_byte(k) % 4);
        const __m512i v = both(a + 32 * (from / 4 + k / 4), b + 32 * (from / 4 + k / 4));
        return _mm512_mul_ps(d, _mm512_cvtepi32_ps(_mm512_srai_epi32(left == 0 ? v : _mm512_slli_epi32(v, left), 24)));
    }
    FD_INLINE __m512i pair(int s) const {
        const __m512i v = both(a + 32 * (s / 2), b + 32 * (s / 2));
        return _mm512_srai_epi16(s & 1 ? v : _mm512_slli_epi16(v, 8), 8);
    }
    FD_INLINE __m512 scale(int) const { return d; }
    FD_INLINE __m512 add() const { return _mm512_setzero_ps(); }
};

// Four words of nibbles a panel, with a scale and something to add.
struct Nibbles {
    static constexpr int kStep = 32, kTurn = 8;
    static constexpr bool kSplit = false;
    const uint8_t *a, *b;
    __m512 d, m;
    FD_INLINE __m512i word(int i) const { return both(a + 32 * i, b + 32 * i); }
    FD_INLINE __m512 get(int from, int k) const {
        return _mm512_fmadd_ps(d, nibble_floats(shifted(word(from / 8), nibble_shift(k))), m);
    }
    FD_INLINE __m512i pair(int s) const { return _mm512_and_si512(shifted(word(s / 4), 4 * (s % 4)), splat(0x000F000F)); }
    FD_INLINE __m512i quad(int s) const { return _mm512_and_si512(shifted(word(s / 2), 4 * (s % 2)), splat(0x0F0F0F0F)); }
    FD_INLINE __m512 scale(int) const { return d; }
    FD_INLINE __m512 add() const { return m; }
};

struct Q4 : Nibbles {
    static constexpr int kFormat = kQ4, kSubs = 1, kOffset = 8;
    static constexpr bool kAdd = false;
    FD_INLINE void open(const uint8_t* first, const uint8_t* second, int) {
        a = first + 16, b = second + 16;
        d = both_halves(first, second);
        m = _mm512_mul_ps(d, _mm512_set1_ps(-8.0f));
    }
};

struct Q4M : Nibbles {
    static constexpr int kFormat = kQ4M, kSubs = 1, kOffset = 0;
    static constexpr bool kAdd = true;
    FD_INLINE void open(const uint8_t* first, const uint8_t* second, int) {
        a = first + 32, b = second + 32;
        d = both_halves(first, second);
        m = both_halves(first + 16, second + 16);
    }
};

struct Q4K : Nibbles {
    static constexpr int kFormat = kQ4K, kSubs = 8, kOffset = 0;
    static constexpr bool kAdd = true;
    FD_INLINE void open(const uint8_t* first, const uint8_t* second, int sub) {
        const uint8_t *one = first + 32 + 144 * sub, *two = second + 32 + 144 * sub;
        a = one + 16, b = two + 16;
        const __m512 s = _mm512_cvtepi32_ps(_mm512_cvtepu8_epi32(both_bytes(one, two)));
        const __m512 t = _mm512_cvtepi32_ps(_mm512_cvtepu8_epi32(both_bytes(one + 8, two + 8)));
        d = _mm512_mul_ps(both_halves(first, second), s);
        m = _mm512_xor_ps(_mm512_mul_ps(both_halves(first + 16, second + 16), t), _mm512_set1_ps(-0.0f));
    }
};

struct Q6K {
    static constexpr int kFormat = kQ6K, kStep = 32, kTurn = 16, kSubs = 8, kOffset = 32;
    static constexpr bool kAdd = false, kSplit = true;
    const uint8_t *a, *b;
    __m512 d0, d1;
    FD_INLINE void open(const uint8_t* first, const uint8_t* second, int sub) {
        const uint8_t *one = first + 16 + 208 * sub, *two = second + 16 + 208 * sub;
        a = one + 16, b = two + 16;
        const __m512 d = both_halves(first, second);
        d0 = _mm512_mul_ps(d, _mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(both_bytes(one, two))));
        d1 = _mm512_mul_ps(d, _mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(both_bytes(one + 8, two + 8))));
    }
    FD_INLINE __m512i word(int i) const { return both(a + 32 * i, b + 32 * i); }
    FD_INLINE __m512 get(int from, int k) const {
        const __m512i low = _mm512_and_si512(shifted(word(from / 8 + nibble_word(k)), nibble_shift(k)), splat(15));
        const __m512i high = _mm512_and_si512(shifted(word(4 + from / 16), crumb_shift(k)), splat(3));
        const __m512i q = _mm512_sub_epi32(_mm512_or_si512(low, _mm512_slli_epi32(high, 4)), splat(32));
        return _mm512_mul_ps(from == 0 ? d0 : d1, _mm512_cvtepi32_ps(q));
    }
    FD_INLINE __m512i pair(int s) const {
        const __m512i low = _mm512_and_si512(shifted(word(s / 4), 4 * (s % 4)), splat(0x000F000F));
        const __m512i high = _mm512_and_si512(shifted(word(4 + s / 8), 2 * (s % 8)), splat(0x00030003));
        return _mm512_or_si512(low, _mm512_slli_epi32(high, 4));
    }
    FD_INLINE __m512 scale(int half) const { return half ? d1 : d0; }
    FD_INLINE __m512 add() const { return _mm512_setzero_ps(); }
};
