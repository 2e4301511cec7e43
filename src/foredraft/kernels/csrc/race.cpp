// Random numbers of a request, and the coupled rule's draw: argmin of E_x / p_x, where the exponentials E are a function
// of seed, position and token.
//
// The numbers are those of sampling/noise.py: Philox4x64-10 (Salmon 2011), counter {block + 1, purpose, position, anchor},
// key {seed, 0}. In a race the anchor is the position, and token x has word x % 4 of block x / 4. Few words are ever turned
// into exponentials: -log u is at least 1 - u, so that a token can only win if 1 - u is under p times the best quotient so
// far. Blocks whose tokens have no probability, which filters leave in plenty, are not drawn at all.
#include <cmath>
#include <cstdint>

#if defined(__x86_64__) && defined(__GNUC__)
#include <immintrin.h>
#define FD_AVX512 1
#endif

namespace {

constexpr uint64_t kCoupled = 3;  // sampling.noise.Purpose.COUPLED
constexpr uint64_t kMultiply0 = 0xD2E7470EE14C6C93u, kMultiply1 = 0xCA5A826395121157u;
constexpr uint64_t kWeyl0 = 0x9E3779B97F4A7C15u, kWeyl1 = 0xBB67AE8584CAA73Bu;

inline void multiply(uint64_t a, uint64_t b, uint64_t& high, uint64_t& low) {
    const unsigned __int128 product = static_cast<unsigned __int128>(a) * b;
    high = static_cast<uint64_t>(product >> 64);
    low = static_cast<uint64_t>(product);
}

inline void philox(uint64_t (&c)[4], uint64_t k0) {
    uint64_t k1 = 0;
    for (int round = 0; round < 10; ++round) {
        uint64_t high0, low0, high1, low1;
        multiply(kMultiply0, c[0], high0, low0);
        multiply(kMultiply1, c[2], high1, low1);
        const uint64_t a = high1 ^ c[1] ^ k0, b = high0 ^ c[3] ^ k1;
        c[0] = a;
        c[1] = low1;
        c[2] = b;
        c[3] = low0;
        k0 += kWeyl0;
        k1 += kWeyl1;
    }
}

struct Race {
    uint64_t seed, position;
    double best = HUGE_VAL, total = 0.0;
    long winner = -1;

