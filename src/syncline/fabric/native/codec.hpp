// Numbers in fewer bits, for slow links: blocks of float32, each with one scale.
#pragma once

#include <cstddef>
#include <cstdint>

namespace syncline {

// What becomes of `CODED_BLOCK` numbers x that lie one behind the other; the last block is filled up with zeros.
//
//   4, 8 bits   the scale s, a bfloat16 of two bytes, and the integers x / s, rounded to nearest, ties to even. s is
//               the largest magnitude over 7 or 127, rounded up; 0 below 2**-100, NaN where a number is not finite, so
//               that all of the block is NaN. Two of 4 bits share a byte: number k the lower half, k + 64 the upper
//               one.
//   16 bits     bfloat16, rounded to nearest, ties to even
constexpr size_t CODED_BLOCK = 128;

// The bytes of `count` numbers in codes of so many bits.
size_t coded_bytes(int bits, size_t count);

// Write the codes of `values + error` to `codes`, and to `error` what they lack of it; 0 where that is not finite.
using Encoder = void (*)(const float* values, float* error, size_t count, uint8_t* codes);

// Add the numbers that `codes` stand for to `into`.
using Decoder = void (*)(const uint8_t* codes, size_t count, float* into);

// Null where there are no codes of so many bits.
Encoder encoder_of(int bits);
Decoder decoder_of(int bits);

}  // namespace syncline
