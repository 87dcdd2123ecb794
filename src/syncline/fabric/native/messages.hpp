// One message on its way: what waits to be sent, and what a receive waits for.
#pragma once

#include <cstdint>
#include <memory>
#include <tuple>
#include <vector>

#include "events.hpp"
#include "memory.hpp"

namespace syncline {

// How a message is sent.
struct MessageSettings {
    uint64_t tag;
    uint32_t signature;
    int64_t urgency;  // lower is sooner
    int connection_class;
};

struct Outgoing {
    uint64_t tag;
    Memory payload;
    int64_t num_bytes;
    uint32_t signature;
    int64_t urgency, order;
    int connection_class;
    bool is_eager;  // sent without a grant, within the receiver's credit
    Completion on_sent;
    int64_t limit_bytes = 0;  // up to which byte it may be sent
    int64_t sent_bytes = 0;
    bool is_queued = false, is_leaving = false, is_discarded = false;

    void drop() {
        payload.drop();
        on_sent.drop();
    }
};
using OutgoingPtr = std::shared_ptr<Outgoing>;

// Orders a heap with the most urgent message on top; of equals, the one that was sent first.
struct IsLessUrgent {
    bool operator()(const OutgoingPtr& a, const OutgoingPtr& b) const {
        return std::tie(a->urgency, a->order) > std::tie(b->urgency, b->order);
    }
};

// A receive that was posted.
struct Receive {
    Memory destination;
    int64_t num_bytes = 0;
    uint32_t signature = 0;
    int64_t urgency = 0;
    Completion on_received;
    int64_t granted_bytes = 0, arrived_bytes = 0;
    bool is_cancelled = false;
    bool is_landing = false;  // a chunk of it is arriving on some connection
    uint64_t address = 0;     // where it lies in the sender's memory, if it is copied out of that
    int64_t serial = 0;       // which fetch it is
    bool is_fetched() const { return address != 0; }

    void drop() {
        destination.drop();
        on_received.drop();
    }
};

// A message for which its sender asked for a grant, and that was not posted yet.
struct Announced {
    int64_t num_bytes;
    uint32_t signature;
    uint64_t address;
};

// A message that came within the credit, before its receive.
struct Unexpected {
    std::vector<uint8_t> payload;
    uint32_t signature = 0;
    bool is_whole = false;
};

// Where a message that was sent within the credit is arriving.
struct EagerTarget {
    enum : uint8_t { TO_RECEIVE, TO_UNEXPECTED, TO_WASTE } where;
    Receive receive;
};

}  // namespace syncline
