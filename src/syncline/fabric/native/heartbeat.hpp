// A thread that says "this process lives" while the communication loop cannot: somebody holds the interpreter's lock.
//
// The loop sends heartbeats itself, and tells this thread what they carry. If the loop has not done so for one and a
// half intervals, the thread repeats the last one on every control connection, for as long as `limit_s`: after that,
// silence is what a loop that never comes back deserves. The thread never touches Python. A stopped process stops it
// too.
//
// Frames are never mixed. Whoever writes to a control connection holds the mutex, and the thread writes only where the
// loop's last frame is whole; of its own frame the loop first sends what the kernel did not take. Such a heartbeat is
// marked by its signature: it is no part of the connection's stream, and is never sent again.
#pragma once

#include <sys/types.h>

#include <condition_variable>
#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <thread>

#include "frames.hpp"
#include "kernel.hpp"

namespace syncline {

// The checks of the heartbeats that the thread sends to one peer, and how many there were.
struct BeatChecks {
    FrameChecks checks;
    uint64_t number = 0;
};

class Heartbeat {
    struct Line {
        std::shared_ptr<BeatChecks> beats;
        std::string rest;      // of a heartbeat of which the kernel took a part
        bool is_whole = true;  // the loop's last frame is with the kernel, or none of it
    };

   public:
    explicit Heartbeat(Kernel& kernel) : kernel_(kernel) {}
    ~Heartbeat() { stop(); }
    Heartbeat(const Heartbeat&) = delete;
    Heartbeat& operator=(const Heartbeat&) = delete;

    // Where the kernel has no threads, `beat_if_late` is called instead.
    void start(double interval_s, double limit_s);
    void stop();
    void add(int fd, std::shared_ptr<BeatChecks> beats);
    void remove(int fd);
    // The loop runs, and sends `frame` itself.
    void renew(Header frame);
    // What the thread does each interval.
    void beat_if_late();

    // While it lives, nobody else writes to control connections; `is_whole` says how the loop leaves this one.
    class WriteGuard {
       public:
        WriteGuard(Heartbeat& heartbeat, int fd);
        // Write what is left of a heartbeat; false if the kernel takes no more now.
        bool finish_heartbeat();
        void leave(bool is_whole);

       private:
        Heartbeat& heartbeat_;
        std::lock_guard<std::mutex> guard_;
        int fd_;
        Line* line_;
    };

   private:
    Kernel& kernel_;
    std::mutex mutex_;
    std::condition_variable changed_;
    std::map<int, Line> lines_;
    Header frame_;
    double interval_s_ = 0, limit_s_ = 0, renewed_s_ = 0;
    bool is_stopping_ = false;
    pid_t process_ = 0;
    std::thread thread_;

    bool is_of_parent() const;
    void run();
    void judge();
    void beat();
    bool send_rest(int fd, std::string& rest);
};

}  // namespace syncline
