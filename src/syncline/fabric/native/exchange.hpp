// One rank's messages with all its peers: what waits, what is granted, what travels, what is here.
//
// The rules stand in the Python modules `inbox.py`, `outbox.py`, `data_connection.py` and `control_connection.py`, and
// both speak the same protocol. Here they run without the interpreter: a rank that is woken for a request, a grant or a
// piece of a message goes back to sleep without touching it, and Python hears of whole messages.
//
// Everything is called on the communication loop's thread. `poll` and `finish` release the interpreter lock and touch
// no Python object; what they release or tell is kept until a call that holds the lock.
#pragma once

#define PY_SSIZE_T_CLEAN
#include <Python.h>

#include <array>
#include <cstdint>
#include <deque>
#include <exception>
#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <tuple>
#include <unordered_map>
#include <vector>

#include "frames.hpp"
#include "grants.hpp"
#include "heartbeat.hpp"

namespace syncline {

constexpr int MAX_CLASSES = 16;

// What Python is told of. Kinds are stable names for `native_wire.py`.
enum EventKind : int {
    SENT = 1,        // object: on_sent
    RECEIVED = 2,    // object: on_received
    FRAME = 3,       // number: its type; tag, text: payload
    MISMATCH = 4,    // tag, number: expected signature, other: received signature
    FETCH = 5,       // tag, number: urgency, other: address, serial
    BROKEN = 6,      // number: errno, 0 for an end of file
    VIOLATION = 7,   // number: whether bytes were damaged; text
    ALL_ENDED = 8,   // the END of every connection has arrived
    ALL_CLOSED = 9,  // every connection was closed after its END
    DRAINED = 10,    // everything that was sent is with the kernel (told while `tells_drained`)
    DONE = 11,       // object: a slice's on_done
    FAULT = 12,      // text: why this rank cannot go on with a peer
};

struct Event {
    explicit Event(EventKind kind, int peer, uint64_t tag = 0, int64_t number = 0, uint64_t other = 0)
        : kind(kind), peer(peer), tag(tag), number(number), other(other) {}

    EventKind kind;
    int peer;
    uint64_t tag;
    int64_t number;
    uint64_t other;
    PyObject* object = nullptr;  // owned
    std::string text;
    int64_t serial = 0;
};

// What was done with while the interpreter lock was not held, of all exchanges.
class Garbage {
   public:
    void drop(const Py_buffer& view) {
        const std::lock_guard<std::mutex> guard(mutex_);
        views_.push_back(view);
    }
    void drop(PyObject*& object) {
        if (!object) return;
        const std::lock_guard<std::mutex> guard(mutex_);
        objects_.push_back(object);
        object = nullptr;
    }
    void sweep() {  // with the lock held
        std::vector<Py_buffer> views;
        std::vector<PyObject*> objects;
        {
            const std::lock_guard<std::mutex> guard(mutex_);
            views.swap(views_);
            objects.swap(objects_);
        }
        for (auto& view : views) PyBuffer_Release(&view);
        for (auto* object : objects) Py_DECREF(object);
    }

   private:
    std::mutex mutex_;
    std::vector<Py_buffer> views_;
    std::vector<PyObject*> objects_;
};

inline Garbage& garbage() {
    static Garbage everywhere;
    return everywhere;
}

// Python's memory, which stays where it is while somebody holds it.
struct Hold {
    explicit Hold(const Py_buffer& view) : view(view) {}
    ~Hold() { garbage().drop(view); }
    Hold(const Hold&) = delete;
    Hold& operator=(const Hold&) = delete;
    Py_buffer view;
};

struct Memory {
    uint8_t* data = nullptr;
    int64_t num_bytes = 0;
    std::shared_ptr<const void> hold;  // of Python's memory, or of whatever else it lies in

