// What `heartbeat.hpp` declares.
#include "heartbeat.hpp"

#include <unistd.h>

#include <chrono>
#include <csignal>
#include <utility>

#include "sockets.hpp"

namespace syncline {

namespace {

constexpr double LATE = 1.5;  // intervals after which the loop is late

// Where there are keys each has a number of its own, or anybody could repeat it for a rank that is gone.
std::string encode(Header frame, BeatChecks& beats) {
    frame.type = HEARTBEAT;
    frame.signature = 1;
    if (beats.checks.has_key()) frame.offset = ++beats.number;
    const EncodedHeader encoded = encode_header(frame, beats.checks);
    return {encoded.begin(), encoded.end()};
}

}  // namespace

void Heartbeat::start(double interval_s, double limit_s) {
    const std::lock_guard<std::mutex> guard(mutex_);
    if (thread_.joinable()) return;
    interval_s_ = interval_s;
    limit_s_ = limit_s;
    renewed_s_ = kernel_.now_s();
    if (!kernel_.has_threads()) return;
    process_ = getpid();
    // Signals are for Python's threads: a new thread inherits what is blocked.
    sigset_t all, before;
    sigfillset(&all);
    pthread_sigmask(SIG_SETMASK, &all, &before);
    thread_ = std::thread(&Heartbeat::run, this);
    pthread_sigmask(SIG_SETMASK, &before, nullptr);
}

void Heartbeat::stop() {
    if (!thread_.joinable()) return;
    if (is_of_parent()) {  // the thread did not come along
        thread_.detach();
        return;
    }
    {
        const std::lock_guard<std::mutex> guard(mutex_);
        is_stopping_ = true;
    }
    changed_.notify_all();
    thread_.join();
}

// In a forked child the mutex may be locked for ever, by a thread that is not there.
bool Heartbeat::is_of_parent() const { return process_ && process_ != getpid(); }

void Heartbeat::add(int fd, std::shared_ptr<BeatChecks> beats) {
    const std::lock_guard<std::mutex> guard(mutex_);
    lines_[fd] = Line{std::move(beats), {}, true};
}

void Heartbeat::remove(int fd) {
    if (is_of_parent()) return;
    const std::lock_guard<std::mutex> guard(mutex_);
    lines_.erase(fd);
}

void Heartbeat::renew(Header frame) {
    const std::lock_guard<std::mutex> guard(mutex_);
    frame_ = frame;
    renewed_s_ = kernel_.now_s();
}

void Heartbeat::run() {
    std::unique_lock<std::mutex> lock(mutex_);
    while (!is_stopping_) {
        changed_.wait_for(lock, std::chrono::duration<double>(interval_s_));
        if (!is_stopping_) judge();
    }
}

void Heartbeat::beat_if_late() {
    const std::lock_guard<std::mutex> guard(mutex_);
    judge();
}

void Heartbeat::judge() {
    const double late_s = kernel_.now_s() - renewed_s_;
    if (late_s >= LATE * interval_s_ && late_s <= limit_s_) beat();
}

void Heartbeat::beat() {
    for (auto& [fd, line] : lines_) {
        if (!line.is_whole) continue;
        if (line.rest.empty()) {
            line.rest = encode(frame_, *line.beats);
            iovec part{line.rest.data(), line.rest.size()};
            const ssize_t num_bytes = kernel_.send(fd, &part, 1);
            line.rest.erase(0, num_bytes > 0 ? static_cast<size_t>(num_bytes) : line.rest.size());
        } else {
            send_rest(fd, line.rest);
        }
    }
}

bool Heartbeat::send_rest(int fd, std::string& rest) {
    while (!rest.empty()) {
        iovec part{rest.data(), rest.size()};
        const ssize_t num_bytes = kernel_.send(fd, &part, 1);
        if (num_bytes >= 0)
            rest.erase(0, static_cast<size_t>(num_bytes));
        else if (would_block(static_cast<int>(-num_bytes)))
            return false;
        else
            return true;  // the loop will find the same error
    }
    return true;
}

Heartbeat::WriteGuard::WriteGuard(Heartbeat& heartbeat, int fd)
    : heartbeat_(heartbeat), guard_(heartbeat.mutex_), fd_(fd) {
    const auto found = heartbeat.lines_.find(fd);
    line_ = found == heartbeat.lines_.end() ? nullptr : &found->second;
}

bool Heartbeat::WriteGuard::finish_heartbeat() { return !line_ || heartbeat_.send_rest(fd_, line_->rest); }

void Heartbeat::WriteGuard::leave(bool is_whole) {
    if (line_) line_->is_whole = is_whole;
}

}  // namespace syncline
