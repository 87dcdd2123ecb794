// CRC-32 as zlib and IEEE 802.3 have it, at memory speed.
#pragma once

#include <cstddef>
#include <cstdint>

namespace syncline {

// Return the checksum of `num_bytes` that follow those with checksum `before` (0: none).
uint32_t crc32(const void* bytes, size_t num_bytes, uint32_t before = 0);

}  // namespace syncline
