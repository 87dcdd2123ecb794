// One connection to a peer, as the reactor sees it, and its owner, as the connection sees it.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

#include "frames.hpp"
#include "kernel.hpp"
#include "messages.hpp"
#include "send_stream.hpp"

namespace syncline {

constexpr int64_t TICK_BYTES = 2 << 20;  // what one connection moves before others are served

class Connection;

// What has the connections to one peer: it hears of their sockets, of whole control frames and of chunks.
class ConnectionOwner {
   public:
    virtual void on_readable(Connection& connection) = 0;
    // Return whether nothing is left to write.
    virtual bool on_writable(Connection& connection) = 0;
    virtual void on_frame(const Header& frame, const uint8_t* payload) = 0;
    // Return where the chunk belongs; null: its bytes are for nobody. Throws FrameError if it must not come.
    virtual uint8_t* begin_chunk(const Header& frame) = 0;
    virtual void end_chunk(const Header& frame) = 0;
    // The END of a connection has arrived.
    virtual void on_end() = 0;
    // The last granted byte of a message is with the kernel, and it is whole or not wanted any more.
    virtual void on_left(const OutgoingPtr& message) = 0;

   protected:
    ConnectionOwner() = default;
    ~ConnectionOwner() = default;
    ConnectionOwner(const ConnectionOwner&) = default;
    ConnectionOwner& operator=(const ConnectionOwner&) = default;
};

class Connection {
   public:
    Connection(ConnectionOwner& owner, Kernel& kernel, int connection_class, size_t block_bytes)
        : owner(owner), kernel(kernel), connection_class(connection_class), stream(block_bytes) {}
    virtual ~Connection() = default;
    Connection(const Connection&) = delete;
    Connection& operator=(const Connection&) = delete;

    // Both throw SocketError. `read` throws FrameError too; `write` returns whether nothing is left to write.
    virtual void read() = 0;
    virtual bool write() = 0;
    // Forget what of a frame is here, and wait for the whole of it, on the next socket.
    virtual void interrupt() = 0;
    virtual void use_socket(int socket) { fd = socket; }

    bool is_open() const { return !is_closed && !is_suspended; }

    ConnectionOwner& owner;
    Kernel& kernel;
    int fd = -1;
    const int connection_class;
    bool is_watched = false;  // by the reactor
    bool is_watching_writer = false, is_write_scheduled = false;
    bool is_deaf = false;       // it broke the protocol: it may be told so, but is not read any more
    bool is_closed = false;     // nothing is read or written any more
    bool is_suspended = false;  // its socket broke: nothing is read or written until there is another
    bool has_ended = false, has_spoken = false;
    int64_t overhead_bytes = 0;
    int64_t num_resumed = 0;
    FrameChecks sending, receiving;
    SendStream stream;
    uint64_t received_bytes_of_stream = 0, acknowledged_bytes = 0;  // in whole frames, of what the peer sends
};

}  // namespace syncline
