// What `send_stream.hpp` declares.
#include "send_stream.hpp"

#include <algorithm>
#include <cstring>
#include <map>
#include <utility>
#include <vector>

namespace syncline {

namespace {

using Bytes = std::unique_ptr<uint8_t[]>;

constexpr size_t MAX_SPARES = 32;       // of each size and thread
constexpr uint32_t PIECE_BYTES = 8192;  // is read once, and checked and copied while it is at hand

// Blocks that no stream of this thread uses, by their size: new ones cost the kernel more than the copies into them.
std::vector<Bytes>& spares(size_t num_bytes) {
    thread_local std::map<size_t, std::vector<Bytes>> found;
    return found[num_bytes];
}

Bytes take_block(size_t num_bytes) {
    std::vector<Bytes>& left = spares(num_bytes);
    if (left.empty()) return Bytes(new uint8_t[num_bytes]);
    Bytes bytes = std::move(left.back());
    left.pop_back();
    return bytes;
}

}  // namespace

uint8_t* SendStream::append(size_t num_bytes) {
    if (start_ == end_ && !blocks_.empty()) {  // nobody needs what is here: begin where the cache is warm
        blocks_.front().start = end_;
        blocks_.front().num_bytes = 0;
    }
    if (blocks_.empty() || blocks_.back().num_bytes + num_bytes > block_bytes_) {
        blocks_.push_back({take_block(block_bytes_), end_, 0});
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
    while (blocks_.size() > 1 && blocks_.front().start + blocks_.front().num_bytes <= start_) drop_first();
    return true;
}

void SendStream::drop_first() {
    std::vector<Bytes>& left = spares(block_bytes_);
    if (left.size() < MAX_SPARES) left.push_back(std::move(blocks_.front().bytes));
    blocks_.pop_front();
}

void SendStream::clear() {
    while (!blocks_.empty()) drop_first();
    start_ = sent_ = end_;
}

bool SendStream::rewind(uint64_t position) {
    if (position < start_ || position > sent_) return false;
    resent_bytes += static_cast<int64_t>(sent_ - position);
    sent_ = position;
    return acknowledge(position);
}

void append_frame(SendStream& stream, FrameChecks& checks, Header header, const void* payload, uint32_t num_bytes) {
    uint8_t* const place = stream.append(HEADER_BYTES + num_bytes);
    const auto* const from = static_cast<const uint8_t*>(payload);
    header.chunk_bytes = num_bytes;
    for (uint32_t start = 0; start < num_bytes; start += PIECE_BYTES) {
        const size_t rest = std::min(PIECE_BYTES, num_bytes - start);
        checks.add(from + start, rest);
        std::memcpy(place + HEADER_BYTES + start, from + start, rest);
    }
    header.payload_crc = checks.payload_field();
    const EncodedHeader encoded = encode_header(header, checks);
    checks.next_frame();
    std::memcpy(place, encoded.data(), HEADER_BYTES);
}

}  // namespace syncline
