// Threads and tiles of the linears. Outputs are shared out between threads, never the sum along `in`.
#include "linear.h"

#include <algorithm>

#include "barrier.h"

#ifdef _OPENMP
#include <omp.h>
#endif

namespace foredraft {

int usable_isa(int wanted) {
    if (wanted == kIsaNeon) return has_neon() ? kIsaNeon : kNoVectors;
    if (wanted == kIsaAvx512 && has_avx512()) return kIsaAvx512;
    return wanted >= kIsaAvx2 && has_avx2() ? kIsaAvx2 : kNoVectors;
}

const Kernels& kernels(int isa) {
    return isa == kIsaAvx512 ? kAvx512 : isa == kIsaAvx2 ? kAvx2 : isa == kIsaNeon ? kNeon : kPortable;
}

// Rows a tile: what was quickest with the vector registers there are, 32 or 16.
static long tile_rows(const Linear& l) {
    if (l.isa == kIsaAvx512 || l.isa == kIsaNeon) return 8;
    if (l.format <= kBF16) return 6;
    return l.activations != kFloat && l.format != kQ6K ? 5 : 8;
}

void linear_units(const Linear& l, const Quantised& q, const Share& share) {
    const Kernels& k = kernels(l.isa);
    const long count = panels(l.out), units = (count + kUnit - 1) / kUnit;
    const long chunk = std::max(1L, units / (8L * share.team));
    const long most = tile_rows(l), tiles = (l.n + most - 1) / most;
    Tile t{0, 0, nullptr, panel_bytes(l.format, l.in), nullptr, l.ldx, 0, l.in};
    float sums[8 * 32];
    share.each(units, chunk, [&](long first, long last) {
        for (long unit = first; unit < last; ++unit) {
            const long panel = unit * kUnit, column = panel * kLanes;
            t.count = static_cast<int>(std::min<long>(kUnit, count - panel));
            t.weights = l.weights + panel * t.stride;
            const long width = std::min<long>(l.out - column, kUnit * kLanes);
            for (long tile = 0; tile < tiles; ++tile) {
                t.first_row = tile * l.n / tiles;
                t.rows = static_cast<int>((tile + 1) * l.n / tiles - t.first_row);
                t.x = l.x + t.first_row * l.ldx;
                if (l.activations == kInt16) {
                    k.int16[l.format](t, q, sums);
                } else if (l.activations == kInt8) {
                    k.int8[l.format](t, q, sums);
                } else {
                    k.linear[l.format](t, sums);
                }
                for (int r = 0; r < t.rows; ++r) {
                    float* y = l.y + (t.first_row + r) * l.ldy + column;
                    for (long c = 0; c < width; ++c) {
                        const float sum = l.bias ? sums[32 * r + c] + l.bias[column + c] : sums[32 * r + c];
                        y[c] = l.add ? y[c] + sum : sum;
                    }
                }
            }
        }
    });
}

void Scratch::reserve(size_t blocks) {
    if (scale.size() >= blocks) return;
    q.resize(blocks * 32);
    scale.resize(blocks);
    scaled_sum.resize(blocks);
    sums.resize(blocks * 2);
}

void quantise_blocks(int isa, int activations, const float* x, long block, long blocks, long row, long n, Scratch& scratch) {
    const long size = activations == kInt8 ? 1 : 2, at = block * n + row;
    const QuantiseKernel quantise = activations == kInt8 ? kernels(isa).quantise8 : kernels(isa).quantise16;
    uint8_t* q = reinterpret_cast<uint8_t*>(scratch.q.data()) + at * 32 * size;
    quantise(x, blocks, n, q, scratch.scale.data() + at, scratch.scaled_sum.data() + at, scratch.sums.data() + 2 * at);
}

void quantise_share(const Linear& l, Scratch& scratch, int thread, int team) {
    const long blocks = l.in / 32, total = l.n * blocks, last = total * (thread + 1) / team;
    for (long at = total * thread / team; at < last;) {
        const long row = at / blocks, column = at % blocks, count = std::min(last - at, blocks - column);
        quantise_blocks(l.isa, l.activations, l.x + row * l.ldx + column * 32, column, count, row, l.n, scratch);
        at += count;
    }
}

int usable(int format, int activations) {
    if (activations == kInt8 && !kPortable.int8[format]) activations = kInt16;
    return activations == kInt16 && !kPortable.int16[format] ? kFloat : activations;
}

}  // namespace foredraft

using namespace foredraft;

extern "C" {

int fd_abi() { return 4; }

int fd_isa() { return has_neon() ? kIsaNeon : usable_isa(kIsaAvx512); }

// y[n, out] = x[n, in] W^T + bias. Float32 sums; `activations` other than kFloat rounds x first, where the format can.
void fd_linear(int format, const uint8_t* weights, long out, long in, const float* x, long ldx, long n, const float* bias,
               float* y, long ldy, int threads, int activations, int isa) {
    const Linear l{format, weights, out, in, x, ldx, n, bias, y, ldy, usable_isa(isa),
                   usable(format, activations)};
    static thread_local Scratch scratch;
    if (l.activations != kFloat) scratch.reserve(static_cast<size_t>(n * (in / 32)));
    Scratch& mine = scratch;  // the caller's, also when another thread of the team names it
    const Quantised q = mine.view(in, n);
    Shares shares(threads, 1);
    Barrier barrier;
    const auto body = [&](int thread, int team) {
        if (l.activations != kFloat) {
            quantise_share(l, mine, thread, team);
            if (team > 1) barrier.meet(team);
        }
        linear_units(l, q, shares.of(0, thread, team));
    };
#ifdef _OPENMP
    if (threads > 1) {
#pragma omp parallel num_threads(threads)
        body(omp_get_thread_num(), omp_get_num_threads());
        return;
    }
#endif
    (void)threads;
    body(0, 1);
}

}  // extern "C"
