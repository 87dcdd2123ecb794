// What `data_connection.hpp` declares.
#include "data_connection.hpp"

#include <algorithm>

#include "sockets.hpp"
#include "urgency.hpp"

namespace syncline {

namespace {

constexpr int64_t WAKE_BYTES = 32 << 10;  // in the middle of a chunk, the kernel wakes us for no less
constexpr size_t BLOCK_BYTES = MAX_CHUNK_BYTES + (8 << 10);
constexpr int64_t MAX_KEPT_BYTES = 64 << 20;  // more than kernels hold for one connection, at both ends

}  // namespace

DataConnection::DataConnection(ConnectionOwner& owner, Kernel& kernel, int connection_class, int attached_fd,
                               int64_t chunk_bytes)
    : Connection(owner, kernel, connection_class, BLOCK_BYTES), chunk_bytes(chunk_bytes) {
    fd = attached_fd;
}

void DataConnection::drop() {
    stream.clear();
    interrupted_.reset();
    for (auto& message : heap_) message->drop();
    for (auto& message : finishing_) message->drop();
    heap_.clear();
    finishing_.clear();
    has_frame_ = false;
}

// --- reading ---

void DataConnection::read() {
    int64_t budget = TICK_BYTES;
    while (budget > 0 && !is_closed) {
        Room wanted = room();
        const ssize_t num_bytes = check_received(kernel.receive(fd, wanted.parts.data(), wanted.num_parts));
        if (num_bytes < 0) break;
        budget -= num_bytes;
        arrived(static_cast<size_t>(num_bytes));
        if (static_cast<size_t>(num_bytes) < wanted.num_bytes) break;
    }
    if (!is_closed) choose_wake_up();
}

// One call of the kernel for the rest of a payload and the header behind it.
DataConnection::Room DataConnection::room() {
    if (!has_frame_) {
        const size_t rest = HEADER_BYTES - num_header_bytes_;
        return {{{{header_.data() + num_header_bytes_, rest}, {}}}, 1, rest};
    }
    const size_t rest = chunk_size_ - num_chunk_bytes_;
    return {{{{chunk_ + num_chunk_bytes_, rest}, {header_.data(), HEADER_BYTES}}}, 2, rest + HEADER_BYTES};
}

void DataConnection::arrived(size_t num_bytes) {
    if (has_frame_) {
        const size_t num_of_chunk = std::min(num_bytes, chunk_size_ - num_chunk_bytes_);
        num_chunk_bytes_ += num_of_chunk;
        num_header_bytes_ = num_bytes - num_of_chunk;
        if (num_chunk_bytes_ == chunk_size_) end_chunk();
    } else {
        num_header_bytes_ += num_bytes;
    }
    if (!has_frame_ && num_header_bytes_ == HEADER_BYTES) begin_chunk();
}

void DataConnection::begin_chunk() {
    num_header_bytes_ = 0;
    frame_ = decode_header(header_.data(), receiving);
    if (frame_.type > END || frame_.connection_class != connection_class || has_ended)
        throw FrameError(format("frame type %u of class %d on a connection of class %d%s", unsigned{frame_.type},
                                int{frame_.connection_class}, connection_class, has_ended ? " after its end" : ""));
    overhead_bytes += HEADER_BYTES;
    num_chunk_bytes_ = 0;
    chunk_ = frame_.type == END ? nullptr : destination();
    has_frame_ = true;
    chunk_size_ = frame_.chunk_bytes;
    is_wasted_ = !chunk_;
    if (is_wasted_ && frame_.chunk_bytes) chunk_ = waste(frame_.chunk_bytes);
    if (!frame_.chunk_bytes) end_chunk();
}

// A chunk that was interrupted comes again: whoever receives it was asked before.
uint8_t* DataConnection::destination() {
    if (!interrupted_) return owner.begin_chunk(frame_);
    if (*interrupted_ != frame_)
        throw FrameError(format("message %#llx goes on with another frame than before its connection broke",
                                ull(interrupted_->tag)));
    interrupted_.reset();
    return interrupted_chunk_;
}

void DataConnection::interrupt() {
    if (has_frame_ && frame_.type != END) {
        interrupted_ = frame_;
        interrupted_chunk_ = is_wasted_ ? nullptr : chunk_;
    }
    receiving.restart();
    has_frame_ = false;
    num_header_bytes_ = chunk_size_ = num_chunk_bytes_ = 0;
}

void DataConnection::use_socket(int socket) {
    Connection::use_socket(socket);
    wakes_at_bytes_ = 1;
    most_resent_ = 0;
}

void DataConnection::end_chunk() {
    const Header frame = frame_;
    receiving.add(chunk_, chunk_size_);
    check_payload(frame, receiving);
    has_frame_ = false;
    chunk_size_ = num_chunk_bytes_ = 0;
    received_bytes_of_stream += HEADER_BYTES + frame.chunk_bytes;
    if (frame.type == END) {
        has_ended = true;
        owner.on_end();
        return;
    }
    received_bytes += frame.chunk_bytes;
    if (frame.offset + frame.chunk_bytes == frame.message_bytes) ++received_messages;
    owner.end_chunk(frame);
}

// Sleep until a good part of the chunk is there; a header is waited for by the byte.
void DataConnection::choose_wake_up() {
    const int64_t rest = has_frame_ ? static_cast<int64_t>(chunk_size_ - num_chunk_bytes_) : 1;
    const int wakes_at_bytes = static_cast<int>(std::max<int64_t>(1, std::min(rest, WAKE_BYTES)));
    if (wakes_at_bytes == wakes_at_bytes_) return;
    wakes_at_bytes_ = wakes_at_bytes;
    kernel.wake_at(fd, wakes_at_bytes);
}

uint8_t* DataConnection::waste(size_t num_bytes) {
    if (scratch_.size() < num_bytes) scratch_.resize(MAX_CHUNK_BYTES);
    return scratch_.data();
}

void DataConnection::redirect(uint64_t tag) {
    if (interrupted_ && interrupted_->tag == tag) interrupted_chunk_ = nullptr;
    if (!has_frame_ || frame_.tag != tag) return;
    is_wasted_ = true;
    receiving.add(chunk_, num_chunk_bytes_);
    chunk_ = waste(frame_.chunk_bytes);
    chunk_size_ -= num_chunk_bytes_;
    num_chunk_bytes_ = 0;
}

// --- writing ---

void DataConnection::push(const OutgoingPtr& message) {
    if (message->is_queued) return;
    message->is_queued = true;
    heap_.push_back(message);
    std::push_heap(heap_.begin(), heap_.end(), IsLessUrgent{});
}

// Send until nothing is queued (true), or the kernel takes no more or the budget is spent (false).
bool DataConnection::write() {
    int64_t budget = TICK_BYTES;
    while (budget > 0) {
        SendStream::Gathered gathered = gather();
        if (!gathered.num_parts) return true;
        const ssize_t num_bytes = check_sent(kernel.send(fd, gathered.parts.data(), gathered.num_parts));
        if (num_bytes < 0) return false;
        budget -= num_bytes;
        sent(static_cast<size_t>(num_bytes));
        if (static_cast<size_t>(num_bytes) < gathered.num_bytes) return false;
    }
    return false;
}

SendStream::Gathered DataConnection::gather() {
    if (!stream.unsent_bytes()) refill();
    return stream.gather();
}

void DataConnection::sent(size_t num_bytes) {
    stream.sent(num_bytes);
    if (!stream.unsent_bytes()) refill_sent();
}

// Take the next chunk of the most urgent messages; small ones share it.
void DataConnection::refill() {
    if (stream.kept_bytes() >= MAX_KEPT_BYTES) return;  // until the peer says that it has some of it
    int64_t room = chunk_bytes;
    if (!heap_.empty() && heap_.front()->urgency >= BULK_URGENCY)
        room = std::max<int64_t>(room, BULK_BYTES + static_cast<int64_t>(HEADER_BYTES));
    size_t num_frames = 0;
    while (!heap_.empty() && room > 0 && num_frames < MAX_FRAMES_AT_ONCE) {
        Outgoing& message = *heap_.front();
        const int64_t rest = message.limit_bytes - message.sent_bytes;
        if (num_frames && rest > room) break;  // a chunk of its own, rather than a crumb now
        // What is sent without asking is never divided, also where chunks became smaller while it waited.
        const int64_t num_bytes = message.is_eager ? rest : std::min(rest, room);
        append_chunk(message, num_bytes);
        ++num_frames;
        room -= num_bytes + static_cast<int64_t>(HEADER_BYTES);
        if (message.sent_bytes != message.limit_bytes) continue;
        message.is_queued = false;
        message.is_leaving = true;
        std::pop_heap(heap_.begin(), heap_.end(), IsLessUrgent{});
        finishing_.push_back(std::move(heap_.back()));
        heap_.pop_back();
    }
    if (num_frames || !wants_end) return;
    wants_end = false;
    Header end;
    end.type = END;
    end.connection_class = static_cast<int16_t>(connection_class);
    append_frame(stream, sending, end, nullptr, 0);
}

void DataConnection::append_chunk(Outgoing& message, int64_t num_bytes) {
    Header header;
    header.type = message.is_eager ? EAGER : DATA;
    header.connection_class = static_cast<int16_t>(connection_class);
    if (!message.is_eager) header.flags = num_resent();
    header.tag = message.tag;
    header.signature = message.signature;
    header.message_bytes = static_cast<uint64_t>(message.num_bytes);
    header.offset = static_cast<uint64_t>(message.sent_bytes);
    append_frame(stream, sending, header, message.payload.data + message.sent_bytes, static_cast<uint32_t>(num_bytes));
    message.sent_bytes += num_bytes;
    sent_bytes += num_bytes;
    overhead_bytes += HEADER_BYTES;
}

// How many segments this connection has lost since the last time; not those that came twice.
uint16_t DataConnection::num_resent() {
    const int64_t before = most_resent_;
    most_resent_ = std::max(most_resent_, kernel.resent_segments(fd));
    return static_cast<uint16_t>(std::min<int64_t>(UINT16_MAX, most_resent_ - before));
}

void DataConnection::refill_sent() {
    std::vector<OutgoingPtr> finishing;
    finishing.swap(finishing_);
    for (auto& message : finishing) message->is_leaving = false;
    for (auto& message : finishing) {
        if (message->is_queued) continue;  // more was granted while this chunk left, and that is still owed
        if (message->sent_bytes == message->num_bytes) ++sent_messages;
        if (message->sent_bytes == message->num_bytes || message->is_discarded) owner.on_left(message);
    }
}

}  // namespace syncline
