// Connections that pass through this rank: what arrives on one of two sockets goes out on the other, both ways.
//
// Two ranks that nobody can dial meet at a third (`syncline.fabric.reach`). Their handshake, frames and codes are none
// of its business; but they must hear each other also while its interpreter is held, or they would take each other for
// dead. So a thread of its own, which never touches Python, carries the bytes. What it reads it keeps until it is
// written, and reads no more meanwhile: who sends too much waits, as on one connection.
#pragma once

#include <sys/types.h>

#include <array>
#include <cstdint>
#include <map>
#include <memory>
#include <mutex>
#include <thread>
#include <vector>

namespace syncline {

class Splices {
    // What comes from one socket and goes to the other.
    struct Way {
        int from = -1, to = -1;
        std::vector<char> bytes;
        size_t first = 0, last = 0;  // which of them are not written yet
        bool has_ended = false;      // nothing more comes
        bool is_over = false;        // and the other end knows
        uint64_t num_bytes = 0;
    };
    struct Splice {
        int64_t number = 0;
        std::array<Way, 2> ways;
    };

   public:
    Splices();  // throws std::system_error
    ~Splices();
    Splices(const Splices&) = delete;
    Splices& operator=(const Splices&) = delete;

    // Carry bytes between two sockets that do not block, which stay the caller's: it closes them when `take_ended`
    // names the number that is returned, or after `close`. Throws std::system_error.
    int64_t add(int one, int other);
    // Which have ended since the last call: both ways, or as a socket broke; neither carries anything any more.
    std::vector<int64_t> take_ended();
    // Readable while `take_ended` has something to tell.
    int fileno() const { return ended_fd_; }
    int64_t num_open();
    // How many bytes were carried by those that have ended, and by those that are open.
    uint64_t num_bytes();
    void close();

   private:
    std::mutex mutex_;
    std::map<int, std::shared_ptr<Splice>> of_socket_;
    std::vector<int64_t> ended_;
    int64_t num_added_ = 0;
    uint64_t num_bytes_ = 0;
    int epoll_fd_ = -1, wake_fd_ = -1, ended_fd_ = -1;
    bool is_closing_ = false;
    pid_t process_ = 0;
    std::thread thread_;

    void start();
    void run();
    bool carry(Splice& splice);
    bool carry_way(Way& way);
    void drop(int socket);
};

}  // namespace syncline
