// Numbers as they travel: little-endian, whatever the processor has. A compiler makes one load or store of each.
#pragma once

#include <bit>
#include <cstddef>
#include <cstdint>
#include <type_traits>

namespace syncline {

template <typename Number>
constexpr Number load_little(const uint8_t* bytes) {
    using Bits = std::make_unsigned_t<Number>;
    Bits bits = 0;
    for (size_t place = 0; place < sizeof(Number); ++place)
        bits = static_cast<Bits>(bits | static_cast<Bits>(Bits{bytes[place]} << (8 * place)));
    return std::bit_cast<Number>(bits);
}

template <typename Number>
constexpr void store_little(uint8_t* bytes, Number number) {
    const auto bits = std::bit_cast<std::make_unsigned_t<Number>>(number);
    for (size_t place = 0; place < sizeof(Number); ++place) bytes[place] = static_cast<uint8_t>(bits >> (8 * place));
}

}  // namespace syncline
