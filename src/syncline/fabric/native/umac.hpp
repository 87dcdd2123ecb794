// UMAC-32 (RFC 4418): message authentication codes of 32 bits at memory speed. A universal hash, whose key one
// connection has in one direction, makes 32 bits of the message; a pad that AES makes of the nonce hides them. Whoever
// has no key fits one code to another message, or guesses one, with a chance of 2^-30.
//
// That holds only while no nonce is used for two messages.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>

#include "aes.hpp"

namespace syncline {

// NH, the hash of a block of 32 bytes or some more: the sum of the products of 32-bit sums, of words that are four
// apart. One is as this processor does it best, the other as any does it.
uint64_t hash_block(const uint8_t* block, const uint32_t* key, size_t num_bytes);
uint64_t hash_block_anywhere(const uint8_t* block, const uint32_t* key, size_t num_bytes);

class Umac {
   public:
    explicit Umac(const Aes::Block& key);

    // Go on with the message; what a message is cut into makes no difference. At most MAX_BYTES in all.
    void add(const uint8_t* bytes, size_t num_bytes);
    // Return the code of all that was added, and begin the next message.
    uint32_t finish(uint64_t nonce);
    // Return the code of a whole message; one that was begun stays as it is.
    uint32_t code_of(const uint8_t* bytes, size_t num_bytes, uint64_t nonce);
    // Forget what was added.
    void restart() { state_ = State(); }

    static constexpr size_t MAX_BYTES = 1 << 24, BLOCK_BYTES = 1024;

   private:
    struct State {
        uint64_t first = 0;       // of the blocks that are hashed
        uint64_t polynomial = 1;  // over them, from the second on
        size_t num_blocks = 0, num_bytes = 0;
    };

    Aes pads_;
    std::array<uint32_t, BLOCK_BYTES / 4> block_key_;
    uint64_t polynomial_key_;
    std::array<uint64_t, 8> last_keys_;
    uint32_t last_key_;
    State state_;
    std::array<uint8_t, BLOCK_BYTES> rest_{};  // of which `state_.num_bytes` are there
    Aes::Block pad_{};
    uint64_t pad_nonce_ = 1;  // of no pad

    void add_block(const uint8_t* block, size_t num_bytes, size_t num_padded_bytes);
    uint32_t hash();
    uint32_t pad(uint64_t nonce);
};

}  // namespace syncline
