// Words in memory that several processes share: stored with release, read with acquire, slept on with futex(2).
//
// The kernel compares the word with what a sleeper has seen before it lets it sleep, under the lock that a waker takes
// too; so whoever stores first and wakes then is never missed.
#pragma once

#include <linux/futex.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <atomic>
#include <chrono>
#include <climits>
#include <cmath>
#include <cstdint>
#include <ctime>
#include <thread>

#include "processor.hpp"

namespace syncline {

constexpr std::size_t SHARED_PAGE_BYTES = 4096;

inline uint64_t load(uint64_t& word) { return std::atomic_ref<uint64_t>(word).load(std::memory_order_acquire); }

inline void store(uint64_t& word, uint64_t value) {
    std::atomic_ref<uint64_t>(word).store(value, std::memory_order_release);
}

// The half of a word that the kernel compares is the first of its bytes on processors that we know.
inline void call_futex(uint64_t& word, int operation, uint32_t value, const timespec* limit) {
    ::syscall(SYS_futex, reinterpret_cast<uint32_t*>(&word), operation, value, limit, nullptr, 0);
}

inline void wake_all(uint64_t& word) { call_futex(word, FUTEX_WAKE, INT_MAX, nullptr); }

// Sleep until the word is no longer `seen`, at most so long, or for no reason.
inline void sleep_on(uint64_t& word, uint64_t seen, double timeout_s) {
    const double seconds = std::floor(timeout_s);
    const timespec limit{static_cast<time_t>(seconds), static_cast<long>((timeout_s - seconds) * 1e9)};
    call_futex(word, FUTEX_WAIT, static_cast<uint32_t>(seen), &limit);
}

using SteadyClock = std::chrono::steady_clock;

// Look until then whether it is so. Being put to sleep and woken takes about as long as callers look, so at worst it
// all takes twice as long; whoever else wants the core is let in between looks.
template <typename Condition>
bool look_for(Condition is_so, SteadyClock::time_point until) {
    constexpr int LOOKS_PER_YIELD = 32;
    for (;;) {
        for (int look = 0; look < LOOKS_PER_YIELD; ++look) {
            if (is_so()) return true;
#ifdef SYNCLINE_ON_X86_64
            _mm_pause();
#endif
        }
        if (SteadyClock::now() >= until) return false;
        std::this_thread::yield();
    }
}

}  // namespace syncline
