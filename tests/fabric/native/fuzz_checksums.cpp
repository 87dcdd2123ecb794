// Checksums of what a peer sends, of any length, at any alignment, in parts: equal to those of one bit at a time, and
// not a byte is read beyond the end (each input ends where its memory does). Codes with a key are the same in parts and
// at once, and by instructions as without them.
#include <algorithm>
#include <array>
#include <vector>

#include "crc32.hpp"
#include "crc32_folding.hpp"
#include "fuzzing.hpp"
#include "processor.hpp"
#include "umac.hpp"

namespace {

uint32_t bit_by_bit(const uint8_t* bytes, size_t num_bytes) {
    uint32_t state = ~0u;
    for (size_t place = 0; place < num_bytes; ++place) {
        state ^= bytes[place];
        for (int bit = 0; bit < 8; ++bit) state = (state >> 1) ^ (state & 1 ? 0xEDB88320u : 0);
    }
    return ~state;
}

void check_codes(const uint8_t* bytes, size_t num_bytes, size_t part, fuzzing::Random& random) {
    syncline::Aes::Block key, block;
    for (auto& byte : key) byte = static_cast<uint8_t>(random.next());
    for (auto& byte : block) byte = static_cast<uint8_t>(random.next());
    const syncline::Aes aes(key);
    fuzzing::require(aes.encrypt(block) == aes.encrypt_anywhere(block), "AES is the same without its instructions");
    syncline::Umac umac(key);
    const uint64_t nonce = random.next();
    const uint32_t expected = umac.code_of(bytes, num_bytes, nonce);
    umac.add(bytes, part);
    umac.add(bytes + part, num_bytes - part);
    fuzzing::require(umac.finish(nonce) == expected, "a code is that of its bytes, in parts too");
    std::array<uint32_t, syncline::Umac::BLOCK_BYTES / 4> words;
    for (auto& word : words) word = static_cast<uint32_t>(random.next());
    for (size_t size = 32; size <= std::min(num_bytes, syncline::Umac::BLOCK_BYTES); size *= 2)
        fuzzing::require(
            syncline::hash_block(bytes, words.data(), size) == syncline::hash_block_anywhere(bytes, words.data(), size),
            "blocks hash alike on every processor");
}

}  // namespace

void fuzzing::run_checksums(uint64_t seed, Outcomes& outcomes) {
    Random random(seed);
    const size_t skipped = random.below<size_t>(64);
    const size_t num_bytes = random.below<size_t>(random.chance(0.5) ? 300 : 5000);
    std::vector<uint8_t> memory(skipped + num_bytes);
    for (auto& byte : memory) byte = static_cast<uint8_t>(random.next());
    const uint8_t* bytes = memory.data() + skipped;
    const uint32_t expected = bit_by_bit(bytes, num_bytes);
    require(syncline::crc32(bytes, num_bytes) == expected, "a checksum is that of its bytes");
    const size_t part = random.below(num_bytes + 1);
    const uint32_t before = syncline::crc32(bytes, part);
    require(syncline::crc32(bytes + part, num_bytes - part, before) == expected, "a checksum goes on where it stopped");
    const size_t narrow = num_bytes / 16 * 16, wide = num_bytes / 256 * 256;
    if (narrow >= 64 && syncline::instruction_sets().crc32_folding) {
        require(~syncline::crc32_by_folding(bytes, narrow, ~0u) == bit_by_bit(bytes, narrow), "folding is a checksum");
        ++outcomes["folded"];
    }
    if (wide >= 256 && syncline::instruction_sets().wide_crc32_folding) {
        require(~syncline::crc32_by_wide_folding(bytes, wide, ~0u) == bit_by_bit(bytes, wide), "wide folding is, too");
        ++outcomes["folded widely"];
    }
    check_codes(bytes, num_bytes, part, random);
    ++outcomes["right"];
}
