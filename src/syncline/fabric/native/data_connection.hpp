// A data connection to a peer: chunks of messages, each straight from and into the memory where it belongs. Parsing and
// queueing are apart from the kernel, which is only in `read` and `write`, so bytes can be fed and taken without
// sockets.
#pragma once

#include <sys/uio.h>

#include <array>
#include <cstdint>
#include <vector>

#include "connection.hpp"

namespace syncline {

class DataConnection : public Connection {
   public:
    DataConnection(ConnectionOwner& owner, int connection_class, int fd, int64_t chunk_bytes);

    int64_t chunk_bytes;     // at most so much of a message is sent at once
    bool wants_end = false;  // END is sent when nothing else is queued
    int64_t sent_bytes = 0, sent_messages = 0, received_bytes = 0, received_messages = 0;

    void push(const OutgoingPtr& message);
    void read() override;
    bool write() override;
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
    struct Gathered {
        std::array<iovec, 2 * MAX_FRAMES_AT_ONCE> parts;
        size_t num_parts = 0, num_bytes = 0;
    };
    void gather(Gathered& gathered);
    void sent(size_t num_bytes);

   private:
    // --- outgoing ---
    struct Segment {
        const uint8_t* data;
        size_t num_bytes;
    };
    std::vector<OutgoingPtr> heap_, finishing_;
    std::array<EncodedHeader, MAX_FRAMES_AT_ONCE> headers_;
    size_t num_headers_ = 0;
    std::vector<Segment> segments_;  // what the last refill gave
    size_t first_segment_ = 0;       // and from where on it is not sent

    void refill();
    int64_t most_resent_ = 0;
    uint16_t num_resent();
    void append_frame(const Header& header, const uint8_t* payload, uint32_t num_bytes);
    void append_chunk(Outgoing& message, int64_t num_bytes);
    void refill_sent();

    // --- incoming ---
    std::array<uint8_t, HEADER_BYTES> header_;
    size_t num_header_bytes_ = 0;
    bool has_frame_ = false;
    Header frame_;
    uint8_t* chunk_ = nullptr;
    size_t chunk_size_ = 0, num_chunk_bytes_ = 0;
    uint32_t crc_before_ = 0;
    int wakes_at_bytes_ = 1;
    std::vector<uint8_t> scratch_;

    void begin_chunk();
    void end_chunk();
    void choose_wake_up();
    uint8_t* waste(size_t num_bytes);
};

}  // namespace syncline
