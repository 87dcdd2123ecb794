// What `kernel.hpp` declares.
#include "kernel.hpp"

#include <netinet/in.h>
#include <netinet/tcp.h>
#include <sys/eventfd.h>
#include <sys/socket.h>
#include <unistd.h>

#include <cerrno>
#include <chrono>
#include <cstring>
#include <system_error>

namespace syncline {

namespace {

msghdr message_of(iovec* parts, size_t num_parts) {
    msghdr message{};
    message.msg_iov = parts;
    message.msg_iovlen = num_parts;
    return message;
}

}  // namespace

LinuxKernel::LinuxKernel() : epoll_fd_(epoll_create1(EPOLL_CLOEXEC)), wake_fd_(eventfd(0, EFD_NONBLOCK | EFD_CLOEXEC)) {
    epoll_event event{};
    event.events = EPOLLIN;
    event.data.fd = wake_fd_;
    if (epoll_fd_ >= 0 && wake_fd_ >= 0 && epoll_ctl(epoll_fd_, EPOLL_CTL_ADD, wake_fd_, &event) == 0) return;
    const std::system_error error(errno, std::generic_category(), "a transport needs two more open files");
    shut();
    throw error;
}

void LinuxKernel::shut() {
    for (int* const fd : {&wake_fd_, &epoll_fd_}) {
        if (*fd >= 0) ::close(*fd);
        *fd = -1;
    }
}

double LinuxKernel::now_s() const {
    return std::chrono::duration<double>(std::chrono::steady_clock::now().time_since_epoch()).count();
}

ssize_t LinuxKernel::receive(int fd, iovec* parts, size_t num_parts) {
    ssize_t num_bytes = 0;
    if (num_parts == 1) {
        num_bytes = ::recv(fd, parts[0].iov_base, parts[0].iov_len, 0);
    } else {
        msghdr message = message_of(parts, num_parts);
        num_bytes = ::recvmsg(fd, &message, 0);
    }
    return num_bytes < 0 ? -errno : num_bytes;
}

ssize_t LinuxKernel::send(int fd, iovec* parts, size_t num_parts) {
    const msghdr message = message_of(parts, num_parts);
    const ssize_t num_bytes = ::sendmsg(fd, &message, MSG_DONTWAIT | MSG_NOSIGNAL);
    return num_bytes < 0 ? -errno : num_bytes;
}

void LinuxKernel::wake_at(int fd, int num_bytes) {
    setsockopt(fd, SOL_SOCKET, SO_RCVLOWAT, &num_bytes, sizeof num_bytes);
}

int64_t LinuxKernel::resent_segments(int fd) const {
    constexpr size_t TOTAL_RETRANS = 100, DSACK_DUPS = 216, NUM_INFO_BYTES = 220;  // of `struct tcp_info`
    uint8_t info[NUM_INFO_BYTES];
    socklen_t size = sizeof info;
    if (::getsockopt(fd, IPPROTO_TCP, TCP_INFO, info, &size) || size < sizeof info) return 0;
    uint32_t resent = 0, twice = 0;
    std::memcpy(&resent, info + TOTAL_RETRANS, sizeof resent);
    std::memcpy(&twice, info + DSACK_DUPS, sizeof twice);
    return resent > twice ? resent - twice : 0;
}

void LinuxKernel::watch(int fd, bool is_new, uint32_t events) {
    epoll_event event{};
    event.events = events;
    event.data.fd = fd;
    if (epoll_ctl(epoll_fd_, is_new ? EPOLL_CTL_ADD : EPOLL_CTL_MOD, fd, &event) < 0 && is_new)
        throw std::system_error(errno, std::generic_category(), "epoll_ctl");
}

void LinuxKernel::forget(int fd) {
    epoll_event event{};
    epoll_ctl(epoll_fd_, EPOLL_CTL_DEL, fd, &event);
}

void LinuxKernel::wake() {
    if (is_awake_) return;
    const uint64_t count = 1;
    is_awake_ = ::write(wake_fd_, &count, sizeof count) > 0;
}

int LinuxKernel::wait(int set_fd, epoll_event* ready, int max_ready, int timeout_ms) {
    const int num_ready = epoll_wait(set_fd, ready, max_ready, timeout_ms);
    for (int place = 0; set_fd == epoll_fd_ && place < num_ready; ++place) {
        if (ready[place].data.fd != wake_fd_) continue;
        uint64_t count = 0;
        is_awake_ = ::read(wake_fd_, &count, sizeof count) < 0;
        ready[place].data.fd = epoll_fd_;
    }
    return num_ready;
}

}  // namespace syncline
