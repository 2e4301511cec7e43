// Row-local operations for AVX2 + FMA.
#include <algorithm>
#include <cmath>
#include <cstring>
#include <vector>

#include "ops.h"

#if defined(__x86_64__) && defined(__GNUC__)
#if defined(__clang__)
#pragma clang attribute push(__attribute__((target("avx2,fma,f16c"))), apply_to = function)
#else
#pragma GCC push_options
#pragma GCC target("avx2,fma,f16c")
#endif
#include <immintrin.h>
#define FD_HERE __attribute__((always_inline))
#define FD_OP inline __attribute__((always_inline))
#define FD_UNROLL _Pragma("GCC unroll 32")
#define FD_FMA(a, b, c) _mm256_fmadd_ps(a, b, c)
namespace foredraft {
namespace {
using V8 = __m256;
using VW = V8;
#define FD_SCORES "scores8.h"
#include "ops_body.h"
}  // namespace
const Ops kOpsAvx2 = kOps;
}  // namespace foredraft
#if defined(__clang__)
#pragma clang attribute pop
#else
#pragma GCC pop_options
#endif
#else
namespace foredraft {
const Ops kOpsAvx2 = kOpsPortable;
}
#endif
