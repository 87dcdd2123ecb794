// What `peer_transport.hpp` declares.
#include "peer_transport.hpp"

#include "sockets.hpp"

namespace syncline {

PeerTransport::PeerTransport(int rank, TransportState& state, int64_t eager_bytes, int64_t credit_bytes)
    : rank(rank),
      connections(*this, state.heartbeat, state.reactor),
      sender(rank, state, connections, eager_bytes),
      receiver(rank, state, connections, credit_bytes),
      state_(state) {}

void PeerTransport::attach_data(int fd, int64_t chunk_bytes) {
    const auto connection_class = static_cast<int>(connections.data.size());
    connections.data.push_back(std::make_unique<DataConnection>(*this, connection_class, fd, chunk_bytes));
}

void PeerTransport::start(int connection_class) {
    Connection& connection = connections.of_class(connection_class);
    state_.reactor.add(connection);
    if (connection_class == CONTROL_CLASS) state_.heartbeat.add(connection.fd);
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
    sender.close();
    receiver.close();
    if (state_.tells_drained) state_.events.tell(Event(DRAINED, rank));
}

void PeerTransport::send_frame(uint8_t type, uint64_t tag, uint64_t message_bytes, const std::string& payload) {
    Header header;
    header.type = type;
    header.tag = tag;
    header.message_bytes = message_bytes;
    if (type == HEARTBEAT) state_.heartbeat.renew(header);
    connections.send_header(header, payload.data(), static_cast<uint32_t>(payload.size()));
}

void PeerTransport::flush_control() {
    ControlConnection& control = connections.control;
    if (control.is_attached() && control.has_unsent() && !control.is_watching_writer) state_.reactor.write(control);
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
    if (connection.is_closed || connection.is_deaf) return;
    connection.has_spoken = true;
    try {
        connection.read();
    } catch (const SocketError& broken) {
        break_off(connection, broken.error);
    } catch (const FrameError& error) {
        mute(connection);
        state_.events.tell(Event(VIOLATION, rank, 0, error.is_damage)).text = error.what();
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

// --- how it ends ---

// An end in good order, or a peer that is lost, for a reason that it may have told.
void PeerTransport::break_off(Connection& connection, int error) {
    if (connection.is_closed) return;
    state_.reactor.remove(connection);
    connection.is_closed = true;
    if (connection.has_ended) {
        if (connections.have_ended()) state_.events.tell(Event(ALL_CLOSED, rank));
        return;
    }
    read_last_frames();
    state_.events.tell(Event(BROKEN, rank, 0, error));
}

// What the peer said last may say why it went.
void PeerTransport::read_last_frames() {
    ControlConnection& control = connections.control;
    if (control.is_closed || control.is_deaf) return;
    try {
        control.read();
    } catch (const SocketError&) {
        return;  // its end is reported by whoever reads it next
    } catch (const std::exception&) {
        control.is_deaf = true;  // its frames are not to be taken twice
    }
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
