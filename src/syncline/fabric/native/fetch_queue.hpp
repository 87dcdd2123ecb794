// Messages that wait to be copied out of the memory of peers on this machine, the most urgent first. What is copied
// before others have their turn is bounded.
#pragma once

#include <algorithm>
#include <cstdint>
#include <tuple>
#include <vector>

namespace syncline {

struct Fetch {
    int64_t urgency, serial;  // serials rise in the order of announcements
    int peer;
    uint64_t tag;
};

// The most urgent comes first; of equals, the one that was announced first.
class FetchQueue {
   public:
    bool empty() const { return heap_.empty(); }
    void clear() { heap_.clear(); }

    void add(const Fetch& fetch) {
        heap_.push_back(fetch);
        std::push_heap(heap_.begin(), heap_.end(), is_after);
    }

    Fetch take() {
        std::pop_heap(heap_.begin(), heap_.end(), is_after);
        const Fetch first = heap_.back();
        heap_.pop_back();
        return first;
    }

   private:
    std::vector<Fetch> heap_;

    static bool is_after(const Fetch& a, const Fetch& b) {
        return std::tie(a.urgency, a.serial) > std::tie(b.urgency, b.serial);
    }
};

}  // namespace syncline
