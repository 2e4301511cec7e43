// Draws from rows of probabilities, and what is asked of rows before: see sampling/draw.py and verify/_chain.py.
#include "law_passes.h"

using namespace foredraft;

namespace {

template <class P>
long argmax(P passes, const void* scores, long count, long n, int64_t* tokens, int threads) {
    std::atomic<long> bad{count};
    each_row(count, count * n, threads, [&](long r) {
        tokens[r] = passes.argmax(static_cast<const typename P::T*>(scores) + r * n, n);
        if (tokens[r] < 0) lower(bad, r);
    });
    return bad;
}

template <class P>
void masses(P passes, const void* p, long count, long n, const int64_t* tokens, double* sums, double* least, double* picked,
            int threads) {
    using T = typename P::T;
    each_row(count, count * n, threads, [&](long r) {
        const T* row = static_cast<const T*>(p) + r * n;
        T low;
        passes.mass(row, n, &sums[r], &low);
        least[r] = low;
        if (tokens) picked[r] = tokens[r] >= 0 ? row[tokens[r]] : 0.0;
    });
}

}  // namespace

extern "C" {

// The first index of the largest score of each row. Returns `count`, or the first row that holds NaN or whose largest
// score is not finite.
long fd_argmax(const void* scores, int wide, long count, long n, int64_t* tokens, int threads, int isa) {
    if (wide) return argmax(Passes64{}, scores, count, n, tokens, threads);
    return argmax(Passes32{rows(isa)}, scores, count, n, tokens, threads);
}

// Sum and least entry of each row, and its entry at tokens[r], 0 where that is negative; `tokens` may be null.
void fd_masses(const void* p, int wide, long count, long n, const int64_t* tokens, double* sums, double* least,
               double* picked, int threads, int isa) {
    if (wide) return masses(Passes64{}, p, count, n, tokens, sums, least, picked, threads);
    masses(Passes32{rows(isa)}, p, count, n, tokens, sums, least, picked, threads);
}

// Draws by the inverse of the cumulative distribution from max(wp * p - wq * q, 0), or from wp * p if q is null; entry
// `without` counts as 0, unless negative. `total` receives the mass. Returns -1 if there is none or it is not finite, and
// where u < 0, which asks for the mass alone.
long fd_draw(const void* p, const void* q, int wide, long n, double wp, double wq, long without, double u, double* total,
             int isa) {
    if (wide) return draw(Passes64{}, p, q, n, wp, wq, without, u, total);
    return draw(Passes32{rows(isa)}, p, q, n, wp, wq, without, u, total);
}

}  // extern "C"
