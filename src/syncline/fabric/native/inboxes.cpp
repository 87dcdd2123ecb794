// What `inboxes.hpp` declares.
#include "inboxes.hpp"

#include <algorithm>
#include <bit>
#include <cstring>
#include <random>
#include <stdexcept>

#include "process_memory.hpp"
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

// Where a rank's page has what others read its memory by, and whether they must call it.
constexpr size_t PROCESS = 128, TOKEN_ADDRESS = 136, TOKEN = 144, CALLED = 256;
constexpr size_t COPIED_BYTES_PER_US = 4096;  // at least, on machines that we know
constexpr size_t MOST_LOOKED_BYTES = 4 << 20;

uint64_t new_token() {
    std::random_device random;
    return static_cast<uint64_t>(random()) << 32 | random();
}

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
      token_(std::make_unique<uint64_t>(new_token())),
      counts_(static_cast<size_t>(num_ranks)) {
    page_word(rank, TOKEN) = *token_;
    page_word(rank, TOKEN_ADDRESS) = std::bit_cast<uintptr_t>(token_.get());
    store(page_word(rank, PROCESS), static_cast<uint64_t>(::getpid()));
}

size_t Inboxes::size_bytes(int num_ranks) {
    const auto count = static_cast<size_t>(num_ranks);
    return count * (SHARED_PAGE_BYTES + count * (SHARED_PAGE_BYTES + RING_BYTES));
}

uint64_t& Inboxes::page_word(int rank, size_t place) const {
    return word(memory_ + static_cast<size_t>(rank) * size_bytes(num_ranks_) / static_cast<size_t>(num_ranks_), place);
}

uint8_t* Inboxes::ring(int from, int to) const {
    auto* own = reinterpret_cast<uint8_t*>(&changes(to));
    return own + SHARED_PAGE_BYTES + static_cast<size_t>(from) * (SHARED_PAGE_BYTES + RING_BYTES);
}

bool Inboxes::put(int peer, const Head& head, const uint8_t* message) {
    uint8_t* there = ring(rank_, peer);
    const uint64_t place = bytes_put(there);
    const size_t num_bytes = whole(head.inline_bytes());
    const uint64_t until = place + num_bytes;
    if (until - load(bytes_taken(there)) > RING_BYTES || until - load(bytes_released(there)) > BUDGET_BYTES)
        return false;
    write(there, place, &head, HEAD_BYTES);
    write(there, place + HEAD_BYTES, message, head.inline_bytes());
    store(bytes_put(there), until);
    change(peer);
    if (head.kind == MESSAGE) count_sent(peer, head.num_bytes);
    if (head.kind == TAKEN) count_received(peer, head.num_bytes);
    return true;
}

std::optional<Inboxes::Head> Inboxes::first(int peer) const {
    uint8_t* here = ring(peer, rank_);
    const uint64_t place = bytes_taken(here), there = load(bytes_put(here)) - place;
    if (!there) return std::nullopt;
    Head head;
    read(here, place, &head, HEAD_BYTES);
    if (there > RING_BYTES || there < HEAD_BYTES || head.kind > TAKEN || head.inline_bytes() > RING_BYTES ||
        whole(head.inline_bytes()) > there)
        throw std::runtime_error("what is in an inbox is no message");
    return head;
}

void Inboxes::take(int peer, uint8_t* into, size_t num_bytes) {
    const auto head = first(peer);
    if (!head || head->inline_bytes() != num_bytes) throw std::runtime_error("there is no such message in the inbox");
    uint8_t* here = ring(peer, rank_);
    const uint64_t place = bytes_taken(here);
    read(here, place + HEAD_BYTES, into, num_bytes);
    store(bytes_taken(here), place + whole(num_bytes));
    if (head->kind == MESSAGE)
        count_received(peer, num_bytes);
    else
        release(peer, 0);
    if (head->kind == TAKEN) count_sent(peer, head->num_bytes);
}

void Inboxes::release(int peer, size_t num_bytes) {
    uint64_t& released = bytes_released(ring(peer, rank_));
    store(released, released + whole(num_bytes));
}

bool Inboxes::copy(int peer, uint64_t address, uint8_t* into, size_t num_bytes) {
    const auto process = static_cast<int>(load(page_word(peer, PROCESS)));
    uint64_t found = 0;
    const auto fetch = [process](uint64_t from, void* to, size_t count) {
        return !read_memory(process, from, static_cast<uint8_t*>(to), static_cast<int64_t>(count));
    };
    return fetch(page_word(peer, TOKEN_ADDRESS), &found, sizeof found) && found == page_word(peer, TOKEN) &&
           fetch(address, into, num_bytes) && load(page_word(peer, PROCESS)) == static_cast<uint64_t>(process);
}

void Inboxes::withdraw() { store(page_word(rank_, PROCESS), 0); }

void Inboxes::be_called(bool is_so) {
    // Whoever says so looks then once more, and whoever puts in something asks then: neither may go before the other.
    std::atomic_ref<uint64_t>(page_word(rank_, CALLED)).exchange(is_so, std::memory_order_seq_cst);
}

bool Inboxes::must_call(int peer) const {
    return std::atomic_ref<uint64_t>(page_word(peer, CALLED)).load(std::memory_order_seq_cst);
}

void Inboxes::count_sent(int peer, size_t num_bytes) {
    auto& counted = counts_[static_cast<size_t>(peer)];
    ++counted.sent_messages;
    counted.sent_bytes += num_bytes;
}

void Inboxes::count_received(int peer, size_t num_bytes) {
    auto& counted = counts_[static_cast<size_t>(peer)];
    ++counted.received_messages;
    counted.received_bytes += num_bytes;
}

uint64_t Inboxes::num_changes() const { return load(changes(rank_)); }

void Inboxes::change(int rank) {
    std::atomic_ref<uint64_t>(changes(rank)).fetch_add(1, std::memory_order_seq_cst);
    wake_all(changes(rank));
}

void Inboxes::wait(uint64_t seen, double timeout_s, size_t num_bytes) const {
    const auto has_changed = [&] { return num_changes() != seen; };
    const auto copies = std::chrono::microseconds(std::min(num_bytes, MOST_LOOKED_BYTES) / COPIED_BYTES_PER_US);
    const auto looks = spin_.count() ? spin_ + copies : spin_;
    if (!look_for(has_changed, SteadyClock::now() + looks)) sleep_on(changes(rank_), seen, timeout_s);
}

}  // namespace syncline
