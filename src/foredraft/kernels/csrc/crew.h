// What the whole passes share: one thread's view of a team that goes through stages together. Rows are shared out where
// they are independent, outputs in the products; no sum is ever split, so neither threads nor company change a bit.
#pragma once
#include <algorithm>
#include <vector>

#include "barrier.h"
#include "linear.h"
#include "pass.h"

#ifdef _OPENMP
#include <omp.h>
#endif

namespace foredraft {

// Rounded activations of one pass, for the products that read them.
struct Rounded {
    Scratch wide, narrow;

    // Room for `rows` rows of up to `widest` inputs.
    void reserve(int64_t activations, size_t rows, int64_t widest) {
        if (activations == kFloat) return;
        const size_t blocks = rows * static_cast<size_t>(widest / 32);
        wide.reserve(blocks);
        if (activations == kInt8) narrow.reserve(blocks);
    }
    Scratch& of(int kind) { return kind == kInt8 ? narrow : wide; }
};

inline void grow(std::vector<float>& v, size_t size) {
    if (v.size() < size) v.resize(size);
}

constexpr long kQueryTile = 16;  // queries at most that share a reading of keys and values

// Items of work that are enough for a team to finish together.
inline long items(long team) { return 3 * team; }

// Into how many tiles the queries of one segment and kv head are cut, of `lists` such lists: a tile is small enough for its
// scores to stay near, and there are enough of them for threads to finish together.
inline long tiles(long queries, long lists, long team) {
    const long small = (queries + kQueryTile - 1) / kQueryTile, fair = team > 1 ? (items(team) + lists - 1) / lists : 1;
    return std::min(queries, std::max(small, fair));
}

class Crew {
  public:
    Crew(int64_t isa, int64_t activations, Rounded& rounded, Shares& shares, Barrier& barrier,
         int thread, int team)
        : isa_(static_cast<int>(isa)), activations_(static_cast<int>(activations)), rounded_(rounded), shares_(shares),
          barrier_(barrier), ops_(isa == kIsaAvx512 ? kOpsAvx512 : isa == kIsaAvx2 ? kOpsAvx2 : kOpsPortable), thread_(thread), team_(team) {}

  protected:
    const int isa_, activations_;
    Rounded& rounded_;
    Shares& shares_;  // of each stage that hands out its work
    Barrier& barrier_;
    const Ops& ops_;
    const int thread_, team_;
    size_t stage_ = 0;

    void meet() {
        if (team_ > 1) barrier_.meet(team_);
    }

    template <class F>
    void each_row(long rows, F f) {
        for (long r = rows * thread_ / team_; r < rows * (thread_ + 1) / team_; ++r) f(r);
        meet();
    }

    // Which kinds of rounded activations the parts of a product read, as bits.
    unsigned kinds(const Product& p) const {
        unsigned found = 0;
        for (long i = 0; i < p.parts; ++i) found |= 1u << usable(static_cast<int>(p.part[i].format), activations_);
        return found & ~(1u << kFloat);
    }

    // Rounds inputs [column, column + count) of one of n rows for `next`, by the thread that has just made them.
    void round(const Product& next, const float* x, long n, long row, long column, long count) {
        const unsigned wanted = kinds(next);
        for (const int kind : {kInt16, kInt8}) {
            if (wanted & (1u << kind)) {
                const float* from = x + row * next.in + column;
                quantise_blocks(isa_, kind, from, column / 32, count / 32, row, n, rounded_.of(kind));
            }
        }
    }

    // y (+)= x W^T for all parts; x must be complete and rounded, y is complete when this returns.
    void product(const Product& product, const float* x, long n, float* y, long ldy, bool add) {
        outputs(product, x, n, y, ldy, add);
        meet();
    }

    // The same, complete once the threads have met.
    void outputs(const Product& product, const float* x, long n, float* y, long ldy, bool add) {
        for (long i = 0; i < product.parts; ++i) {
            const Matrix& a = product.part[i];
            const int format = static_cast<int>(a.format), kind = usable(format, activations_);
            const Linear l{format, a.weights, a.out, product.in, x, product.in, n, a.bias, y, ldy, isa_, kind, add};
            linear_units(l, rounded_.of(kind).view(product.in, n), shares_.of(stage_++, thread_, team_));
            y += a.out;
        }
    }

    // inner = act(gate) * up for rows of `gates`, gate before up, rounded for `next`. Slices of 128 numbers (four blocks of
    // activations), so that one row keeps all threads busy.
    void gated(const Product& next, const float* gates, long rows, long width, bool tanh_gelu, float* inner) {
        const long slices = (width + 127) / 128;
        each_row(rows * slices, [&](long item) {
            const long r = item / slices, from = item % slices * 128, n = std::min(128L, width - from);
            const float* g = gates + 2 * r * width + from;
            ops_.gate(g, g + width, n, tanh_gelu, inner + r * width + from);
            round(next, inner, rows, r, from, n);
        });
    }
};

// Runs body(thread, team) on `threads` threads.
template <class F>
void with_team(int64_t threads, const F& body) {
#ifdef _OPENMP
    if (threads > 1) {
#pragma omp parallel num_threads(static_cast<int>(threads))
        body(omp_get_thread_num(), omp_get_num_threads());
        return;
    }
#endif
    body(0, 1);
}

}  // namespace foredraft
