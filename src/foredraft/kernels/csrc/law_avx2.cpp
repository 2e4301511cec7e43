// Passes over rows for AVX2 + FMA.
#include <cmath>
#include <cstring>

#include "law.h"
#include "layout.h"

#if defined(__x86_64__) && defined(__GNUC__)
#if defined(__clang__)
#pragma clang attribute push(__attribute__((target("avx2,fma"))), apply_to = function)
#else
#pragma GCC push_options
#pragma GCC target("avx2,fma")
#endif
#include <immintrin.h>
#define FD_OP inline __attribute__((always_inline))
#define FD_FMA(a, b, c) _mm256_fmadd_ps(a, b, c)
#define FD_BITS(mask) _mm256_movemask_ps((__m256)(mask))
namespace foredraft {
namespace {
using V8 = __m256;

// For every set of lanes: its lanes, a hexadecimal digit each, the first one lowest.
struct Order {
    uint32_t digits[256];
};
constexpr Order make_order() {
    Order order{};
    for (int hits = 0; hits < 256; ++hits) {
        int at = 0;
        for (int lane = 0; lane < 8; ++lane) {
            if (hits >> lane & 1) order.digits[hits] |= static_cast<uint32_t>(lane) << 4 * at++;
        }
    }
    return order;
}
constexpr Order kOrder = make_order();

FD_OP void pack(int hits, __m256i i, V8 v, int32_t* to_i, float* to_v) {
    const __m256i shifts = _mm256_setr_epi32(0, 4, 8, 12, 16, 20, 24, 28);  // permutations read the lowest three bits
    const __m256i order = _mm256_srlv_epi32(_mm256_set1_epi32(static_cast<int>(kOrder.digits[hits])), shifts);
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(to_i), _mm256_permutevar8x32_epi32(i, order));
    _mm256_storeu_ps(to_v, _mm256_permutevar8x32_ps(v, order));
}
#define FD_PACK(hits, i, v, to_i, to_v) pack(hits, (__m256i)(i), v, to_i, to_v)
#include "law_body.h"
}  // namespace
const RowKernels kRowsAvx2 = kRows;
}  // namespace foredraft
#if defined(__clang__)
#pragma clang attribute pop
#else
#pragma GCC pop_options
#endif
#else
namespace foredraft {
const RowKernels kRowsAvx2 = kRowsPortable;
}
#endif
