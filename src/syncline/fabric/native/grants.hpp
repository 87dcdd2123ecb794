// Who may send next: the receiver's grants. Pure: events in, grants out.
//
// A large message waits at its sender until its receiver grants it. The receiver grants by (urgency, arrival) *across
// all senders* and keeps no more than a window of granted bytes under way, so that
//
// - two senders that converge on one rank are ordered by urgency even where no switch honours priorities, and the
//   queues in the switches stay short (receiver-driven transport, as in Homa, SIGCOMM 2018);
// - nothing arrives for which no destination is known.
//
// An urgent message finds room in the window although less urgent ones fill it: a switch that honours priorities lets
// it overtake them, and any other serves it right after them. What is less urgent is not granted before most of it is
// here: sent any earlier, the last part of the urgent message would share the link with it.
//
// A window alone would let a few slow senders hold all of it while fast ones idle. So a sender that has nothing under
// way gets one quantum more, up to twice the window, unless something more urgent is under way; and one sender's share
// has its own limit.
//
// A receiver sees only its own link, but where several receivers draw over one slow link, their windows add up in the
// queue in front of it. So each holds to its *share* of such a link, over all senders behind it (`link_share.hpp`):
// then that queue does not overflow, whatever TCP makes of it. Among equally urgent messages those with the smallest
// share go first: a slow link that idles for a moment is never made up for, and what it carries hardly delays the
// others.
#pragma once

#include <algorithm>
#include <cstdint>
#include <functional>
#include <limits>
#include <map>
#include <memory>
#include <queue>
#include <set>
#include <tuple>
#include <unordered_map>
#include <utility>
#include <vector>

#include "grant_window.hpp"
#include "link_share.hpp"

namespace syncline {

struct Grant {
    int peer;
    uint64_t tag;
    int64_t limit_bytes;
};

// Orders the grants of one rank. The window bounds what is granted and has not arrived, but for one quantum and for the
// allowance to what is more urgent and to idle senders; `sender_bytes` does so for single senders, and `shares` for the
// slow links that a sender's route crosses. A grant is for a quantum at most, or a quarter of a window that grows. Each
// call costs O(log n) in the number of waiting messages. Times are seconds of one monotonic clock.
class GrantScheduler {
   public:
    using Shares = std::vector<std::shared_ptr<LinkShare>>;

    GrantScheduler(GrantWindow window, int64_t quantum_bytes, std::unordered_map<int, int64_t> sender_bytes,
                   std::unordered_map<int, Shares> shares)
        : window_(window),
          least_quantum_bytes_(quantum_bytes),
          sender_bytes_(std::move(sender_bytes)),
          shares_(std::move(shares)) {}

    int64_t underway_bytes = 0;

    void resize(GrantWindow window, int64_t quantum_bytes, std::unordered_map<int, int64_t> sender_bytes) {
        window_ = window;
        least_quantum_bytes_ = quantum_bytes;
        sender_bytes_ = std::move(sender_bytes);
        for (auto& [peer, sender] : senders_) {
            sender.limit_bytes = limit_of(peer);
            sender.log = log_for(sender.limit_bytes, sender.underway_bytes);
            offer(peer, sender);
        }
    }

    int64_t window_bytes() const { return window_.num_bytes; }
    int64_t quantum_bytes() const {
        return window_.is_fixed() ? least_quantum_bytes_ : std::max(least_quantum_bytes_, window_.num_bytes / 4);
    }
    bool has_wishes() const { return !ready_.empty(); }

    void wish(int peer, uint64_t tag, int64_t num_bytes, int64_t urgency) {
        auto found = senders_.find(peer);
        if (found == senders_.end()) {
            Sender sender;
            sender.limit_bytes = limit_of(peer);
            if (auto shares = shares_.find(peer); shares != shares_.end()) sender.shares = shares->second;
            sender.log = log_for(sender.limit_bytes, 0);
            found = senders_.emplace(peer, std::move(sender)).first;
        }
        Sender& sender = found->second;
        auto wish = std::make_shared<Wish>(Wish{tag, num_bytes, urgency, ++order_});
        sender.by_tag[tag] = wish;
        sender.wishes.push(wish);
        if (sender.best() == wish.get()) offer(peer, sender);
    }

    void arrived(int peer, int64_t num_bytes, int64_t urgency, double now_s) {
        Sender& sender = senders_.at(peer);
        sender.underway_bytes -= num_bytes;
        underway_bytes -= num_bytes;
        count_down(sender.underway_by_urgency, urgency, num_bytes);
        count_down(underway_by_urgency_, urgency, num_bytes);
        if (sender.log) sender.log->arrived(num_bytes, window_, now_s);
        if (!sender.shares.empty()) {
            for (auto& share : sender.shares) share->arrived(num_bytes, now_s);
            offer_waiting(sender.shares);
        }
        if (!sender.wishes.empty()) offer(peer, sender);
    }

