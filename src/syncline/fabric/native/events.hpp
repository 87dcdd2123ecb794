// What Python is told of, oldest first, and whom a message tells of its end.
#pragma once

#include <cstdint>
#include <deque>
#include <memory>
#include <string>
#include <utility>

#include "python_reference.hpp"

namespace syncline {

// Kinds are stable names for the Python side, `peer_transport.py`.
enum EventKind : uint8_t {
    SENT = 1,        // callback: on_sent
    RECEIVED = 2,    // callback: on_received
    FRAME = 3,       // number: its type; tag, text: payload
    MISMATCH = 4,    // tag, number: expected signature, other: received signature
    UNREADABLE = 5,  // number: errno; a message could not be copied out of the peer's memory
    BROKEN = 6,      // number: errno, 0 for an end of file
    VIOLATION = 7,   // number: whether bytes were damaged; text
    ALL_ENDED = 8,   // the END of every connection has arrived
    ALL_CLOSED = 9,  // every connection was closed after its END
    DRAINED = 10,    // everything that was sent is with the kernel (told while `tells_drained`)
    DONE = 11,       // callback: a call's on_done
    FAULT = 12,      // text: why this rank cannot go on with a peer
    SUSPENDED = 13,  // tag: its class, from 0 (control); number: errno, other: whether bytes were damaged, as text says
};

struct Event {
    explicit Event(EventKind kind, int peer, uint64_t tag = 0, int64_t number = 0, uint64_t other = 0)
        : kind(kind), peer(peer), tag(tag), number(number), other(other) {}

    EventKind kind;
    int peer;
    uint64_t tag;
    int64_t number;
    uint64_t other;
    PythonReference callback;
    std::string text;
};

// Reads bytes of a message where its sender keeps them.
class MessageReader {
   public:
    virtual ~MessageReader() = default;
    // False if that cannot be done; then the message never ends.
    virtual bool read(size_t offset, uint8_t* into, size_t num_bytes) const = 0;
};

// Who began a message without Python's knowing; called within the transport, and may send and receive there.
class Listener {
   public:
    virtual ~Listener() = default;
    virtual void ended(uint32_t number) = 0;
    // Whether a message of a peer on this machine could be used at once, where it is: then `use` is called before
    // `ended`, and nothing is written to its destination.
    virtual bool can_use(uint32_t) const { return false; }
    virtual bool use(uint32_t, const MessageReader&) { return false; }
};

// Whom to tell that a message is sent or received: a callable, or a listener by the number that it gave. Told once.
struct Completion {
    PythonReference callback;
    std::shared_ptr<Listener> listener;
    uint32_t number = 0;

    void drop() {
        callback.reset();
        listener.reset();
    }
};

class EventQueue {
   public:
    bool empty() const { return events_.empty(); }
    Event& tell(Event event) { return events_.emplace_back(std::move(event)); }

    // Uses the completion up: a listener is called before this returns, a callable when Python takes the event.
    void complete(Completion& completion, Event event) {
        if (completion.callback) {
            tell(std::move(event)).callback = std::move(completion.callback);
        } else if (completion.listener) {
            const auto listener = std::move(completion.listener);
            listener->ended(completion.number);
        }
    }

    // Forget that a message was received, if that is not taken yet.
    void cancel_received(int peer, uint64_t tag) {
        for (auto event = events_.begin(); event != events_.end(); ++event)
            if (event->kind == RECEIVED && event->peer == peer && event->tag == tag) {
                events_.erase(event);
                return;
            }
    }

    Event take() {
        Event event = std::move(events_.front());
        events_.pop_front();
        return event;
    }

    void clear() { events_.clear(); }

   private:
    std::deque<Event> events_;
};

}  // namespace syncline
