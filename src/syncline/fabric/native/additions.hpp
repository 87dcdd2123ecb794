// How contributions are added.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>

namespace syncline {

// Adds `num_bytes` of numbers to as many, each in its place.
using Addition = void (*)(uint8_t* into, const uint8_t* other, size_t num_bytes);

// Returns how numbers of `dtype` are added; null if not here.
Addition addition_of(const std::string& dtype);

}  // namespace syncline
