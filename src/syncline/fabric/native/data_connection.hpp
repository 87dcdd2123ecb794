// A data connection to a peer: chunks of messages, each straight from and into the memory where it belongs.
//
// Messages to be sent are looked at again for each chunk, by (urgency, sequence), so an urgent one waits for no more
// than that. A chunk that breaks off with its socket comes again on the next, from its first byte, to the same
// destination. Parsing and queueing are apart from the kernel, which is only in `read` and `write`, so bytes can be fed
// and taken without sockets.
#pragma once

#include <sys/uio.h>

#include <array>
#include <cstdint>
#include <optional>
#include <vector>

#include "connection.hpp"

namespace syncline {

class DataConnection : public Connection {
   public:
    DataConnection(ConnectionOwner& owner, Kernel& kernel, int connection_class, int fd, int64_t chunk_bytes);

    int64_t chunk_bytes;     // at most so much of a message is sent at once
    bool wants_end = false;  // END is sent when nothing else is queued
    int64_t sent_bytes = 0, sent_messages = 0, received_bytes = 0, received_messages = 0;

    void push(const OutgoingPtr& message);
    void read() override;
    bool write() override;
    void interrupt() override;
    void use_socket(int socket) override;
    // Nothing is read into any destination or sent from any payload any more.
    void drop();
    // Let the rest of a chunk of `tag` that is arriving go to waste; its destination is not touched again.
    void redirect(uint64_t tag);

    // Where the next bytes go: the rest of a payload and the header behind it, or the rest of a header.
    struct Room {
        std::array<iovec, 2> parts;
        size_t num_parts, num_bytes;
    };
    Room room();
    void arrived(size_t num_bytes);

    static constexpr size_t MAX_FRAMES_AT_ONCE = 64;
    // What is to be sent next: none if nothing is queued.
    SendStream::Gathered gather();
    void sent(size_t num_bytes);

   private:
    // --- outgoing ---
    std::vector<OutgoingPtr> heap_, finishing_;

    void refill();
    int64_t most_resent_ = 0;
    uint16_t num_resent();
    void append_chunk(Outgoing& message, int64_t num_bytes);
    void refill_sent();

    // --- incoming ---
    std::array<uint8_t, HEADER_BYTES> header_;
    size_t num_header_bytes_ = 0;
    bool has_frame_ = false;
    Header frame_;
    uint8_t* chunk_ = nullptr;
    size_t chunk_size_ = 0, num_chunk_bytes_ = 0;
    bool is_wasted_ = false;                // the rest of the chunk is for nobody
    std::optional<Header> interrupted_;     // of a chunk that comes again on this socket, from its first byte,
    uint8_t* interrupted_chunk_ = nullptr;  // and where it goes (null: it is for nobody)
    int wakes_at_bytes_ = 1;
    std::vector<uint8_t> scratch_;

    void begin_chunk();
    uint8_t* destination();
    void end_chunk();
    void choose_wake_up();
    uint8_t* waste(size_t num_bytes);
};

}  // namespace syncline
