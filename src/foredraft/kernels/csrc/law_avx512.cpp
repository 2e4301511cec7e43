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
#define FD_FMA(a, b, c) _mm256_fmadd_ps(a, b, c)
#define FD_BITS(mask) _mm256_movemask_ps((__m256)(mask))
namespace foredraft {
namespace {
using V8 = __m256;

FD_OP void pack(int hits, __m256i i, V8 v, int32_t* to_i, float* to_v) {
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(to_i), _mm256_maskz_compress_epi32(static_cast<__mmask8>(hits), i));
    _mm256_storeu_ps(to_v, _mm256_maskz_compress_ps(static_cast<__mmask8>(hits), v));
}
#define FD_PACK(hits, i, v, to_i, to_v) pack(hits, (__m256i)(i), v, to_i, to_v)

// exp8 of law_body.h, operation by operation.
FD_OP __m512 exp16(__m512 x) {
    const __m512 low = _mm512_set1_ps(-86.6f), magic = _mm512_set1_ps(12582912.0f);
    const __m512 bounded = _mm512_max_ps(x, low);
    const __m512 t = _mm512_fmadd_ps(bounded, _mm512_set1_ps(1.44269504f), magic);
    const __m512 n = _mm512_sub_ps(t, magic);
    __m512 r = _mm512_fmadd_ps(n, _mm512_set1_ps(-0.693145752f), bounded);
    r = _mm512_fmadd_ps(n, _mm512_set1_ps(-1.42860677e-6f), r);
    __m512 p = _mm512_set1_ps(1.0f / 720);
    p = _mm512_fmadd_ps(p, r, _mm512_set1_ps(1.0f / 120));
    p = _mm512_fmadd_ps(p, r, _mm512_set1_ps(1.0f / 24));
    p = _mm512_fmadd_ps(p, r, _mm512_set1_ps(1.0f / 6));
    p = _mm512_fmadd_ps(p, r, _mm512_set1_ps(0.5f));
    p = _mm512_fmadd_ps(p, r, _mm512_set1_ps(1.0f));
    p = _mm512_fmadd_ps(p, r, _mm512_set1_ps(1.0f));
    const __m512i power = _mm512_slli_epi32(_mm512_castps_si512(t), 23);
    const __m512i result = _mm512_add_epi32(_mm512_castps_si512(p), power);
    return _mm512_castsi512_ps(_mm512_maskz_mov_epi32(_mm512_cmp_ps_mask(x, low, _CMP_NLT_UQ), result));
}
FD_OP void exp_pair(const float* x, V8 s, V8 f, V8* p, V8* q) {
    const __m512 shift = _mm512_broadcast_f32x8(s), factor = _mm512_broadcast_f32x8(f);
    const __m512 both = exp16(_mm512_mul_ps(_mm512_sub_ps(_mm512_loadu_ps(x), shift), factor));
    *p = _mm512_castps512_ps256(both);
    *q = _mm512_extractf32x8_ps(both, 1);
}
#define FD_EXP16(x, s, f, p, q) exp_pair(x, s, f, &p, &q)
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
