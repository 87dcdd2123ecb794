// What fills the two 32-bit fields of every frame of one connection and direction: CRC-32s, which find accidents, or
// codes that only a key can make; decision 0053 says why these.
//
// With `authenticate_frames` each connection has two keys, one for each direction, from its handshake. A field is the
// code that UMAC-32 makes of four bytes: the payload's with twice the number of the frame as its nonce, the header's,
// in which the payload's stands, with one more. Frames are numbered on each connection and direction and the number is
// not sent, so a frame that is replayed, left out or moved fails too. A connection that goes on with another socket
// keeps its keys and its numbers, and what is sent again is the same bytes. Heartbeats beside the stream say their own
// numbers, which grow, and have nonces from 2^63 on; so no nonce is ever used for two frames. Some few that fail end
// the peer: a forger has so many guesses in 2^30.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>

#include "umac.hpp"

namespace syncline {

class FrameChecks {
   public:
    // From now on, and before the first frame: codes by this key.
    void use_key(const Aes::Block& key) { umac_ = std::make_unique<Umac>(key); }
    bool has_key() const { return umac_ != nullptr; }

    // Begin, or go on with, the payload of this frame.
    void add(const void* bytes, size_t num_bytes);
    // Return the field of the payload: of all that was added.
    uint32_t payload_field();
    // Return the field of a header: of its other bytes.
    uint32_t header_field(const uint8_t* header);
    // Whether the header is the next one, and as it was sent.
    bool is_sound(const uint8_t* header);
    // Go on to the next frame: this one was made, or found to be sound.
    void next_frame();
    // Forget what was added: this frame comes again from its first byte.
    void restart();
    // What to say of a frame whose fields are wrong.
    const char* blame() const;

   private:
    std::unique_ptr<Umac> umac_;
    uint32_t crc_ = 0;
    uint64_t number_ = 0;  // of this frame
    uint64_t beat_ = 0;    // of this one, if it is a heartbeat beside the stream; else 0
    uint64_t last_beat_ = 0;
};

}  // namespace syncline
