// What `receiver.hpp` declares.
#include "receiver.hpp"

#include <algorithm>
#include <cstring>
#include <map>
#include <utility>

#include "sender.hpp"

namespace syncline {

int64_t Receiver::num_pending() const {
    auto pending = static_cast<int64_t>(posted_.size());
    for (const auto& [tag, receive] : arriving_) pending += !receive.is_cancelled;
    for (const auto& [tag, target] : eager_) pending += target.where == EagerTarget::TO_RECEIVE;
    return pending;
}

void Receiver::receive(const MessageSettings& settings, Memory destination, Completion on_received) {
    Receive receive;
    receive.num_bytes = destination.num_bytes;
    receive.destination = std::move(destination);
    receive.signature = settings.signature;
    receive.urgency = settings.urgency;
    receive.on_received = std::move(on_received);
    posted_.emplace(settings.tag, std::move(receive));
    if (announced_.count(settings.tag))
        match(settings.tag);
    else if (unexpected_.count(settings.tag))
        deliver_unexpected(settings.tag);
}

Receive Receiver::take_posted(uint64_t tag) {
    const auto posted = posted_.find(tag);
    Receive receive = std::move(posted->second);
    posted_.erase(posted);
    return receive;
}

// --- no longer wanted ---

void Receiver::cancel(uint64_t tag) {
    state_.events.cancel_received(peer_, tag);
    if (auto posted = posted_.find(tag); posted != posted_.end()) {
        posted->second.drop();
        posted_.erase(posted);
    }
    if (auto eager = eager_.find(tag); eager != eager_.end() && eager->second.where == EagerTarget::TO_RECEIVE) {
        eager->second.receive.drop();
        eager->second.where = EagerTarget::TO_WASTE;
        redirect(tag);
    }
    cancel_arriving(tag);
}

void Receiver::cancel_arriving(uint64_t tag) {
    auto found = arriving_.find(tag);
    if (found == arriving_.end() || found->second.is_cancelled) return;
    Receive& receive = found->second;
    receive.drop();
    receive.is_cancelled = true;
    if (receive.is_fetched()) {
        arriving_.erase(found);
        discard(tag);
        return;
    }
    redirect(tag);
    state_.scheduler->forget(peer_, tag);
    if (receive.granted_bytes >= receive.num_bytes) return;
    receive.num_bytes = receive.granted_bytes;
    discard(tag);
    if (receive.arrived_bytes == receive.num_bytes) arriving_.erase(found);
}

void Receiver::redirect(uint64_t tag) {
    for (auto& connection : connections_.data) connection->redirect(tag);
}

void Receiver::discard(uint64_t tag) {
    Header header;
    header.type = DISCARD;
    header.tag = tag;
    connections_.send_header(header);
}

void Receiver::mismatch(uint64_t tag, Receive& receive, uint32_t signature) {
    receive.drop();
    state_.events.tell(Event(MISMATCH, peer_, tag, receive.signature, signature));
}

// --- streams that are over ---

namespace {

constexpr int STREAM_SHIFT = 48;  // the stream is in the highest bits of a tag: see `slice_executor.py`

}  // namespace

bool Receiver::is_dropped(uint64_t tag) const {
    const uint64_t stream = tag >> STREAM_SHIFT;
    return std::any_of(dropped_.begin(), dropped_.end(),
                       [stream](const auto& range) { return range.first <= stream && stream < range.second; });
}

void Receiver::drop_streams(uint64_t first, uint64_t stop) {
    dropped_.emplace_back(first, stop);
    std::erase_if(announced_, [this](const auto& entry) {
        if (!is_dropped(entry.first)) return false;
        ++num_dropped;
        discard(entry.first);
        return true;
    });
    std::erase_if(unexpected_, [this](const auto& entry) {
        if (!is_dropped(entry.first)) return false;
        const auto num_bytes = static_cast<int64_t>(entry.second.payload.size());
        ++num_dropped;
        unexpected_bytes -= num_bytes;
        if (auto eager = eager_.find(entry.first); eager != eager_.end()) {
            eager->second.where = EagerTarget::TO_WASTE;  // its credit is returned when all of it is here
            redirect(entry.first);
        } else {
            return_credit(num_bytes);
        }
        return true;
    });
}

// --- messages that are granted ---

void Receiver::on_request(const Header& frame) {
    const uint64_t tag = frame.tag;
    if (announced_.count(tag) || arriving_.count(tag) || announced_.size() >= MAX_REQUESTS)
        throw FrameError(format("request %#llx comes twice, or is one of more than %zu", ull(tag), MAX_REQUESTS));
    if (frame.offset && !pid)
        throw FrameError(format("request %#llx names an address, but no memory is shared", ull(tag)));
    if (is_dropped(tag)) {
        ++num_dropped;
        discard(tag);
        return;
    }
    announced_[tag] = {static_cast<int64_t>(frame.message_bytes), frame.signature, frame.offset};
    if (posted_.count(tag)) match(tag);
}

// Let a message that is announced and posted be granted when its time comes, or refuse it.
void Receiver::match(uint64_t tag) {
    const Announced announced = announced_.at(tag);
    announced_.erase(tag);
    Receive receive = take_posted(tag);
    if (announced.signature != receive.signature || announced.num_bytes != receive.num_bytes) {
        discard(tag);
        mismatch(tag, receive, announced.signature);
    } else if (!announced.num_bytes) {
        // A sender without credit announces even an empty message: there is nothing to grant.
        discard(tag);
        received(tag, receive);
    } else {
        begin_arriving(announced, std::move(receive), tag);
    }
}

void Receiver::begin_arriving(const Announced& announced, Receive receive, uint64_t tag) {
    receive.address = announced.address;
    if (receive.is_fetched()) {
        receive.serial = ++state_.num_fetches;
        state_.fetches.add({receive.urgency, receive.serial, peer_, tag});
    } else {
        state_.scheduler->wish(peer_, tag, announced.num_bytes, receive.urgency);
        state_.must_grant = true;
    }
    arriving_.emplace(tag, std::move(receive));
}

void Receiver::grant(uint64_t tag, int64_t limit_bytes) {
    const auto found = arriving_.find(tag);
    if (found == arriving_.end()) return;
    found->second.granted_bytes = limit_bytes;
    Header header;
    header.type = GRANT;
    header.tag = tag;
    header.message_bytes = static_cast<uint64_t>(limit_bytes);
    connections_.send_header(header);
}

uint8_t* Receiver::begin_granted(const Header& frame) {
    auto found = arriving_.find(frame.tag);
    const uint64_t end = frame.offset + frame.chunk_bytes;
    if (found == arriving_.end() || !frame.chunk_bytes ||
        frame.offset != static_cast<uint64_t>(found->second.arrived_bytes) ||
        end > static_cast<uint64_t>(found->second.granted_bytes))
        throw FrameError(format("bytes %llu to %llu of message %#llx were not granted", ull(frame.offset), ull(end),
                                ull(frame.tag)));
    Receive& receive = found->second;
    if (receive.is_landing)
        throw FrameError(
            format("bytes %llu to %llu of message %#llx are sent again while they arrive on another "
                   "connection",
                   ull(frame.offset), ull(end), ull(frame.tag)));
    receive.is_landing = true;
    return receive.is_cancelled ? nullptr : receive.destination.data + frame.offset;
}

void Receiver::end_granted(const Header& frame) {
    auto found = arriving_.find(frame.tag);
    Receive& receive = found->second;
    receive.is_landing = false;
    receive.arrived_bytes += frame.chunk_bytes;
    if (frame.flags) state_.scheduler->lost(peer_, frame.flags);
    state_.scheduler->arrived(peer_, frame.chunk_bytes, receive.urgency, state_.kernel->now_s());
    if (state_.scheduler->has_wishes()) state_.must_grant = true;
    if (receive.arrived_bytes != receive.num_bytes) return;
    Receive whole = std::move(receive);
    arriving_.erase(found);
    if (!whole.is_cancelled) received(frame.tag, whole);
}

// --- messages that are sent within the credit ---

uint8_t* Receiver::begin_eager(const Header& frame) {
    const uint64_t tag = frame.tag;
    if (frame.offset || frame.chunk_bytes != frame.message_bytes || unexpected_.count(tag) || eager_.count(tag))
        throw FrameError(format("message %#llx was sent without asking, in part or twice", ull(tag)));
    if (!credit_.take(frame.chunk_bytes + static_cast<int64_t>(HEADER_BYTES)))
        throw FrameError(format("message %#llx exceeds the credit of %lld bytes", ull(tag),
                                static_cast<long long>(credit_.credit_bytes)));
    if (is_dropped(tag)) {
        ++num_dropped;
        eager_[tag] = {EagerTarget::TO_WASTE, {}};
        return nullptr;
    }
    if (!posted_.count(tag)) {
        Unexpected& unexpected = unexpected_[tag];
        unexpected.payload.resize(frame.chunk_bytes);
        unexpected.signature = frame.signature;
        eager_[tag] = {EagerTarget::TO_UNEXPECTED, {}};
        unexpected_bytes += frame.chunk_bytes;
        return unexpected.payload.data();
    }
    Receive receive = take_posted(tag);
    if (receive.signature != frame.signature || receive.num_bytes != static_cast<int64_t>(frame.chunk_bytes)) {
        eager_[tag] = {EagerTarget::TO_WASTE, {}};
        mismatch(tag, receive, frame.signature);
        return nullptr;
    }
    uint8_t* const destination = receive.destination.data;
    eager_[tag] = {EagerTarget::TO_RECEIVE, std::move(receive)};
    return destination;
}

void Receiver::end_eager(const Header& frame) {
    auto found = eager_.find(frame.tag);
    EagerTarget target = std::move(found->second);
    eager_.erase(found);
    if (target.where == EagerTarget::TO_UNEXPECTED) {
        unexpected_.at(frame.tag).is_whole = true;
        if (posted_.count(frame.tag)) deliver_unexpected(frame.tag);
        return;
    }
    return_credit(frame.chunk_bytes);
    if (target.where == EagerTarget::TO_RECEIVE) received(frame.tag, target.receive);
}

// Hand over a message that came before its receive, unless it is not whole yet.
void Receiver::deliver_unexpected(uint64_t tag) {
    auto found = unexpected_.find(tag);
    if (found == unexpected_.end() || !found->second.is_whole) return;
    Receive receive = take_posted(tag);
    const Unexpected unexpected = std::move(found->second);
    unexpected_.erase(found);
    const auto num_bytes = static_cast<int64_t>(unexpected.payload.size());
    unexpected_bytes -= num_bytes;
    return_credit(num_bytes);
    if (receive.signature != unexpected.signature || receive.num_bytes != num_bytes) {
        mismatch(tag, receive, unexpected.signature);
        return;
    }
    if (num_bytes) std::memcpy(receive.destination.data, unexpected.payload.data(), unexpected.payload.size());
    received(tag, receive);
}

void Receiver::return_credit(int64_t num_bytes) {
    const int64_t returned = credit_.consume(num_bytes + static_cast<int64_t>(HEADER_BYTES));
    if (!returned) return;
    Header header;
    header.type = CREDIT;
    header.message_bytes = static_cast<uint64_t>(returned);
    connections_.send_header(header);
}

// Whoever is told may receive and send at once: nothing here may point into what that changes.
void Receiver::received(uint64_t tag, Receive& receive) {
    if (receive.on_received.listener) heard_s = state_.kernel->now_s();
    receive.destination.drop();
    state_.events.complete(receive.on_received, Event(RECEIVED, peer_, tag));
}

// --- copies out of the peer's memory ---

namespace {

// A message that lies in the memory of a peer.
class RemoteMessage : public MessageReader {
   public:
    RemoteMessage(Receiver& receiver, uint64_t address) : receiver_(receiver), address_(address) {}
    bool read(size_t offset, uint8_t* into, size_t num_bytes) const override {
        return receiver_.read(address_ + offset, into, static_cast<int64_t>(num_bytes));
    }

