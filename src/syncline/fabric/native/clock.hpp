// The clock that grants and deadlines are measured with; Python's `time.monotonic()` reads the same one.
#pragma once

#include <chrono>

namespace syncline {

inline double monotonic_s() {
    return std::chrono::duration<double>(std::chrono::steady_clock::now().time_since_epoch()).count();
}

}  // namespace syncline
