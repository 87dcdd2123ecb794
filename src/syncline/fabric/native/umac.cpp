// What `umac.hpp` declares; names and steps are those of RFC 4418, section 5, with one iteration.
#include "umac.hpp"

#include <algorithm>
#include <cassert>
#include <cstring>

#include "little_endian.hpp"
#include "processor.hpp"

namespace syncline {

namespace {

constexpr size_t BLOCK_BYTES = Umac::BLOCK_BYTES;
using Wide = unsigned __int128;

constexpr uint64_t PRIME_36 = (uint64_t{1} << 36) - 5;
constexpr uint64_t PRIME_64 = ~uint64_t{0} - 58;
constexpr uint64_t POLYNOMIAL_MASK = 0x01FFFFFF01FFFFFF;
constexpr uint64_t MAX_WORD = 0xFFFFFFFF00000000;

uint64_t load_big(const uint8_t* bytes, size_t num_bytes = 8) {
    uint64_t number = 0;
    for (size_t place = 0; place < num_bytes; ++place) number = (number << 8) | bytes[place];
    return number;
}

void store_big(uint8_t* bytes, uint64_t number) {
    for (size_t place = 0; place < 8; ++place) bytes[place] = static_cast<uint8_t>(number >> (56 - 8 * place));
}

// KDF: as many bytes for one purpose as are asked for.
template <size_t num_bytes>
std::array<uint8_t, num_bytes> derive(const Aes& aes, uint64_t purpose) {
    std::array<uint8_t, num_bytes> derived;
    for (size_t done = 0; done < num_bytes; done += 16) {
        Aes::Block counter{};
        store_big(counter.data(), purpose);
        store_big(counter.data() + 8, done / 16 + 1);
        const Aes::Block made = aes.encrypt(counter);
        std::memcpy(derived.data() + done, made.data(), std::min<size_t>(16, num_bytes - done));
    }
    return derived;
}

#ifdef SYNCLINE_ON_X86_64

[[gnu::target("avx2")]] inline __m256i keyed(const uint8_t* block, const uint32_t* key) {
    return _mm256_add_epi32(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(block)),
                            _mm256_loadu_si256(reinterpret_cast<const __m256i*>(key)));
}

// 64 bytes at a time: the compiler makes half the speed of the loop below.
[[gnu::target("avx2")]] uint64_t sum_products_with_avx2(const uint8_t* block, const uint32_t* key) {
    __m256i evens = _mm256_setzero_si256(), odds = evens;
    for (size_t place = 0; place < BLOCK_BYTES; place += 64) {
        const __m256i first = keyed(block + place, key + place / 4);
        const __m256i second = keyed(block + place + 32, key + place / 4 + 8);
        const __m256i left = _mm256_permute2x128_si256(first, second, 0x20);
        const __m256i right = _mm256_permute2x128_si256(first, second, 0x31);
        evens = _mm256_add_epi64(evens, _mm256_mul_epu32(left, right));
        odds = _mm256_add_epi64(odds, _mm256_mul_epu32(_mm256_srli_epi64(left, 32), _mm256_srli_epi64(right, 32)));
    }
    std::array<uint64_t, 4> sums;
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(sums.data()), _mm256_add_epi64(evens, odds));
    return sums[0] + sums[1] + sums[2] + sums[3];
}

#endif

uint64_t next_value(uint64_t key, uint64_t value, uint64_t word) {
    return static_cast<uint64_t>((Wide{key} * value + word) % PRIME_64);
}

}  // namespace

uint64_t hash_block_anywhere(const uint8_t* block, const uint32_t* key, size_t num_bytes) {
    uint64_t total = 0;
    for (; num_bytes; num_bytes -= 32, block += 32, key += 8)
        for (size_t place = 0; place < 4; ++place) {
            const uint32_t left = load_little<uint32_t>(block + 4 * place) + key[place];
            const uint32_t right = load_little<uint32_t>(block + 4 * place + 16) + key[place + 4];
            total += uint64_t{left} * right;
        }
    return total;
}

uint64_t hash_block(const uint8_t* block, const uint32_t* key, size_t num_bytes) {
#ifdef SYNCLINE_ON_X86_64
    if (instruction_sets().avx2 && num_bytes == BLOCK_BYTES) return sum_products_with_avx2(block, key);
#endif
    return hash_block_anywhere(block, key, num_bytes);
}