    void drop() { *this = Memory(); }
};

// Who began a message without Python's knowing; called within the exchange, and may send and receive there.
class Listener {
   public:
    virtual ~Listener() = default;
    virtual void ended(uint32_t number) = 0;
};

// Whom to tell that a message is sent or received: a callable, or a listener by the number that it gave.
struct Completion {
    PyObject* object = nullptr;  // owned
    std::shared_ptr<Listener> listener;
    uint32_t number = 0;
};

struct Outgoing {
    uint64_t tag;
    Memory payload;
    int64_t num_bytes;
    uint32_t signature;
    int64_t urgency, order;
    int connection_class;
    bool is_eager;
    Completion on_sent;
    int64_t limit_bytes = 0;
    int64_t sent_bytes = 0;
    bool is_queued = false, is_leaving = false, is_discarded = false;
};
using OutgoingPtr = std::shared_ptr<Outgoing>;

struct Receive {
    Memory destination;
    bool is_cancelled = false;
    int64_t num_bytes = 0;
    uint32_t signature = 0;
    int64_t urgency = 0;
    Completion on_received;
    int64_t granted_bytes = 0, arrived_bytes = 0;
    bool is_landing = false;  // a chunk of it is arriving on some connection
    bool is_fetched = false;
    int64_t serial = 0;  // which fetch it is
};

struct Held {
    std::vector<uint8_t> payload;
    uint32_t signature = 0;
    bool is_whole = false;
};

struct Announced {
    int64_t num_bytes;
    uint32_t signature;
    uint64_t address;
};

struct EagerTarget {
    enum { TO_RECEIVE, TO_HELD, TO_WASTE } where;
    Receive receive;
};

struct Peer;

struct Connection {
    Peer* peer = nullptr;
    int fd = -1;
    int connection_class = CONTROL_CLASS;
    bool is_watching_writer = false, is_write_scheduled = false;
    bool is_watched = false;
    bool is_deaf = false;    // it broke the protocol: it may be told so, but is not read any more
    bool is_closed = false;  // nothing is read or written any more
    bool has_ended = false, has_spoken = false;
    int64_t overhead_bytes = 0;
};

struct ControlConnection : Connection {
    std::string queue;
    size_t num_queue_sent = 0;
    std::vector<uint8_t> inbox;
    size_t num_inbox_bytes = 0;
};

struct IsAfter {
    bool operator()(const OutgoingPtr& a, const OutgoingPtr& b) const {
        return std::tie(a->urgency, a->order) > std::tie(b->urgency, b->order);
    }
};

struct DataConnection : Connection {
    static constexpr size_t MAX_FRAMES_AT_ONCE = 64;

    int64_t chunk_bytes = MAX_CHUNK_BYTES;
    std::vector<OutgoingPtr> heap, finishing;
    bool wants_end = false;
    std::array<Header, MAX_FRAMES_AT_ONCE> headers;
    struct Piece {
        const uint8_t* data;
        size_t num_bytes;
    };
    std::vector<Piece> pieces;  // what the last refill gave
    size_t first_piece = 0;     // and from where on it is not sent

    std::array<uint8_t, HEADER_BYTES> header;
    size_t num_header_bytes = 0;
    bool has_frame = false;
    Header frame;
    uint8_t* chunk = nullptr;
    size_t chunk_size = 0, num_chunk_bytes = 0;
    uint32_t crc_before = 0;
    int wakes_at_bytes = 1;
    std::vector<uint8_t> scratch;
    int64_t sent_bytes = 0, sent_messages = 0, received_bytes = 0, received_messages = 0;
};

struct Peer {
    Peer(int rank, int64_t credit_bytes) : rank(rank), credit(credit_bytes) {}

    int rank;
    bool is_gone = false;
    uint64_t progress = 0;  // what its last heartbeat carried
    double heard_s = 0;  // when its last message for a listener arrived
    ControlConnection control;
    std::vector<std::unique_ptr<DataConnection>> data;

    // What it sends to us.
    EagerCredit credit;
    std::unordered_map<uint64_t, Receive> posted, arriving;
    std::unordered_map<uint64_t, Announced> announced;
    std::unordered_map<uint64_t, Held> held;
    std::unordered_map<uint64_t, EagerTarget> eager;
    int64_t unexpected_bytes = 0, fetched_bytes = 0, num_fetched = 0;
    bool can_be_read = false;  // messages can be copied out of its memory

    // What we send to it.
    int64_t eager_bytes = 0, credit_bytes = 0, order = 0, num_unsent = 0;
    std::unordered_map<uint64_t, OutgoingPtr> asked;
    std::vector<OutgoingPtr> unasked;  // a heap
    std::array<int64_t, MAX_CLASSES> queued_bytes{};
    bool reads_us = false;  // it can copy messages out of our memory
    int64_t sent_fetched_bytes = 0, num_sent_fetched = 0;

    bool has_ended() const;
    template <typename Each>
    void each_connection(Each each) {
        if (control.fd < 0) return;
        each(static_cast<Connection&>(control));
        for (auto& connection : data) each(static_cast<Connection&>(*connection));
    }
};

class Exchange {
   public:
    explicit Exchange(std::shared_ptr<GrantScheduler> scheduler);
    ~Exchange();
    void close();
    Exchange(const Exchange&) = delete;
    Exchange& operator=(const Exchange&) = delete;

    std::shared_ptr<GrantScheduler> scheduler;
    Heartbeat heartbeat;
    bool tells_drained = false;
    bool is_served = false;  // `wait` grants and writes what was asked for, and looks for events

    int fileno() const { return epoll_fd_; }

