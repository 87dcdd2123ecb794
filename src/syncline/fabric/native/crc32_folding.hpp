// CRC-32 by carry-less multiplication, on processors that have it: 64 or 256 bytes at a time.
//
// In all of these `state` is the register itself, without the inversions before and after.
#pragma once

#include <cstddef>
#include <cstdint>

namespace syncline {

// Needs `InstructionSets::crc32_folding`. `num_bytes` is a multiple of 16 and at least 64.
uint32_t crc32_by_folding(const uint8_t* data, size_t num_bytes, uint32_t state);

// Needs `wide_crc32_folding`. `num_bytes` is a multiple of 256 and at least 256.
uint32_t crc32_by_wide_folding(const uint8_t* data, size_t num_bytes, uint32_t state);

}  // namespace syncline
