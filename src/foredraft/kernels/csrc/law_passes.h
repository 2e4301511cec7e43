// The passes over rows by type of number, and how rows are shared out between threads.
#pragma once
#include <algorithm>
#include <atomic>
#include <cmath>
#include <vector>

#include "law.h"
#include "layout.h"

namespace foredraft {

inline const RowKernels& rows(int isa) {
    if (isa == kIsaAvx512 && has_avx512()) return kRowsAvx512;
    return isa >= kIsaAvx2 && has_avx2() ? kRowsAvx2 : kRowsPortable;
}

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

// Fewer numbers than this are done before a second thread has begun; and where other programs hold the second core, the
// first one waits for it, which takes a hundred times as long.
constexpr long kWorthAThread = 1 << 20;  // of plain passes; exponentials weigh eight times as much

template <class F>
void each_row(long count, long work, int threads, F f) {
#ifdef _OPENMP
    if (threads > 1 && count > 1 && work >= kWorthAThread) {
#pragma omp parallel for num_threads(threads) schedule(dynamic)
        for (long r = 0; r < count; ++r) f(r);
        return;
    }
#endif
    (void)work, (void)threads;
    for (long r = 0; r < count; ++r) f(r);
}

// Draws from max(wp * p - wq * q, 0): see fd_draw.
template <class P>
long draw(P passes, const void* p_row, const void* q_row, long n, double wp, double wq, long without, double u, double* total) {
    using T = typename P::T;
    constexpr long kBlock = 1024;
    const T* p = static_cast<const T*>(p_row);
    const T* q = static_cast<const T*>(q_row);
    const auto rest = [&](long i) {
        if (i == without) return 0.0;
        const double v = wp * static_cast<double>(p[i]) - (q ? wq * static_cast<double>(q[i]) : 0.0);
        return q && !(v > 0.0) ? 0.0 : v;
    };
    thread_local std::vector<double> sums;
    sums.clear();
    *total = 0.0;
    for (long first = 0; first < n; first += kBlock) {
        const long last = std::min(n, first + kBlock);
        double sum = 0.0;
        if (without >= first && without < last) {
            for (long i = first; i < last; ++i) sum += rest(i);
        } else {
            sum = passes.excess(p + first, q ? q + first : nullptr, last - first, wp, wq);
        }
        sums.push_back(sum);
        *total += sum;
    }
    if (u < 0.0 || !(*total > 0.0 && *total < HUGE_VAL)) return -1;
    const double target = u * *total;
    double before = 0.0;
    for (long first = 0; first < n; first += kBlock) {
        const double after = before + sums[first / kBlock];
        if (after > target) {
            double reached = before;
            for (long i = first; i < std::min(n, first + kBlock); ++i) {
                const double v = rest(i);
                reached += v;
                if (v > 0.0 && reached > target) return i;
            }
        }
        before = after;
    }
    long last = n - 1;  // rounding: u * total is the whole
    while (!(rest(last) > 0.0)) --last;
    return last;
}

inline void lower(std::atomic<long>& least, long value) {
    long seen = least.load();
    while (value < seen && !least.compare_exchange_weak(seen, value)) {
    }
}

}  // namespace foredraft
