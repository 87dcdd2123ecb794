// What one peer sends us: receives that were posted, messages that came before theirs, and where each chunk belongs.
//
// What a header says is believed only as far as it was allowed before: a large message must have been granted, byte for
// byte, and a small one must fit into the credit. So no peer can make this process allocate more than its credit.
#pragma once

#include <cstdint>
#include <unordered_map>
#include <utility>
#include <vector>

#include "connections.hpp"
#include "eager_credit.hpp"
#include "messages.hpp"
#include "transport_state.hpp"

namespace syncline {

class Receiver {
   public:
    Receiver(int peer, TransportState& state, Connections& connections, int64_t credit_bytes)
        : peer_(peer), state_(state), connections_(connections), credit_(credit_bytes) {}

    int pid = 0;         // of the peer, if messages can be copied out of its memory
    double heard_s = 0;  // when its last message for a listener arrived
    int64_t unexpected_bytes = 0, num_dropped = 0, fetched_bytes = 0, num_fetched = 0;

    bool is_posted(uint64_t tag) const { return posted_.count(tag) || arriving_.count(tag); }
    int64_t num_pending() const;
    int64_t used_credit_bytes() const { return credit_.used_bytes(); }
    void receive(const MessageSettings& settings, Memory destination, Completion on_received);
    void cancel(uint64_t tag);
    // Throw away what came early in the streams [first, stop), and whatever comes in them from now on.
    void drop_streams(uint64_t first, uint64_t stop);

    // What the peer sends; all throw FrameError where it must not. `begin_*` return where the chunk belongs.
    void on_request(const Header& frame);
    uint8_t* begin_granted(const Header& frame);
    void end_granted(const Header& frame);
    uint8_t* begin_eager(const Header& frame);
    void end_eager(const Header& frame);

    // The peer may send the message up to that byte, unless nobody waits for it any more.
    void grant(uint64_t tag, int64_t limit_bytes);
    // Copy of a message out of the peer's memory what is missing, or `limit_bytes` of it, which puts it in the queue
    // again; returns how much was copied. Nothing is, if nobody waits for it any more.
    int64_t fetch(const Fetch& fetch, int64_t limit_bytes);
    // Copy bytes out of the peer's memory; false, and told, if that cannot be done.
    bool read(uint64_t address, uint8_t* into, int64_t num_bytes);

    // Forget what can never arrive; what is here as a whole can still be received.
    void close();
    void drop_posted() { posted_.clear(); }

   private:
    const int peer_;
    TransportState& state_;
    Connections& connections_;
    EagerCredit credit_;
    std::unordered_map<uint64_t, Receive> posted_, arriving_;
    std::unordered_map<uint64_t, Announced> announced_;
    std::unordered_map<uint64_t, Unexpected> unexpected_;
    std::unordered_map<uint64_t, EagerTarget> eager_;
    std::vector<std::pair<uint64_t, uint64_t>> dropped_;

    bool is_dropped(uint64_t tag) const;
    void match(uint64_t tag);
    void begin_arriving(const Announced& announced, Receive receive, uint64_t tag);
    void cancel_arriving(uint64_t tag);
    Receive take_posted(uint64_t tag);
    void deliver_unexpected(uint64_t tag);
    void redirect(uint64_t tag);
    void discard(uint64_t tag);
    void mismatch(uint64_t tag, Receive& receive, uint32_t signature);
    void return_credit(int64_t num_bytes);
    void received(uint64_t tag, Receive& receive);
    void fetched(uint64_t tag);
};

}  // namespace syncline
