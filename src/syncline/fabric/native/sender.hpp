// What one peer is sent: at once within its credit, else announced and sent as it grants; the most urgent first. A
// message counts as unsent until its last byte is with the kernel.
#pragma once

#include <array>
#include <cstdint>
#include <unordered_map>
#include <vector>

#include "connections.hpp"
#include "messages.hpp"
#include "transport_state.hpp"

namespace syncline {

constexpr int MAX_CLASSES = 16;
constexpr size_t MAX_REQUESTS = 16384;  // announced messages that wait for their grant at one peer

class Sender {
   public:
    Sender(int peer, TransportState& state, Connections& connections, int64_t eager_bytes)
        : eager_bytes(eager_bytes), peer_(peer), state_(state), connections_(connections) {}

    int64_t eager_bytes;    // messages of at most so many bytes are sent at once
    bool reads_us = false;  // the peer can copy messages out of our memory
    int64_t num_unsent = 0;
    int64_t fetched_bytes = 0, num_fetched = 0;
    std::array<int64_t, MAX_CLASSES> queued_bytes{};

    int64_t credit_bytes() const { return credit_bytes_; }
    bool is_announced(uint64_t tag) const { return asked_.count(tag) > 0; }
    void send(const MessageSettings& settings, Memory payload, Completion on_sent);
    // What the peer answers. All throw FrameError where it must not.
    void on_grant(uint64_t tag, int64_t limit_bytes);
    void on_discard(uint64_t tag);
    void on_fetched(uint64_t tag);
    void on_credit(uint64_t num_bytes);

    void finish(const OutgoingPtr& message);
    void close();

   private:
    const int peer_;
    TransportState& state_;
    Connections& connections_;
    bool is_closed_ = false;
    int64_t credit_bytes_ = 0, order_ = 0;
    std::unordered_map<uint64_t, OutgoingPtr> asked_;
    std::vector<OutgoingPtr> unasked_;  // a heap

    void push(const OutgoingPtr& message);
    void announce(const OutgoingPtr& message);
    void withdraw(uint64_t tag);
    OutgoingPtr announced_message(uint64_t tag);
};

}  // namespace syncline
