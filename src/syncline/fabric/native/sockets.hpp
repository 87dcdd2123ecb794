// What the answers of a kernel mean when a socket is read or written.
#pragma once

#include <sys/types.h>

#include <cerrno>
#include <exception>

namespace syncline {

struct SocketError : std::exception {
    explicit SocketError(int error) : error(error) {}
    const char* what() const noexcept override { return "a connection broke"; }
    int error;  // 0: end of file
};

inline bool would_block(int error) { return error == EAGAIN || error == EWOULDBLOCK || error == EINTR; }

// Return how many bytes the kernel took, or -1 if it takes none now.
inline ssize_t check_sent(ssize_t num_bytes) {
    if (num_bytes >= 0) return num_bytes;
    const auto error = static_cast<int>(-num_bytes);
    if (would_block(error)) return -1;
    throw SocketError(error);
}

// Return how many bytes came, or -1 if none are there yet.
inline ssize_t check_received(ssize_t num_bytes) {
    if (num_bytes == 0) throw SocketError(0);
    return check_sent(num_bytes);
}

}  // namespace syncline
