// How the work of a stage is shared out: every thread has a part of its own and takes it in order, so that what it fetches
// ahead is what it needs next; a thread that is done helps the others, so that none waits for one that was interrupted.
#pragma once
#include <algorithm>
#include <atomic>
#include <cstddef>
#include <cstdint>
#include <vector>

namespace foredraft {

// One thread's access to the parts of one stage.
struct Share {
    std::atomic<long>* taken;  // of thread 0; the others' follow at `stride`
    size_t stride;
    int thread, team;

    // Calls f(first, last) for pieces of up to `chunk` of [0, units) until every piece is taken.
    template <class F>
    void each(long units, long chunk, F f) const {
        for (int i = 0; i < team; ++i) {
            const int owner = (thread + i) % team;
            const long first = units * owner / team, last = units * (owner + 1) / team;
            std::atomic<long>& counter = taken[static_cast<size_t>(owner) * stride];
            for (long at = first + counter.fetch_add(chunk); at < last; at = first + counter.fetch_add(chunk)) {
                f(at, std::min(last, at + chunk));
            }
        }
    }
};

// The parts of all stages of a call. Counters of different threads are on different lines.
class Shares {
  public:
    Shares(int64_t threads, size_t stages)
        : stride_((stages + kLine - 1) / kLine * kLine), taken_(static_cast<size_t>(std::max<int64_t>(1, threads)) * stride_) {}

    Share of(size_t stage, int thread, int team) { return {taken_.data() + stage, stride_, thread, team}; }

    // One counter for all threads, where a stage hands out single pieces to whichever is free.
    std::atomic<long>& counter(size_t stage) { return taken_[stage]; }

  private:
    static constexpr size_t kLine = 64 / sizeof(std::atomic<long>);
    const size_t stride_;
    std::vector<std::atomic<long>> taken_;
};

}  // namespace foredraft
