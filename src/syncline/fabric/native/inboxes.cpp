// What `inboxes.hpp` declares.
#include "inboxes.hpp"

#include <algorithm>
#include <cstring>
#include <stdexcept>

#include "shared_words.hpp"

namespace syncline {

namespace {

constexpr size_t HEAD_BYTES = sizeof(Inboxes::Head);
static_assert(HEAD_BYTES % 8 == 0 && Inboxes::RING_BYTES % 8 == 0);

// How many bytes were put in, were taken out, and are needed no longer: each by itself in what a processor's cache
// keeps together, as they have different writers.
uint64_t& word(uint8_t* ring, size_t place) { return *reinterpret_cast<uint64_t*>(ring + place); }
uint64_t& bytes_put(uint8_t* ring) { return word(ring, 0); }
uint64_t& bytes_taken(uint8_t* ring) { return word(ring, 128); }
uint64_t& bytes_released(uint8_t* ring) { return word(ring, 256); }

size_t whole(size_t num_bytes) { return HEAD_BYTES + (num_bytes + 7) / 8 * 8; }

// Copy between `ours` and the ring's bytes from `place` on, which go on at its beginning.
template <typename Copy>
void copy_parts(uint8_t* ring, uint64_t place, size_t num_bytes, Copy copy) {
    const size_t start = place % Inboxes::RING_BYTES, before_end = std::min(num_bytes, Inboxes::RING_BYTES - start);
    uint8_t* bytes = ring + SHARED_PAGE_BYTES;
    copy(bytes + start, size_t{0}, before_end);
    copy(bytes, before_end, num_bytes - before_end);
}

void write(uint8_t* ring, uint64_t place, const void* ours, size_t num_bytes) {
    copy_parts(ring, place, num_bytes, [&](uint8_t* theirs, size_t start, size_t count) {
        if (count) std::memcpy(theirs, static_cast<const uint8_t*>(ours) + start, count);
    });
}

void read(uint8_t* ring, uint64_t place, void* ours, size_t num_bytes) {
    copy_parts(ring, place, num_bytes, [&](const uint8_t* theirs, size_t start, size_t count) {
        if (count) std::memcpy(static_cast<uint8_t*>(ours) + start, theirs, count);
    });
}

}  // namespace

Inboxes::Inboxes(uint8_t* memory, int rank, int num_ranks, double spin_s)
    : memory_(memory),
      rank_(rank),
      num_ranks_(num_ranks),
      spin_(static_cast<int64_t>(spin_s * 1e9)),
      counts_(static_cast<size_t>(num_ranks)) {}

size_t Inboxes::size_bytes(int num_ranks) {
    const auto count = static_cast<size_t>(num_ranks);
    return count * (SHARED_PAGE_BYTES + count * (SHARED_PAGE_BYTES + RING_BYTES));
}

uint64_t& Inboxes::changes(int rank) const {
    return word(memory_ + static_cast<size_t>(rank) * size_bytes(num_ranks_) / static_cast<size_t>(num_ranks_), 0);
}

uint8_t* Inboxes::ring(int from, int to) const {
    auto* own = reinterpret_cast<uint8_t*>(&changes(to));
    return own + SHARED_PAGE_BYTES + static_cast<size_t>(from) * (SHARED_PAGE_BYTES + RING_BYTES);
}

bool Inboxes::put(int peer, const Head& head, const uint8_t* message) {
    uint8_t* there = ring(rank_, peer);
    const uint64_t place = bytes_put(there);
    const size_t num_bytes = whole(head.num_bytes);
    const uint64_t until = place + num_bytes;
    if (until - load(bytes_taken(there)) > RING_BYTES || until - load(bytes_released(there)) > BUDGET_BYTES)
        return false;
    write(there, place, &head, HEAD_BYTES);
    write(there, place + HEAD_BYTES, message, head.num_bytes);
    store(bytes_put(there), until);
    change(peer);
    auto& counted = counts_[static_cast<size_t>(peer)];
    ++counted.sent_messages;
    counted.sent_bytes += head.num_bytes;
    return true;
}

std::optional<Inboxes::Head> Inboxes::first(int peer) const {
    uint8_t* here = ring(peer, rank_);
    const uint64_t place = bytes_taken(here), there = load(bytes_put(here)) - place;
    if (!there) return std::nullopt;
    Head head;
    read(here, place, &head, HEAD_BYTES);
    if (there > RING_BYTES || head.num_bytes > RING_BYTES || whole(head.num_bytes) > there)
        throw std::runtime_error("what is in an inbox is no message");
    return head;
}

void Inboxes::take(int peer, uint8_t* into, size_t num_bytes) {
    const auto head = first(peer);
    if (!head || head->num_bytes != num_bytes) throw std::runtime_error("there is no such message in the inbox");
    uint8_t* here = ring(peer, rank_);
    const uint64_t place = bytes_taken(here);
    read(here, place + HEAD_BYTES, into, num_bytes);
    store(bytes_taken(here), place + whole(num_bytes));
    auto& counted = counts_[static_cast<size_t>(peer)];
    ++counted.received_messages;
    counted.received_bytes += num_bytes;
}

void Inboxes::release(int peer, size_t num_bytes) {
    uint64_t& released = bytes_released(ring(peer, rank_));
    store(released, released + whole(num_bytes));
}

uint64_t Inboxes::num_changes() const { return load(changes(rank_)); }

void Inboxes::change(int rank) {
    std::atomic_ref<uint64_t>(changes(rank)).fetch_add(1, std::memory_order_acq_rel);
    wake_all(changes(rank));
}

void Inboxes::wait(uint64_t seen, double timeout_s, bool looks) const {
    const auto has_changed = [&] { return num_changes() != seen; };
    if (!looks || !look_for(has_changed, SteadyClock::now() + spin_)) sleep_on(changes(rank_), seen, timeout_s);
}

}  // namespace syncline
