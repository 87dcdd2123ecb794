// What `codec.hpp` declares: loops that compilers make vectors of, once for any processor and once for those with AVX2.
//
// Blocks with scales are those of Dettmers et al., "8-bit optimizers via block-wise quantization" (2022); what codes
// lack is added to the next numbers, after Seide et al., "1-bit stochastic gradient descent" (2014).
#include "codec.hpp"

#include <algorithm>
#include <bit>
#include <cstring>

#include "processor.hpp"

namespace syncline {

namespace {

constexpr uint32_t MAGNITUDE = 0x7FFFFFFF, INFINITE = 0x7F800000, SMALLEST = 0x0D800000;  // 2**-100
constexpr uint16_t NAN_SCALE = 0x7FC0;
constexpr float ROUND = 0x1.8p23F;  // what is added to it and taken off again is rounded to an integer

template <int Bits>
constexpr size_t RECORD = Bits == 16 ? 2 * CODED_BLOCK : 2 + CODED_BLOCK * Bits / 8;
template <int Bits>
constexpr float LARGEST = (1 << (Bits - 1)) - 1;

inline float finite_or_zero(float value) {
    return (std::bit_cast<uint32_t>(value) & MAGNITUDE) < INFINITE ? value : 0.0F;
}

// Return the upper half of a float that is rounded up; no number is larger than LARGEST of it.
template <int Bits>
uint16_t scale_for(uint32_t largest) {
    if (largest >= INFINITE) return NAN_SCALE;
    if (largest < SMALLEST) return 0;
    const float scale = std::bit_cast<float>(largest) / LARGEST<Bits>;
    return static_cast<uint16_t>((std::bit_cast<uint32_t>(scale) + 0xFFFF) >> 16);
}

inline float widened(uint16_t upper) { return std::bit_cast<float>(uint32_t{upper} << 16); }

[[gnu::always_inline]] inline void encode_halves(const float* values, float* error, uint8_t* record) {
    uint16_t halves[CODED_BLOCK];
    for (size_t k = 0; k < CODED_BLOCK; ++k) {
        const float sum = values[k] + error[k];
        const auto bits = std::bit_cast<uint32_t>(sum);
        const uint32_t rounded = (bits + 0x7FFF + ((bits >> 16) & 1)) >> 16;
        halves[k] = static_cast<uint16_t>((bits & MAGNITUDE) > INFINITE ? NAN_SCALE : rounded);
        error[k] = finite_or_zero(sum - widened(halves[k]));
    }
    std::memcpy(record, halves, sizeof halves);
}

template <int Bits>
[[gnu::always_inline]] inline void encode_integers(const float* values, float* error, uint8_t* record) {
    float sums[CODED_BLOCK];
    uint32_t largest = 0;
    for (size_t k = 0; k < CODED_BLOCK; ++k) {
        sums[k] = values[k] + error[k];
        largest = std::max(largest, std::bit_cast<uint32_t>(sums[k]) & MAGNITUDE);
    }
    const uint16_t stored = scale_for<Bits>(largest);
    std::memcpy(record, &stored, sizeof stored);
    if (stored == 0 || stored == NAN_SCALE) {
        for (size_t k = 0; k < CODED_BLOCK; ++k) error[k] = stored == 0 ? sums[k] : 0.0F;
        std::memset(record + sizeof stored, 0, RECORD<Bits> - sizeof stored);
        return;
    }
    const float scale = widened(stored), inverse = 1.0F / scale;
    int8_t codes[CODED_BLOCK];
    for (size_t k = 0; k < CODED_BLOCK; ++k) {
        const float rounded = (sums[k] * inverse + ROUND) - ROUND;  // LARGEST at most, since the scale is rounded up
        error[k] = sums[k] - rounded * scale;
        codes[k] = static_cast<int8_t>(static_cast<int32_t>(rounded));
    }
    uint8_t* bytes = record + sizeof stored;
    if constexpr (Bits == 8)
        std::memcpy(bytes, codes, sizeof codes);
    else
        for (size_t k = 0; k < CODED_BLOCK / 2; ++k)
            bytes[k] = static_cast<uint8_t>((codes[k] & 15) | (codes[k + CODED_BLOCK / 2] << 4));
}

template <int Bits>
[[gnu::always_inline]] inline void encode_block(const float* values, float* error, uint8_t* record) {
    if constexpr (Bits == 16)
        encode_halves(values, error, record);
    else
        encode_integers<Bits>(values, error, record);
}

template <int Bits>
[[gnu::always_inline]] inline void decode_block(const uint8_t* record, float* into) {
    if constexpr (Bits == 16) {
        uint16_t halves[CODED_BLOCK];
        std::memcpy(halves, record, sizeof halves);
        for (size_t k = 0; k < CODED_BLOCK; ++k) into[k] += widened(halves[k]);
        return;
    }
    uint16_t stored;
    std::memcpy(&stored, record, sizeof stored);
    const float scale = widened(stored);
    const uint8_t* bytes = record + sizeof stored;
    if constexpr (Bits == 8)
        for (size_t k = 0; k < CODED_BLOCK; ++k) into[k] += static_cast<float>(static_cast<int8_t>(bytes[k])) * scale;
    if constexpr (Bits == 4)
        for (size_t k = 0; k < CODED_BLOCK / 2; ++k) {
            const auto low = static_cast<int8_t>(static_cast<int8_t>(bytes[k] << 4) >> 4);
            const auto high = static_cast<int8_t>(static_cast<int8_t>(bytes[k]) >> 4);
            into[k] += static_cast<float>(low) * scale;
            into[k + CODED_BLOCK / 2] += static_cast<float>(high) * scale;
        }
}

template <int Bits>
[[gnu::always_inline]] inline void encode(const float* values, float* error, size_t count, uint8_t* codes) {
    size_t done = 0;
    for (; done + CODED_BLOCK <= count; done += CODED_BLOCK, codes += RECORD<Bits>)
        encode_block<Bits>(values + done, error + done, codes);
    if (done == count) return;
    float rest[CODED_BLOCK] = {}, lacking[CODED_BLOCK] = {};
    std::copy(values + done, values + count, rest);
    std::copy(error + done, error + count, lacking);
    encode_block<Bits>(rest, lacking, codes);
    std::copy(lacking, lacking + (count - done), error + done);
}

template <int Bits>
[[gnu::always_inline]] inline void decode(const uint8_t* codes, size_t count, float* into) {
    size_t done = 0;
    for (; done + CODED_BLOCK <= count; done += CODED_BLOCK, codes += RECORD<Bits>)
        decode_block<Bits>(codes, into + done);
    if (done == count) return;
    float rest[CODED_BLOCK] = {};
    std::copy(into + done, into + count, rest);
    decode_block<Bits>(codes, rest);
    std::copy(rest, rest + (count - done), into + done);
}

template <int Bits>
void encode_anywhere(const float* values, float* error, size_t count, uint8_t* codes) {
    encode<Bits>(values, error, count, codes);
}

template <int Bits>
void decode_anywhere(const uint8_t* codes, size_t count, float* into) {
    decode<Bits>(codes, count, into);
}

#ifdef SYNCLINE_ON_X86_64

template <int Bits>
[[gnu::target("avx2")]] void encode_with_avx2(const float* values, float* error, size_t count, uint8_t* codes) {
    encode<Bits>(values, error, count, codes);
}

template <int Bits>
[[gnu::target("avx2")]] void decode_with_avx2(const uint8_t* codes, size_t count, float* into) {
    decode<Bits>(codes, count, into);
}

template <int Bits>
Encoder choose_encoder() {
    return instruction_sets().avx2 ? encode_with_avx2<Bits> : encode_anywhere<Bits>;
}

template <int Bits>
Decoder choose_decoder() {
    return instruction_sets().avx2 ? decode_with_avx2<Bits> : decode_anywhere<Bits>;
}

#else

template <int Bits>
Encoder choose_encoder() {
    return encode_anywhere<Bits>;
}

template <int Bits>
Decoder choose_decoder() {
    return decode_anywhere<Bits>;
}

#endif

}  // namespace

size_t coded_bytes(int bits, size_t count) {
    const size_t num_blocks = (count + CODED_BLOCK - 1) / CODED_BLOCK;
    return num_blocks * (bits == 16 ? RECORD<16> : bits == 8 ? RECORD<8> : RECORD<4>);
}

Encoder encoder_of(int bits) {
    return bits == 4    ? choose_encoder<4>()
           : bits == 8  ? choose_encoder<8>()
           : bits == 16 ? choose_encoder<16>()
                        : nullptr;
}

Decoder decoder_of(int bits) {
    return bits == 4    ? choose_decoder<4>()
           : bits == 8  ? choose_decoder<8>()
           : bits == 16 ? choose_decoder<16>()
                        : nullptr;
}

}  // namespace syncline
