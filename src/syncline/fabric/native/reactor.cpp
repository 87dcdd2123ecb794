// What `reactor.hpp` declares.
#include "reactor.hpp"

#include <sys/epoll.h>
#include <sys/eventfd.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <system_error>

namespace syncline {

namespace {

constexpr int MAX_READY = 64;

}  // namespace

Reactor::Reactor() : epoll_fd_(epoll_create1(EPOLL_CLOEXEC)), wake_fd_(eventfd(0, EFD_NONBLOCK | EFD_CLOEXEC)) {
    epoll_event event{};
    event.events = EPOLLIN;
    event.data.ptr = nullptr;
    if (epoll_fd_ >= 0 && wake_fd_ >= 0 && epoll_ctl(epoll_fd_, EPOLL_CTL_ADD, wake_fd_, &event) == 0) return;
    const std::system_error error(errno, std::generic_category(), "a transport needs two more open files");
    for (const int fd : {wake_fd_, epoll_fd_})
        if (fd >= 0) ::close(fd);
    throw error;
}

void Reactor::close() {
    if (is_closed()) return;
    to_write_.clear();
    ::close(wake_fd_);
    ::close(epoll_fd_);
    epoll_fd_ = wake_fd_ = -1;
}

void Reactor::add(Connection& connection) {
    epoll_event event{};
    event.events = EPOLLIN;
    event.data.ptr = &connection;
    if (epoll_ctl(epoll_fd_, EPOLL_CTL_ADD, connection.fd, &event) < 0)
        throw std::system_error(errno, std::generic_category(), "epoll_ctl");
    connection.is_watched = true;
}

void Reactor::remove(Connection& connection) {
    if (!connection.is_watched) return;
    connection.is_watched = connection.is_watching_writer = false;
    epoll_event event{};
    epoll_ctl(epoll_fd_, EPOLL_CTL_DEL, connection.fd, &event);
}

void Reactor::watch_writer(Connection& connection, bool is_watching) {
    if (!connection.is_watched) return;
    epoll_event event{};
    event.events = EPOLLIN | (is_watching ? EPOLLOUT : 0u);
    event.data.ptr = &connection;
    epoll_ctl(epoll_fd_, EPOLL_CTL_MOD, connection.fd, &event);
    connection.is_watching_writer = is_watching;
}

void Reactor::schedule_write(Connection& connection) {
    if (connection.is_write_scheduled || connection.is_watching_writer || !connection.is_open()) return;
    connection.is_write_scheduled = true;
    to_write_.push_back(&connection);
}

void Reactor::write_scheduled() {
    std::vector<Connection*> writes;
    writes.swap(to_write_);
    std::stable_sort(writes.begin(), writes.end(), [](const Connection* a, const Connection* b) {
        return a->connection_class < b->connection_class;
    });
    for (Connection* connection : writes) {
        connection->is_write_scheduled = false;
        write(*connection);
    }
}

void Reactor::write(Connection& connection) {
    if (!connection.is_open()) return;
    const bool is_done = connection.owner.on_writable(connection);
    if (connection.is_watching_writer == is_done) watch_writer(connection, !is_done);
}

bool Reactor::poll_once() {
    std::array<epoll_event, MAX_READY> ready;
    const int num_ready = epoll_wait(epoll_fd_, ready.data(), MAX_READY, 0);
    for (int place = 0; place < num_ready; ++place) {
        const epoll_event& event = ready[static_cast<size_t>(place)];
        if (!event.data.ptr) {
            uint64_t count = 0;
            is_awake_ = ::read(wake_fd_, &count, sizeof count) < 0;
            continue;
        }
        auto& connection = *static_cast<Connection*>(event.data.ptr);
        if (event.events & ~static_cast<uint32_t>(EPOLLOUT)) connection.owner.on_readable(connection);
        if (connection.is_watching_writer && event.events & ~static_cast<uint32_t>(EPOLLIN)) write(connection);
    }
    return num_ready > 0;
}

void Reactor::wake() {
    if (is_awake_) return;
    const uint64_t count = 1;
    is_awake_ = ::write(wake_fd_, &count, sizeof count) > 0;
}

}  // namespace syncline
