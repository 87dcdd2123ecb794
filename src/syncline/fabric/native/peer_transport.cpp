// What `peer_transport.hpp` declares.
#include "peer_transport.hpp"

#include "sockets.hpp"

namespace syncline {

namespace {

// So much of what a peer sends is not acknowledged yet at most, and keeps its memory.
constexpr uint64_t ACKNOWLEDGED_DATA_BYTES = 512 << 10, ACKNOWLEDGED_CONTROL_BYTES = 16 << 10;
constexpr uint64_t LEAST_CONTROL_BYTES = 4 << 10;  // what is acknowledged with a heartbeat, or each would answer one

// Whether there may be somebody at the other end; whoever does not answer at all is judged elsewhere.
bool can_go_on(int error) { return !error || error == ECONNRESET || error == EPIPE || error == ECONNABORTED; }

}  // namespace

PeerTransport::PeerTransport(int rank, TransportState& state, int64_t eager_bytes, int64_t credit_bytes)
    : rank(rank),
      connections(*this, state.heartbeat, state.reactor),
      sender(rank, state, connections, eager_bytes),
      receiver(rank, state, connections, credit_bytes),
      state_(state) {}

void PeerTransport::attach_data(int fd, int64_t chunk_bytes) {
    const auto connection_class = static_cast<int>(connections.data.size());
    connections.data.push_back(
        std::make_unique<DataConnection>(*this, *state_.kernel, connection_class, fd, chunk_bytes));
}

void PeerTransport::start(int connection_class) {
    Connection& connection = connections.of_class(connection_class);
    state_.reactor.add(connection);
    if (connection_class == CONTROL_CLASS) state_.heartbeat.add(connection.fd, connections.control.beats);
    state_.reactor.schedule_write(connection);
}

void PeerTransport::use(int64_t eager_bytes, int64_t chunk_bytes) {
    sender.eager_bytes = eager_bytes;
    for (auto& connection : connections.data) connection->chunk_bytes = chunk_bytes;
}

void PeerTransport::end() {
    for (auto& connection : connections.data) {
        connection->wants_end = true;
        state_.reactor.schedule_write(*connection);
    }
    send_frame(END, 0, 0, "");
}

void PeerTransport::close() {
    if (is_gone) return;
    is_gone = true;
    if (connections.control.is_attached()) state_.heartbeat.remove(connections.control.fd);
    connections.each([this](Connection& connection) {
        state_.reactor.remove(connection);
        connection.is_closed = true;
    });
    connections.control.stream.clear();
    sender.close();
    receiver.close();
    if (state_.tells_drained) state_.events.tell(Event(DRAINED, rank));
}

void PeerTransport::send_frame(uint8_t type, uint64_t tag, uint64_t message_bytes, const std::string& payload) {
    Header header;
    header.type = type;
    header.tag = tag;
    header.message_bytes = message_bytes;
    if (type == HEARTBEAT) {
        state_.heartbeat.renew(header);
        acknowledge_all();
    }
    connections.send_header(header, payload.data(), static_cast<uint32_t>(payload.size()));
}

void PeerTransport::flush_control() {
    ControlConnection& control = connections.control;
    if (!control.is_attached() || !control.has_unsent() || control.is_watching_writer) return;
    if (control.is_suspended && control.fd >= 0)
        on_writable(control);  // it may be deaf alone, and the last words arrive
    else
        state_.reactor.write(control);
}

int64_t PeerTransport::num_unacknowledged() const {
    int64_t num_bytes = 0;
    for (const auto& connection : connections.data) num_bytes += connection->stream.kept_bytes();
    return num_bytes;
}

bool PeerTransport::take_heard() {
    bool is_heard = false;
    connections.each([&](Connection& connection) {
        is_heard |= connection.has_spoken;
        connection.has_spoken = false;
    });
    return is_heard;
}

int64_t PeerTransport::fetch(const Fetch& next, int64_t limit_bytes) {
    try {
        return receiver.fetch(next, limit_bytes);
    } catch (const std::exception& error) {
        state_.events.tell(Event(FAULT, rank)).text = error.what();
    }
    return 0;
}

// --- what the sockets bring ---

void PeerTransport::on_readable(Connection& connection) {
    if (!connection.is_open() || connection.is_deaf) return;
    connection.has_spoken = true;
    try {
        connection.read();
        const bool is_control = connection.connection_class == CONTROL_CLASS;
        acknowledge(connection, is_control ? ACKNOWLEDGED_CONTROL_BYTES : ACKNOWLEDGED_DATA_BYTES);
    } catch (const SocketError& broken) {
        break_off(connection, broken.error);
    } catch (const FrameError& error) {
        interrupt(connection, error);
    } catch (const std::exception& error) {
        give_up(connection, error);
    }
}

bool PeerTransport::on_writable(Connection& connection) {
    try {
        return connection.write();
    } catch (const SocketError& broken) {
        break_off(connection, broken.error);
    } catch (const std::exception& error) {
        give_up(connection, error);
    }
    return true;
}

void PeerTransport::on_frame(const Header& frame, const uint8_t* payload) {
    switch (frame.type) {
        case REQUEST:
            receiver.on_request(frame);
            break;
        case GRANT:
            sender.on_grant(frame.tag, static_cast<int64_t>(frame.message_bytes));
            break;
        case DISCARD:
            sender.on_discard(frame.tag);
            break;
        case CREDIT:
            sender.on_credit(frame.message_bytes);
            break;
        case FETCHED:
            sender.on_fetched(frame.tag);
            break;
        case HEARTBEAT:
            progress = frame.tag;
            break;
        case END:
            on_end();
            break;
        case ACKNOWLEDGED:
            on_acknowledged(frame);
            break;
        default:
            state_.events.tell(Event(FRAME, rank, frame.tag, frame.type))
                .text.assign(reinterpret_cast<const char*>(payload), frame.chunk_bytes);
    }
}

uint8_t* PeerTransport::begin_chunk(const Header& frame) {
    return frame.type == EAGER ? receiver.begin_eager(frame) : receiver.begin_granted(frame);
}

void PeerTransport::end_chunk(const Header& frame) {
    if (frame.type == EAGER)
        receiver.end_eager(frame);
    else
        receiver.end_granted(frame);
}

void PeerTransport::on_end() {
    if (connections.have_ended()) state_.events.tell(Event(ALL_ENDED, rank));
}

// --- connections that break and go on ---

void PeerTransport::suspend(Connection& connection) {
    state_.reactor.remove(connection);
    if (connection.connection_class == CONTROL_CLASS) state_.heartbeat.remove(connection.fd);
    connection.is_suspended = true;
    connection.interrupt();
}

void PeerTransport::suspend(int connection_class) {
    Connection& connection = connections.of_class(connection_class);
    if (connection.is_open()) suspend(connection);
}

int64_t PeerTransport::resume(int connection_class, int fd, uint64_t position) {
    Connection& connection = connections.of_class(connection_class);
    const int64_t before_bytes = connection.stream.resent_bytes;
    if (!connection.stream.rewind(position)) return -1;
    connection.use_socket(fd);
    connection.is_suspended = false;
    connection.has_spoken = true;
    ++connection.num_resumed;
    start(connection_class);
    return connection.stream.resent_bytes - before_bytes;
}

void PeerTransport::acknowledge(Connection& connection, uint64_t least_bytes) {
    if (connection.received_bytes_of_stream - connection.acknowledged_bytes < least_bytes) return;
    connection.acknowledged_bytes = connection.received_bytes_of_stream;
    Header header;
    header.type = ACKNOWLEDGED;
    header.tag = static_cast<uint64_t>(connection.connection_class - CONTROL_CLASS);
    header.message_bytes = connection.received_bytes_of_stream;
    connections.send_header(header);
}

void PeerTransport::acknowledge_all() {
    connections.each([this](Connection& connection) {
        acknowledge(connection, connection.connection_class == CONTROL_CLASS ? LEAST_CONTROL_BYTES : 1);
    });
}

void PeerTransport::on_acknowledged(const Header& frame) {
    if (frame.tag > connections.data.size())
        throw FrameError(format("an acknowledgement of connection %llu, which is not there", ull(frame.tag)));
    Connection& connection = connections.of_class(static_cast<int>(frame.tag) + CONTROL_CLASS);
    if (!connection.stream.acknowledge(frame.message_bytes))
        throw FrameError(format("an acknowledgement of byte %llu of class %d, which was not sent",
                                ull(frame.message_bytes), connection.connection_class));
    state_.reactor.schedule_write(connection);
}

// --- how it ends ---

// An end in good order, a socket that may have a successor, or a peer that is lost, for a reason that it may have told.
void PeerTransport::break_off(Connection& connection, int error) {
    if (!connection.is_open()) return;
    if (connection.has_ended) {
        state_.reactor.remove(connection);
        connection.is_closed = true;
        if (connections.have_ended()) state_.events.tell(Event(ALL_CLOSED, rank));
        return;
    }
    suspend(connection);
    on_readable(connections.control);  // what the peer said last may say why it went
    const auto number = static_cast<uint64_t>(connection.connection_class - CONTROL_CLASS);
    state_.events.tell(Event(can_go_on(error) ? SUSPENDED : BROKEN, rank, number, error));
}

// Bytes that were changed on the way come again; a peer that breaks the protocol is not heard any more.
void PeerTransport::interrupt(Connection& connection, const FrameError& error) {
    if (!error.is_damage || connection.has_ended) {
        mute(connection);
        state_.events.tell(Event(VIOLATION, rank, 0, error.is_damage)).text = error.what();
        return;
    }
    suspend(connection);
    const auto number = static_cast<uint64_t>(connection.connection_class - CONTROL_CLASS);
    state_.events.tell(Event(SUSPENDED, rank, number, 0, 1)).text = error.what();
}

void PeerTransport::mute(Connection& connection) {
    state_.reactor.remove(connection);
    connection.is_deaf = true;
}

// What no rule foresees (no memory is left, a mistake of ours) costs this peer, and never the loop with all others.
void PeerTransport::give_up(Connection& connection, const std::exception& error) {
    mute(connection);
    state_.events.tell(Event(FAULT, rank)).text = error.what();
}

}  // namespace syncline
