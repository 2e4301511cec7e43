#pragma once
#include <atomic>

#include "layout.h"

namespace foredraft {

constexpr int kUnit = 4;  // panels handed to a thread at a time

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
    int activations;  // of enum Activations, float where the format has no integer kernel
};

const Kernels& kernels(int isa);

// Takes units of outputs from `next` until none is left. Called by every thread of a team.
void linear_units(const Linear& l, const Quantised& q, std::atomic<long>& next, int threads);

}  // namespace foredraft
