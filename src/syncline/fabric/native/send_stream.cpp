// What `send_stream.hpp` declares.
#include "send_stream.hpp"

#include <algorithm>
#include <cstring>

namespace syncline {

uint8_t* SendStream::append(size_t num_bytes) {
    if (start_ == end_ && !blocks_.empty()) {  // nobody needs what is here: begin where the cache is warm
        blocks_.front().start = end_;
        blocks_.front().num_bytes = 0;
    }
    if (blocks_.empty() || blocks_.back().num_bytes + num_bytes > block_bytes_) {
        auto bytes = spare_ ? std::move(spare_) : std::unique_ptr<uint8_t[]>(new uint8_t[block_bytes_]);
        blocks_.push_back({std::move(bytes), end_, 0});
    }
    Block& block = blocks_.back();
    uint8_t* const place = block.bytes.get() + block.num_bytes;
    block.num_bytes += num_bytes;
    end_ += num_bytes;
    return place;
}

SendStream::Gathered SendStream::gather() const {
    Gathered gathered;
    for (const Block& block : blocks_) {
        const uint64_t stop = block.start + block.num_bytes;
        if (stop <= sent_) continue;
        if (gathered.num_parts == MAX_PARTS) break;
        const size_t skipped = sent_ > block.start ? static_cast<size_t>(sent_ - block.start) : 0;
        gathered.parts[gathered.num_parts++] = {block.bytes.get() + skipped, block.num_bytes - skipped};
        gathered.num_bytes += block.num_bytes - skipped;
    }
    return gathered;
}

bool SendStream::acknowledge(uint64_t position) {
    if (position > sent_) return false;
    start_ = std::max(start_, position);
    while (blocks_.size() > 1 && blocks_.front().start + blocks_.front().num_bytes <= start_) {
        spare_ = std::move(blocks_.front().bytes);
        blocks_.pop_front();
    }
    if (start_ == end_) spare_.reset();
    return true;
}

void SendStream::clear() {
    blocks_.clear();
    spare_.reset();
    start_ = sent_ = end_;
}

bool SendStream::rewind(uint64_t position) {
    if (position < start_ || position > sent_) return false;
    resent_bytes += static_cast<int64_t>(sent_ - position);
    sent_ = position;
    return acknowledge(position);
}

void append_frame(SendStream& stream, const Header& header, const void* payload, uint32_t num_bytes) {
    const EncodedHeader encoded = seal(header, payload, num_bytes);
    uint8_t* const place = stream.append(HEADER_BYTES + num_bytes);
    std::memcpy(place, encoded.data(), HEADER_BYTES);
    if (num_bytes) std::memcpy(place + HEADER_BYTES, payload, num_bytes);
}

}  // namespace syncline
