// The law of a row of scores: sampling/law.py, filters.py and processors.py say what is computed; this is the same in a
// few passes over the row. float32 rows go through the row kernels of law_body.h, float64 ones, which only models of
// float64 have, through plain loops.
#include <cstring>
#include <functional>
#include <vector>

#include "law_passes.h"

using namespace foredraft;

extern "C" long fd_race(const void* p, int wide, long n, uint64_t seed, uint64_t position, int threads, int isa);  // race.cpp

namespace {

// The controls of one request; kernels/law.py has the same fields.
struct Controls {
    double temperature;
    int64_t top_k;  // 0 for all
    double top_p;   // 1 for all
    double min_p;   // 0 for all
    double repetition, presence, frequency;
    const double* count;  // [n] occurrences in the output; null for no penalties
    const int64_t* seen;  // [seen_n] ids that they concern
    int64_t seen_n;
    const int64_t* biased;  // [biased_n] ids
    const double* bias;
    int64_t biased_n;
};
static_assert(sizeof(Controls) == 13 * 8, "kernels/law.py has the same fields");

// --- processors

// A score whose token was seen, `count` times in the output; rounded where numpy rounds.
template <class T>
T penalised(T score, double count, const Controls& c) {
    if (c.repetition != 1.0) {
        const T r = static_cast<T>(c.repetition);
        score = score > 0 ? score / r : score * r;
    }
    const double less = c.presence * (count > 0) + c.frequency * count;
    return static_cast<T>(static_cast<double>(score) - less);
}

template <class T>
void process(const Controls& c, T* row, const int64_t* path, long length) {
    if (c.count) {
        // Scores of drafted tokens are read before the committed counts change them, and written after.
        thread_local std::vector<std::pair<int64_t, T>> drafted;
        drafted.clear();
        for (long i = 0; i < length; ++i) {
            if (std::find(path, path + i, path[i]) != path + i) continue;
            const double extra = static_cast<double>(std::count(path + i, path + length, path[i]));
            drafted.emplace_back(path[i], penalised(row[path[i]], c.count[path[i]] + extra, c));
        }
        for (int64_t i = 0; i < c.seen_n; ++i) row[c.seen[i]] = penalised(row[c.seen[i]], c.count[c.seen[i]], c);
        for (const auto& [token, score] : drafted) row[token] = score;
    }
    for (int64_t i = 0; i < c.biased_n; ++i) row[c.biased[i]] += static_cast<T>(c.bias[i]);
}

// --- filters, on the tokens that still have probability: ids ascending

template <class T>
struct Left {
    std::vector<int32_t> ids;
    std::vector<T> p;
    long n = 0;

    void reserve(long most) {
        if (static_cast<long>(p.size()) < most + kSlack) p.resize(most + kSlack), ids.resize(most + kSlack);
    }

    double sum() const {
        double lanes[4] = {};
        long i = 0;
        for (; i + 4 <= n; i += 4) {
            for (int l = 0; l < 4; ++l) lanes[l] += p[i + l];
        }
        for (; i < n; ++i) lanes[0] += p[i];
        return (lanes[0] + lanes[2]) + (lanes[1] + lanes[3]);
    }

    template <class Keep>
    void keep(Keep stays) {
        long kept = 0;
        for (long i = 0; i < n; ++i) {  // without a branch, which nobody could foretell
            const bool stay = stays(p[i]);
            ids[kept] = ids[i];
            p[kept] = p[i];
            kept += stay;
        }
        n = kept;
    }

    // The k likeliest, `least` being the last one's probability; the lowest ids of those that have just it.
    void keep_best(T least, long k) {
        long level = k - std::count_if(p.begin(), p.begin() + n, [&](T v) { return v > least; });
        keep([&](T v) { return v > least || (v == least && level-- > 0); });
    }

