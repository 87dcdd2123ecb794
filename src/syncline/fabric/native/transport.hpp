// One rank's messages with all its peers: what waits, what is granted, what travels, what is here.
//
// All of it runs without the interpreter: a rank that is woken for a request, a grant or a chunk of a message goes back
// to sleep without touching it, and Python hears of whole messages.
//
// Everything is called on the communication loop's thread. `poll` and `finish` run without the interpreter lock and
// touch no Python object; what they release or tell is kept until a call that holds the lock.
#pragma once

#include <cstdint>
#include <memory>
#include <unordered_map>
#include <utility>
#include <vector>

#include "peer_transport.hpp"
#include "transport_state.hpp"

namespace syncline {

class NativeTransport {
   public:
    explicit NativeTransport(std::shared_ptr<GrantScheduler> scheduler,
                             std::shared_ptr<Kernel> kernel = std::make_shared<LinuxKernel>())
        : state_(std::move(scheduler), std::move(kernel)) {}
    ~NativeTransport() { close(); }
    void close();
    NativeTransport(const NativeTransport&) = delete;
    NativeTransport& operator=(const NativeTransport&) = delete;

    bool is_served = false;  // `wait` grants and writes what was asked for, and looks for events

    int fileno() const { return state_.reactor.fileno(); }
    TransportState& state() { return state_; }

    void add_peer(int rank, int64_t eager_bytes, int64_t credit_bytes);
    // Throws std::out_of_range.
    PeerTransport& peer(int rank) { return *peers_.at(rank); }
    // When the peer's last message for a listener arrived; 0 if never.
    double heard_s(int rank) const;

    // Read what there is, grant and write, until Python has something to hear of or nothing is left to do.
    void poll();
    // Grant and write what was asked for.
    void finish();
    bool has_work() const { return state_.must_grant || state_.reactor.has_writes(); }
    bool has_events() const { return !state_.events.empty(); }
    // Copy messages out of the memory of peers, as much as may be done before others have their turn.
    void fetch();
    bool has_fetches() const { return !state_.fetches.empty(); }
    // Become readable if there is something to do or to tell, for a loop that asks for nothing else.
    void wake();
    Event next_event() { return state_.events.take(); }
    void tell_done(PythonReference on_done);

   private:
    TransportState state_;
    std::unordered_map<int, std::unique_ptr<PeerTransport>> peers_;

    void give_grants();
};

// Wait for what is ready for Python in an epoll set that holds some transports: descriptors with their events. What the
// transports, of which there is at least one, can do alone is done. At most `timeout_s` seconds; a negative number
// waits forever.
std::vector<std::pair<int, uint32_t>> wait(int epoll_fd, double timeout_s,
                                           const std::vector<NativeTransport*>& transports);

}  // namespace syncline
