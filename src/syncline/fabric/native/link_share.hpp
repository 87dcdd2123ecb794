// What one receiver may draw over a link that it shares with others. Why stands in `link_share.py`.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <deque>
#include <limits>
#include <set>
#include <utility>

#include "urgency.hpp"

namespace syncline {

// What one receiver may have under way on a link that several receivers draw over, but for one quantum.
class LinkShare {
   public:
    LinkShare(int64_t part_bytes, int64_t most_bytes, int64_t least_bytes, double target_s)
        : part_bytes(part_bytes),
          limit_bytes(part_bytes),
          most_bytes_(std::max(part_bytes, most_bytes)),
          least_bytes_(std::min(part_bytes, least_bytes)),
          target_s_(target_s) {}

    int64_t part_bytes;
    int64_t limit_bytes;
    int64_t underway_bytes = 0;
    std::set<int> waiting;  // senders that were passed over because the share was used up

    int64_t quantum_bytes(int64_t urgency) const {
        return std::max(urgency < BULK_URGENCY ? int64_t{1} : BULK_BYTES, std::min(part_bytes / 2, limit_bytes));
    }
    bool is_used_up() const { return underway_bytes >= limit_bytes; }

    void granted(int64_t num_bytes, double now_s) {
        underway_bytes += num_bytes;
        granted_bytes_ += num_bytes;
        grants_.emplace_back(granted_bytes_, now_s);
    }

    void arrived(int64_t num_bytes, double now_s) {
        const double granted_s = count_out(num_bytes);
        judged_bytes_ += num_bytes;
        if (judged_bytes_ >= limit_bytes && is_lossy()) {
            limit_bytes = std::max(least_bytes_, limit_bytes * 7 / 10);
            return;
        }
        if (std::isnan(granted_s)) return;
        if (now_s - granted_s > target_s_) {
            limit_bytes = std::max(std::min(part_bytes, limit_bytes), limit_bytes - num_bytes / 2);
        } else if (limit_bytes < part_bytes) {
            limit_bytes = std::min(
                part_bytes, limit_bytes + std::max<int64_t>(1, num_bytes * SEGMENT_BYTES / (LENGTHS * limit_bytes)));
        } else if (!waiting.empty()) {
            const int64_t grown_bytes = std::max<int64_t>(1, num_bytes * quantum_bytes(0) / limit_bytes);
            limit_bytes = std::min(most_bytes_, limit_bytes + grown_bytes);
        }
    }

    void lost(int64_t num_segments) { lost_bytes_ += num_segments * SEGMENT_BYTES; }

    void forgotten(int64_t num_bytes) { count_out(num_bytes); }

   private:
    static constexpr int64_t SEGMENT_BYTES = 1448, TOLERATED = 50, LENGTHS = 8;

    int64_t most_bytes_, least_bytes_;
    double target_s_;
    int64_t granted_bytes_ = 0, arrived_bytes_ = 0, judged_bytes_ = 0, lost_bytes_ = 0;
    std::deque<std::pair<int64_t, double>> grants_;

    bool is_lossy() {
        const bool found = lost_bytes_ * TOLERATED > judged_bytes_;
        judged_bytes_ = lost_bytes_ = 0;
        return found;
    }

    // Return when the last grant that is now complete was given; NaN if none is.
    double count_out(int64_t num_bytes) {
        underway_bytes -= num_bytes;
        arrived_bytes_ += num_bytes;
        double granted_s = std::numeric_limits<double>::quiet_NaN();
        for (; !grants_.empty() && grants_.front().first <= arrived_bytes_; grants_.pop_front())
            granted_s = grants_.front().second;
        return granted_s;
    }
};

}  // namespace syncline
