// The control connection to a peer: small frames in order, both ways, ahead of all data. It parses and queues; the
// kernel is only in `read` and `write`, so bytes can be fed and taken without sockets.
#pragma once

#include <cstdint>
#include <memory>
#include <vector>

#include "connection.hpp"
#include "heartbeat.hpp"

namespace syncline {

class ControlConnection : public Connection {
   public:
    ControlConnection(ConnectionOwner& owner, Kernel& kernel, Heartbeat& heartbeat);

    // Begin to use a socket; it stays the caller's.
    void attach(int fd);
    // Of the heartbeats that are sent beside the stream, which has the same key.
    const std::shared_ptr<BeatChecks> beats = std::make_shared<BeatChecks>();
    bool is_attached() const { return !inbox_.empty(); }

    void queue(Header header, const void* payload, uint32_t num_bytes);
    bool has_unsent() const { return stream.unsent_bytes() > 0; }
    void read() override;
    bool write() override;
    void interrupt() override;

    // Where the next bytes go, and that some of them are there: every whole frame is handed over.
    uint8_t* room() { return inbox_.data() + num_inbox_bytes_; }
    size_t room_bytes() const { return inbox_.size() - num_inbox_bytes_; }
    void arrived(size_t num_bytes);
    // What waits to be sent, and that some of it was.
    SendStream::Gathered gather() const { return stream.gather(); }
    void sent(size_t num_bytes);

   private:
    Heartbeat& heartbeat_;
    std::vector<uint8_t> inbox_;
    size_t num_inbox_bytes_ = 0;
};

}  // namespace syncline
