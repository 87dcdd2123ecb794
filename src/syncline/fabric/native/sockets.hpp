// What the kernel answers when a socket is read or written.
#pragma once

#include <netinet/in.h>
#include <netinet/tcp.h>
#include <sys/socket.h>
#include <sys/types.h>

#include <cerrno>
#include <cstdint>
#include <cstring>
#include <exception>

namespace syncline {

struct SocketError : std::exception {
    explicit SocketError(int error) : error(error) {}
    const char* what() const noexcept override { return "a connection broke"; }
    int error;  // 0: end of file
};

inline bool would_block(int error) { return error == EAGAIN || error == EWOULDBLOCK || error == EINTR; }

// Return how many segments were lost and sent again; see `sockets.resent_segments`.
inline int64_t resent_segments(int fd) {
    constexpr size_t TOTAL_RETRANS = 100, DSACK_DUPS = 216, NUM_INFO_BYTES = 220;  // of `struct tcp_info`
    uint8_t info[NUM_INFO_BYTES];
    socklen_t size = sizeof info;
    if (::getsockopt(fd, IPPROTO_TCP, TCP_INFO, info, &size) || size < sizeof info) return 0;
    uint32_t resent = 0, twice = 0;
    std::memcpy(&resent, info + TOTAL_RETRANS, sizeof resent);
    std::memcpy(&twice, info + DSACK_DUPS, sizeof twice);
    return resent > twice ? resent - twice : 0;
}

// Return how many bytes came, or -1 if none are there yet.
inline ssize_t check_received(ssize_t num_bytes) {
    if (num_bytes > 0) return num_bytes;
    if (num_bytes == 0) throw SocketError(0);
    if (would_block(errno)) return -1;
    throw SocketError(errno);
}

// Return how many bytes the kernel took, or -1 if it takes none now.
inline ssize_t check_sent(ssize_t num_bytes) {
    if (num_bytes >= 0) return num_bytes;
    if (would_block(errno)) return -1;
    throw SocketError(errno);
}

}  // namespace syncline
