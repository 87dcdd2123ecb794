// Wishes, arrivals, losses and other sizes, in any order, for the scheduler of grants. Whatever comes,
//
// - a wish is granted bytes in order, never more than it asked for, and never after it was forgotten;
// - what is under way is what was granted and has not arrived, and nothing is granted beyond twice the window;
// - nobody waits for ever: once everything has arrived, somebody is granted something until all wishes are whole.
#include <algorithm>
#include <iterator>
#include <map>
#include <memory>
#include <unordered_map>
#include <utility>
#include <vector>

#include "fuzzing.hpp"
#include "grants.hpp"

namespace {

using fuzzing::Random;
using fuzzing::require;
using syncline::Grant;
using syncline::GrantScheduler;
using syncline::GrantWindow;
using syncline::LinkShare;

struct Wish {
    int64_t num_bytes, urgency;
    int64_t granted_bytes = 0, arrived_bytes = 0;
    bool is_forgotten = false;
};

class Run {
   public:
    explicit Run(uint64_t seed) : random_(seed), scheduler_(window(), quantum(), sender_bytes(), shares()) {}

    void act() {
        now_s_ += static_cast<double>(random_.below(1000)) * 1e-6;
        const int choice = random_.below(100);
        if (choice < 35)
            wish();
        else if (choice < 60)
            grant();
        else if (choice < 90)
            arrive();
        else if (choice < 95)
            forget();
        else if (choice < 98)
            forget_peer();
        else
            scheduler_.resize(window(), quantum(), sender_bytes());
        require(scheduler_.underway_bytes == underway_bytes(), "what is under way was granted and has not arrived");
    }

    void finish() {
        while (std::any_of(wishes_.begin(), wishes_.end(), [](const auto& wish) { return is_open(wish.second); })) {
            while (underway_bytes()) arrive();
            require(grant() > 0, "somebody who waits is granted something when nothing is under way");
        }
    }

   private:
    using Key = std::pair<int, uint64_t>;
    Random random_;
    double now_s_ = 0;
    uint64_t num_tags_ = 0;
    std::map<Key, Wish> wishes_;
    GrantScheduler scheduler_;

    static bool is_open(const Wish& wish) { return !wish.is_forgotten && wish.granted_bytes < wish.num_bytes; }

    GrantWindow window() {
        const int64_t most = 1 + random_.below(100'000);
        return {most, random_.chance(0.5) ? most : std::max<int64_t>(1, most / 4), 1e6};
    }
    int64_t quantum() { return 1 + random_.below(9000); }
    std::unordered_map<int, int64_t> sender_bytes() {
        std::unordered_map<int, int64_t> limits;
        for (int peer = 0; peer < 4; ++peer)
            if (random_.chance(0.3)) limits[peer] = random_.below(50'000);
        return limits;
    }
    std::unordered_map<int, GrantScheduler::Shares> shares() {
        const auto share = std::make_shared<LinkShare>(1 + random_.below(20'000), random_.below(100'000), 1, 1e-3, 0.02,
                                                       random_.below(100'000));
        std::unordered_map<int, GrantScheduler::Shares> found;
        for (int peer = 0; peer < 4; ++peer)
            if (random_.chance(0.4)) found[peer] = {share};
        return found;
    }

    void wish() {
        const Key key{random_.below(4), num_tags_++};
        const int64_t urgency = random_.chance(0.2) ? syncline::BULK_URGENCY : random_.below(3);
        const Wish wish{1 + random_.below(int64_t{1} << random_.below(20)), urgency};
        wishes_.emplace(key, wish);
        scheduler_.wish(key.first, key.second, wish.num_bytes, wish.urgency);
    }

    size_t grant() {
        const std::vector<Grant> grants = scheduler_.grants(now_s_);
        int64_t underway = underway_bytes();
        for (const Grant& grant : grants) {
            const auto found = wishes_.find({grant.peer, grant.tag});
            require(found != wishes_.end() && is_open(found->second), "only who waits is granted something");
            Wish& wish = found->second;
            require(grant.limit_bytes > wish.granted_bytes && grant.limit_bytes <= wish.num_bytes,
                    "a grant is of bytes that were asked for and not granted");
            require(underway < 2 * scheduler_.window_bytes(), "nothing is granted beyond twice the window");
            underway += grant.limit_bytes - wish.granted_bytes;
            wish.granted_bytes = grant.limit_bytes;
        }
        return grants.size();
    }

    void arrive() {
        std::vector<Key> under_way;
        for (const auto& [key, wish] : wishes_)
            if (wish.granted_bytes > wish.arrived_bytes) under_way.push_back(key);
        if (under_way.empty()) return;
        const Key key = random_.of(under_way);
        Wish& wish = wishes_.at(key);
        const int64_t num_bytes = 1 + random_.below(wish.granted_bytes - wish.arrived_bytes);
        wish.arrived_bytes += num_bytes;
        scheduler_.arrived(key.first, num_bytes, wish.urgency, now_s_);
    }

    void forget() {
        if (wishes_.empty()) return;
        const auto found = std::next(wishes_.begin(), random_.below(static_cast<int64_t>(wishes_.size())));
        scheduler_.forget(found->first.first, found->first.second);
        found->second.is_forgotten = true;
    }

    void forget_peer() {
        const int peer = random_.below(4);
        std::map<int64_t, int64_t> underway;
        for (const auto& [key, wish] : wishes_)
            if (key.first == peer && wish.granted_bytes > wish.arrived_bytes)
                underway[wish.urgency] += wish.granted_bytes - wish.arrived_bytes;
        scheduler_.forget_peer(peer, underway);
        std::erase_if(wishes_, [peer](const auto& wish) { return wish.first.first == peer; });
    }

    int64_t underway_bytes() const {
        int64_t sum = 0;
        for (const auto& [key, wish] : wishes_) sum += wish.granted_bytes - wish.arrived_bytes;
        return sum;
    }
};

}  // namespace

void fuzzing::run_grants(uint64_t seed, Outcomes& outcomes) {
    Run run(seed);
    const int num_actions = 1 + static_cast<int>(seed % 60);
    for (int action = 0; action < num_actions; ++action) run.act();
    run.finish();
    ++outcomes["all granted"];
}
