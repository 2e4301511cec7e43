// Row-local operations for any CPU.
#include "ops.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <vector>

#define FD_HERE __attribute__((always_inline))
#define FD_OP inline
#define FD_UNROLL
namespace foredraft {
namespace {
using V8 = float __attribute__((vector_size(32)));
using VW = V8;
inline V8 fused(V8 a, V8 b, V8 c) {
    V8 y;
    for (int i = 0; i < 8; ++i) y[i] = std::fma(a[i], b[i], c[i]);
    return y;
}
#define FD_FMA(a, b, c) fused(a, b, c)
#define FD_SCORES "scores8.h"
#include "ops_body.h"
}  // namespace
const Ops kOpsPortable = kOps;
}  // namespace foredraft
