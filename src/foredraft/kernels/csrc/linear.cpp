// Threads and tiles of the linears. Outputs are shared out between threads, never the sum along `in`.
#include "linear.h"

#include <algorithm>
#include <atomic>
#include <cstdlib>
#include <vector>

#ifdef _OPENMP
#include <omp.h>
#endif

namespace foredraft {

const Kernels& kernels(int isa) { return isa == 1 ? kAvx2 : kPortable; }

void linear_units(const Linear& l, const Quantised* x16, std::atomic<long>& next, int threads) {
    const Kernels& k = kernels(l.isa);
    const long count = panels(l.out), units = (count + kUnit - 1) / kUnit;
    const long chunk = std::max(1L, units / (8L * threads));
    const long tiles = (l.n + 7) / 8;
    Tile t{0, 0, nullptr, panel_bytes(l.format, l.in), nullptr, l.ldx, 0, l.in};
    float sums[8 * 32];
    for (long first = next.fetch_add(chunk); first < units; first = next.fetch_add(chunk)) {
        for (long unit = first; unit < std::min(units, first + chunk); ++unit) {
            const long panel = unit * kUnit, column = panel * kLanes;
            t.count = static_cast<int>(std::min<long>(kUnit, count - panel));
            t.weights = l.weights + panel * t.stride;
            const long width = std::min<long>(l.out - column, kUnit * kLanes);
            for (long tile = 0; tile < tiles; ++tile) {
                t.first_row = tile * l.n / tiles;
                t.rows = static_cast<int>((tile + 1) * l.n / tiles - t.first_row);
                t.x = l.x + t.first_row * l.ldx;
                if (x16) {
                    k.integer[l.format](t, *x16, sums);
                } else {
                    k.linear[l.format](t, sums);
                }
                for (int r = 0; r < t.rows; ++r) {
                    float* y = l.y + (t.first_row + r) * l.ldy + column;
                    for (long c = 0; c < width; ++c) y[c] = l.bias ? sums[32 * r + c] + l.bias[column + c] : sums[32 * r + c];
                }
            }
        }
    }
}

// Scratch of the calling thread for quantised activations; grows, never shrinks.
struct Scratch {
    std::vector<int16_t> q;
    std::vector<float> scale, scaled_sum;
    std::vector<int32_t> sums;
};

}  // namespace foredraft

using namespace foredraft;

extern "C" {

int fd_abi() { return 1; }

int fd_isa() { return has_avx2() ? 1 : 0; }

// y[n, out] = x[n, in] W^T + bias. Float32 sums; with `int16` set, activations are rounded to int16 per 32 inputs first.
int fd_linear(int format, const uint8_t* weights, long out, long in, const float* x, long ldx, long n, const float* bias,
              float* y, long ldy, int threads, int int16, int isa) {
    const Linear l{format, weights, out, in, x, ldx, n, bias, y, ldy, isa == 1 && has_avx2() ? 1 : 0};
    const long blocks = in / 32;
    static thread_local Scratch scratch;
    Quantised x16{};
    if (int16) {
        if (!kernels(l.isa).integer[format]) return -1;
        const size_t total = static_cast<size_t>(n * blocks);
        if (scratch.scale.size() < total) {
            scratch.q.resize(total * 32);
            scratch.scale.resize(total);
            scratch.scaled_sum.resize(total);
            scratch.sums.resize(total * 2);
        }
        x16 = {scratch.q.data(), scratch.scale.data(), scratch.scaled_sum.data(), scratch.sums.data(), in};
    }
    Scratch* buffer = &scratch;
    std::atomic<long> next{0};
    const auto body = [&](int thread, int team) {
        if (int16) {
            // Slices of all blocks of all rows; rounding is local to a block, so the split cannot matter.
            const long total = n * blocks, first = total * thread / team, last = total * (thread + 1) / team;
            for (long at = first; at < last;) {
                const long row = at / blocks, column = at % blocks, count = std::min(last - at, blocks - column);
                kernels(l.isa).quantise(x + row * ldx + column * 32, count, buffer->q.data() + at * 32, buffer->scale.data() + at,
                                        buffer->scaled_sum.data() + at, buffer->sums.data() + 2 * at);
                at += count;
            }
#ifdef _OPENMP
            if (team > 1) {
#pragma omp barrier
            }
#endif
        }
        linear_units(l, int16 ? &x16 : nullptr, next, team);
    };
#ifdef _OPENMP
    if (threads > 1) {
#pragma omp parallel num_threads(threads)
        body(omp_get_thread_num(), omp_get_num_threads());
        return 0;
    }
#endif
    (void)threads;
    body(0, 1);
    return 0;
}

}  // extern "C"
