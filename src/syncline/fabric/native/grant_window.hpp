// How much may be under way to one rank: as little as keeps its link busy.
//
// What is under way cannot be called back, so an urgent message waits for a whole window of it, and its request for one
// more. Too small a window lets the link idle until hosts have answered, and how long they take is not known: tens of
// microseconds on a quiet machine, milliseconds where ranks wait for a core. But it shows. Where L bytes are under way
// on average and an arrival takes W seconds from its grant, L / W bytes arrive in a second (Little's law): if that is
// the link's rate, a smaller window may do, and if it is less, the link idles, or what comes to it is held up
// elsewhere. So the window follows L / W in small steps, between two bounds. (The mirror image of `link_share.hpp`,
// whose queue belongs to several receivers.)
#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <deque>

namespace syncline {

// The bytes that may be granted and not yet here; follows what the link does between two bounds.
class GrantWindow {
   public:
    GrantWindow(int64_t most_bytes, int64_t least_bytes, double bytes_per_s)
        : num_bytes(most_bytes), most_bytes(most_bytes), least_bytes(least_bytes), bytes_per_s_(bytes_per_s) {}

    int64_t num_bytes, most_bytes, least_bytes;

    bool is_fixed() const { return least_bytes == most_bytes || std::isinf(bytes_per_s_); }

    // `count` bytes came `took_s` after their grant, and `underway_bytes` were under way with them. Where less was
    // under way than might have been, the window was not what held the link up.
    void learn(int64_t count, int64_t underway_bytes, double took_s) {
        if (underway_bytes < num_bytes) return;
        const auto weight = static_cast<double>(count);
        num_learnt_bytes_ += weight;
        sum_underway_bytes_ += static_cast<double>(underway_bytes) * weight;
        sum_took_s_ += took_s * weight;
        if (num_learnt_bytes_ >= static_cast<double>(NUM_WINDOWS * num_bytes)) {
            const bool is_busy = sum_underway_bytes_ >= BUSY * bytes_per_s_ * sum_took_s_;
            const auto wanted = static_cast<int64_t>(static_cast<double>(num_bytes) * (is_busy ? DECAY : GROWTH));
            num_bytes = std::min(most_bytes, std::max(least_bytes, wanted));
            num_learnt_bytes_ = sum_underway_bytes_ = sum_took_s_ = 0.0;
        }
    }

   private:
    // A link that brings this part of its rate is busy; 0.956 of it is payload.
    static constexpr double BUSY = 0.92;
    static constexpr double GROWTH = 1.25, DECAY = 0.85;
    static constexpr int64_t NUM_WINDOWS = 2;  // so many must arrive before the next step
    double bytes_per_s_;
    double num_learnt_bytes_ = 0, sum_underway_bytes_ = 0, sum_took_s_ = 0;
};

// When one sender's grants were given; its messages count as if they came in turn.
class GrantLog {
   public:
    explicit GrantLog(int64_t underway_bytes) : unknown_bytes_(underway_bytes) {}

    void granted(int64_t num_bytes, int64_t underway_bytes, double now_s) {
        grants_.push_back({num_bytes, underway_bytes, now_s});
    }

    void arrived(int64_t num_bytes, GrantWindow& window, double now_s) {
        const int64_t unknown_bytes = std::min(num_bytes, unknown_bytes_);
        unknown_bytes_ -= unknown_bytes;
        for (int64_t rest = num_bytes - unknown_bytes; rest && !grants_.empty();) {
            Noted& grant = grants_.front();
            const int64_t part_bytes = std::min(rest, grant.left_bytes);
            window.learn(part_bytes, grant.underway_bytes, now_s - grant.granted_s);
            rest -= part_bytes;
            grant.left_bytes -= part_bytes;
            if (!grant.left_bytes) grants_.pop_front();
        }
    }

   private:
    struct Noted {
        int64_t left_bytes, underway_bytes;
        double granted_s;
    };
    int64_t unknown_bytes_;
    std::deque<Noted> grants_;
};

}  // namespace syncline
