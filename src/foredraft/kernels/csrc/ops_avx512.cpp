// Row-local operations for AVX-512: sixteen numbers at a time where they do not meet; in attention's scores, whose sums
// run over eight lanes, two keys in the halves of a register.
#include <algorithm>
#include <cmath>
#include <cstring>
#include <vector>

#include "ops.h"

#if defined(__x86_64__) && defined(__GNUC__)
#if defined(__clang__)
#pragma clang attribute push(__attribute__((target("avx2,fma,f16c,avx512f,avx512bw,avx512dq,avx512vl"))), apply_to = function)
#else
#pragma GCC push_options
#pragma GCC target("avx2,fma,f16c,avx512f,avx512bw,avx512dq,avx512vl")
#endif
#include <immintrin.h>
#pragma GCC diagnostic ignored "-Wmaybe-uninitialized"  // GCC's own header, PR 105593
#pragma GCC diagnostic ignored "-Wuninitialized"
#define FD_HERE __attribute__((always_inline))
#define FD_OP inline __attribute__((always_inline))
#define FD_UNROLL _Pragma("GCC unroll 32")
#define FD_FMA(a, b, c) fused(a, b, c)
namespace foredraft {
namespace {
using V8 = __m256;
using VW = __m512;
FD_OP V8 fused(V8 a, V8 b, V8 c) { return _mm256_fmadd_ps(a, b, c); }
FD_OP VW fused(VW a, VW b, VW c) { return _mm512_fmadd_ps(a, b, c); }
FD_OP void add_eights(V8& total, VW v) {
    total += _mm512_castps512_ps256(v);
    total += _mm512_extractf32x8_ps(v, 1);
}
#define FD_SCORES "scores16.h"
#include "ops_body.h"
}  // namespace
const Ops kOpsAvx512 = kOps;
}  // namespace foredraft
#if defined(__clang__)
#pragma clang attribute pop
#else
#pragma GCC pop_options
#endif
#else
namespace foredraft {
const Ops kOpsAvx512 = kOpsPortable;
}
#endif
