// What `transport.hpp` declares.
#include "transport.hpp"

#include <algorithm>
#include <array>
#include <cmath>
#include <stdexcept>

namespace syncline {

namespace {

constexpr int MAX_ROUNDS = 32;  // of reading and writing, before Python is asked again
constexpr int MAX_READY = 64;
constexpr int64_t FETCH_BYTES = 1 << 20;  // about 0.1 ms

}  // namespace

void NativeTransport::close() {
    if (state_.reactor.is_closed()) return;
    state_.heartbeat.stop();
    for (auto& [rank, peer] : peers_) {
        peer->close();
        peer->receiver.drop_posted();
    }
    state_.events.clear();
    state_.fetches.clear();
    state_.must_grant = false;
    state_.reactor.close();
}

void NativeTransport::add_peer(int rank, int64_t eager_bytes, int64_t credit_bytes) {
    auto added = std::make_unique<PeerTransport>(rank, state_, eager_bytes, credit_bytes);
    if (!peers_.emplace(rank, std::move(added)).second) throw std::invalid_argument("a rank becomes a peer twice");
}

double NativeTransport::heard_s(int rank) const {
    const auto found = peers_.find(rank);
    return found == peers_.end() ? 0.0 : found->second->receiver.heard_s;
}

void NativeTransport::poll() {
    for (int round = 0; round < MAX_ROUNDS; ++round) {
        const bool is_fetching = has_fetches();
        if (is_fetching) fetch();
        if (!(state_.reactor.poll_once() || is_fetching) || has_events()) return;
        finish();
        if (has_events()) return;
    }
}

void NativeTransport::finish() {
    while (has_work()) {
        if (state_.must_grant) give_grants();
        state_.reactor.write_scheduled();
    }
}

void NativeTransport::fetch() {
    for (int64_t rest_bytes = FETCH_BYTES; rest_bytes > 0 && has_fetches();) {
        const Fetch next = state_.fetches.take();
        rest_bytes -= peer(next.peer).fetch(next, rest_bytes);
    }
}

void NativeTransport::give_grants() {
    state_.must_grant = false;
    for (const Grant& grant : state_.scheduler->grants(state_.kernel->now_s()))
        peer(grant.peer).receiver.grant(grant.tag, grant.limit_bytes);
}

void NativeTransport::wake() {
    if (!is_served && (has_work() || has_events() || has_fetches())) state_.reactor.wake();
}

void NativeTransport::tell_done(PythonReference on_done) {
    state_.events.tell(Event(DONE, -1)).callback = std::move(on_done);
}

namespace {

// How long may be slept: not at all if Python has something to hear of, or messages are to be copied.
int timeout_ms(bool is_busy, double timeout_s, double rest_s) {
    if (is_busy) return 0;
    if (timeout_s < 0) return -1;
    return static_cast<int>(std::ceil(std::max(rest_s, 0.0) * 1e3));
}

}  // namespace

std::vector<std::pair<int, uint32_t>> wait(int epoll_fd, double timeout_s,
                                           const std::vector<NativeTransport*>& transports) {
    std::vector<std::pair<int, uint32_t>> found;
    Kernel& kernel = *transports.front()->state().kernel;
    const double deadline_s = kernel.now_s() + timeout_s;
    while (true) {
        bool is_busy = false;
        for (NativeTransport* transport : transports) {
            transport->finish();
            if (!transport->has_events() && transport->has_fetches()) {
                transport->fetch();
                transport->finish();
            }
            is_busy |= transport->has_events() || transport->has_fetches();
        }
        std::array<epoll_event, MAX_READY> ready;
        const int sleeps_ms = timeout_ms(is_busy, timeout_s, deadline_s - kernel.now_s());
        const int num_ready = kernel.wait(epoll_fd, ready.data(), MAX_READY, sleeps_ms);
        for (int place = 0; place < num_ready; ++place) {
            const epoll_event& event = ready[static_cast<size_t>(place)];
            const int fd = event.data.fd;
            const auto served = std::find_if(transports.begin(), transports.end(),
                                             [fd](const NativeTransport* each) { return each->fileno() == fd; });
            if (served == transports.end())
                found.emplace_back(fd, uint32_t{event.events});
            else
                (*served)->poll();
        }
        for (const NativeTransport* transport : transports)
            if (transport->has_events()) found.emplace_back(transport->fileno(), EPOLLIN);
        if (!found.empty() || num_ready < 0) return found;  // a signal is for Python too
        if (timeout_s >= 0 && kernel.now_s() >= deadline_s) return found;
    }
}

}  // namespace syncline
