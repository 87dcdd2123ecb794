// What `splices.hpp` declares.
#include "splices.hpp"

#include <sys/epoll.h>
#include <sys/eventfd.h>
#include <sys/socket.h>
#include <unistd.h>

#include <cerrno>
#include <csignal>
#include <set>
#include <system_error>
#include <utility>

#include "sockets.hpp"

namespace syncline {

namespace {

constexpr size_t BUFFER_BYTES = 256 << 10;
constexpr int MAX_READY = 64;
constexpr int MAX_ROUNDS = 8;  // of one splice, before the others have their turn

[[noreturn]] void fail(const char* what) { throw std::system_error(errno, std::generic_category(), what); }

void watch(int epoll_fd, int fd, uint32_t events) {
    epoll_event event{};
    event.events = events;
    event.data.fd = fd;
    if (epoll_ctl(epoll_fd, EPOLL_CTL_ADD, fd, &event) < 0) fail("epoll_ctl");
}

}  // namespace

Splices::Splices() : ended_fd_(eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK)) {
    if (ended_fd_ < 0) fail("eventfd");
}

Splices::~Splices() {
    close();
    ::close(ended_fd_);
}

int64_t Splices::add(int one, int other) {
    const std::lock_guard<std::mutex> guard(mutex_);
    if (!thread_.joinable()) start();
    auto splice = std::make_shared<Splice>();
    splice->number = num_added_++;
    splice->ways[0] = Way{one, other, std::vector<char>(BUFFER_BYTES)};
    splice->ways[1] = Way{other, one, std::vector<char>(BUFFER_BYTES)};
    of_socket_[one] = of_socket_[other] = splice;
    // Told at every edge, the first one at once: who is told carries until the kernel gives or takes no more.
    constexpr uint32_t EDGES = EPOLLIN | EPOLLOUT | EPOLLRDHUP | EPOLLET;
    watch(epoll_fd_, one, EDGES);
    watch(epoll_fd_, other, EDGES);
    return splice->number;
}

std::vector<int64_t> Splices::take_ended() {
    const std::lock_guard<std::mutex> guard(mutex_);
    uint64_t number = 0;
    (void)!read(ended_fd_, &number, sizeof number);
    return std::exchange(ended_, {});
}

int64_t Splices::num_open() {
    const std::lock_guard<std::mutex> guard(mutex_);
    return static_cast<int64_t>(of_socket_.size() / 2);
}

uint64_t Splices::num_bytes() {
    const std::lock_guard<std::mutex> guard(mutex_);
    return num_bytes_;
}

void Splices::close() {
    if (!thread_.joinable()) return;
    if (process_ != getpid()) {  // a forked child, where the thread did not come along
        thread_.detach();
        return;
    }
    {
        const std::lock_guard<std::mutex> guard(mutex_);
        is_closing_ = true;
        const uint64_t one = 1;
        (void)!write(wake_fd_, &one, sizeof one);
    }
    thread_.join();
    while (!of_socket_.empty()) drop(of_socket_.begin()->first);
    ::close(epoll_fd_);
    ::close(wake_fd_);
}

void Splices::start() {
    epoll_fd_ = epoll_create1(EPOLL_CLOEXEC);
    if (epoll_fd_ < 0) fail("epoll_create1");
    wake_fd_ = eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK);
    if (wake_fd_ < 0) fail("eventfd");
    watch(epoll_fd_, wake_fd_, EPOLLIN);
    process_ = getpid();
    // Signals are for Python's threads: a new thread inherits what is blocked.
    sigset_t all, before;
    sigfillset(&all);
    pthread_sigmask(SIG_SETMASK, &all, &before);
    thread_ = std::thread(&Splices::run, this);
    pthread_sigmask(SIG_SETMASK, &before, nullptr);
}

void Splices::run() {
    std::set<std::shared_ptr<Splice>> busy;
    std::array<epoll_event, MAX_READY> ready;
    while (true) {
        const int num_ready = epoll_wait(epoll_fd_, ready.data(), MAX_READY, busy.empty() ? -1 : 0);
        const std::lock_guard<std::mutex> guard(mutex_);
        if (is_closing_) return;
        for (int place = 0; place < num_ready; ++place) {
            const auto found = of_socket_.find(ready[static_cast<size_t>(place)].data.fd);
            if (found != of_socket_.end()) busy.insert(found->second);
        }
        for (auto next = busy.begin(); next != busy.end();) next = carry(**next) ? std::next(next) : busy.erase(next);
    }
}

// Carry for some rounds; false if nothing can be done until an edge is told.
bool Splices::carry(Splice& splice) {
    bool is_busy = false;
    try {
        for (Way& way : splice.ways) {
            int round = 0;
            while (round < MAX_ROUNDS && carry_way(way)) ++round;
            is_busy |= round == MAX_ROUNDS;
        }
    } catch (const std::system_error&) {
        drop(splice.ways[0].from);
        return false;
    }
    if (splice.ways[0].is_over && splice.ways[1].is_over) drop(splice.ways[0].from);
    return is_busy;
}

// Read and write once; whether there may be more to do.
bool Splices::carry_way(Way& way) {
    if (way.is_over) return false;
    bool has_read = false;
    if (way.first == way.last && !way.has_ended) {
        const ssize_t count = recv(way.from, way.bytes.data(), way.bytes.size(), 0);
        if (count < 0 && !would_block(errno)) fail("recv");
        if (count == 0) way.has_ended = true;
        if (count > 0) {
            way.first = 0;
            way.last = static_cast<size_t>(count);
            num_bytes_ += static_cast<uint64_t>(count);
            has_read = true;
        }
    }
    if (way.first < way.last) {
        const ssize_t count = send(way.to, way.bytes.data() + way.first, way.last - way.first, MSG_NOSIGNAL);
        if (count < 0 && !would_block(errno)) fail("send");
        if (count < 0) return false;
        way.first += static_cast<size_t>(count);
        return true;
    }
    if (way.has_ended) {
        shutdown(way.to, SHUT_WR);
        way.is_over = true;
    }
    return has_read;
}

// Both ends of what is joined at `socket` learn it: the sockets are shut down, whoever else holds them.
void Splices::drop(int socket) {
    const std::shared_ptr<Splice> splice = std::move(of_socket_.at(socket));
    for (const Way& way : splice->ways) {
        epoll_ctl(epoll_fd_, EPOLL_CTL_DEL, way.from, nullptr);
        shutdown(way.from, SHUT_RDWR);
        of_socket_.erase(way.from);
    }
    ended_.push_back(splice->number);
    const uint64_t one = 1;
    (void)!write(ended_fd_, &one, sizeof one);
}

}  // namespace syncline
