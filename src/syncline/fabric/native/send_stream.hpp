// What a connection sends: its frames, one after the other, kept until the peer has them.
//
// A socket that broke has a successor, and what the peer has not got is sent again there: the same bytes, from the end
// of the last frame that arrived whole. Positions count the bytes of the stream, so they are the sequence number of
// each frame, though no frame carries one. Payload is copied when it is first sent: whoever sends it may change it
// before the peer has it, and a send that waited for the peer would cost each step a round trip.
#pragma once

#include <sys/uio.h>

#include <array>
#include <cstddef>
#include <cstdint>
#include <deque>
#include <memory>

#include "frames.hpp"

namespace syncline {

class SendStream {
   public:
    // A frame is never larger than a block.
    explicit SendStream(size_t block_bytes) : block_bytes_(block_bytes) {}

    static constexpr size_t MAX_PARTS = 8;
    struct Gathered {
        std::array<iovec, MAX_PARTS> parts;
        size_t num_parts = 0, num_bytes = 0;
    };

    // Return where the next `num_bytes` go, which are sent from then on.
    uint8_t* append(size_t num_bytes);
    // Return what is to be sent next.
    Gathered gather() const;
    void sent(size_t num_bytes) { sent_ += num_bytes; }
    size_t unsent_bytes() const { return static_cast<size_t>(end_ - sent_); }
    int64_t kept_bytes() const { return static_cast<int64_t>(end_ - start_); }
    // The peer has everything before `position`; false if that was never sent.
    bool acknowledge(uint64_t position);
    // Send everything from `position` on, of which the peer has nothing; false if that is not here.
    bool rewind(uint64_t position);
    void clear();
    // How much was sent more than once.
    int64_t resent_bytes = 0;

   private:
    struct Block {
        std::unique_ptr<uint8_t[]> bytes;
        uint64_t start;  // position of its first byte
        size_t num_bytes;
    };
    size_t block_bytes_;
    std::deque<Block> blocks_;
    uint64_t start_ = 0, sent_ = 0, end_ = 0;

    void drop_first();
};

// Send a frame; its payload is copied, as whoever sends it may change it before the peer has it.
void append_frame(SendStream& stream, FrameChecks& checks, Header header, const void* payload, uint32_t num_bytes);

}  // namespace syncline
