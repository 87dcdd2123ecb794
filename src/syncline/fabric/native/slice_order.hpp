// Which call's next slice begins, and whether it may; the rules stand in `runtime/python_slice_executor.py`.
#pragma once

#include <algorithm>
#include <cstdint>
#include <deque>
#include <memory>
#include <tuple>
#include <utility>
#include <vector>

namespace syncline {

// A call that is cut into slices, as far as their order needs it.
struct Sliced {
    Sliced(int64_t urgency, int connection_class, int64_t number, size_t num_slices)
        : urgency(urgency), connection_class(connection_class), number(number), num_left(num_slices) {}

    const int64_t urgency;
    const int connection_class;
    const int64_t number;  // of all calls of this rank, as it made them
    size_t num_left, num_active = 0;
    int64_t inflight_bytes = 0, largest_slice_bytes = 0;

    bool has_more() const { return num_left > 0; }
};
using SlicedPtr = std::shared_ptr<Sliced>;

class SliceOrder {
   public:
    explicit SliceOrder(int64_t max_inflight_bytes) : max_inflight_bytes_(max_inflight_bytes) {}

    int64_t inflight_bytes() const {
        int64_t sum = 0;
        for (const auto& call : inflight_) sum += call->inflight_bytes;
        return sum;
    }

    // Take a call of which no slice has begun.
    void add(const SlicedPtr& call) {
        if (!call->has_more()) return;
        starved_.push_back(call);
        queue_.push_back(call);
        std::push_heap(queue_.begin(), queue_.end(), is_after);
    }

    // Count the next slice of a call, which begins.
    void began(const SlicedPtr& call, int64_t num_bytes) {
        if (!call->num_active++) inflight_.push_back(call);
        --call->num_left;
        call->inflight_bytes += num_bytes;
        call->largest_slice_bytes = std::max(call->largest_slice_bytes, num_bytes);
    }

    // Count a slice that ended.
    void ended(const SlicedPtr& call, int64_t num_bytes) {
        call->inflight_bytes -= num_bytes;
        if (--call->num_active) return;
        remove(inflight_, call);
        if (call->has_more()) starved_.push_back(call);
    }

    // Let no slice of a call begin or count any more.
    void forget(const SlicedPtr& call) {
        call->num_left = call->num_active = 0;
        call->inflight_bytes = 0;
        remove(inflight_, call);
        remove(starved_, call);
        // Calls that have begun all their slices wait here to come to the top, which they may never do after this.
        std::erase_if(queue_, [](const SlicedPtr& each) { return !each->has_more(); });
        std::make_heap(queue_.begin(), queue_.end(), is_after);
    }

    // The call of which a slice may begin now; null if there is none.
    SlicedPtr next() {
        while (!starved_.empty()) {
            SlicedPtr call = std::move(starved_.front());
            starved_.pop_front();
            if (call->has_more() && !call->num_active) return call;
        }
        while (!queue_.empty() && !queue_.front()->has_more()) {
            std::pop_heap(queue_.begin(), queue_.end(), is_after);
            queue_.pop_back();
        }
        return !queue_.empty() && has_room(*queue_.front()) ? queue_.front() : nullptr;
    }

   private:
    int64_t max_inflight_bytes_;
    std::deque<SlicedPtr> starved_;
    std::vector<SlicedPtr> queue_;     // a heap with the most urgent call on top; of equals, the one made first
    std::vector<SlicedPtr> inflight_;  // with slices under way

    static bool is_after(const SlicedPtr& a, const SlicedPtr& b) {
        return std::tie(a->urgency, a->number) > std::tie(b->urgency, b->number);
    }

    template <typename Calls>
    static void remove(Calls& calls, const SlicedPtr& call) {
        calls.erase(std::remove(calls.begin(), calls.end(), call), calls.end());
    }

    bool has_room(const Sliced& call) const {
        int64_t ahead = 0, beside = 0;
        for (const auto& other : inflight_) {
            if (other->connection_class > call.connection_class) continue;
            if (other->urgency <= call.urgency)
                ahead += other->inflight_bytes;
            else
                beside += std::max<int64_t>(other->inflight_bytes - other->largest_slice_bytes, 0);
        }
        return ahead < max_inflight_bytes_ && ahead + beside < 2 * max_inflight_bytes_;
    }
};

}  // namespace syncline