   private:
    Receiver& receiver_;
    const uint64_t address_;
};

}  // namespace

int64_t Receiver::fetch(const Fetch& fetch, int64_t limit_bytes) {
    const auto found = arriving_.find(fetch.tag);
    if (found == arriving_.end() || found->second.serial != fetch.serial) return 0;
    Receive& receive = found->second;
    const int64_t start = receive.arrived_bytes;
    int64_t num_bytes = receive.num_bytes - start;
    const Completion& waiting = receive.on_received;
    if (!start && waiting.listener && waiting.listener->can_use(waiting.number)) {
        if (!waiting.listener->use(waiting.number, RemoteMessage(*this, receive.address))) return 0;
    } else {
        num_bytes = std::min(num_bytes, limit_bytes);
        if (!read(receive.address + static_cast<uint64_t>(start), receive.destination.data + start, num_bytes))
            return 0;
    }
    receive.arrived_bytes += num_bytes;
    if (receive.arrived_bytes == receive.num_bytes)
        fetched(fetch.tag);
    else
        state_.fetches.add(fetch);
    return num_bytes;
}

bool Receiver::read(uint64_t address, uint8_t* into, int64_t num_bytes) {
    const int error = state_.read_memory(pid, address, into, num_bytes);
    if (error) state_.events.tell(Event(UNREADABLE, peer_, 0, error));
    return !error;
}

void Receiver::fetched(uint64_t tag) {
    const auto found = arriving_.find(tag);
    fetched_bytes += found->second.num_bytes;
    ++num_fetched;
    Header header;
    header.type = FETCHED;
    header.tag = tag;
    connections_.send_header(header);
    Receive whole = std::move(found->second);
    arriving_.erase(found);
    received(tag, whole);
}

// --- the end ---

void Receiver::close() {
    std::map<int64_t, int64_t> underway;
    for (const auto& [tag, receive] : arriving_)
        if (!receive.is_fetched()) underway[receive.urgency] += receive.granted_bytes - receive.arrived_bytes;
    state_.scheduler->forget_peer(peer_, underway);
    state_.must_grant = true;
    arriving_.clear();
    announced_.clear();
    eager_.clear();
    std::erase_if(unexpected_, [this](const auto& entry) {
        if (!entry.second.is_whole) unexpected_bytes -= static_cast<int64_t>(entry.second.payload.size());
        return !entry.second.is_whole;
    });
    std::erase_if(posted_, [this](const auto& entry) { return !unexpected_.count(entry.first); });
}

}  // namespace syncline
