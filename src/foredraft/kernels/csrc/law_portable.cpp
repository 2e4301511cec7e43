// Passes over rows for any CPU.
#include <cmath>
#include <cstring>

#include "law.h"
#include "layout.h"

#define FD_OP inline
namespace foredraft {
namespace {
using V8 = float __attribute__((vector_size(32)));
using M8 = int32_t __attribute__((vector_size(32)));
inline V8 fused(V8 a, V8 b, V8 c) {
    V8 y;
    for (int i = 0; i < 8; ++i) y[i] = std::fma(a[i], b[i], c[i]);
    return y;
}
inline int bits(M8 mask) {
    int result = 0;
    for (int i = 0; i < 8; ++i) result |= mask[i] ? 1 << i : 0;
    return result;
}
inline void pack(int hits, M8 i, V8 v, int32_t* to_i, float* to_v) {
    for (int lane = 0, at = 0; lane < 8; ++lane) {
        to_i[at] = i[lane];
        to_v[at] = v[lane];
        at += hits >> lane & 1;
    }
}
#define FD_FMA(a, b, c) fused(a, b, c)
#define FD_BITS(mask) bits(mask)
#define FD_PACK(hits, i, v, to_i, to_v) pack(hits, i, v, to_i, to_v)
#include "law_body.h"
}  // namespace
const RowKernels kRowsPortable = kRows;
}  // namespace foredraft