Umac::Umac(const Aes::Block& key) : pads_(derive<16>(Aes(key), 0)) {
    const Aes aes(key);
    const auto block_key = derive<BLOCK_BYTES>(aes, 1);
    for (size_t place = 0; place < block_key_.size(); ++place)
        block_key_[place] = static_cast<uint32_t>(load_big(block_key.data() + 4 * place, 4));
    polynomial_key_ = load_big(derive<24>(aes, 2).data()) & POLYNOMIAL_MASK;
    const auto last_keys = derive<64>(aes, 3);
    for (size_t place = 0; place < last_keys_.size(); ++place)
        last_keys_[place] = load_big(last_keys.data() + 8 * place) % PRIME_36;
    last_key_ = static_cast<uint32_t>(load_big(derive<4>(aes, 4).data(), 4));
}

// The last block is padded; no other is smaller than BLOCK_BYTES.
void Umac::add_block(const uint8_t* block, size_t num_bytes, size_t num_padded_bytes) {
    const uint64_t hashed = hash_block(block, block_key_.data(), num_padded_bytes) + 8 * num_bytes;
    const auto go_on = [this](uint64_t word) {
        uint64_t& value = state_.polynomial;
        if (word >= MAX_WORD) {
            value = next_value(polynomial_key_, value, PRIME_64 - 1);
            word -= ~uint64_t{0} - PRIME_64 + 1;
        }
        value = next_value(polynomial_key_, value, word);
    };
    if (state_.num_blocks == 0) state_.first = hashed;
    if (state_.num_blocks == 1) go_on(state_.first);
    if (state_.num_blocks > 0) go_on(hashed);
    ++state_.num_blocks;
}

void Umac::add(const uint8_t* bytes, size_t num_bytes) {
    assert(state_.num_blocks * BLOCK_BYTES + state_.num_bytes + num_bytes <= MAX_BYTES);
    if (state_.num_bytes) {
        const size_t num_taken = std::min(num_bytes, BLOCK_BYTES - state_.num_bytes);
        std::memcpy(rest_.data() + state_.num_bytes, bytes, num_taken);
        state_.num_bytes += num_taken;
        bytes += num_taken;
        num_bytes -= num_taken;
        if (state_.num_bytes < BLOCK_BYTES) return;
        add_block(rest_.data(), BLOCK_BYTES, BLOCK_BYTES);
        state_.num_bytes = 0;
    }
    for (; num_bytes >= BLOCK_BYTES; bytes += BLOCK_BYTES, num_bytes -= BLOCK_BYTES)
        add_block(bytes, BLOCK_BYTES, BLOCK_BYTES);
    if (num_bytes) std::memcpy(rest_.data(), bytes, num_bytes);
    state_.num_bytes = num_bytes;
}

uint32_t Umac::hash() {
    if (state_.num_bytes || !state_.num_blocks) {
        const size_t num_padded_bytes = std::max<size_t>(32, (state_.num_bytes + 31) / 32 * 32);
        std::memset(rest_.data() + state_.num_bytes, 0, num_padded_bytes - state_.num_bytes);
        add_block(rest_.data(), state_.num_bytes, num_padded_bytes);
    }
    // The second layer makes 16 bytes of it, of which 8 are 0, and the third one multiplies them two by two.
    const uint64_t value = state_.num_blocks == 1 ? state_.first : state_.polynomial;
    uint64_t total = 0;
    for (size_t place = 0; place < 4; ++place) total += ((value >> (48 - 16 * place)) & 0xFFFF) * last_keys_[place + 4];
    return static_cast<uint32_t>(total % PRIME_36) ^ last_key_;
}

// One block of AES is the pads of four nonces.
uint32_t Umac::pad(uint64_t nonce) {
    const uint64_t first = nonce & ~uint64_t{3};
    if (pad_nonce_ != first) {
        Aes::Block block{};
        store_big(block.data(), first);
        pad_ = pads_.encrypt(block);
        pad_nonce_ = first;
    }
    return static_cast<uint32_t>(load_big(pad_.data() + 4 * (nonce & 3), 4));
}

uint32_t Umac::finish(uint64_t nonce) {
    const uint32_t code = hash() ^ pad(nonce);
    restart();
    return code;
}

uint32_t Umac::code_of(const uint8_t* bytes, size_t num_bytes, uint64_t nonce) {
    const State begun = state_;
    assert(!begun.num_bytes);
    restart();
    add(bytes, num_bytes);
    const uint32_t code = finish(nonce);
    state_ = begun;
    return code;
}

}  // namespace syncline
