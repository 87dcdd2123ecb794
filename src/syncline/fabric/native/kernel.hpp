// What the transport asks of the machine that it runs on: sockets, which of them are ready, and the time.
//
// This is the seam at which a simulation takes the machine's place (`tests/simulation/virtual_kernel.py`): besides
// `process_memory.cpp`, and what shares memory with other processes and is no part of a transport, nothing else here
// asks the machine for anything. Each transport has a kernel of its own.
#pragma once

#include <sys/epoll.h>
#include <sys/types.h>
#include <sys/uio.h>

#include <cstddef>
#include <cstdint>

namespace syncline {

class Kernel {
   public:
    virtual ~Kernel() = default;
    Kernel(const Kernel&) = delete;
    Kernel& operator=(const Kernel&) = delete;

    // Seconds; Python's `time.monotonic()` reads the same clock. Grants and deadlines are measured with it.
    virtual double now_s() const = 0;
    // Whether a thread may run beside the loop. If not, whoever lets time pass does what the thread would.
    virtual bool has_threads() const = 0;

    // As recvmsg(2) and sendmsg(2), and they never wait: how many bytes (0: the end of the stream), or minus errno.
    virtual ssize_t receive(int fd, iovec* parts, size_t num_parts) = 0;
    virtual ssize_t send(int fd, iovec* parts, size_t num_parts) = 0;
    // Let `fd` be readable when so many bytes are there, or its end.
    virtual void wake_at(int fd, int num_bytes) = 0;
    // Return how many segments were lost and sent again; as `sockets.tcp_counters` counts them.
    virtual int64_t resent_segments(int fd) const = 0;

    // The transport's own epoll set. Watch for EPOLLIN and, perhaps, EPOLLOUT. Throws std::system_error.
    virtual int fileno() const = 0;
    virtual void watch(int fd, bool is_new, uint32_t events) = 0;
    virtual void forget(int fd) = 0;
    // Make `fileno` readable, for a loop that asks for nothing else.
    virtual void wake() = 0;
    // As epoll_wait(2), of this set or of the loop's, whose descriptors are in `data.fd`. That `wake` was called is
    // told once, as an event of `fileno`.
    virtual int wait(int set_fd, epoll_event* ready, int max_ready, int timeout_ms) = 0;
    // Close what `fileno` means.
    virtual void close() = 0;

   protected:
    Kernel() = default;
};

// System calls, and nothing else.
class LinuxKernel final : public Kernel {
   public:
    // Throws std::system_error where no file can be opened.
    LinuxKernel();
    ~LinuxKernel() override { shut(); }

    double now_s() const override;
    bool has_threads() const override { return true; }
    ssize_t receive(int fd, iovec* parts, size_t num_parts) override;
    ssize_t send(int fd, iovec* parts, size_t num_parts) override;
    void wake_at(int fd, int num_bytes) override;
    int64_t resent_segments(int fd) const override;
    int fileno() const override { return epoll_fd_; }
    void watch(int fd, bool is_new, uint32_t events) override;
    void forget(int fd) override;
    void wake() override;
    int wait(int set_fd, epoll_event* ready, int max_ready, int timeout_ms) override;
    void close() override { shut(); }

   private:
    int epoll_fd_, wake_fd_;
    bool is_awake_ = false;

    void shut();
};

}  // namespace syncline