    void normalise() {
        const T by = static_cast<T>(sum());
        for (long i = 0; i < n; ++i) p[i] /= by;
    }
};

template <class T>
void top_k(Left<T>& left, long k) {
    if (k >= left.n) return;
    thread_local std::vector<T> order;
    order.assign(left.p.begin(), left.p.begin() + left.n);
    std::nth_element(order.begin(), order.begin() + (k - 1), order.end(), std::greater<T>());
    left.keep_best(order[k - 1], k);
}

// How many of the likeliest reach p, and the last one's probability; all sorted, and summed one by one.
template <class T>
bool reach_sorted(const Left<T>& left, double p, long* k, T* least) {
    std::vector<T> order(left.p.begin(), left.p.begin() + left.n);
    std::sort(order.begin(), order.end(), std::greater<T>());
    double sum = 0.0;
    for (*k = 0; *k < left.n;) {
        sum += *least = order[(*k)++];
        if (sum >= p) return true;
    }
    return false;
}

// The same where it is not close: values of one eighth of an octave are summed together, and only those are sorted
// among which the sum passes p. A sum in another order may differ in its last digits, so what is close is told.
template <class T>
bool reach(const Left<T>& left, double p, long* k, T* least) {
    constexpr double kClose = 1e-10;
    constexpr long kBuckets = 2048;
    const auto bucket = [](T v) {
        if constexpr (sizeof(T) == 4) {
            return static_cast<long>(load<uint32_t>(&v) >> 20);
        } else {
            return static_cast<long>(load<uint64_t>(&v) >> 49);
        }
    };
    const long first = bucket(*std::max_element(left.p.begin(), left.p.begin() + left.n));
    double sums[kBuckets] = {};
    long counts[kBuckets] = {};
    for (long i = 0; i < left.n; ++i) {
        const long b = std::min(first - bucket(left.p[i]), kBuckets - 1);
        sums[b] += left.p[i];
        ++counts[b];
    }
    double sum = 0.0;
    *k = 0;
    long b = 0;
    for (; b < kBuckets - 1 && sum + sums[b] < p - kClose; ++b) sum += sums[b], *k += counts[b];
    if (b == kBuckets - 1) return reach_sorted(left, p, k, least);
    thread_local std::vector<T> order;
    order.clear();
    for (long i = 0; i < left.n; ++i) {
        if (first - bucket(left.p[i]) == b) order.push_back(left.p[i]);
    }
    std::sort(order.begin(), order.end(), std::greater<T>());
    for (T v : order) {
        if (std::abs(sum - p) < kClose) break;
        sum += v;
        ++*k;
        if (sum >= p + kClose) {
            *least = v;
            return true;
        }
    }
    return reach_sorted(left, p, k, least);
}

// --- a row

template <class P>
struct RowLaw {
    using T = typename P::T;
    P passes;

    // The law of one row, which is written to `out`, or if that is null its probability of one token to `chance`. False if
    // there is none, or if rounding decides what a filter keeps.
    bool operator()(const Controls& c, const T* row, long n, const int64_t* path, long length, T* out, long token,
                    double* chance) const {
        thread_local std::vector<T> scratch;
        if (static_cast<long>(scratch.size()) < n) scratch.resize(n);
        if (c.count || c.biased_n) {
            std::memcpy(scratch.data(), row, n * sizeof(T));
            process(c, scratch.data(), path, length);
            row = scratch.data();
        }
        T best;
        if (!passes.top(row, n, &best) || !std::isfinite(best)) return false;
        const bool filters = c.top_k > 0 || c.top_p < 1.0 || c.min_p > 0.0;
        T* e = filters ? scratch.data() : out;
        const T by = static_cast<T>(1.0 / passes.weigh(row, n, best, c.temperature, e));
        if (!filters) {
            if (out) {
                passes.scale(out, n, by);
            } else {
                *chance = passes.weight(row[token], best, c.temperature) * by;
            }
            return true;
        }
        thread_local Left<T> left;
        left.reserve(n);
        gather(c, e, n, by, left);
        if (!filter(c, left)) return false;
        if (!out) {
            const auto end = left.ids.begin() + left.n, at = std::lower_bound(left.ids.begin(), end, token);
            *chance = at != end && *at == token ? left.p[at - left.ids.begin()] : 0.0;
            return true;
        }
        std::memset(out, 0, n * sizeof(T));
        for (long i = 0; i < left.n; ++i) out[left.ids[i]] = left.p[i];
        return true;
    }

    // Lists the tokens that may pass the first filter.
    void gather(const Controls& c, const T* e, long n, T by, Left<T>& left) const {
        const auto from = [&](T least) { left.n = passes.above(e, n, by, least, left.ids.data(), left.p.data()); };
        if (c.top_k > 0) {
            thread_local std::vector<T> tops;
            const long blocks = (n + kTops - 1) / kTops;
            if (c.top_k > blocks) return from(0);
            tops.resize(blocks);  // k of them: as many tokens at least are as likely as the k-th
            passes.tops(e, n, tops.data());
            std::nth_element(tops.begin(), tops.begin() + (c.top_k - 1), tops.end(), std::greater<T>());
            from(tops[c.top_k - 1] * by);
        } else if (c.top_p < 1.0) {
            for (T share : {T(1e-3), T(1e-4), T(1e-5)}) {  // of the likeliest: mostly enough, and far fewer
                from(share * by);
                if (left.sum() > c.top_p + 1e-6) return;
            }
            from(static_cast<T>(0.5 * (1.0 - c.top_p) / n));  // all under it have less than 1 - p
        } else {
            from(static_cast<T>(c.min_p) * by);  // the likeliest has e = 1
        }
    }

