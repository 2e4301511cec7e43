// Passes over rows for AVX-512: those of AVX2 with exponentials of sixteen numbers at once.
#include <cmath>
#include <cstring>

#include "law.h"
#include "layout.h"

#if defined(__x86_64__) && defined(__GNUC__)
#if defined(__clang__)
#pragma clang attribute push(__attribute__((target("avx2,fma,avx512f,avx512dq,avx512vl"))), apply_to = function)
#else
#pragma GCC push_options
#pragma GCC target("avx2,fma,avx512f,avx512dq,avx512vl")
#pragma GCC diagnostic push  // GCC's own header reads what it leaves undefined (bug 105593)
#pragma GCC diagnostic ignored "-Wuninitialized"
#pragma GCC diagnostic ignored "-Wmaybe-uninitialized"
#endif
#include <immintrin.h>
#define FD_OP inline __attribute__((always_inline))
#define FD_FMA(a, b, c) fused(a, b, c)
#define FD_BITS(mask) _mm256_movemask_ps((__m256)(mask))
namespace foredraft {
namespace {
using V8 = __m256;
FD_OP V8 fused(V8 a, V8 b, V8 c) { return _mm256_fmadd_ps(a, b, c); }
FD_OP __m512 fused(__m512 a, __m512 b, __m512 c) { return _mm512_fmadd_ps(a, b, c); }

FD_OP void pack(int hits, __m256i i, V8 v, int32_t* to_i, float* to_v) {
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(to_i), _mm256_maskz_compress_epi32(static_cast<__mmask8>(hits), i));
    _mm256_storeu_ps(to_v, _mm256_maskz_compress_ps(static_cast<__mmask8>(hits), v));
}
#define FD_PACK(hits, i, v, to_i, to_v) pack(hits, (__m256i)(i), v, to_i, to_v)

#define FD_EXP16(x, s, f, p, q)                                                                                  \
    do {                                                                                                         \
        const __m512 shift = _mm512_broadcast_f32x8(s), factor = _mm512_broadcast_f32x8(f);                      \
        const __m512 both = exponential((_mm512_loadu_ps(x) - shift) * factor);                                  \
        p = _mm512_castps512_ps256(both), q = _mm512_extractf32x8_ps(both, 1);                                   \
    } while (false)
#include "law_body.h"
}  // namespace
const RowKernels kRowsAvx512 = kRows;
}  // namespace foredraft
#if defined(__clang__)
#pragma clang attribute pop
#else
#pragma GCC diagnostic pop
#pragma GCC pop_options
#endif
#else
namespace foredraft {
const RowKernels kRowsAvx512 = kRowsPortable;
}
#endif
