// Bulk messages: those that may wait for all others, as `protocol.py` has them.
#pragma once

#include <cstdint>

namespace syncline {

constexpr int64_t BULK_URGENCY = int64_t{1} << 30;  // from here on; lower is sooner
constexpr int64_t BULK_BYTES = 64 << 10;            // granted and sent at once at least

}  // namespace syncline