    static bool filter(const Controls& c, Left<T>& left) {
        if (c.top_k > 0) {
            top_k(left, c.top_k);
            left.normalise();
        }
        if (c.top_p < 1.0) {
            long k;
            T least;
            if (!reach(left, c.top_p, &k, &least)) return false;
            left.keep_best(least, k);
            left.normalise();
        }
        if (c.min_p > 0.0) {
            const T least = static_cast<T>(c.min_p) * *std::max_element(left.p.begin(), left.p.begin() + left.n);
            left.keep([&](T v) { return v >= least; });
            left.normalise();
        }
        return true;
    }
};

template <class P>
long law(P passes, const Controls& c, const void* logits, long count, long n, const int64_t* tokens, const int64_t* starts,
         void* out, const int64_t* wanted, double* chances, int threads) {
    using T = typename P::T;
    const RowLaw<P> one{passes};
    std::atomic<long> bad{count};
    each_row(count, 8 * count * n, threads, [&](long r) {
        const int64_t* path = tokens ? tokens + starts[r] : nullptr;
        const long length = tokens ? starts[r + 1] - starts[r] : 0;
        T* to = out ? static_cast<T*>(out) + r * n : nullptr;
        const bool sound = one(c, static_cast<const T*>(logits) + r * n, n, path, length, to, out ? 0 : wanted[r],
                               out ? nullptr : &chances[r]);
        if (!sound) lower(bad, r);
    });
    return bad;
}

// The law of one row in memory that lasts until this thread's next call; null if the reference must be asked.
template <class P>
const typename P::T* law_of_row(P passes, const Controls& c, const void* logits, long n, const int64_t* path, long length) {
    using T = typename P::T;
    thread_local std::vector<T> p;
    if (static_cast<long>(p.size()) < n) p.resize(n);
    const bool sound = RowLaw<P>{passes}(c, static_cast<const T*>(logits), n, path, length, p.data(), 0, nullptr);
    return sound ? p.data() : nullptr;
}

template <class P>
long law_draw(P passes, const Controls& c, const void* logits, long n, const int64_t* path, long length, double weight,
              long without, double u, double* total) {
    const auto* p = law_of_row(passes, c, logits, n, path, length);
    return p ? draw(passes, p, nullptr, n, weight, 0.0, without, u, total) : -2;
}

}  // namespace

extern "C" {

// The laws of `count` rows of n scores (float, or double if `wide`), each after its path: those of row r are tokens
// starts[r] … starts[r+1]-1; null without penalties. If `out` is null, only the probabilities of one token a row are
// told. Returns `count`, or the first row for which the caller must ask the reference: it has no law, or rounding decides
// what a filter keeps.
long fd_law(const void* controls, const void* logits, int wide, long count, long n, const int64_t* tokens,
            const int64_t* starts, void* out, const int64_t* wanted, double* chances, int threads, int isa) {
    const Controls& c = *static_cast<const Controls*>(controls);
    if (wide) return law(Passes64{}, c, logits, count, n, tokens, starts, out, wanted, chances, threads);
    return law(Passes32{rows(isa)}, c, logits, count, n, tokens, starts, out, wanted, chances, threads);
}

// fd_draw from the law that fd_law has for one row, which nobody else gets to see; -2 if the reference must be asked.
long fd_law_draw(const void* controls, const void* logits, int wide, long n, const int64_t* path, long length, double weight,
                 long without, double u, double* total, int isa) {
    const Controls& c = *static_cast<const Controls*>(controls);
    if (wide) return law_draw(Passes64{}, c, logits, n, path, length, weight, without, u, total);
    return law_draw(Passes32{rows(isa)}, c, logits, n, path, length, weight, without, u, total);
}

// fd_race over that law.
long fd_law_race(const void* controls, const void* logits, int wide, long n, const int64_t* path, long length, uint64_t seed,
                 uint64_t position, int threads, int isa) {
    const Controls& c = *static_cast<const Controls*>(controls);
    const void* p = wide ? static_cast<const void*>(law_of_row(Passes64{}, c, logits, n, path, length))
                         : law_of_row(Passes32{rows(isa)}, c, logits, n, path, length);
    return p ? fd_race(p, wide, n, seed, position, threads, isa) : -2;
}

}  // extern "C"
