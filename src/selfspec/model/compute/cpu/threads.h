// Threads that work on one call together: how they share work out, and how they meet.

#pragma once

#include <algorithm>
#include <atomic>
#include <climits>
#include <cstdint>
#include <thread>
#include <vector>

#include <omp.h>

#if defined(__linux__)
#include <linux/futex.h>
#include <sys/syscall.h>
#include <unistd.h>
#endif

// One of `parts` parts of [0, count), in whole units; by itself the part that belongs to this
// thread.
struct Share {
    int64_t begin, end;
    explicit Share(int64_t count, int64_t part = omp_get_thread_num(),
                   int64_t parts = omp_get_num_threads())
        : begin(count * part / parts), end(count * (part + 1) / parts) {}
};

constexpr int SPINS = 10000;  // about a fifth of a millisecond

// Where the threads of a call wait for one another. Who comes early spins. After a while it sleeps:
// the thread that it waits for may be waiting for this very core.
class Meeting {
    std::atomic<int> arrived{0}, held{0}, asleep{0};

#if defined(__linux__)
    void sleep(int now) {
        asleep++;
        while (held == now) syscall(SYS_futex, &held, FUTEX_WAIT_PRIVATE, now, nullptr);
        asleep--;
    }
    void wake() {
        if (asleep) syscall(SYS_futex, &held, FUTEX_WAKE_PRIVATE, INT_MAX);
    }
#else
    void sleep(int now) {
        while (held == now) std::this_thread::yield();
    }
    void wake() {}
#endif

   public:
    void wait() {
        int now = held.load(std::memory_order_relaxed);
        if (arrived.fetch_add(1, std::memory_order_acq_rel) + 1 == omp_get_num_threads()) {
            arrived.store(0, std::memory_order_relaxed);
            held = now + 1;
            return wake();
        }
        for (int spins = 0; spins < SPINS; spins++) {
            if (held.load(std::memory_order_acquire) != now) return;
#if defined(__x86_64__)
            __builtin_ia32_pause();
#endif
        }
        sleep(now);
    }
};

// What a step of a pass is cut into. Each thread has an equal share and takes it front to back, so
// that it reads memory in order. Then it helps the others: one whose core is wanted elsewhere takes
// fewer, and nobody waits for it.
class Items {
    std::atomic<int>* taken;  // of each thread's share
    int64_t stride;           // from one thread's number to the next one's

   public:
    Items(std::atomic<int>* taken, int64_t stride) : taken(taken), stride(stride) {}

    template <class Work>
    void share_out(int64_t count, Work work) {
        int own = omp_get_thread_num(), threads = omp_get_num_threads();
        for (int i = 0; i < threads; i++) {
            int owner = (own + i) % threads;
            Share share(count, owner, threads);
            std::atomic<int>& next = taken[owner * stride];
            while (share.begin + next.load(std::memory_order_relaxed) < share.end) {
                int64_t item = share.begin + next.fetch_add(1, std::memory_order_relaxed);
                if (item < share.end) work(item);
            }
        }
    }
};

// Room for the `Items` of some steps.
class Steps {
    int64_t stride;  // a thread's numbers lie apart from the others'
    std::vector<std::atomic<int>> taken;

   public:
    Steps(int64_t steps, int threads)
        : stride((steps + 15) / 16 * 16), taken(stride * std::max(threads, 1)) {}
    Items operator[](int64_t step) { return Items(taken.data() + step, stride); }
};