    void try_token(double chance, uint64_t word, long token) {
        const double u = (static_cast<double>(word >> 12) + 0.5) * 0x1p-52;
        if (!(chance > 0.0) || (1.0 - u) * (1.0 - 1e-15) > best * chance) return;
        const double quotient = -std::log(u) / chance;
        if (quotient < best) {
            best = quotient;
            winner = token;
        }
    }
};

// Tokens [first, last) of a row; `first` is a multiple of 4.
template <class T>
void run(Race& race, const T* p, long first, long last) {
    for (; first < last; first += 4) {
        const long count = last - first < 4 ? last - first : 4;
        double mass = 0.0;
        for (long i = 0; i < count; ++i) mass += static_cast<double>(p[first + i]);
        race.total += mass;
        if (mass == 0.0) continue;
        uint64_t c[4] = {static_cast<uint64_t>(first / 4) + 1, kCoupled, race.position, race.position};
        philox(c, race.seed);
        for (long i = 0; i < count; ++i) race.try_token(static_cast<double>(p[first + i]), c[i], first + i);
    }
}

#ifdef FD_AVX512
#ifndef __clang__  // GCC's own header reads what it leaves undefined (bug 105593)
#pragma GCC diagnostic push
#pragma GCC diagnostic ignored "-Wuninitialized"
#pragma GCC diagnostic ignored "-Wmaybe-uninitialized"
#endif
#define FD_HERE __attribute__((target("avx512f,avx512dq")))

// The two halves of a * m, by halves of 32 bits.
FD_HERE inline void multiply8(__m512i a, uint64_t m, __m512i& high, __m512i& low) {
    const __m512i half = _mm512_set1_epi64(0xFFFFFFFF);
    const __m512i m0 = _mm512_set1_epi64(static_cast<long long>(m & 0xFFFFFFFF));
    const __m512i m1 = _mm512_set1_epi64(static_cast<long long>(m >> 32));
    const __m512i a1 = _mm512_srli_epi64(a, 32);
    const __m512i p00 = _mm512_mul_epu32(a, m0), p10 = _mm512_mul_epu32(a1, m0);
    const __m512i p01 = _mm512_mul_epu32(a, m1), p11 = _mm512_mul_epu32(a1, m1);
    const __m512i x = _mm512_add_epi64(p10, _mm512_srli_epi64(p00, 32));
    const __m512i y = _mm512_add_epi64(p01, _mm512_and_epi64(x, half));
    high = _mm512_add_epi64(_mm512_add_epi64(p11, _mm512_srli_epi64(x, 32)), _mm512_srli_epi64(y, 32));
    low = _mm512_mask_blend_epi32(0xAAAA, p00, _mm512_slli_epi64(y, 32));
}

// Eight blocks at a time; returns where it stopped, less than 32 tokens before `last`.
FD_HERE long run8(Race& race, const float* p, long first, long last) {
    const __m512i lane = _mm512_set_epi64(7, 6, 5, 4, 3, 2, 1, 0);
    const __m512i position = _mm512_set1_epi64(static_cast<long long>(race.position));
    const __m512i coupled = _mm512_set1_epi64(kCoupled);
    // of 32 probabilities in two vectors, every fourth, from the j-th on
    const __m512i every = _mm512_setr_epi32(0, 4, 8, 12, 16, 20, 24, 28, 0, 4, 8, 12, 16, 20, 24, 28);
    const __m512d half = _mm512_set1_pd(0.5), unit = _mm512_set1_pd(0x1p-52), one = _mm512_set1_pd(1.0);
    const __m512d nearly = _mm512_set1_pd(1.0 - 1e-15);
    __m512d total = _mm512_setzero_pd();
    for (; first + 32 <= last; first += 32) {
        const __m512 low = _mm512_loadu_ps(p + first), high = _mm512_loadu_ps(p + first + 16);
        const __mmask16 some = _mm512_cmp_ps_mask(low, _mm512_setzero_ps(), _CMP_NEQ_UQ) |
                               _mm512_cmp_ps_mask(high, _mm512_setzero_ps(), _CMP_NEQ_UQ);
        if (!some) continue;
        __m512i c0 = _mm512_add_epi64(_mm512_set1_epi64(first / 4 + 1), lane), c1 = coupled, c2 = position, c3 = position;
        uint64_t k0 = race.seed, k1 = 0;
        for (int round = 0; round < 10; ++round) {
            __m512i high0, low0, high1, low1;
            multiply8(c0, kMultiply0, high0, low0);
            multiply8(c2, kMultiply1, high1, low1);
            c0 = _mm512_ternarylogic_epi64(high1, c1, _mm512_set1_epi64(static_cast<long long>(k0)), 0x96);
            c2 = _mm512_ternarylogic_epi64(high0, c3, _mm512_set1_epi64(static_cast<long long>(k1)), 0x96);
            c1 = low1;
            c3 = low0;
            k0 += kWeyl0;
            k1 += kWeyl1;
        }
        const __m512i words[4] = {c0, c1, c2, c3};
        const __m512d best = _mm512_set1_pd(race.best);
        uint32_t hits = 0;  // bit 4 * block + word
        for (int j = 0; j < 4; ++j) {
            const __m512i index = _mm512_add_epi32(every, _mm512_set1_epi32(j));
            const __m256 mine = _mm512_castps512_ps256(_mm512_permutex2var_ps(low, index, high));
            const __m512d chance = _mm512_cvtps_pd(mine);
            total = _mm512_add_pd(total, chance);
            const __m512d whole = _mm512_cvtepu64_pd(_mm512_srli_epi64(words[j], 12));
            const __m512d u = _mm512_mul_pd(_mm512_add_pd(whole, half), unit);
            const __m512d least = _mm512_mul_pd(_mm512_sub_pd(one, u), nearly);
            __mmask8 mask = _mm512_cmp_pd_mask(chance, _mm512_setzero_pd(), _CMP_GT_OQ);
            mask = _mm512_mask_cmp_pd_mask(mask, least, _mm512_mul_pd(best, chance), _CMP_LE_OQ);
            for (uint32_t m = mask; m; m &= m - 1) hits |= 1u << (4 * __builtin_ctz(m) + j);
        }
        if (!hits) continue;
        uint64_t word[4][8];
        for (int j = 0; j < 4; ++j) _mm512_storeu_si512(word[j], words[j]);
        for (; hits; hits &= hits - 1) {
            const int i = __builtin_ctz(hits);
            race.try_token(static_cast<double>(p[first + i]), word[i % 4][i / 4], first + i);
        }
    }
    race.total += _mm512_reduce_add_pd(total);
    return first;
}

bool has_avx512() {
    static const bool has = __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512dq");
    return has;
}
#ifndef __clang__
#pragma GCC diagnostic pop
#endif
#endif

void run(Race& race, const void* p, int wide, long first, long last, int isa) {
    if (wide) return run(race, static_cast<const double*>(p), first, last);
    const float* row = static_cast<const float*>(p);
#ifdef FD_AVX512
    if (isa >= 1 && has_avx512()) first = run8(race, row, first, last);
#endif
    (void)isa;
    run(race, row, first, last);
}

}  // namespace

extern "C" {

// The winning token of a row of `n` probabilities (float, or double if `wide`); -1 if the row has no mass, or NaN. What
// the threads and instructions are changes nothing: least quotient, lowest id on ties.
long fd_race(const void* p, int wide, long n, uint64_t seed, uint64_t position, int threads, int isa) {
    constexpr int kMost = 16;
    constexpr long kWorth = 8192;  // tokens that are worth a thread
    long team = n / kWorth < threads ? n / kWorth : threads;
    team = team < 1 ? 1 : team > kMost ? kMost : team;
#ifndef _OPENMP
    team = 1;
#endif
    Race parts[kMost];
    const auto part = [&](long t) {
        Race mine{seed, position};
        run(mine, p, wide, n / 32 * t / team * 32, t + 1 == team ? n : n / 32 * (t + 1) / team * 32, isa);
        parts[t] = mine;
    };
#ifdef _OPENMP
    if (team > 1) {
#pragma omp parallel for num_threads(team) schedule(static, 1)
        for (long t = 0; t < team; ++t) part(t);
    }
#endif
    if (team == 1) part(0);
    Race all = parts[0];
    for (long t = 1; t < team; ++t) {
        all.total += parts[t].total;
        if (parts[t].best < all.best) {
            all.best = parts[t].best;
            all.winner = parts[t].winner;
        }
    }
    return all.total > 0.0 && all.total < HUGE_VAL ? all.winner : -1;
}

// The first numbers in [0, 1) of `count` streams, at the positions from `first` on.
void fd_uniforms(uint64_t seed, uint64_t purpose, uint64_t first, uint64_t anchor, long count, double* u) {
    for (long i = 0; i < count; ++i) {
        uint64_t c[4] = {1, purpose, first + static_cast<uint64_t>(i), anchor};
        philox(c, seed);
        u[i] = static_cast<double>(c[0] >> 11) * 0x1p-53;
    }
}

}  // extern "C"
