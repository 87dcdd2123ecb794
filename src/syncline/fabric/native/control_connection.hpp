// The control connection to a peer: small frames in order, both ways. It parses and queues; the kernel is only in
// `read` and `write`, so bytes can be fed and taken without sockets.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "connection.hpp"
#include "heartbeat.hpp"

namespace syncline {

class ControlConnection : public Connection {
   public:
    ControlConnection(ConnectionOwner& owner, Heartbeat& heartbeat)
        : Connection(owner, CONTROL_CLASS), heartbeat_(heartbeat) {}

    // Begin to use a socket; it stays the caller's.
    void attach(int fd);
    bool is_attached() const { return fd >= 0; }

    void queue(Header header, const void* payload, uint32_t num_bytes);
    bool has_unsent() const { return num_sent_ < queue_.size(); }
    void read() override;
    bool write() override;

    // Where the next bytes go, and that some of them are there: every whole frame is handed over.
    uint8_t* room() { return inbox_.data() + num_inbox_bytes_; }
    size_t room_bytes() const { return inbox_.size() - num_inbox_bytes_; }
    void arrived(size_t num_bytes);
    // What waits to be sent, and that some of it was.
    const char* unsent() const { return queue_.data() + num_sent_; }
    size_t unsent_bytes() const { return queue_.size() - num_sent_; }
    void sent(size_t num_bytes);

   private:
    Heartbeat& heartbeat_;
    std::string queue_;
    size_t num_sent_ = 0;
    std::vector<uint8_t> inbox_;
    size_t num_inbox_bytes_ = 0;
};

}  // namespace syncline
