// What `aes.hpp` declares.
#include "aes.hpp"

#include <cstddef>

#include "processor.hpp"

namespace syncline {

namespace {

uint8_t doubled(uint8_t value) { return static_cast<uint8_t>((value << 1) ^ (0x1B & (0 - (value >> 7)))); }

Aes::Block multiplied(Aes::Block left, Aes::Block right) {
    Aes::Block product{};
    for (int bit = 0; bit < 8; ++bit)
        for (size_t place = 0; place < 16; ++place) {
            product[place] ^= static_cast<uint8_t>(left[place] & (0 - (right[place] & 1)));
            left[place] = doubled(left[place]);
            right[place] = static_cast<uint8_t>(right[place] >> 1);
        }
    return product;
}

uint8_t rotated(uint8_t value, int by) { return static_cast<uint8_t>((value << by) | (value >> (8 - by))); }

// The S-box: the inverse in GF(2^8), which is the 254th power, and an affine map of its bits.
Aes::Block substituted(const Aes::Block& block) {
    Aes::Block power = block, inverse = multiplied(block, block);  // to the power of 2, 4, 8, ... 128
    power = inverse;
    for (int bit = 2; bit < 8; ++bit) {
        power = multiplied(power, power);
        inverse = multiplied(inverse, power);
    }
    for (uint8_t& value : inverse)
        value = static_cast<uint8_t>(value ^ rotated(value, 1) ^ rotated(value, 2) ^ rotated(value, 3) ^
                                     rotated(value, 4) ^ 0x63);
    return inverse;
}

// Byte r of column c comes from column c + r.
Aes::Block with_rows_shifted(const Aes::Block& block) {
    Aes::Block shifted;
    for (size_t place = 0; place < 16; ++place) shifted[place] = block[(place + 4 * (place % 4)) % 16];
    return shifted;
}

Aes::Block with_columns_mixed(const Aes::Block& block) {
    Aes::Block mixed;
    for (size_t place = 0; place < 16; ++place) {
        const size_t column = place - place % 4;
        const auto row = [&](size_t number) { return block[column + (place + number) % 4]; };
        mixed[place] = static_cast<uint8_t>(doubled(row(0)) ^ doubled(row(1)) ^ row(1) ^ row(2) ^ row(3));
    }
    return mixed;
}

Aes::Block sum(Aes::Block block, const Aes::Block& other) {
    for (size_t place = 0; place < 16; ++place) block[place] ^= other[place];
    return block;
}

#ifdef SYNCLINE_ON_X86_64

[[gnu::target("aes")]] Aes::Block encrypt_by_instruction(const Aes::Block* round_keys, const Aes::Block& block,
                                                         size_t num_rounds) {
    const auto load = [](const Aes::Block& bytes) {
        return _mm_loadu_si128(reinterpret_cast<const __m128i*>(bytes.data()));
    };
    __m128i state = _mm_xor_si128(load(block), load(round_keys[0]));
    for (size_t round = 1; round < num_rounds; ++round) state = _mm_aesenc_si128(state, load(round_keys[round]));
    state = _mm_aesenclast_si128(state, load(round_keys[num_rounds]));
    Aes::Block result;
    _mm_storeu_si128(reinterpret_cast<__m128i*>(result.data()), state);
    return result;
}

#endif

}  // namespace

Aes::Aes(const Block& key) : round_keys_{key} {
    uint8_t constant = 1;
    for (size_t round = 1; round <= NUM_ROUNDS; ++round, constant = doubled(constant)) {
        const Block& before = round_keys_[round - 1];
        Block& next = round_keys_[round];
        const Block last = substituted({before[13], before[14], before[15], before[12]});
        for (size_t place = 0; place < 4; ++place) next[place] = before[place] ^ last[place];
        next[0] ^= constant;
        for (size_t place = 4; place < 16; ++place) next[place] = before[place] ^ next[place - 4];
    }
}

Aes::Block Aes::encrypt(const Block& block) const {
#ifdef SYNCLINE_ON_X86_64
    if (instruction_sets().aes) return encrypt_by_instruction(round_keys_.data(), block, NUM_ROUNDS);
#endif
    return encrypt_anywhere(block);
}

Aes::Block Aes::encrypt_anywhere(Block block) const {
    block = sum(block, round_keys_[0]);
    for (size_t round = 1; round < NUM_ROUNDS; ++round)
        block = sum(with_columns_mixed(with_rows_shifted(substituted(block))), round_keys_[round]);
    return sum(with_rows_shifted(substituted(block)), round_keys_[NUM_ROUNDS]);
}

}  // namespace syncline
