// What `slice_run.hpp` declares.
#include "slice_run.hpp"

#include <algorithm>
#include <cstring>
#include <utility>

#include "slice_executor.hpp"

namespace syncline {

SliceRun::SliceRun(std::shared_ptr<NativeTransport> transport, std::shared_ptr<const Slice> slice,
                   std::shared_ptr<TemporaryPool> pool, Memory buffer, MessageSettings settings,
                   std::shared_ptr<CallRun> call)
    : transport_(std::move(transport)),
      slice_(std::move(slice)),
      dataflow_(slice_->dataflow.get()),
      pool_(std::move(pool)),
      buffer_(std::move(buffer)),
      settings_(settings),
      call_(std::move(call)),
      states_(dataflow_->operations.size()),
      landings_(dataflow_->operations.size()),
      num_open_(dataflow_->operations.size()) {
    for (size_t number = 0; number < states_.size(); ++number) states_[number].num_waits = dataflow_->num_waits[number];
}

// After this nothing is written to the buffer any more, whatever arrives.
void SliceRun::stop() {
    if (is_stopped_) return;
    is_stopped_ = true;
    for (uint32_t number = 0; number < states_.size(); ++number) {
        if (states_[number].is_posted) {
            states_[number].is_posted = false;
            transport_->peer(operation(number).member).receiver.cancel(settings_.tag + operation(number).index);
        }
        Landing& landing = landings_[number];
        if (landing.block) pool_->give_back(std::move(landing.block), landing.num_bytes);
    }
    buffer_.drop();
    call_.reset();
}

std::set<int> SliceRun::awaited_peers() const {
    std::set<int> peers;
    for (uint32_t number = 0; number < states_.size(); ++number)
        if (states_[number].is_posted) peers.insert(operation(number).peer);
    return peers;
}

std::set<int> SliceRun::open_peers() const {
    std::set<int> peers;
    for (uint32_t number = 0; number < states_.size(); ++number)
        if (states_[number].is_open) peers.insert(operation(number).peer);
    return peers;
}

// A message is sent, or has arrived.
void SliceRun::ended(uint32_t number) {
    if (is_stopped_) return;
    states_[number].is_posted = false;
    settled_.push_back(number);
    if (!is_stepping_) step({});
}

void SliceRun::step(const std::vector<uint32_t>& ready) {
    const auto alive = shared_from_this();
    is_stepping_ = true;
    for (const uint32_t number : ready) begin(number);
    while (!settled_.empty()) {
        const uint32_t number = settled_.back();
        settled_.pop_back();
        go_on(number);
    }
    is_stepping_ = false;
    if (num_open_ || is_stopped_) return;
    is_stopped_ = true;
    buffer_.drop();
    std::exchange(call_, nullptr)->slice_ended(this);
}

// Begin an operation that waits for nothing more.
void SliceRun::begin(uint32_t number) {
    const Operation& begun = operation(number);
    if (!size_of(begun)) {
        settled_.push_back(number);
    } else if (begun.kind == Kind::SEND) {
        send(number);
    } else if (begun.kind == Kind::APPLY) {
        states_[number].is_cleared = true;
        apply(number);
    } else {
        post(number);
    }
}

MessageSettings SliceRun::settings_of(const Operation& operation) const {
    MessageSettings settings = settings_;
    settings.tag += operation.index;
    return settings;
}

void SliceRun::send(uint32_t number) {
    const Operation& begun = operation(number);
    PeerTransport& peer = transport_->peer(begun.member);
    if (peer.is_gone) return;  // its loss is reported by others
    peer.sender.send(settings_of(begun),
                     {buffer_.data + start_of(begun), static_cast<int64_t>(size_of(begun)), buffer_.owner},
                     {{}, shared_from_this(), number});
}

void SliceRun::post(uint32_t number) {
    const Operation& posted = operation(number);
    Memory destination{buffer_.data + start_of(posted), static_cast<int64_t>(size_of(posted)), buffer_.owner};
    if (posted.kind == Kind::LAND) {
        Landing& landing = landings_[number];
        landing.num_bytes = size_of(posted);
        landing.block = pool_->take(landing.num_bytes);
        for (const uint32_t apply : posted.applies) landing.num_uses += size_of(operation(apply)) > 0;
        destination.data = landing.block.get();
    }
    states_[number].is_posted = true;
    transport_->peer(posted.member)
        .receiver.receive(settings_of(posted), std::move(destination), {{}, shared_from_this(), number});
}

void SliceRun::go_on(uint32_t number) {
    const Operation& settled = operation(number);
    states_[number].is_open = false;
    --num_open_;
    for (const uint32_t waiting : settled.then)
        if (!--states_[waiting].num_waits) begin(waiting);
    if (settled.applies.empty()) return;
    states_[number].has_arrived = true;
    for (const uint32_t waiting : settled.applies) apply(waiting);
}

// Add as much as has arrived in order: a, b | own | c gives ((a + b) + own) + c.
void SliceRun::apply(uint32_t number) {
    const Operation& sum = operation(number);
    State& state = states_[number];
    if (!state.is_open || !size_of(sum)) return;
    const auto &before = sum.before, &after = sum.after;
    uint32_t& used = state.num_used;
    // What precedes the own value is summed in the first one's temporary.
    for (; used < before.size() && states_[before[used]].has_arrived; ++used)
        if (used) {
            slice_->addition(part(before[0], sum), part(before[used], sum), size_of(sum));
            release(before[used]);
        }
    if (used < before.size() || !state.is_cleared) return;
    uint8_t* own = buffer_.data + start_of(sum);
    if (used == before.size()) {
        if (!before.empty()) add(own, before[0], sum);
        ++used;
    }
    for (size_t place; (place = used - before.size() - 1) < after.size() && states_[after[place]].has_arrived; ++used)
        add(own, after[place], sum);
    if (used == before.size() + 1 + after.size()) {
        ++used;  // it ends once
        settled_.push_back(number);
    }
}

// Where the values of a landing can be added now; null if it is not their turn, or they must land to be added to.
uint8_t* SliceRun::sum_for(uint32_t number, uint32_t landing) const {
    const Operation& sum = operation(number);
    const State& state = states_[number];
    const auto &before = sum.before, &after = sum.after;
    const size_t used = state.num_used;
    uint8_t* own = buffer_.data + start_of(sum);
    if (used < before.size()) {
        if (before[used] != landing) return nullptr;
        if (used) return part(before[0], sum);
        return before.size() == 1 && state.is_cleared ? own : nullptr;
    }
    if (used == before.size()) return nullptr;  // the own values come first
    const size_t place = used - before.size() - 1;
    return place < after.size() && after[place] == landing ? own : nullptr;
}

bool SliceRun::can_use(uint32_t number) const {
    if (is_stopped_ || operation(number).kind != Kind::LAND) return false;
    size_t num_bytes = 0;
    for (const uint32_t apply : operation(number).applies) {
        const size_t size = size_of(operation(apply));
        if (size && !sum_for(apply, number)) return false;
        num_bytes += size;
    }
    return num_bytes > 0;
}

// What is added here need not land: in pieces it never leaves the processor's caches between its copy and its sum.
bool SliceRun::use(uint32_t number, const MessageReader& message) {
    for (const uint32_t apply : operation(number).applies) {
        const Operation& sum = operation(apply);
        if (!size_of(sum)) continue;
        uint8_t* into = sum_for(apply, number);
        if (!add_message(message, start_of(sum) - start_of(operation(number)), into, sum)) return false;
        // Values that alone precede the own ones are added to those, and both are in then.
        states_[apply].num_used += states_[apply].num_used == 0 ? 2 : 1;
        release(number);
    }
    return true;
}

bool SliceRun::add_message(const MessageReader& message, size_t start, uint8_t* into, const Operation& apply) {
    const size_t num_bytes = size_of(apply);
    if (apply.replaces) return message.read(start, into, num_bytes);
    uint8_t* piece = pool_->piece();
    for (size_t done = 0; done < num_bytes; done += TemporaryPool::PIECE_BYTES) {
        const size_t rest = std::min(num_bytes - done, TemporaryPool::PIECE_BYTES);
        if (!message.read(start + done, piece, rest)) return false;
        slice_->addition(into + done, piece, rest);
    }
    return true;
}

void SliceRun::add(uint8_t* own, uint32_t landing, const Operation& apply) {
    const uint8_t* values = part(landing, apply);
    if (apply.replaces)
        std::memcpy(own, values, size_of(apply));
    else
        slice_->addition(own, values, size_of(apply));
    release(landing);
}

uint8_t* SliceRun::part(uint32_t landing, const Operation& apply) const {
    return landings_[landing].block.get() + (start_of(apply) - start_of(operation(landing)));
}

void SliceRun::release(uint32_t number) {
    Landing& landing = landings_[number];
    if (!--landing.num_uses) pool_->give_back(std::move(landing.block), landing.num_bytes);
}

}  // namespace syncline
