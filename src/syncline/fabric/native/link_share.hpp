// One receiver's share of a link that several receivers draw over.
//
// If all of them draw, each may have its part of the link's window under way, and the queue in front of the link does
// not overflow. If some do not, that is seen without asking them: what was granted arrives sooner than a full queue
// would let it. Then the share grows by one quantum for each of its lengths that arrives, and shrinks again, faster,
// once arrivals take longer than the target (delay-based congestion control, as in Swift, SIGCOMM 2020, but at the
// receiver).
//
// How long the queue is, nobody says. Where it is shorter than the parts, packets are lost, and delay does not tell: so
// senders do. Where more than a fiftieth was lost on the way (BBRv2 draws the line there too), the share shrinks below
// its part; it grows back as TCP does, but slowly: by one segment for each LENGTHS of its lengths that arrive, since a
// loss costs more than a share that is a little small. A far link also loses some whatever is under way, and of a short
// share one segment is over a fiftieth: so its share tolerates more, and judges over more than its length
// (`sizing.py`).
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
    LinkShare(int64_t part_bytes, int64_t most_bytes, int64_t least_bytes, double target_s, double tolerated_share,
              int64_t least_judged_bytes)
        : part_bytes(part_bytes),
          limit_bytes(part_bytes),
          most_bytes_(std::max(part_bytes, most_bytes)),
          least_bytes_(std::min(part_bytes, least_bytes)),
          target_s_(target_s),
          tolerated_share_(tolerated_share),
          least_judged_bytes_(least_judged_bytes) {}

    int64_t part_bytes;
    int64_t limit_bytes;
    int64_t underway_bytes = 0;
    std::set<int> waiting;  // senders that were passed over because the share was used up

    // What one grant takes of it at most: smaller ones cost the ranks more than a shorter queue gains.
    int64_t quantum_bytes(int64_t urgency) const {
        return std::max(urgency < BULK_URGENCY ? int64_t{1} : BULK_BYTES, std::min(part_bytes / 2, limit_bytes));
    }
    bool is_used_up() const { return underway_bytes >= limit_bytes; }

    void granted(int64_t num_bytes, double now_s) {
        underway_bytes += num_bytes;
        granted_bytes_ += num_bytes;
        grants_.emplace_back(granted_bytes_, now_s);
    }

    // Of several senders, as if they came in turn.
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
    static constexpr int64_t SEGMENT_BYTES = 1448;  // what a TCP segment carries where a frame has 1500 bytes
    static constexpr int64_t LENGTHS = 8;

    int64_t most_bytes_, least_bytes_;
    double target_s_, tolerated_share_;
    int64_t least_judged_bytes_;
    int64_t granted_bytes_ = 0, arrived_bytes_ = 0, judged_bytes_ = 0, lost_bytes_ = 0;
    std::deque<std::pair<int64_t, double>> grants_;

    bool is_lossy() {
        const auto most_lost = tolerated_share_ * static_cast<double>(std::max(judged_bytes_, least_judged_bytes_));
        const bool found = static_cast<double>(lost_bytes_) > most_lost;
        if (found || judged_bytes_ >= least_judged_bytes_) judged_bytes_ = lost_bytes_ = 0;
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
