// What `exchange.hpp` declares.
#include "exchange.hpp"

#include <errno.h>
#include <sys/epoll.h>
#include <sys/eventfd.h>
#include <sys/socket.h>
#include <sys/uio.h>
#include <time.h>
#include <unistd.h>

#include <algorithm>
#include <cmath>
#include <system_error>

namespace syncline {

namespace {

constexpr int64_t BUDGET_BYTES = 2 << 20;     // what one connection moves before others have their turn
constexpr int64_t WAKE_BYTES = 32 << 10;      // in the middle of a chunk, the kernel wakes us for no less
constexpr size_t INBOX_BYTES = 128 << 10;     // room for control frames that arrive at once; no frame is larger
constexpr size_t MAX_REQUESTS = 16384;        // announced messages that wait for their grant at one peer
constexpr uint64_t MOST_CREDIT_BYTES = uint64_t{1} << 48;  // more than any memory, and far from overflowing
constexpr int MAX_ROUNDS = 32;                // before Python has its turn again
constexpr int MAX_READY = 64;

struct SocketError {
    int error;  // 0: end of file
};

double now_s() {
    timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return static_cast<double>(now.tv_sec) + 1e-9 * static_cast<double>(now.tv_nsec);
}

bool would_block(int error) { return error == EAGAIN || error == EWOULDBLOCK || error == EINTR; }

unsigned long long ull(uint64_t number) { return number; }

// Return how many bytes came, or -1 if none are there yet.
ssize_t check_received(ssize_t num_bytes) {
    if (num_bytes > 0) return num_bytes;
    if (num_bytes == 0) throw SocketError{0};
    if (would_block(errno)) return -1;
    throw SocketError{errno};
}

}  // namespace

bool Peer::has_ended() const {
    if (control.fd < 0 || !control.has_ended) return false;
    return std::all_of(data.begin(), data.end(), [](const auto& connection) { return connection->has_ended; });
}

Exchange::Exchange(std::shared_ptr<GrantScheduler> scheduler)
    : scheduler(std::move(scheduler)),
      epoll_fd_(epoll_create1(EPOLL_CLOEXEC)),
      stir_fd_(eventfd(0, EFD_NONBLOCK | EFD_CLOEXEC)) {
    epoll_event event{};
    event.events = EPOLLIN;
    event.data.ptr = nullptr;
    if (epoll_fd_ >= 0 && stir_fd_ >= 0 && epoll_ctl(epoll_fd_, EPOLL_CTL_ADD, stir_fd_, &event) == 0) return;
    const std::system_error error(errno, std::generic_category(), "an exchange needs two more open files");
    for (const int fd : {stir_fd_, epoll_fd_})
        if (fd >= 0) ::close(fd);
    throw error;
}

Exchange::~Exchange() { close(); }

void Exchange::close() {
    if (epoll_fd_ < 0) return;
    heartbeat.stop();
    for (auto& [rank, peer] : peers_) {
        close_peer(rank);
        for (auto& [tag, receive] : peer->posted) drop(receive);
        peer->posted.clear();
    }
    for (auto& event : events_) garbage().drop(event.object);
    events_.clear();
    to_write_.clear();
    must_grant_ = false;
    garbage().sweep();
    ::close(stir_fd_);
    ::close(epoll_fd_);
    epoll_fd_ = stir_fd_ = -1;
}

// --- peers and their connections ---

void Exchange::add_peer(int rank, int64_t eager_bytes, int64_t credit_bytes) {
    auto added = std::make_unique<Peer>(rank, credit_bytes);
    added->eager_bytes = eager_bytes;
    peers_[rank] = std::move(added);
}

void Exchange::attach_control(int rank, int fd) {
    Peer& peer = this->peer(rank);
    peer.control.peer = &peer;
    peer.control.fd = fd;
    peer.control.inbox.resize(INBOX_BYTES);
}

void Exchange::attach_data(int rank, int fd, int64_t chunk_bytes) {
    Peer& peer = this->peer(rank);
    auto added = std::make_unique<DataConnection>();
    added->peer = &peer;
    added->fd = fd;
    added->connection_class = static_cast<int>(peer.data.size());
    added->chunk_bytes = chunk_bytes;
    peer.data.push_back(std::move(added));
}

void Exchange::start(int rank, int connection_class) {
    Peer& peer = this->peer(rank);
    Connection& connection = connection_class == CONTROL_CLASS
                                 ? static_cast<Connection&>(peer.control)
                                 : static_cast<Connection&>(*peer.data.at(static_cast<size_t>(connection_class)));
    epoll_event event{};
    event.events = EPOLLIN;
    event.data.ptr = &connection;
    if (epoll_ctl(epoll_fd_, EPOLL_CTL_ADD, connection.fd, &event) < 0)
        throw std::system_error(errno, std::generic_category(), "epoll_ctl");
    connection.is_watched = true;
    if (connection_class == CONTROL_CLASS) heartbeat.add(connection.fd);
    schedule_write(connection);
}

void Exchange::use(int rank, int64_t eager_bytes, int64_t chunk_bytes) {
    Peer& peer = this->peer(rank);
    peer.eager_bytes = eager_bytes;
    for (auto& connection : peer.data) connection->chunk_bytes = chunk_bytes;
}

void Exchange::end(int rank) {
    Peer& peer = this->peer(rank);
    for (auto& connection : peer.data) {
        connection->wants_end = true;
        schedule_write(*connection);
    }
    send_frame(rank, END, 0, 0, "");
}

void Exchange::close_peer(int rank) {
    Peer& peer = this->peer(rank);
    if (peer.is_gone) return;
    peer.is_gone = true;
    if (peer.control.fd >= 0) heartbeat.remove(peer.control.fd);
    peer.each_connection([&](Connection& connection) {
        unwatch(connection);
        connection.is_closed = true;
    });
    for (auto& connection : peer.data) {
        connection->pieces.clear();
        for (auto& message : connection->heap) drop(message);
        for (auto& message : connection->finishing) drop(message);
        connection->heap.clear();
        connection->finishing.clear();
        connection->has_frame = false;
    }
    for (auto& [tag, message] : peer.asked) drop(message);
    for (auto& message : peer.unasked) drop(message);
    peer.asked.clear();
    peer.unasked.clear();
    peer.queued_bytes.fill(0);
    peer.num_unsent = 0;

    std::map<int64_t, int64_t> underway;
    for (auto& [tag, receive] : peer.arriving) {
        if (!receive.is_fetched) underway[receive.urgency] += receive.granted_bytes - receive.arrived_bytes;
        drop(receive);
    }
    scheduler->forget_peer(rank, underway);
    must_grant_ = true;
    peer.arriving.clear();
    peer.announced.clear();
    for (auto& [tag, target] : peer.eager)
        if (target.where == EagerTarget::TO_RECEIVE) drop(target.receive);
    peer.eager.clear();
    // What arrived whole can still be received.
    for (auto held = peer.held.begin(); held != peer.held.end();)
        held = held->second.is_whole ? std::next(held) : peer.held.erase(held);
    for (auto posted = peer.posted.begin(); posted != peer.posted.end();) {
        if (peer.held.count(posted->first)) {
            ++posted;
        } else {
            drop(posted->second);
            posted = peer.posted.erase(posted);
        }
    }
    if (tells_drained) tell(Event(DRAINED, rank));
}

void Exchange::watch(Connection& connection, bool writer) {
    if (!connection.is_watched) return;
    epoll_event event{};
    event.events = EPOLLIN | (writer ? EPOLLOUT : 0u);
    event.data.ptr = &connection;
    epoll_ctl(epoll_fd_, EPOLL_CTL_MOD, connection.fd, &event);
    connection.is_watching_writer = writer;
}

void Exchange::unwatch(Connection& connection) {
    if (!connection.is_watched) return;
    connection.is_watched = false;
    epoll_event event{};
    epoll_ctl(epoll_fd_, EPOLL_CTL_DEL, connection.fd, &event);
}

double Exchange::heard_s(int rank) const {
    const auto found = peers_.find(rank);
    return found == peers_.end() ? 0.0 : found->second->heard_s;
}

bool Exchange::take_heard(int rank) {
    bool is_heard = false;
    peer(rank).each_connection([&](Connection& connection) {
        is_heard |= connection.has_spoken;
        connection.has_spoken = false;
    });
    return is_heard;
}

// --- a turn ---

void Exchange::poll() {
    epoll_event ready[MAX_READY];
    for (int round = 0; round < MAX_ROUNDS; ++round) {
        const int num_ready = epoll_wait(epoll_fd_, ready, MAX_READY, 0);
        if (num_ready <= 0) return;
        for (int place = 0; place < num_ready; ++place) {
            if (!ready[place].data.ptr) {
                uint64_t count;
                is_stirred_ = ::read(stir_fd_, &count, sizeof count) < 0;
                continue;
            }
            auto& connection = *static_cast<Connection*>(ready[place].data.ptr);
            if (ready[place].events & ~static_cast<uint32_t>(EPOLLOUT)) guarded_read(connection);
            if (connection.is_watching_writer && ready[place].events & ~static_cast<uint32_t>(EPOLLIN))
                write(connection);
        }
        if (!events_.empty()) return;
        finish();
        if (!events_.empty()) return;
    }
}

void Exchange::finish() {
    while (has_work()) {
        if (must_grant_) {
            must_grant_ = false;
            for (const Grant& grant : scheduler->grants(now_s())) {
                Peer& peer = this->peer(grant.peer);
                const auto found = peer.arriving.find(grant.tag);
                if (found == peer.arriving.end()) continue;
                found->second.granted_bytes = grant.limit_bytes;
                Header header;
                header.type = GRANT;
                header.tag = grant.tag;
                header.message_bytes = static_cast<uint64_t>(grant.limit_bytes);
                send_header(peer, header);
            }
        }
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
}

void Exchange::stir() {
    if (is_served || is_stirred_ || !(has_work() || has_events())) return;
    const uint64_t count = 1;
    is_stirred_ = ::write(stir_fd_, &count, sizeof count) > 0;
}

Event Exchange::next_event() {
    Event event = std::move(events_.front());
    events_.pop_front();
    return event;
}

void Exchange::schedule_write(Connection& connection) {
    if (connection.is_write_scheduled || connection.is_watching_writer || connection.is_closed) return;
    connection.is_write_scheduled = true;
    to_write_.push_back(&connection);
}

// --- reading ---

void Exchange::guarded_read(Connection& connection) {
    if (connection.is_closed || connection.is_deaf) return;
    connection.has_spoken = true;
    try {
        read(connection);
    } catch (const SocketError& broken) {
        break_off(connection, broken.error);
    } catch (const FrameError& error) {
        unwatch(connection);
        connection.is_deaf = true;
        tell(Event(VIOLATION, connection.peer->rank, 0, error.is_damage)).text = error.what();
    } catch (const std::exception& error) {
        give_up(connection, error);
    }
}

// What no rule foresees (no memory is left, a mistake of ours) costs this peer, and never the loop with all others.
void Exchange::give_up(Connection& connection, const std::exception& error) {
    unwatch(connection);
    connection.is_deaf = true;
    tell(Event(FAULT, connection.peer->rank)).text = error.what();
}

void Exchange::read(Connection& connection) {
    if (connection.connection_class == CONTROL_CLASS) {
        read_control(static_cast<ControlConnection&>(connection));
        return;
    }
    auto& data = static_cast<DataConnection&>(connection);
    read_data(data);
    if (!data.is_closed) choose_wake_up(data);
}

// An end in good order, or a peer that is lost, for a reason that it may have told.
void Exchange::break_off(Connection& connection, int error) {
    if (connection.is_closed) return;
    Peer& peer = *connection.peer;
    unwatch(connection);
    connection.is_closed = true;
    if (connection.has_ended) {
        if (peer.has_ended()) tell(Event(ALL_CLOSED, peer.rank));
        return;
    }
    read_last_words(peer);
    tell(Event(BROKEN, peer.rank, 0, error));
}

void Exchange::read_last_words(Peer& peer) {
    if (peer.control.is_closed || peer.control.is_deaf) return;
    try {
        read_control(peer.control);
    } catch (const SocketError&) {
    } catch (const std::exception&) {
        peer.control.is_deaf = true;  // its frames are not to be taken twice
    }
}

void Exchange::note_end(Connection& connection) {
    connection.has_ended = true;
    if (connection.peer->has_ended()) tell(Event(ALL_ENDED, connection.peer->rank));
}

void Exchange::read_control(ControlConnection& connection) {
    const ssize_t num_bytes = check_received(::recv(connection.fd, connection.inbox.data() + connection.num_inbox_bytes,
                                                    connection.inbox.size() - connection.num_inbox_bytes, 0));
    if (num_bytes < 0) return;
    connection.overhead_bytes += num_bytes;
    connection.num_inbox_bytes += static_cast<size_t>(num_bytes);
    take_frames(connection);
}

// Handle every whole frame that is here and keep the rest, a part of one frame, for later.
void Exchange::take_frames(ControlConnection& connection) {
    const uint8_t* const inbox = connection.inbox.data();
    size_t start = 0;
    const size_t stop = connection.num_inbox_bytes;
    while (stop - start >= HEADER_BYTES) {
        const Header frame = decode_header(inbox + start);
        if (frame.type == EAGER || frame.type == DATA || frame.connection_class != CONTROL_CLASS)
            throw FrameError(format("frame type %u of class %d on the control connection", unsigned{frame.type},
                                    int{frame.connection_class}));
        if (frame.chunk_bytes > MAX_CONTROL_BYTES)
            throw FrameError(format("control frame of %u bytes; %u are allowed", unsigned{frame.chunk_bytes},
                                    MAX_CONTROL_BYTES));
        const size_t end = start + HEADER_BYTES + frame.chunk_bytes;
        if (end > stop) break;
        const uint8_t* payload = inbox + start + HEADER_BYTES;
        check_payload(frame, crc32(payload, frame.chunk_bytes));
        start = end;
        take_frame(connection, frame, payload);
    }
    std::memmove(connection.inbox.data(), inbox + start, stop - start);
    connection.num_inbox_bytes = stop - start;
}

void Exchange::take_frame(ControlConnection& connection, const Header& frame, const uint8_t* payload) {
    Peer& peer = *connection.peer;
    switch (frame.type) {
        case REQUEST:
            on_request(peer, frame);
            break;
        case GRANT:
            on_grant(peer, frame.tag, static_cast<int64_t>(frame.message_bytes));
            break;
        case DISCARD:
            on_discard(peer, frame.tag);
            break;
        case CREDIT:
            if (frame.message_bytes > MOST_CREDIT_BYTES)
                throw FrameError(format("credit of %llu bytes is not allowed", ull(frame.message_bytes)));
            peer.credit_bytes = std::min(peer.credit_bytes + static_cast<int64_t>(frame.message_bytes),
                                         static_cast<int64_t>(MOST_CREDIT_BYTES));
            break;
        case FETCHED:
            on_fetched(peer.rank, frame.tag);
            break;
        case HEARTBEAT:
            peer.progress = frame.tag;
            break;
        case END:
            note_end(connection);
            break;
        default:
            tell(Event(FRAME, peer.rank, frame.tag, frame.type))
                .text.assign(reinterpret_cast<const char*>(payload), frame.chunk_bytes);
    }
}

void Exchange::read_data(DataConnection& connection) {
    int64_t budget = BUDGET_BYTES;
    while (budget > 0 && !connection.is_closed) {
        size_t wanted = 0, num_bytes = 0;
        if (!receive_once(connection, wanted, num_bytes)) return;
        budget -= static_cast<int64_t>(num_bytes);
        if (connection.has_frame && connection.num_chunk_bytes == connection.chunk_size) end_chunk(connection);
        if (!connection.has_frame && connection.num_header_bytes == HEADER_BYTES) begin_chunk(connection);
        if (num_bytes < wanted) return;
    }
}

// Read into the rest of the payload and the header behind it: one call of the kernel for both.
bool Exchange::receive_once(DataConnection& connection, size_t& wanted, size_t& num_bytes) {
    ssize_t received;
    if (!connection.has_frame) {
        wanted = HEADER_BYTES - connection.num_header_bytes;
        received = check_received(::recv(connection.fd, connection.header.data() + connection.num_header_bytes, wanted, 0));
        if (received < 0) return false;
        num_bytes = static_cast<size_t>(received);
        connection.num_header_bytes += num_bytes;
        return true;
    }
    const size_t rest = connection.chunk_size - connection.num_chunk_bytes;
    iovec parts[2] = {{connection.chunk + connection.num_chunk_bytes, rest}, {connection.header.data(), HEADER_BYTES}};
    msghdr message{};
    message.msg_iov = parts;
    message.msg_iovlen = 2;
    wanted = rest + HEADER_BYTES;
    received = check_received(::recvmsg(connection.fd, &message, 0));
    if (received < 0) return false;
    num_bytes = static_cast<size_t>(received);
    connection.num_chunk_bytes += std::min(num_bytes, rest);
    connection.num_header_bytes = num_bytes > rest ? num_bytes - rest : 0;
    return true;
}

void Exchange::begin_chunk(DataConnection& connection) {
    connection.num_header_bytes = 0;
    const Header frame = decode_header(connection.header.data());
    if (frame.type > END || frame.connection_class != connection.connection_class || connection.has_ended)
        throw FrameError(format("frame type %u of class %d on a connection of class %d%s", unsigned{frame.type},
                                int{frame.connection_class}, connection.connection_class,
                                connection.has_ended ? " after its end" : ""));
    connection.overhead_bytes += HEADER_BYTES;
    connection.crc_before = 0;
    connection.num_chunk_bytes = 0;
    connection.frame = frame;
    connection.has_frame = true;
    connection.chunk_size = frame.chunk_bytes;
    connection.chunk = nullptr;
    if (frame.type != END) {
        Peer& peer = *connection.peer;
        connection.chunk = frame.type == EAGER ? begin_eager(peer, frame) : begin_granted(peer, frame);
    }
    if (!connection.chunk && frame.chunk_bytes) connection.chunk = waste(connection, frame.chunk_bytes);
    if (!frame.chunk_bytes) end_chunk(connection);
}

void Exchange::end_chunk(DataConnection& connection) {
    const Header frame = connection.frame;
    check_payload(frame, crc32(connection.chunk, connection.chunk_size, connection.crc_before));
    connection.has_frame = false;
    connection.chunk_size = connection.num_chunk_bytes = 0;
    if (frame.type == END) {
        note_end(connection);
        return;
    }
    connection.received_bytes += frame.chunk_bytes;
    if (frame.offset + frame.chunk_bytes == frame.message_bytes) ++connection.received_messages;
    if (frame.type == EAGER)
        end_eager(*connection.peer, frame);
    else
        end_granted(*connection.peer, frame);
}

// Sleep until a good part of the chunk is there; a header is waited for by the byte.
void Exchange::choose_wake_up(DataConnection& connection) {
    const int64_t rest =
        connection.has_frame ? static_cast<int64_t>(connection.chunk_size - connection.num_chunk_bytes) : 1;
    const int wakes_at_bytes = static_cast<int>(std::max<int64_t>(1, std::min(rest, WAKE_BYTES)));
    if (wakes_at_bytes == connection.wakes_at_bytes) return;
    connection.wakes_at_bytes = wakes_at_bytes;
    setsockopt(connection.fd, SOL_SOCKET, SO_RCVLOWAT, &wakes_at_bytes, sizeof wakes_at_bytes);
}

uint8_t* Exchange::waste(DataConnection& connection, size_t num_bytes) {
    if (connection.scratch.size() < num_bytes) connection.scratch.resize(MAX_CHUNK_BYTES);
    return connection.scratch.data();
}

// Let the rest of a chunk of `tag` that is arriving go to waste; its destination is not touched again.
void Exchange::redirect(Peer& peer, uint64_t tag) {
    for (auto& connection : peer.data) {
        if (!connection->has_frame || connection->frame.tag != tag) continue;
        const size_t done = connection->num_chunk_bytes;
        connection->crc_before = crc32(connection->chunk, done, connection->crc_before);
        connection->chunk = waste(*connection, connection->frame.chunk_bytes);
        connection->chunk_size -= done;
        connection->num_chunk_bytes = 0;
    }
}

// --- writing ---

void Exchange::write(Connection& connection) {
    if (connection.is_closed) return;
    bool is_done = false;
    try {
        is_done = connection.connection_class == CONTROL_CLASS ? write_control(static_cast<ControlConnection&>(connection))
                                                               : write_data(static_cast<DataConnection&>(connection));
    } catch (const SocketError& broken) {
        break_off(connection, broken.error);
        return;
    } catch (const std::exception& error) {
        give_up(connection, error);
        return;
    }
    if (connection.is_watching_writer == is_done) watch(connection, !is_done);
}

bool Exchange::write_control(ControlConnection& connection) {
    Heartbeat::Turn turn(heartbeat, connection.fd);
    if (!turn.finish_beat()) return false;
    turn.leave(false);
    while (connection.num_queue_sent < connection.queue.size()) {
        const ssize_t num_bytes = ::send(connection.fd, connection.queue.data() + connection.num_queue_sent,
                                         connection.queue.size() - connection.num_queue_sent, MSG_NOSIGNAL);
        if (num_bytes < 0) {
            if (would_block(errno)) return false;
            throw SocketError{errno};
        }
        connection.overhead_bytes += num_bytes;
        connection.num_queue_sent += static_cast<size_t>(num_bytes);
    }
    connection.queue.clear();
    connection.num_queue_sent = 0;
    turn.leave(true);
    return true;
}

// Send until nothing is queued (true), or the kernel takes no more or the budget is spent (false).
bool Exchange::write_data(DataConnection& connection) {
    int64_t budget = BUDGET_BYTES;
    while (budget > 0) {
        if (connection.first_piece == connection.pieces.size() && !refill(connection)) return true;
        std::array<iovec, 2 * DataConnection::MAX_FRAMES_AT_ONCE> parts;
        size_t num_parts = 0, left = 0;
        for (size_t place = connection.first_piece; place < connection.pieces.size(); ++place) {
            const auto& piece = connection.pieces[place];
            parts[num_parts++] = {const_cast<uint8_t*>(piece.data), piece.num_bytes};
            left += piece.num_bytes;
        }
        msghdr message{};
        message.msg_iov = parts.data();
        message.msg_iovlen = num_parts;
        const ssize_t sent = ::sendmsg(connection.fd, &message, MSG_NOSIGNAL);
        if (sent < 0) {
            if (would_block(errno)) return false;
            throw SocketError{errno};
        }
        budget -= sent;
        auto num_bytes = static_cast<size_t>(sent);
        if (num_bytes < left) {
            while (num_bytes >= connection.pieces[connection.first_piece].num_bytes)
                num_bytes -= connection.pieces[connection.first_piece++].num_bytes;
            auto& piece = connection.pieces[connection.first_piece];
            piece.data += num_bytes;
            piece.num_bytes -= num_bytes;
            return false;
        }
        connection.pieces.clear();
        connection.first_piece = 0;
        refill_sent(connection);
    }
    return false;
}

// Take the next chunk of the most urgent messages; small ones share it.
bool Exchange::refill(DataConnection& connection) {
    auto& heap = connection.heap;
    int64_t room = connection.chunk_bytes;
    if (!heap.empty() && heap.front()->urgency >= PATIENT)
        room = std::max<int64_t>(room, PATIENT_BYTES + static_cast<int64_t>(HEADER_BYTES));
    connection.pieces.clear();
    connection.first_piece = 0;
    size_t num_frames = 0;
    while (!heap.empty() && room > 0 && num_frames < DataConnection::MAX_FRAMES_AT_ONCE) {
        Outgoing& message = *heap.front();
        const int64_t rest = message.limit_bytes - message.sent_bytes;
        if (num_frames && rest > room) break;  // a chunk of its own, rather than a crumb now
        // What is sent without asking is never divided, also where chunks became smaller while it waited.
        const int64_t num_bytes = message.is_eager ? rest : std::min(rest, room);
        const uint8_t* chunk = message.payload.data + message.sent_bytes;
        Header& header = connection.headers[num_frames++];
        header = Header{};
        header.type = message.is_eager ? EAGER : DATA;
        header.connection_class = static_cast<int16_t>(connection.connection_class);
        header.tag = message.tag;
        header.signature = message.signature;
        header.message_bytes = static_cast<uint64_t>(message.num_bytes);
        header.offset = static_cast<uint64_t>(message.sent_bytes);
        seal(header, chunk, static_cast<uint32_t>(num_bytes));
        connection.pieces.push_back({reinterpret_cast<const uint8_t*>(&header), HEADER_BYTES});
        if (num_bytes) connection.pieces.push_back({chunk, static_cast<size_t>(num_bytes)});
        message.sent_bytes += num_bytes;
        room -= num_bytes + static_cast<int64_t>(HEADER_BYTES);
        connection.sent_bytes += num_bytes;
        connection.overhead_bytes += HEADER_BYTES;
        if (message.sent_bytes == message.limit_bytes) {
            message.is_queued = false;
            message.is_leaving = true;
            std::pop_heap(heap.begin(), heap.end(), IsAfter{});
            connection.finishing.push_back(std::move(heap.back()));
            heap.pop_back();
        }
    }
    if (connection.pieces.empty() && connection.wants_end) {
        connection.wants_end = false;
        Header& header = connection.headers[0];
        header = Header{};
        header.type = END;
        header.connection_class = static_cast<int16_t>(connection.connection_class);
        seal(header, nullptr, 0);
        connection.pieces.push_back({reinterpret_cast<const uint8_t*>(&header), HEADER_BYTES});
    }
    return !connection.pieces.empty();
}

void Exchange::refill_sent(DataConnection& connection) {
    std::vector<OutgoingPtr> finishing;
    finishing.swap(connection.finishing);
    for (auto& message : finishing) message->is_leaving = false;
    for (auto& message : finishing) {
        if (message->sent_bytes == message->num_bytes) ++connection.sent_messages;
        if (message->sent_bytes == message->num_bytes || message->is_discarded)
            finish_message(*connection.peer, message);
    }
}

void Exchange::send_header(Peer& peer, Header header, const void* payload, uint32_t num_bytes) {
    if (peer.control.fd < 0 || peer.control.is_closed) return;
    seal(header, payload, num_bytes);
    peer.control.queue.append(reinterpret_cast<const char*>(&header), HEADER_BYTES);
    if (num_bytes) peer.control.queue.append(static_cast<const char*>(payload), num_bytes);
    schedule_write(peer.control);
}

void Exchange::send_frame(int rank, uint8_t type, uint64_t tag, uint64_t message_bytes, const std::string& payload) {
    Header header;
    header.type = type;
    header.tag = tag;
    header.message_bytes = message_bytes;
    if (type == HEARTBEAT) heartbeat.renew(header);
    send_header(peer(rank), header, payload.data(), static_cast<uint32_t>(payload.size()));
}

void Exchange::flush_control(int rank) {
    ControlConnection& connection = peer(rank).control;
    if (connection.fd >= 0 && !connection.queue.empty() && !connection.is_watching_writer) write(connection);
}

// --- what we send ---

void Exchange::send(int rank, uint64_t tag, Memory payload, uint32_t signature, int64_t urgency, int connection_class,
                    Completion on_sent) {
    Peer& peer = this->peer(rank);
    auto message = std::make_shared<Outgoing>();
    message->tag = tag;
    message->num_bytes = payload.num_bytes;
    message->payload = std::move(payload);
    message->signature = signature;
    message->urgency = urgency;
    message->order = ++peer.order;
    message->connection_class = std::min(connection_class, static_cast<int>(peer.data.size()) - 1);
    message->on_sent = std::move(on_sent);
    const int64_t cost_bytes = message->num_bytes + static_cast<int64_t>(HEADER_BYTES);
    message->is_eager = message->num_bytes <= peer.eager_bytes && cost_bytes <= peer.credit_bytes;
    ++peer.num_unsent;
    peer.queued_bytes[static_cast<size_t>(message->connection_class)] += message->num_bytes;
    if (message->is_eager) {
        peer.credit_bytes -= cost_bytes;
        message->limit_bytes = message->num_bytes;
        push(peer, message);
    } else if (peer.asked.size() < MAX_REQUESTS) {
        announce(peer, message);
    } else {
        peer.unasked.push_back(message);
        std::push_heap(peer.unasked.begin(), peer.unasked.end(), IsAfter{});
    }
}

void Exchange::push(Peer& peer, const OutgoingPtr& message) {
    if (message->is_queued) return;
    DataConnection& connection = *peer.data[static_cast<size_t>(message->connection_class)];
    message->is_queued = true;
    connection.heap.push_back(message);
    std::push_heap(connection.heap.begin(), connection.heap.end(), IsAfter{});
    schedule_write(connection);
}

void Exchange::announce(Peer& peer, const OutgoingPtr& message) {
    peer.asked[message->tag] = message;
    Header header;
    header.type = REQUEST;
    header.tag = message->tag;
    header.signature = message->signature;
    header.message_bytes = static_cast<uint64_t>(message->num_bytes);
    header.offset = peer.reads_us && message->num_bytes ? reinterpret_cast<uint64_t>(message->payload.data) : 0;
    send_header(peer, header);
}

void Exchange::withdraw(Peer& peer, uint64_t tag) {
    peer.asked.erase(tag);
    if (peer.unasked.empty()) return;
    std::pop_heap(peer.unasked.begin(), peer.unasked.end(), IsAfter{});
    const OutgoingPtr message = std::move(peer.unasked.back());
    peer.unasked.pop_back();
    announce(peer, message);
}

OutgoingPtr Exchange::announced_message(Peer& peer, uint64_t tag) {
    auto found = peer.asked.find(tag);
    if (found == peer.asked.end())
        throw FrameError(format("grant of message %#llx, which was not announced", ull(tag)));
    return found->second;
}

void Exchange::on_grant(Peer& peer, uint64_t tag, int64_t limit_bytes) {
    const OutgoingPtr message = announced_message(peer, tag);
    if (limit_bytes <= message->limit_bytes || limit_bytes > message->num_bytes)
        throw FrameError(format("grant of message %#llx up to byte %lld of %lld", ull(tag),
                                static_cast<long long>(limit_bytes), static_cast<long long>(message->num_bytes)));
    message->limit_bytes = limit_bytes;
    if (limit_bytes == message->num_bytes) withdraw(peer, tag);
    push(peer, message);
}

void Exchange::on_discard(Peer& peer, uint64_t tag) {
    const OutgoingPtr message = announced_message(peer, tag);
    withdraw(peer, tag);
    message->is_discarded = true;
    if (!message->is_queued && !message->is_leaving) finish_message(peer, message);
}

void Exchange::on_fetched(int rank, uint64_t tag) {
    Peer& peer = this->peer(rank);
    const OutgoingPtr message = announced_message(peer, tag);
    if (!peer.reads_us || message->limit_bytes)
        throw FrameError(format("message %#llx cannot have been copied", ull(tag)));
    withdraw(peer, tag);
    peer.sent_fetched_bytes += message->num_bytes;
    ++peer.num_sent_fetched;
    finish_message(peer, message);
}

void Exchange::finish_message(Peer& peer, const OutgoingPtr& message) {
    if (peer.is_gone) return;
    --peer.num_unsent;
    peer.queued_bytes[static_cast<size_t>(message->connection_class)] -= message->num_bytes;
    message->payload.drop();
    if (!peer.num_unsent && tells_drained) tell(Event(DRAINED, peer.rank));
    complete(message->on_sent, Event(SENT, peer.rank, message->tag));
}

// The completion is used up.
void Exchange::complete(Completion& completion, Event event) {
    if (completion.object) {
        tell(std::move(event)).object = completion.object;
        completion.object = nullptr;
    } else if (completion.listener) {
        const auto listener = std::move(completion.listener);
        listener->ended(completion.number);
    }
}

void Exchange::drop(Completion& completion) {
    garbage().drop(completion.object);
    completion.listener.reset();
}

void Exchange::drop(OutgoingPtr& message) {
    message->payload.drop();
    drop(message->on_sent);
}

// --- what we receive ---

void Exchange::receive(int rank, uint64_t tag, Memory destination, uint32_t signature, int64_t urgency,
                       Completion on_received) {
    Peer& peer = this->peer(rank);
    Receive receive;
    receive.num_bytes = destination.num_bytes;
    receive.destination = std::move(destination);
    receive.signature = signature;
    receive.urgency = urgency;
    receive.on_received = std::move(on_received);
    peer.posted.emplace(tag, receive);
    if (peer.announced.count(tag))
        match(peer, tag);
    else if (peer.held.count(tag))
        deliver_held(peer, tag);
}

void Exchange::cancel(int rank, uint64_t tag) {
    Peer& peer = this->peer(rank);
    for (auto event = events_.begin(); event != events_.end(); ++event)
        if (event->kind == RECEIVED && event->peer == rank && event->tag == tag) {
            garbage().drop(event->object);
            events_.erase(event);
            break;
        }
    if (auto posted = peer.posted.find(tag); posted != peer.posted.end()) {
        drop(posted->second);
        peer.posted.erase(posted);
    }
    if (auto eager = peer.eager.find(tag); eager != peer.eager.end() && eager->second.where == EagerTarget::TO_RECEIVE) {
        drop(eager->second.receive);
        eager->second.where = EagerTarget::TO_WASTE;
        redirect(peer, tag);
    }
    auto found = peer.arriving.find(tag);
    if (found == peer.arriving.end() || found->second.is_cancelled) return;
    Receive& receive = found->second;
    drop(receive);
    receive.is_cancelled = true;
    Header discard;
    discard.type = DISCARD;
    discard.tag = tag;
    if (receive.is_fetched) {
        peer.arriving.erase(found);
        send_header(peer, discard);
        return;
    }
    redirect(peer, tag);
    scheduler->forget(rank, tag);
    if (receive.granted_bytes < receive.num_bytes) {
        receive.num_bytes = receive.granted_bytes;
        send_header(peer, discard);
        if (receive.arrived_bytes == receive.num_bytes) peer.arriving.erase(found);
    }
}

void Exchange::on_request(Peer& peer, const Header& frame) {
    const uint64_t tag = frame.tag;
    if (peer.announced.count(tag) || peer.arriving.count(tag) || peer.announced.size() >= MAX_REQUESTS)
        throw FrameError(
            format("request %#llx comes twice, or is one of more than %zu", ull(tag), MAX_REQUESTS));
    if (frame.offset && !peer.can_be_read)
        throw FrameError(format("request %#llx names an address, but no memory is shared", ull(tag)));
    peer.announced[tag] = {static_cast<int64_t>(frame.message_bytes), frame.signature, frame.offset};
    if (peer.posted.count(tag)) match(peer, tag);
}

// Let a message that is announced and posted take its turn, or refuse it.
void Exchange::match(Peer& peer, uint64_t tag) {
    const Announced announced = peer.announced.at(tag);
    peer.announced.erase(tag);
    Receive receive = peer.posted.at(tag);
    peer.posted.erase(tag);
    Header discard;
    discard.type = DISCARD;
    discard.tag = tag;
    if (announced.signature != receive.signature || announced.num_bytes != receive.num_bytes) {
        send_header(peer, discard);
        drop(receive);
        tell(Event(MISMATCH, peer.rank, tag, receive.signature, announced.signature));
        return;
    }
    if (!announced.num_bytes) {
        // A sender without credit announces even an empty message: there is nothing to grant.
        send_header(peer, discard);
        received(peer, tag, receive);
        return;
    }
    receive.is_fetched = announced.address != 0;
    receive.serial = ++num_fetches_;
    peer.arriving.emplace(tag, receive);
    if (receive.is_fetched) {
        tell(Event(FETCH, peer.rank, tag, receive.urgency, announced.address)).serial = receive.serial;
        return;
    }
    scheduler->wish(peer.rank, tag, announced.num_bytes, receive.urgency);
    must_grant_ = true;
}

uint8_t* Exchange::begin_granted(Peer& peer, const Header& frame) {
    auto found = peer.arriving.find(frame.tag);
    const uint64_t end = frame.offset + frame.chunk_bytes;
    if (found == peer.arriving.end() || !frame.chunk_bytes ||
        frame.offset != static_cast<uint64_t>(found->second.arrived_bytes) ||
        end > static_cast<uint64_t>(found->second.granted_bytes))
        throw FrameError(format("bytes %llu to %llu of message %#llx were not granted", ull(frame.offset), ull(end),
                                ull(frame.tag)));
    Receive& receive = found->second;
    if (receive.is_landing)
        throw FrameError(format("bytes %llu to %llu of message %#llx are sent again while they arrive on another "
                                "connection",
                                ull(frame.offset), ull(end), ull(frame.tag)));
    receive.is_landing = true;
    return receive.is_cancelled ? nullptr : receive.destination.data + frame.offset;
}

void Exchange::end_granted(Peer& peer, const Header& frame) {
    auto found = peer.arriving.find(frame.tag);
    Receive& receive = found->second;
    receive.is_landing = false;
    receive.arrived_bytes += frame.chunk_bytes;
    scheduler->arrived(peer.rank, frame.chunk_bytes, receive.urgency, now_s());
    if (scheduler->has_wishes()) must_grant_ = true;
    if (receive.arrived_bytes != receive.num_bytes) return;
    Receive whole = std::move(receive);
    peer.arriving.erase(found);
    if (!whole.is_cancelled) received(peer, frame.tag, whole);
}

uint8_t* Exchange::begin_eager(Peer& peer, const Header& frame) {
    const uint64_t tag = frame.tag;
    if (frame.offset || frame.chunk_bytes != frame.message_bytes || peer.held.count(tag) || peer.eager.count(tag))
        throw FrameError(format("message %#llx was sent without asking, in part or twice", ull(tag)));
    if (!peer.credit.take(frame.chunk_bytes + static_cast<int64_t>(HEADER_BYTES)))
        throw FrameError(format("message %#llx exceeds the credit of %lld bytes", ull(tag),
                                static_cast<long long>(peer.credit.credit_bytes)));
    auto posted = peer.posted.find(tag);
    if (posted == peer.posted.end()) {
        Held& held = peer.held[tag];
        held.payload.resize(frame.chunk_bytes);
        held.signature = frame.signature;
        peer.eager[tag] = {EagerTarget::TO_HELD, {}};
        peer.unexpected_bytes += frame.chunk_bytes;
        return held.payload.data();
    }
    Receive receive = posted->second;
    peer.posted.erase(posted);
    if (receive.signature != frame.signature || receive.num_bytes != static_cast<int64_t>(frame.chunk_bytes)) {
        peer.eager[tag] = {EagerTarget::TO_WASTE, {}};
        drop(receive);
        tell(Event(MISMATCH, peer.rank, tag, receive.signature, frame.signature));
        return nullptr;
    }
    peer.eager[tag] = {EagerTarget::TO_RECEIVE, receive};
    return receive.destination.data;
}

void Exchange::end_eager(Peer& peer, const Header& frame) {
    auto found = peer.eager.find(frame.tag);
    EagerTarget target = found->second;
    peer.eager.erase(found);
    if (target.where == EagerTarget::TO_HELD) {
        peer.held.at(frame.tag).is_whole = true;
        if (peer.posted.count(frame.tag)) deliver_held(peer, frame.tag);
        return;
    }
    return_credit(peer, frame.chunk_bytes);
    if (target.where == EagerTarget::TO_RECEIVE) received(peer, frame.tag, target.receive);
}

// Hand over a message that came before its receive, unless it is not whole yet.
void Exchange::deliver_held(Peer& peer, uint64_t tag) {
    auto held = peer.held.find(tag);
    if (held == peer.held.end() || !held->second.is_whole) return;
    auto posted = peer.posted.find(tag);
    Receive receive = posted->second;
    peer.posted.erase(posted);
    const std::vector<uint8_t> payload = std::move(held->second.payload);
    const uint32_t signature = held->second.signature;
    peer.held.erase(held);
    const auto num_bytes = static_cast<int64_t>(payload.size());
    peer.unexpected_bytes -= num_bytes;
    return_credit(peer, num_bytes);
    if (receive.signature != signature || receive.num_bytes != num_bytes) {
        drop(receive);
        tell(Event(MISMATCH, peer.rank, tag, receive.signature, signature));
        return;
    }
    if (num_bytes) std::memcpy(receive.destination.data, payload.data(), payload.size());
    received(peer, tag, receive);
}

void Exchange::return_credit(Peer& peer, int64_t num_bytes) {
    const int64_t returned = peer.credit.consume(num_bytes + static_cast<int64_t>(HEADER_BYTES));
    if (!returned) return;
    Header header;
    header.type = CREDIT;
    header.message_bytes = static_cast<uint64_t>(returned);
    send_header(peer, header);
}

// Whoever is told may receive and send at once: nothing here may point into what that changes.
void Exchange::received(Peer& peer, uint64_t tag, Receive& receive) {
    if (receive.on_received.listener) peer.heard_s = now_s();
    receive.destination.drop();
    complete(receive.on_received, Event(RECEIVED, peer.rank, tag));
}

void Exchange::drop(Receive& receive) {
    receive.destination.drop();
    drop(receive.on_received);
}

// --- copies out of a peer's memory ---

std::tuple<uint8_t*, int64_t, int64_t> Exchange::fetch_target(int rank, uint64_t tag, int64_t serial,
                                                              int64_t limit_bytes) {
    Peer& peer = this->peer(rank);
    auto found = peer.arriving.find(tag);
    if (found == peer.arriving.end() || found->second.serial != serial) return {nullptr, 0, 0};
    const Receive& receive = found->second;
    const int64_t start = receive.arrived_bytes;
    return {receive.destination.data + start, start, std::min(limit_bytes, receive.num_bytes - start)};
}

int64_t Exchange::fetched(int rank, uint64_t tag, int64_t serial, int64_t num_bytes) {
    Peer& peer = this->peer(rank);
    auto found = peer.arriving.find(tag);
    if (found == peer.arriving.end() || found->second.serial != serial) return 0;
    Receive& receive = found->second;
    receive.arrived_bytes += num_bytes;
    const int64_t rest = receive.num_bytes - receive.arrived_bytes;
    if (rest) return rest;
    peer.fetched_bytes += receive.num_bytes;
    ++peer.num_fetched;
    Header header;
    header.type = FETCHED;
    header.tag = tag;
    send_header(peer, header);
    Receive whole = std::move(receive);
    peer.arriving.erase(found);
    received(peer, tag, whole);
    return 0;
}

std::vector<std::pair<int, uint32_t>> wait(int epoll_fd, double timeout_s, const std::vector<Exchange*>& exchanges) {
    std::vector<std::pair<int, uint32_t>> found;
    const double deadline_s = now_s() + timeout_s;
    while (true) {
        bool has_events = false;
        for (Exchange* exchange : exchanges) {
            exchange->finish();
            has_events |= exchange->has_events();
        }
        int timeout_ms = -1;
        if (has_events)
            timeout_ms = 0;
        else if (timeout_s >= 0)
            timeout_ms = static_cast<int>(std::ceil(std::max(deadline_s - now_s(), 0.0) * 1e3));
        epoll_event ready[MAX_READY];
        const int num_ready = epoll_wait(epoll_fd, ready, MAX_READY, timeout_ms);
        for (int place = 0; place < num_ready; ++place) {
            const int fd = ready[place].data.fd;
            const auto served = std::find_if(exchanges.begin(), exchanges.end(),
                                             [fd](const Exchange* exchange) { return exchange->fileno() == fd; });
            if (served == exchanges.end())
                found.emplace_back(fd, uint32_t{ready[place].events});
            else
                (*served)->poll();
        }
        for (const Exchange* exchange : exchanges)
            if (exchange->has_events()) found.emplace_back(exchange->fileno(), EPOLLIN);
        if (!found.empty() || num_ready < 0) return found;  // a signal is for Python too
        if (timeout_s >= 0 && now_s() >= deadline_s) return found;
    }
}

}  // namespace syncline
