// What the processor's multipliers give at most: sums of byte products in registers alone, without memory, decoding or
// scales. benchmarks/kernels.py holds products of many rows against it, as it holds those of one row against memory.
#include "layout.h"

#if defined(__x86_64__) && defined(__GNUC__)
#include <immintrin.h>

namespace {

constexpr int kSums = 8;  // enough running sums to hide the instructions' latency

__attribute__((target("avx2"))) long sums_avx2(long rounds) {
    __m256i sum[kSums], weights = _mm256_set1_epi8(15), inputs = _mm256_set1_epi8(1);
    for (auto& s : sum) s = _mm256_setzero_si256();
    for (long i = 0; i < rounds; ++i) {
        _Pragma("GCC unroll 8")
        for (auto& s : sum) {
            __m256i products = _mm256_maddubs_epi16(weights, inputs);
            asm volatile("" : "+x"(products));  // made anew each time
            s = _mm256_add_epi16(s, products);
            asm volatile("" : "+x"(s));
        }
    }
    return rounds * kSums * 32;
}

__attribute__((target("avx512f,avx512vnni"))) long sums_avx512(long rounds) {
    __m512i sum[kSums], weights = _mm512_set1_epi8(15), inputs = _mm512_set1_epi8(1);
    for (auto& s : sum) s = _mm512_setzero_si512();
    for (long i = 0; i < rounds; ++i) {
        _Pragma("GCC unroll 8")
        for (auto& s : sum) {
            s = _mm512_dpbusd_epi32(s, weights, inputs);
            asm volatile("" : "+v"(s));
        }
    }
    return rounds * kSums * 64;
}

}  // namespace
#endif

// Byte products that the loop of an instruction set has added up; 0 where there is none.
extern "C" long fd_ceiling(int isa, long rounds) {
#if defined(__x86_64__) && defined(__GNUC__)
    using namespace foredraft;
    if (usable_isa(isa) == kIsaAvx512) return sums_avx512(rounds);
    if (usable_isa(isa) == kIsaAvx2) return sums_avx2(rounds);
#endif
    (void)isa, (void)rounds;
    return 0;
}
