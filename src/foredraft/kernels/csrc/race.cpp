// The coupled rule's draw: argmin of E_x / p_x, where the exponentials E are a function of seed, position and token.
//
// The numbers are those of sampling/noise.py: Philox4x64-10 (Salmon 2011), counter {block + 1, purpose, position, position},
// key {seed, 0}, token x on word x % 4 of block x / 4. Few of them are ever turned into exponentials: -log u is at least
// 1 - u, so that a token can only win if 1 - u is under p times the best quotient so far. Blocks whose tokens have no
// probability, which filters leave in plenty, are not drawn at all.
#include <cmath>
#include <cstdint>

namespace {

constexpr uint64_t kCoupled = 3;  // sampling.noise.Purpose.COUPLED

inline void multiply(uint64_t a, uint64_t b, uint64_t& high, uint64_t& low) {
    const unsigned __int128 product = static_cast<unsigned __int128>(a) * b;
    high = static_cast<uint64_t>(product >> 64);
    low = static_cast<uint64_t>(product);
}

inline void philox(uint64_t (&c)[4], uint64_t k0) {
    uint64_t k1 = 0;
    for (int round = 0; round < 10; ++round) {
        uint64_t high0, low0, high1, low1;
        multiply(0xD2E7470EE14C6C93u, c[0], high0, low0);
        multiply(0xCA5A826395121157u, c[2], high1, low1);
        const uint64_t a = high1 ^ c[1] ^ k0, b = high0 ^ c[3] ^ k1;
        c[0] = a;
        c[1] = low1;
        c[2] = b;
        c[3] = low0;
        k0 += 0x9E3779B97F4A7C15u;
        k1 += 0xBB67AE8584CAA73Bu;
    }
}

template <class T>
long race(const T* p, long n, uint64_t seed, uint64_t position) {
    double best = HUGE_VAL, total = 0.0;
    long winner = -1;
    for (long first = 0; first < n; first += 4) {
        const long count = n - first < 4 ? n - first : 4;
        double mass = 0.0;
        for (long i = 0; i < count; ++i) mass += static_cast<double>(p[first + i]);
        total += mass;
        if (mass == 0.0) continue;
        uint64_t c[4] = {static_cast<uint64_t>(first / 4) + 1, kCoupled, position, position};
        philox(c, seed);
        for (long i = 0; i < count; ++i) {
            const double chance = static_cast<double>(p[first + i]);
            const double u = (static_cast<double>(c[i] >> 12) + 0.5) * 0x1p-52;
            if (!(chance > 0.0) || (1.0 - u) * (1.0 - 1e-15) > best * chance) continue;
            const double quotient = -std::log(u) / chance;
            if (quotient < best) {
                best = quotient;
                winner = first + i;
            }
        }
    }
    return total > 0.0 && total < HUGE_VAL ? winner : -1;
}

}  // namespace

extern "C" {

// The winning token of a row of `n` probabilities (float, or double if `wide`); -1 if the row has no mass, or NaN.
long fd_race(const void* p, int wide, long n, uint64_t seed, uint64_t position) {
    if (wide) return race(static_cast<const double*>(p), n, seed, position);
    return race(static_cast<const float*>(p), n, seed, position);
}

}  // extern "C"
