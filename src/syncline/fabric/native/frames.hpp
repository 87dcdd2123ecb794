// Frames as they travel: a header of 48 bytes, little-endian, and at most one chunk. See `frames.py`, which says why.
#pragma once

#include <cstdint>
#include <cstdio>
#include <cstring>
#include <stdexcept>
#include <string>

#include "crc32.hpp"

namespace syncline {

constexpr uint16_t MAGIC = 0x4C53;
constexpr uint8_t VERSION = 1;
constexpr int CONTROL_CLASS = -1;
constexpr uint32_t MAX_CHUNK_BYTES = 256 << 10;
constexpr uint32_t MAX_CONTROL_BYTES = 16384;

enum FrameType : uint8_t {
    EAGER = 1,
    DATA = 2,
    END = 3,
    REQUEST = 4,
    GRANT = 5,
    DISCARD = 6,
    CREDIT = 7,
    CONTROL = 8,
    HEARTBEAT = 9,
    FAREWELL = 10,
    LOST = 11,
    OFFER = 12,
    ACCEPT = 13,
    FETCHED = 14,
    OPEN = 15,
    OPENED = 16,
};

#pragma pack(push, 1)
struct Header {
    uint16_t magic = MAGIC;
    uint8_t version = VERSION;
    uint8_t type = 0;
    int16_t connection_class = CONTROL_CLASS;
    uint16_t flags = 0;
    uint64_t tag = 0;
    uint32_t signature = 0;
    uint64_t message_bytes = 0;
    uint64_t offset = 0;
    uint32_t chunk_bytes = 0;
    uint32_t payload_crc = 0;
    uint32_t header_crc = 0;
};
#pragma pack(pop)

constexpr size_t HEADER_BYTES = sizeof(Header);
constexpr size_t BODY_BYTES = HEADER_BYTES - sizeof(uint32_t);
static_assert(HEADER_BYTES == 48, "the wire's header");
static_assert(__BYTE_ORDER__ == __ORDER_LITTLE_ENDIAN__, "the wire is little-endian, and headers are copied as they lie");

// What arrived is not a frame, or not one that is allowed here; `is_damage`: bytes were changed on the way.
struct FrameError : std::runtime_error {
    explicit FrameError(const std::string& text, bool is_damage = false)
        : std::runtime_error(text), is_damage(is_damage) {}
    bool is_damage;
};

constexpr const char* BLAME =
    "they were changed between the sender's memory and this one, or while they were being sent; "
    "check memory, cable and NIC offloads";

template <typename... Args>
std::string format(const char* pattern, Args... args) {
    char text[512];
    std::snprintf(text, sizeof text, pattern, args...);
    return text;
}

// Fill in the checksums; the payload is sent after the header and not copied.
inline void seal(Header& header, const void* payload, uint32_t num_bytes) {
    header.chunk_bytes = num_bytes;
    header.payload_crc = crc32(payload, num_bytes);
    header.header_crc = crc32(&header, BODY_BYTES);
}

inline Header decode_header(const uint8_t* bytes) {
    Header header;
    std::memcpy(&header, bytes, HEADER_BYTES);
    if (header.magic != MAGIC || header.version != VERSION)
        throw FrameError(format("frame begins with 0x%04x version %u: not one of ours", unsigned{header.magic},
                                unsigned{header.version}));
    if (header.header_crc != crc32(bytes, BODY_BYTES))
        throw FrameError(std::string("a frame header failed its checksum: ") + BLAME, true);
    if (header.type < EAGER || header.type > OPENED || header.chunk_bytes > MAX_CHUNK_BYTES || header.flags)
        throw FrameError(format("frame type %u with %u bytes and flags %u is not allowed", unsigned{header.type},
                                unsigned{header.chunk_bytes}, unsigned{header.flags}));
    return header;
}

inline void check_payload(const Header& header, uint32_t crc) {
    if (crc != header.payload_crc)
        throw FrameError(format("%u bytes of message %#llx failed their checksum: %s", unsigned{header.chunk_bytes},
                                static_cast<unsigned long long>(header.tag), BLAME),
                         true);
}

}  // namespace syncline
