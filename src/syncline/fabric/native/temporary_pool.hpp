// Memory in which contributions land until they are added.
#pragma once

#include <cstddef>
#include <cstdint>
#include <map>
#include <memory>
#include <vector>

namespace syncline {

// Blocks in sizes of powers of two, the last one used first.
class TemporaryPool {
   public:
    explicit TemporaryPool(int64_t max_kept_bytes) : max_kept_bytes_(max_kept_bytes) {}

    using Block = std::unique_ptr<uint8_t[]>;
    Block take(size_t num_bytes);
    void give_back(Block block, size_t num_bytes);
    // PIECE_BYTES for whoever uses them before anybody else asks: the same ones each time, so they stay in the caches.
    static constexpr size_t PIECE_BYTES = 256 << 10;
    uint8_t* piece();

    int64_t used_bytes = 0, kept_bytes = 0;

   private:
    int64_t max_kept_bytes_;
    std::map<size_t, std::vector<Block>> free_;
    Block piece_;

    static size_t size_of(size_t num_bytes);
};

}  // namespace syncline