    void lost(int peer, int64_t num_segments) {
        const auto shares = shares_.find(peer);
        if (shares == shares_.end()) return;
        for (auto& share : shares->second) share->lost(num_segments);
    }

    void forget(int peer, uint64_t tag) {
        auto found = senders_.find(peer);
        if (found == senders_.end()) return;
        Sender& sender = found->second;
        auto wish = sender.by_tag.find(tag);
        if (wish == sender.by_tag.end()) return;
        wish->second->is_forgotten = true;
        sender.by_tag.erase(wish);
        if (sender.best()) offer(peer, sender);
    }

    void forget_peer(int peer, const std::map<int64_t, int64_t>& underway) {
        auto found = senders_.find(peer);
        if (found == senders_.end()) return;
        Sender sender = std::move(found->second);
        senders_.erase(found);
        underway_bytes -= sender.underway_bytes;
        for (auto& share : sender.shares) share->forgotten(sender.underway_bytes);
        offer_waiting(sender.shares);
        for (const auto& [urgency, num_bytes] : underway) count_down(underway_by_urgency_, urgency, num_bytes);
    }

    std::vector<Grant> grants(double now_s) {
        std::vector<Grant> found;
        while (underway_bytes < 2 * window_bytes()) {
            const Choice chosen = pop(ready_, /*needs_idle=*/false);
            if (!chosen.wish) return found;
            if (!is_its_turn(chosen.wish->urgency)) {
                offer(chosen.peer, *chosen.sender);
                break;
            }
            found.push_back(grant(chosen, now_s));
        }
        while (underway_bytes < 2 * window_bytes()) {
            const Choice chosen = pop(idle_, /*needs_idle=*/true);
            if (!chosen.wish) break;
            if (is_anything_more_urgent_underway(chosen.wish->urgency)) {
                offer(chosen.peer, *chosen.sender);
                break;
            }
            found.push_back(grant(chosen, now_s));
        }
        return found;
    }

   private:
    struct Wish {
        uint64_t tag;
        int64_t num_bytes, urgency, order;
        int64_t granted_bytes = 0;
        bool is_forgotten = false;
    };
    struct IsLessUrgent {
        bool operator()(const std::shared_ptr<Wish>& a, const std::shared_ptr<Wish>& b) const {
            return std::pair(a->urgency, a->order) > std::pair(b->urgency, b->order);
        }
    };
    using ByUrgency = std::map<int64_t, int64_t>;
    struct Sender {
        int64_t limit_bytes = 0;
        Shares shares;
        std::priority_queue<std::shared_ptr<Wish>, std::vector<std::shared_ptr<Wish>>, IsLessUrgent> wishes;
        std::unordered_map<uint64_t, std::shared_ptr<Wish>> by_tag;
        int64_t underway_bytes = 0;
        ByUrgency underway_by_urgency;
        std::unique_ptr<GrantLog> log;
        int64_t ready_order = 0, idle_order = 0;

        double room_bytes() const {
            double room = std::numeric_limits<double>::infinity();
            for (const auto& share : shares) room = std::min(room, static_cast<double>(share->part_bytes));
            return room;
        }
        Wish* best() {
            while (!wishes.empty() && wishes.top()->is_forgotten) wishes.pop();
            return wishes.empty() ? nullptr : wishes.top().get();
        }
    };
    struct Ticket {
        int64_t urgency;
        double room_bytes;
        int64_t order;
        int peer;
        bool operator>(const Ticket& other) const {
            return std::tie(urgency, room_bytes, order, peer) >
                   std::tie(other.urgency, other.room_bytes, other.order, other.peer);
        }
    };
    using Tickets = std::priority_queue<Ticket, std::vector<Ticket>, std::greater<Ticket>>;
    struct Choice {
        int peer = -1;
        Sender* sender = nullptr;
        Wish* wish = nullptr;
    };

    GrantWindow window_;
    int64_t least_quantum_bytes_;
    std::unordered_map<int, int64_t> sender_bytes_;
    std::unordered_map<int, Shares> shares_;
    std::unordered_map<int, Sender> senders_;
    // Entries are not removed when they no longer hold: they are checked when they surface.
    Tickets ready_, idle_;
    ByUrgency underway_by_urgency_;
    int64_t order_ = 0;

