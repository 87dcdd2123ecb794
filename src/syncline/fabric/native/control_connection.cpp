// What `control_connection.hpp` declares.
#include "control_connection.hpp"

#include <cstring>

#include "sockets.hpp"

namespace syncline {

namespace {

constexpr size_t INBOX_BYTES = 128 << 10;  // room for frames that arrive at once; none is larger
constexpr size_t BLOCK_BYTES = 64 << 10;

Header decode_control(const uint8_t* bytes, FrameChecks& checks) {
    const Header frame = decode_header(bytes, checks);
    if (frame.type == EAGER || frame.type == DATA || frame.connection_class != CONTROL_CLASS)
        throw FrameError(format("frame type %u of class %d on the control connection", unsigned{frame.type},
                                int{frame.connection_class}));
    if (frame.chunk_bytes > MAX_CONTROL_BYTES)
        throw FrameError(
            format("control frame of %u bytes; %u are allowed", unsigned{frame.chunk_bytes}, MAX_CONTROL_BYTES));
    return frame;
}

}  // namespace

ControlConnection::ControlConnection(ConnectionOwner& owner, Kernel& kernel, Heartbeat& heartbeat)
    : Connection(owner, kernel, CONTROL_CLASS, BLOCK_BYTES), heartbeat_(heartbeat) {}

void ControlConnection::attach(int attached_fd) {
    fd = attached_fd;
    inbox_.resize(INBOX_BYTES);
}

void ControlConnection::queue(Header header, const void* payload, uint32_t num_bytes) {
    append_frame(stream, sending, header, payload, num_bytes);
}

void ControlConnection::interrupt() {
    num_inbox_bytes_ = 0;
    receiving.restart();
}

void ControlConnection::read() {
    iovec part{room(), room_bytes()};
    const ssize_t num_bytes = check_received(kernel.receive(fd, &part, 1));
    if (num_bytes > 0) arrived(static_cast<size_t>(num_bytes));
}

// The rest, a part of one frame, is kept for later.
void ControlConnection::arrived(size_t num_bytes) {
    overhead_bytes += static_cast<int64_t>(num_bytes);
    num_inbox_bytes_ += num_bytes;
    const uint8_t* const inbox = inbox_.data();
    size_t start = 0;
    const size_t stop = num_inbox_bytes_;
    while (stop - start >= HEADER_BYTES) {
        const Header frame = decode_control(inbox + start, receiving);
        const size_t end = start + HEADER_BYTES + frame.chunk_bytes;
        if (end > stop) break;
        const uint8_t* payload = inbox + start + HEADER_BYTES;
        receiving.add(payload, frame.chunk_bytes);
        check_payload(frame, receiving);
        start = end;
        if (frame.is_counted()) received_bytes_of_stream += HEADER_BYTES + frame.chunk_bytes;
        if (frame.type == END) has_ended = true;
        owner.on_frame(frame, payload);
    }
    std::memmove(inbox_.data(), inbox + start, stop - start);
    num_inbox_bytes_ = stop - start;
}

bool ControlConnection::write() {
    Heartbeat::WriteGuard guard(heartbeat_, fd);
    if (!guard.finish_heartbeat()) return false;
    guard.leave(false);
    while (has_unsent()) {
        SendStream::Gathered gathered = gather();
        const ssize_t num_bytes = check_sent(kernel.send(fd, gathered.parts.data(), gathered.num_parts));
        if (num_bytes < 0) return false;
        sent(static_cast<size_t>(num_bytes));
    }
    guard.leave(true);
    return true;
}

void ControlConnection::sent(size_t num_bytes) {
    overhead_bytes += static_cast<int64_t>(num_bytes);
    stream.sent(num_bytes);
}

}  // namespace syncline
