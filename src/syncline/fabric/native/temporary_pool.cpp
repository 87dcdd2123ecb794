// What `temporary_pool.hpp` declares.
#include "temporary_pool.hpp"

#include <utility>

namespace syncline {

namespace {

constexpr size_t MIN_BLOCK_BYTES = 4096;

}  // namespace

size_t TemporaryPool::size_of(size_t num_bytes) {
    size_t size = MIN_BLOCK_BYTES;
    while (size < num_bytes) size *= 2;
    return size;
}

TemporaryPool::Block TemporaryPool::take(size_t num_bytes) {
    const size_t size = size_of(num_bytes);
    used_bytes += static_cast<int64_t>(size);
    auto& free = free_[size];
    if (free.empty()) return Block(new uint8_t[size]);
    kept_bytes -= static_cast<int64_t>(size);
    Block block = std::move(free.back());
    free.pop_back();
    return block;
}

void TemporaryPool::give_back(Block block, size_t num_bytes) {
    const size_t size = size_of(num_bytes);
    used_bytes -= static_cast<int64_t>(size);
    if (kept_bytes + static_cast<int64_t>(size) > max_kept_bytes_) return;
    kept_bytes += static_cast<int64_t>(size);
    free_[size].push_back(std::move(block));
}

uint8_t* TemporaryPool::piece() {
    if (!piece_) piece_.reset(new uint8_t[PIECE_BYTES]);
    return piece_.get();
}

}  // namespace syncline
