// Where a team of threads meets, hundreds of times a pass. The OpenMP runtime's barrier spins for milliseconds before
// it sleeps, which is ruinous when another program holds a partner's core; this one sleeps after some 20 microseconds.
#pragma once
#include <atomic>
#include <climits>

#ifdef __linux__
#include <linux/futex.h>
#include <sys/syscall.h>
#include <unistd.h>
#endif

namespace foredraft {

class Barrier {
  public:
    void meet(int team) {
        const int round = round_.load();
        if (arrived_.fetch_add(1) + 1 == team) {
            arrived_.store(0);
            round_.store(round + 1);
            if (sleeping_.load() > 0) wake();
            return;
        }
        for (int i = 0; i < kSpins; ++i) {
            if (round_.load(std::memory_order_acquire) != round) return;
            relax();
        }
        sleeping_.fetch_add(1);  // before the kernel compares round_: either the waker sees us or we see its round
        while (round_.load() == round) sleep(round);
        sleeping_.fetch_sub(1);
    }

  private:
    static constexpr int kSpins = 1500;
    alignas(64) std::atomic<int> round_{0};
    alignas(64) std::atomic<int> arrived_{0};
    alignas(64) std::atomic<int> sleeping_{0};

    static void relax() {
#if defined(__x86_64__)
        __builtin_ia32_pause();
#endif
    }

    void sleep(int round) {
#ifdef __linux__
        syscall(SYS_futex, reinterpret_cast<int*>(&round_), FUTEX_WAIT_PRIVATE, round, nullptr, nullptr, 0);
#else
        (void)round;
#endif
    }

    void wake() {
#ifdef __linux__
        syscall(SYS_futex, reinterpret_cast<int*>(&round_), FUTEX_WAKE_PRIVATE, INT_MAX, nullptr, nullptr, 0);
#endif
    }
};

static_assert(sizeof(std::atomic<int>) == sizeof(int), "a futex is an int");

}  // namespace foredraft