    Grant grant(const Choice& chosen, double now_s) {
        Sender& sender = *chosen.sender;
        Wish& wish = *chosen.wish;
        int64_t amount = std::min({wish.num_bytes - wish.granted_bytes, quantum_bytes(), sender.limit_bytes});
        for (const auto& share : sender.shares) amount = std::min(amount, share->quantum_bytes(wish.urgency));
        for (auto& share : sender.shares) share->granted(amount, now_s);
        wish.granted_bytes += amount;
        sender.underway_bytes += amount;
        underway_bytes += amount;
        if (sender.log) sender.log->granted(amount, underway_bytes, now_s);
        sender.underway_by_urgency[wish.urgency] += amount;
        underway_by_urgency_[wish.urgency] += amount;
        const Grant given{chosen.peer, wish.tag, wish.granted_bytes};
        if (wish.granted_bytes == wish.num_bytes) {
            sender.by_tag.erase(wish.tag);
            sender.wishes.pop();
        }
        if (!sender.wishes.empty()) offer(chosen.peer, sender);
        return given;
    }

    int64_t limit_of(int peer) const {
        auto found = sender_bytes_.find(peer);
        return std::max<int64_t>(found == sender_bytes_.end() ? window_.most_bytes : found->second, 1);
    }

    // A sender on a slower route says nothing of this link.
    std::unique_ptr<GrantLog> log_for(int64_t limit_bytes, int64_t underway) const {
        if (window_.is_fixed() || limit_bytes < window_.most_bytes) return nullptr;
        return std::make_unique<GrantLog>(underway);
    }

    void offer(int peer, Sender& sender) {
        const Wish* wish = sender.best();
        if (!wish) return;
        const Ticket ticket{wish->urgency, sender.room_bytes(), wish->order, peer};
        if (sender.underway_bytes < sender.limit_bytes && sender.ready_order != wish->order) {
            sender.ready_order = wish->order;
            ready_.push(ticket);
        }
        if (!sender.underway_bytes && sender.idle_order != wish->order) {
            sender.idle_order = wish->order;
            idle_.push(ticket);
        }
    }

    Choice pop(Tickets& tickets, bool needs_idle) {
        while (!tickets.empty()) {
            const Ticket ticket = tickets.top();
            tickets.pop();
            auto found = senders_.find(ticket.peer);
            if (found == senders_.end()) continue;
            Sender& sender = found->second;
            int64_t& offered = needs_idle ? sender.idle_order : sender.ready_order;
            if (offered == ticket.order) offered = 0;
            Wish* wish = sender.best();
            if (!wish || wish->order != ticket.order) continue;
            if (sender.underway_bytes && (needs_idle || sender.underway_bytes >= sender.limit_bytes)) continue;
            LinkShare* used_up = nullptr;
            for (auto& share : sender.shares)
                if (share->is_used_up()) {
                    used_up = share.get();
                    break;
                }
            if (!used_up) return {ticket.peer, &sender, wish};
            used_up->waiting.insert(ticket.peer);
        }
        return {};
    }

    // Let those wait no longer who were passed over for want of what is free again.
    void offer_waiting(const Shares& shares) {
        for (const auto& share : shares) {
            if (share->waiting.empty() || share->is_used_up()) continue;
            std::set<int> waiting;
            waiting.swap(share->waiting);
            for (int peer : waiting)
                if (auto found = senders_.find(peer); found != senders_.end()) offer(peer, found->second);
        }
    }

    static void count_down(ByUrgency& counts, int64_t urgency, int64_t num_bytes) {
        auto found = counts.emplace(urgency, 0).first;
        found->second -= num_bytes;
        if (!found->second) counts.erase(found);
    }

    bool is_its_turn(int64_t urgency) const {
        int64_t ahead = 0;
        auto entry = underway_by_urgency_.begin();
        for (; entry != underway_by_urgency_.end() && entry->first < urgency; ++entry) ahead += entry->second;
        const int64_t equal = entry != underway_by_urgency_.end() && entry->first == urgency ? entry->second : 0;
        if (ahead + equal >= window_bytes()) return false;
        const int64_t most = window_bytes() / 4;
        return ahead <= most || weighted_ahead(urgency) <= most;
    }

    int64_t weighted_ahead(int64_t urgency) const {
        int64_t ahead = 0;
        for (const auto& [peer, sender] : senders_) {
            int64_t urgent = 0;
            for (const auto& [other, num_bytes] : sender.underway_by_urgency)
                if (other < urgency) urgent += num_bytes;
            ahead += urgent * std::min(sender.limit_bytes, window_bytes()) / window_bytes();
        }
        return ahead;
    }

    bool is_anything_more_urgent_underway(int64_t urgency) const {
        return !underway_by_urgency_.empty() && underway_by_urgency_.begin()->first < urgency;
    }
};

}  // namespace syncline