    void add_peer(int rank, int64_t eager_bytes, int64_t credit_bytes);
    void attach_control(int peer, int fd);
    void attach_data(int peer, int fd, int64_t chunk_bytes);
    void start(int peer, int connection_class);
    void use(int peer, int64_t eager_bytes, int64_t chunk_bytes);
    void end(int peer);
    void close_peer(int peer);
    Peer& peer(int rank) { return *peers_.at(rank); }
    double heard_s(int rank) const;

    void send(int peer, uint64_t tag, Memory payload, uint32_t signature, int64_t urgency, int connection_class,
              Completion on_sent);
    void receive(int peer, uint64_t tag, Memory destination, uint32_t signature, int64_t urgency,
                 Completion on_received);
    void cancel(int peer, uint64_t tag);
    void send_frame(int peer, uint8_t type, uint64_t tag, uint64_t message_bytes, const std::string& payload);
    void flush_control(int peer);
    bool take_heard(int peer);

    // Of a message that is being copied out of the peer's memory: where its next bytes go, and that they are there.
    std::tuple<uint8_t*, int64_t, int64_t> fetch_target(int peer, uint64_t tag, int64_t serial, int64_t limit_bytes);
    int64_t fetched(int peer, uint64_t tag, int64_t serial, int64_t num_bytes);
    void on_fetched(int peer, uint64_t tag);

    // Read what there is, grant and write, until Python has something to hear of or nothing is left to do.
    void poll();
    // Grant and write what was asked for.
    void finish();
    bool has_work() const { return must_grant_ || !to_write_.empty(); }
    bool has_events() const { return !events_.empty(); }
    // Become readable if there is something to do or to tell, for a loop that asks for nothing else.
    void stir();
    Event next_event();
    void tell_done(PyObject* on_done) { tell(Event(DONE, -1)).object = on_done; }

   private:
    int epoll_fd_, stir_fd_;
    bool is_stirred_ = false;
    std::unordered_map<int, std::unique_ptr<Peer>> peers_;
    std::deque<Event> events_;
    std::vector<Connection*> to_write_;
    bool must_grant_ = false;
    int64_t num_fetches_ = 0;

    Event& tell(Event event) { return events_.emplace_back(std::move(event)); }
    void watch(Connection& connection, bool writer);
    void unwatch(Connection& connection);
    void schedule_write(Connection& connection);

    void guarded_read(Connection& connection);
    void read(Connection& connection);
    void read_control(ControlConnection& connection);
    void take_frames(ControlConnection& connection);
    void take_frame(ControlConnection& connection, const Header& frame, const uint8_t* payload);
    void read_data(DataConnection& connection);
    bool receive_once(DataConnection& connection, size_t& wanted, size_t& num_bytes);
    void begin_chunk(DataConnection& connection);
    void end_chunk(DataConnection& connection);
    void choose_wake_up(DataConnection& connection);
    uint8_t* waste(DataConnection& connection, size_t num_bytes);
    void redirect(Peer& peer, uint64_t tag);
    void note_end(Connection& connection);
    void break_off(Connection& connection, int error);
    void give_up(Connection& connection, const std::exception& error);
    void read_last_words(Peer& peer);

    void write(Connection& connection);
    bool write_control(ControlConnection& connection);
    bool write_data(DataConnection& connection);
    bool refill(DataConnection& connection);
    void refill_sent(DataConnection& connection);
    void send_header(Peer& peer, Header header, const void* payload = nullptr, uint32_t num_bytes = 0);

    void push(Peer& peer, const OutgoingPtr& message);
    void announce(Peer& peer, const OutgoingPtr& message);
    void withdraw(Peer& peer, uint64_t tag);
    OutgoingPtr announced_message(Peer& peer, uint64_t tag);
    void on_grant(Peer& peer, uint64_t tag, int64_t limit_bytes);
    void on_discard(Peer& peer, uint64_t tag);
    void finish_message(Peer& peer, const OutgoingPtr& message);
    void complete(Completion& completion, Event event);
    static void drop(Completion& completion);
    static void drop(OutgoingPtr& message);

    void on_request(Peer& peer, const Header& frame);
    void match(Peer& peer, uint64_t tag);
    uint8_t* begin_granted(Peer& peer, const Header& frame);
    void end_granted(Peer& peer, const Header& frame);
    uint8_t* begin_eager(Peer& peer, const Header& frame);
    void end_eager(Peer& peer, const Header& frame);
    void deliver_held(Peer& peer, uint64_t tag);
    void return_credit(Peer& peer, int64_t num_bytes);
    void received(Peer& peer, uint64_t tag, Receive& receive);
    static void drop(Receive& receive);
};

// Wait for what is ready for Python in an epoll set that holds some exchanges: descriptors with their events. What the
// exchanges can do alone is done. At most `timeout_s` seconds; a negative number waits forever.
std::vector<std::pair<int, uint32_t>> wait(int epoll_fd, double timeout_s, const std::vector<Exchange*>& exchanges);

}  // namespace syncline
