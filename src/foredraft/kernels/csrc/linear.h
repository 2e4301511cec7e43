// Matrix products by a team of threads.
#pragma once
#include <vector>

#include "layout.h"
#include "shares.h"

namespace foredraft {

struct Linear {
    int format;
    const uint8_t* weights;
    long out, in;
    const float* x;
    long ldx, n;
    const float* bias;  // may be null
    float* y;
    long ldy;
    int isa;
    int activations;   // what `usable` says
    bool add = false;  // y += product instead of y = product
};

const Kernels& kernels(int isa);

// The kind of activations that a format really uses where `activations` is asked for.
int usable(int format, int activations);

// Quantised activations of one precision; grows, never shrinks.
struct Scratch {
    std::vector<int16_t> q;
    std::vector<float> scale, scaled_sum;
    std::vector<int32_t> sums;

    void reserve(size_t blocks);
    Quantised view(long in, long n) const { return {q.data(), scale.data(), scaled_sum.data(), sums.data(), in, n}; }
};

// Rounds inputs [32 * block, 32 * (block + blocks)) of row `row` of `n`, which start at x.
void quantise_blocks(int isa, int activations, const float* x, long block, long blocks, long row, long n, Scratch& scratch);

// Rounds this thread's share of all blocks of all rows; rounding is local to a block, so the shares cannot matter.
void quantise_share(const Linear& l, Scratch& scratch, int thread, int team);

// Computes units of outputs until none is left. Called by every thread of a team.
void linear_units(const Linear& l, const Quantised& q, const Share& share);

}  // namespace foredraft
