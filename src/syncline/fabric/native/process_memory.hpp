// Copies out of the memory of other processes on this machine; whose, and from where, `shared_host.py` says.
#pragma once

#include <cstdint>

namespace syncline {

// Copy `num_bytes` bytes at `address` of process `pid`; returns 0, or the errno that says why that cannot be.
using MemoryReader = int (*)(int pid, uint64_t address, uint8_t* into, int64_t num_bytes);

int read_memory(int pid, uint64_t address, uint8_t* into, int64_t num_bytes);

}  // namespace syncline
