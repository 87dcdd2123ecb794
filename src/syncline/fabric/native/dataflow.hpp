// What one rank does with one slice of a bucket, before any call; made in `runtime/dataflow.py`.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <vector>

#include "additions.hpp"

namespace syncline {

enum class Kind : uint8_t { SEND = 0, COPY = 1, LAND = 2, APPLY = 3 };

struct Operation {
    Kind kind;
    size_t first, last;  // atoms
    int peer;            // as the call numbers its ranks
    int member;          // as the transport does
    uint64_t index;
    std::vector<uint32_t> then, applies, before, after;
    bool replaces;
};

// What one rank does with one slice.
struct Dataflow {
    std::vector<Operation> operations;
    std::vector<uint32_t> num_waits, first;
};

// A slice before any call: what is done with it, and where its atoms lie in the buffer, in bytes.
struct Slice {
    std::shared_ptr<const Dataflow> dataflow;
    std::vector<size_t> offsets;
    Addition addition;

    int64_t num_bytes() const { return static_cast<int64_t>(offsets.back() - offsets.front()); }
};

// A `schedule.Layout` with what one rank does with each of its slices.
struct Layout {
    std::vector<Slice> slices;
};

}  // namespace syncline
