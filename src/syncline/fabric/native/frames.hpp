// Frames as they travel: a header of 48 bytes, little-endian, and at most one chunk. `frames.py` says what each kind is
// for.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <cstdio>
#include <stdexcept>
#include <string>

#include "frame_checks.hpp"
#include "little_endian.hpp"

namespace syncline {

constexpr uint16_t MAGIC = 0x4C53;
constexpr uint8_t VERSION = 6;
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
    ACKNOWLEDGED = 17,
    GOSSIP = 18,
    ROUTED = 19,
    REST = 20,
};

struct Header {
    uint8_t type = 0;
    int16_t connection_class = CONTROL_CLASS;
    uint16_t flags = 0;
    uint64_t tag = 0;
    uint32_t signature = 0;
    uint64_t message_bytes = 0;
    uint64_t offset = 0;
    uint32_t chunk_bytes = 0;
    uint32_t payload_crc = 0;

    bool operator==(const Header&) const = default;
    // A heartbeat that is sent beside the stream is not counted in it; see `heartbeat.hpp`.
    bool is_counted() const { return type != HEARTBEAT || !signature; }
};

// Where each field lies: magic 0, version 2, type 3, class 4, flags 6, tag 8, signature 16, message_bytes 20,
// offset 28, chunk_bytes 36, payload_crc 40, header_crc 44.
constexpr size_t HEADER_BYTES = 48;
constexpr size_t HEADER_CRC_PLACE = 44;
using EncodedHeader = std::array<uint8_t, HEADER_BYTES>;

// What arrived is not a frame, or not one that is allowed here; `is_damage`: bytes were changed on the way.
struct FrameError : std::runtime_error {
    explicit FrameError(const std::string& text, bool is_damage = false)
        : std::runtime_error(text), is_damage(is_damage) {}
    bool is_damage;
};

template <typename... Args>
std::string format(const char* pattern, Args... args) {
    char text[512];
    std::snprintf(text, sizeof text, pattern, args...);
    return text;
}

// Return the header of the next frame, whose payload is in `header.payload_crc`.
inline EncodedHeader encode_header(const Header& header, FrameChecks& checks) {
    EncodedHeader bytes;
    store_little(&bytes[0], MAGIC);
    store_little(&bytes[2], VERSION);
    store_little(&bytes[3], header.type);
    store_little(&bytes[4], header.connection_class);
    store_little(&bytes[6], header.flags);
    store_little(&bytes[8], header.tag);
    store_little(&bytes[16], header.signature);
    store_little(&bytes[20], header.message_bytes);
    store_little(&bytes[28], header.offset);
    store_little(&bytes[36], header.chunk_bytes);
    store_little(&bytes[40], header.payload_crc);
    store_little(&bytes[HEADER_CRC_PLACE], checks.header_field(bytes.data()));
    return bytes;
}

// Return the header of the next frame, with this payload, which is sent behind it and not copied.
inline EncodedHeader seal(Header header, const void* payload, uint32_t num_bytes, FrameChecks& checks) {
    header.chunk_bytes = num_bytes;
    checks.add(payload, num_bytes);
    header.payload_crc = checks.payload_field();
    const EncodedHeader encoded = encode_header(header, checks);
    checks.next_frame();
    return encoded;
}

inline Header decode_header(const uint8_t* bytes, FrameChecks& checks) {
    const auto magic = load_little<uint16_t>(bytes);
    const auto version = load_little<uint8_t>(bytes + 2);
    const bool is_sound = checks.is_sound(bytes);
    if (magic != MAGIC || version != VERSION)
        throw FrameError(
            format("frame begins with 0x%04x version %u: not one of ours", unsigned{magic}, unsigned{version}),
            !is_sound);
    if (!is_sound) throw FrameError(std::string("a frame header failed its checksum: ") + checks.blame(), true);
    Header header;
    header.type = load_little<uint8_t>(bytes + 3);
    header.connection_class = load_little<int16_t>(bytes + 4);
    header.flags = load_little<uint16_t>(bytes + 6);
    header.tag = load_little<uint64_t>(bytes + 8);
    header.signature = load_little<uint32_t>(bytes + 16);
    header.message_bytes = load_little<uint64_t>(bytes + 20);
    header.offset = load_little<uint64_t>(bytes + 28);
    header.chunk_bytes = load_little<uint32_t>(bytes + 36);
    header.payload_crc = load_little<uint32_t>(bytes + 40);
    if (header.type < EAGER || header.type > REST || header.chunk_bytes > MAX_CHUNK_BYTES ||
        (header.flags && header.type != DATA))
        throw FrameError(format("frame type %u with %u bytes and flags %u is not allowed", unsigned{header.type},
                                unsigned{header.chunk_bytes}, unsigned{header.flags}));
    return header;
}

// An unsigned number as `format` takes it.
constexpr unsigned long long ull(uint64_t number) { return number; }

// Throws FrameError unless what was added to `checks` is what the header promised. The frame is complete with this.
inline void check_payload(const Header& header, FrameChecks& checks) {
    if (checks.payload_field() != header.payload_crc)
        throw FrameError(format("%u bytes of message %#llx failed their checksum: %s", unsigned{header.chunk_bytes},
                                static_cast<unsigned long long>(header.tag), checks.blame()),
                         true);
    checks.next_frame();
}

}  // namespace syncline
