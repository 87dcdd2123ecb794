// What `frame_checks.hpp` declares.
#include "frame_checks.hpp"

#include "crc32.hpp"
#include "frames.hpp"
#include "little_endian.hpp"

namespace syncline {

namespace {

constexpr uint64_t BEATS = uint64_t{1} << 63;  // from here on nonces are those of heartbeats beside the stream

// Such a heartbeat says its own number, which is not 0; other frames have none.
uint64_t beat_of(const uint8_t* header) {
    const bool is_beat = header[3] == HEARTBEAT && load_little<uint32_t>(header + 16);
    return is_beat ? load_little<uint64_t>(header + 28) : 0;
}

}  // namespace

void FrameChecks::add(const void* bytes, size_t num_bytes) {
    if (umac_)
        umac_->add(static_cast<const uint8_t*>(bytes), num_bytes);
    else
        crc_ = crc32(bytes, num_bytes, crc_);
}

uint32_t FrameChecks::payload_field() {
    if (umac_) return beat_ ? 0 : umac_->finish(2 * number_);
    const uint32_t crc = crc_;
    crc_ = 0;
    return crc;
}

uint32_t FrameChecks::header_field(const uint8_t* header) {
    if (!umac_) return crc32(header, HEADER_CRC_PLACE);
    const uint64_t beat = beat_of(header);
    return umac_->code_of(header, HEADER_CRC_PLACE, (beat ? BEATS | 2 * beat : 2 * number_) + 1);
}

// Numbers of heartbeats grow, so none is taken twice; they carry nothing.
bool FrameChecks::is_sound(const uint8_t* header) {
    if (load_little<uint32_t>(header + HEADER_CRC_PLACE) != header_field(header)) return false;
    if (!umac_) return true;
    beat_ = beat_of(header);
    return !beat_ || (beat_ > last_beat_ && !load_little<uint32_t>(header + 36));
}

void FrameChecks::next_frame() {
    if (beat_)
        last_beat_ = beat_;
    else
        ++number_;
    beat_ = 0;
}

void FrameChecks::restart() {
    if (umac_) umac_->restart();
    crc_ = 0;
    beat_ = 0;
}

const char* FrameChecks::blame() const {
    return umac_
               ? "the authentication code does not fit; the frame was changed, repeated, left out or moved by someone "
                 "on the way, or damaged: find out who can change packets between the hosts, then check memory, cable "
                 "and NIC offloads"
               : "they were changed between the sender's memory and this one, or while they were being sent; check "
                 "memory, cable and NIC offloads";
}

}  // namespace syncline
