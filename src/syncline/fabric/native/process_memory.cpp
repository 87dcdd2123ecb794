// What `process_memory.hpp` declares.
#include "process_memory.hpp"

#include <sys/syscall.h>
#include <sys/uio.h>
#include <unistd.h>

#include <bit>
#include <cerrno>
#include <cstdint>

namespace syncline {

int read_memory(int pid, uint64_t address, uint8_t* into, int64_t num_bytes) {
    for (int64_t done = 0; done < num_bytes;) {
        const auto rest = static_cast<size_t>(num_bytes - done);
        const iovec here{into + done, rest};
        // The kernel's own call: not every C library has a function for it.
        const iovec there{std::bit_cast<void*>(static_cast<uintptr_t>(address) + static_cast<uintptr_t>(done)), rest};
        const auto copied = ::syscall(SYS_process_vm_readv, pid, &here, 1, &there, 1, 0);
        if (copied <= 0) return copied < 0 ? errno : EFAULT;
        done += copied;
    }
    return 0;
}

}  // namespace syncline
