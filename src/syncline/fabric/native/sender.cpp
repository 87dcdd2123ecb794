// What `sender.hpp` declares.
#include "sender.hpp"

#include <algorithm>
#include <utility>

namespace syncline {

namespace {

constexpr uint64_t MAX_CREDIT_BYTES = uint64_t{1} << 48;  // more than any memory, and far from overflowing

}  // namespace

void Sender::send(const MessageSettings& settings, Memory payload, Completion on_sent) {
    auto message = std::make_shared<Outgoing>();
    message->tag = settings.tag;
    message->num_bytes = payload.num_bytes;
    message->payload = std::move(payload);
    message->signature = settings.signature;
    message->urgency = settings.urgency;
    message->order = ++order_;
    message->connection_class = std::min(settings.connection_class, static_cast<int>(connections_.data.size()) - 1);
    message->on_sent = std::move(on_sent);
    const int64_t cost_bytes = message->num_bytes + static_cast<int64_t>(HEADER_BYTES);
    message->is_eager = message->num_bytes <= eager_bytes && cost_bytes <= credit_bytes_;
    ++num_unsent;
    queued_bytes[static_cast<size_t>(message->connection_class)] += message->num_bytes;
    if (message->is_eager) {
        credit_bytes_ -= cost_bytes;
        message->limit_bytes = message->num_bytes;
        push(message);
    } else if (asked_.size() < MAX_REQUESTS) {
        announce(message);
    } else {
        unasked_.push_back(message);
        std::push_heap(unasked_.begin(), unasked_.end(), IsLessUrgent{});
    }
}

void Sender::push(const OutgoingPtr& message) {
    DataConnection& connection = *connections_.data[static_cast<size_t>(message->connection_class)];
    connection.push(message);
    connections_.reactor.schedule_write(connection);
}

void Sender::announce(const OutgoingPtr& message) {
    asked_[message->tag] = message;
    Header header;
    header.type = REQUEST;
    header.tag = message->tag;
    header.signature = message->signature;
    header.message_bytes = static_cast<uint64_t>(message->num_bytes);
    header.offset = reads_us && message->num_bytes ? reinterpret_cast<uint64_t>(message->payload.data) : 0;
    connections_.send_header(header);
}

// A message waits for its grant no longer: another may be announced.
void Sender::withdraw(uint64_t tag) {
    asked_.erase(tag);
    if (unasked_.empty()) return;
    std::pop_heap(unasked_.begin(), unasked_.end(), IsLessUrgent{});
    const OutgoingPtr message = std::move(unasked_.back());
    unasked_.pop_back();
    announce(message);
}

OutgoingPtr Sender::announced_message(uint64_t tag) {
    auto found = asked_.find(tag);
    if (found == asked_.end()) throw FrameError(format("grant of message %#llx, which was not announced", ull(tag)));
    return found->second;
}

void Sender::on_grant(uint64_t tag, int64_t limit_bytes) {
    const OutgoingPtr message = announced_message(tag);
    if (limit_bytes <= message->limit_bytes || limit_bytes > message->num_bytes)
        throw FrameError(format("grant of message %#llx up to byte %lld of %lld", ull(tag),
                                static_cast<long long>(limit_bytes), static_cast<long long>(message->num_bytes)));
    message->limit_bytes = limit_bytes;
    if (limit_bytes == message->num_bytes) withdraw(tag);
    push(message);
}

void Sender::on_discard(uint64_t tag) {
    const OutgoingPtr message = announced_message(tag);
    withdraw(tag);
    message->is_discarded = true;
    if (!message->is_queued && !message->is_leaving) finish(message);
}

void Sender::on_fetched(uint64_t tag) {
    const OutgoingPtr message = announced_message(tag);
    if (!reads_us || message->limit_bytes) throw FrameError(format("message %#llx cannot have been copied", ull(tag)));
    withdraw(tag);
    fetched_bytes += message->num_bytes;
    ++num_fetched;
    finish(message);
}

void Sender::on_credit(uint64_t num_bytes) {
    if (num_bytes > MAX_CREDIT_BYTES) throw FrameError(format("credit of %llu bytes is not allowed", ull(num_bytes)));
    credit_bytes_ = std::min(credit_bytes_ + static_cast<int64_t>(num_bytes), static_cast<int64_t>(MAX_CREDIT_BYTES));
}

void Sender::finish(const OutgoingPtr& message) {
    if (is_closed_) return;
    --num_unsent;
    queued_bytes[static_cast<size_t>(message->connection_class)] -= message->num_bytes;
    message->payload.drop();
    if (!num_unsent && state_.tells_drained) state_.events.tell(Event(DRAINED, peer_));
    state_.events.complete(message->on_sent, Event(SENT, peer_, message->tag));
}

void Sender::close() {
    is_closed_ = true;
    for (auto& connection : connections_.data) connection->drop();
    for (auto& [tag, message] : asked_) message->drop();
    for (auto& message : unasked_) message->drop();
    asked_.clear();
    unasked_.clear();
    queued_bytes.fill(0);
    num_unsent = 0;
}

}  // namespace syncline
