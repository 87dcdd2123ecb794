// What fills the two 32-bit fields of every frame of one connection and direction: CRC-32s, or codes that only a key
// can make. `frame_checks.py` says which, and which nonce belongs to which frame.
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
