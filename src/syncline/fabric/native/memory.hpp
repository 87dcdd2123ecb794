// Bytes that messages leave from and land in, whoever owns them.
#pragma once

#include <cstdint>
#include <memory>

namespace syncline {

struct Memory {
    uint8_t* data = nullptr;
    int64_t num_bytes = 0;
    std::shared_ptr<const void> owner;  // keeps the bytes where they are: Python's buffer, or whatever else they lie in

    void drop() { *this = Memory(); }
};

}  // namespace syncline
