// AES-128 (FIPS 197), one block at a time, forwards only: it makes keys and pads, of which each frame needs half a one.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>

namespace syncline {

class Aes {
   public:
    using Block = std::array<uint8_t, 16>;

    explicit Aes(const Block& key);
    Block encrypt(const Block& block) const;
    // As on a processor without instructions for it: no table, whose places in the cache would tell of the key.
    Block encrypt_anywhere(Block block) const;

   private:
    static constexpr size_t NUM_ROUNDS = 10;
    std::array<Block, NUM_ROUNDS + 1> round_keys_;
};

}  // namespace syncline
