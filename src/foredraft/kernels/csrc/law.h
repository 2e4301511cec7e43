// Passes over one row of scores or probabilities, for each instruction set; every one gives the same bits.
#pragma once
#include <cstdint>

namespace foredraft {

struct RowKernels {
    // The largest of n numbers; false if one of them is NaN.
    bool (*top)(const float* x, long n, float* best);
    // The first index of the largest of n numbers; -1 if one is NaN or the largest is not finite.
    long (*argmax)(const float* x, long n);
    // The largest of every kTops numbers.
    void (*tops)(const float* x, long n, float* best);
    // e = exp((x - shift) * factor) for x <= shift, unless e is null; returns their sum. And one of them.
    double (*weigh)(const float* x, long n, float shift, float factor, float* e);
    float (*weight)(float x, float shift, float factor);
    void (*scale)(float* e, long n, float by);
    // Indices and values of those e * by that are above 0 and not under `least`; returns how many. May write up to
    // kSlack entries more.
    long (*above)(const float* e, long n, float by, float least, int32_t* ids, float* p);
    void (*mass)(const float* p, long n, double* sum, float* least);
    // The sum of max(wp * p - wq * q, 0); no q if null.
    double (*excess)(const float* p, const float* q, long n, double wp, double wq);
};

constexpr long kTops = 64;
constexpr long kSlack = 8;

extern const RowKernels kRowsPortable;
extern const RowKernels kRowsAvx2;
extern const RowKernels kRowsAvx512;

}  // namespace foredraft
