// The passes over rows by type of number, and how rows are shared out between threads.
#pragma once
#include <algorithm>
#include <atomic>
#include <cmath>

#include "law.h"
#include "layout.h"

namespace foredraft {

inline const RowKernels& rows(int isa) { return isa >= 1 && has_avx2() ? kRowsAvx2 : kRowsPortable; }

struct Passes32 {
    using T = float;
    const RowKernels& k;
    bool top(const float* x, long n, float* best) const { return k.top(x, n, best); }
    long argmax(const float* x, long n) const { return k.argmax(x, n); }
    void tops(const float* x, long n, float* best) const { k.tops(x, n, best); }
    double weigh(const float* x, long n, float shift, double temperature, float* e) const {
        return k.weigh(x, n, shift, static_cast<float>(1.0 / temperature), e);
    }
    float weight(float x, float shift, double temperature) const {
        return k.weight(x, shift, static_cast<float>(1.0 / temperature));
    }
    void scale(float* e, long n, float by) const { k.scale(e, n, by); }
    long above(const float* e, long n, float by, float least, int32_t* ids, float* p) const {
        return k.above(e, n, by, least, ids, p);
    }
    void mass(const float* p, long n, double* sum, float* least) const { k.mass(p, n, sum, least); }
    double excess(const float* p, const float* q, long n, double wp, double wq) const { return k.excess(p, q, n, wp, wq); }
};

struct Passes64 {
    using T = double;
    bool top(const double* x, long n, double* best) const {
        *best = -HUGE_VAL;
        bool sound = true;
        for (long i = 0; i < n; ++i) {
            sound = sound && x[i] == x[i];
            *best = x[i] > *best ? x[i] : *best;
        }
        return sound;
    }
    long argmax(const double* x, long n) const {
        double best;
        if (!top(x, n, &best) || !std::isfinite(best)) return -1;
        return std::find(x, x + n, best) - x;
    }
    void tops(const double* x, long n, double* best) const {
        for (long i = 0; i < n; i += kTops) top(x + i, std::min(kTops, n - i), &best[i / kTops]);
    }
    double weigh(const double* x, long n, double shift, double temperature, double* e) const {
        double sum = 0.0;
        for (long i = 0; i < n; ++i) {
            const double v = weight(x[i], shift, temperature);
            sum += v;
            if (e) e[i] = v;
        }
        return sum;
    }
    double weight(double x, double shift, double temperature) const { return std::exp((x - shift) / temperature); }
    void scale(double* e, long n, double by) const {
        for (long i = 0; i < n; ++i) e[i] *= by;
    }
    long above(const double* e, long n, double by, double least, int32_t* ids, double* p) const {
        long count = 0;
        for (long i = 0; i < n; ++i) {
            const double v = e[i] * by;
            if (!(v >= least && v > 0.0)) continue;
            ids[count] = static_cast<int32_t>(i);
            p[count++] = v;
        }
        return count;
    }
    void mass(const double* p, long n, double* sum, double* least) const {
        *sum = 0.0, *least = HUGE_VAL;
        for (long i = 0; i < n; ++i) {
            *sum += p[i];
            *least = p[i] < *least ? p[i] : *least;
        }
    }
    double excess(const double* p, const double* q, long n, double wp, double wq) const {
        double sum = 0.0;
        for (long i = 0; i < n; ++i) {
            const double rest = wp * p[i] - (q ? wq * q[i] : 0.0);
            sum += !q || rest > 0.0 ? rest : 0.0;
        }
        return sum;
    }
};

template <class F>
void each_row(long count, int threads, F f) {
#ifdef _OPENMP
    if (threads > 1 && count > 1) {
#pragma omp parallel for num_threads(threads) schedule(dynamic)
        for (long r = 0; r < count; ++r) f(r);
        return;
    }
#endif
    (void)threads;
    for (long r = 0; r < count; ++r) f(r);
}

inline void lower(std::atomic<long>& least, long value) {
    long seen = least.load();
    while (value < seen && !least.compare_exchange_weak(seen, value)) {
    }
}

}  // namespace foredraft
