// What `reactor.hpp` declares.
#include "reactor.hpp"

#include <algorithm>
#include <array>

namespace syncline {

namespace {

constexpr int MAX_READY = 64;

}  // namespace

void Reactor::close() {
    if (is_closed()) return;
    is_closed_ = true;
    to_write_.clear();
    watched_.clear();
    kernel.close();
}

void Reactor::add(Connection& connection) {
    kernel.watch(connection.fd, /*is_new=*/true, EPOLLIN);
    watched_[connection.fd] = &connection;
    connection.is_watched = true;
}

void Reactor::remove(Connection& connection) {
    if (!connection.is_watched) return;
    connection.is_watched = connection.is_watching_writer = false;
    watched_.erase(connection.fd);
    kernel.forget(connection.fd);
}

void Reactor::watch_writer(Connection& connection, bool is_watching) {
    if (!connection.is_watched) return;
    kernel.watch(connection.fd, /*is_new=*/false, EPOLLIN | (is_watching ? EPOLLOUT : 0u));
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
    const int num_ready = kernel.wait(fileno(), ready.data(), MAX_READY, 0);
    for (int place = 0; place < num_ready; ++place) {
        const epoll_event& event = ready[static_cast<size_t>(place)];
        const auto found = watched_.find(event.data.fd);
        if (found == watched_.end()) continue;  // it was woken, or one that was ready ended this one
        Connection& connection = *found->second;
        if (event.events & ~static_cast<uint32_t>(EPOLLOUT)) connection.owner.on_readable(connection);
        if (connection.is_watching_writer && event.events & ~static_cast<uint32_t>(EPOLLIN)) write(connection);
    }
    return num_ready > 0;
}

}  // namespace syncline
