// What `crc32.hpp` declares: it chooses how, and does itself what no processor's instruction does, eight bytes at a
// time by tables ("slicing by 8", M. Kounavis and F. Berry, 2005).
#include "crc32.hpp"

#include <array>

#include "crc32_folding.hpp"
#include "little_endian.hpp"
#include "processor.hpp"

namespace syncline {

namespace {

using Crc32Tables = std::array<std::array<uint32_t, 256>, 8>;

constexpr Crc32Tables make_crc32_tables() {
    Crc32Tables tables{};
    for (uint32_t value = 0; value < 256; ++value) {
        uint32_t crc = value;
        for (int bit = 0; bit < 8; ++bit) crc = (crc >> 1) ^ (0xEDB88320u & (0u - (crc & 1u)));
        tables[0][value] = crc;
    }
    for (size_t slice = 1; slice < 8; ++slice)
        for (size_t value = 0; value < 256; ++value) {
            const uint32_t before = tables[slice - 1][value];
            tables[slice][value] = (before >> 8) ^ tables[0][before & 0xFF];
        }
    return tables;
}

constexpr Crc32Tables TABLES = make_crc32_tables();

// `state` is the register itself, without the inversions before and after.
uint32_t crc32_by_tables(const uint8_t* data, size_t num_bytes, uint32_t state) {
    for (; num_bytes >= 8; data += 8, num_bytes -= 8) {
        const uint64_t word = load_little<uint64_t>(data) ^ state;
        state = 0;
        for (size_t byte = 0; byte < 8; ++byte) state ^= TABLES[7 - byte][(word >> (8 * byte)) & 0xFF];
    }
    for (; num_bytes; ++data, --num_bytes) state = (state >> 8) ^ TABLES[0][(state ^ *data) & 0xFF];
    return state;
}

}  // namespace

uint32_t crc32(const void* bytes, size_t num_bytes, uint32_t before) {
    const auto* data = static_cast<const uint8_t*>(bytes);
    uint32_t state = ~before;
    if (instruction_sets().wide_crc32_folding && num_bytes >= 1024) {
        const size_t num_folded = num_bytes & ~size_t{255};
        state = crc32_by_wide_folding(data, num_folded, state);
        data += num_folded;
        num_bytes -= num_folded;
    }
    if (instruction_sets().crc32_folding && num_bytes >= 64) {
        const size_t num_folded = num_bytes & ~size_t{15};
        state = crc32_by_folding(data, num_folded, state);
        data += num_folded;
        num_bytes -= num_folded;
    }
    return ~crc32_by_tables(data, num_bytes, state);
}

}  // namespace syncline
