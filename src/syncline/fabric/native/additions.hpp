// How contributions become one: mostly they are added, so that is what all of it is called.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>

namespace syncline {

// Adds `num_bytes` of numbers to as many, each in its place. What comes of a number depends on nothing but the two:
// not on its place, nor on how many there are.
using Addition = void (*)(uint8_t* into, const uint8_t* other, size_t num_bytes);

// Returns how numbers of `dtype` are added, or what `op` ("max", "min", "product", "band", "bor", "bxor") says instead;
// null if that is not here. The results are those of NumPy and PyTorch, to the bit but for which NaN it is:
//
// - 16-bit floats as floats of 32 bits, rounded to nearest, ties to even;
// - the maximum and minimum of a NaN and anything is NaN, of two equal numbers (zeros of either sign) the second;
// - integers wrap around; a bool is true where any bit of it is set.
Addition addition_of(const std::string& dtype, const std::string& op);

}  // namespace syncline
