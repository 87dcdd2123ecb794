// Small messages between ranks of one machine, through memory that they share: written by the thread that sends, and
// read by the one that receives, with nobody between them.
//
// Each rank has a ring for what each other one sends it. In a ring's first page the sender keeps how many bytes it has
// ever put in, and the receiver how many it has taken out, and how many of these it needs no longer: what was taken
// and not asked for yet lies in its memory, so a sender puts in no more than BUDGET_BYTES ahead of that. A message is
// HEAD_BYTES and its own, and ends at a multiple of 8 bytes. Each word has one writer, but for `num_changes` of a rank,
// on which its waiting threads sleep: it rises with each message for it, and whenever its own process says so.
//
// A rank's threads call this one at a time, but for `wait`. What is read is checked, as a peer may be broken.
#pragma once

#include <chrono>
#include <cstddef>
#include <cstdint>
#include <optional>
#include <vector>

namespace syncline {

class Inboxes {
   public:
    struct Head {
        int64_t tag;
        uint64_t number;
        size_t num_bytes;
    };
    struct Counts {
        uint64_t sent_messages = 0, sent_bytes = 0, received_messages = 0, received_bytes = 0;
    };

    static constexpr size_t RING_BYTES = 256 << 10;
    static constexpr size_t BUDGET_BYTES = 4 << 20;

    // `memory` stays where it is as long as this lives, and is all zero when the first rank begins.
    Inboxes(uint8_t* memory, int rank, int num_ranks, double spin_s);
    static size_t size_bytes(int num_ranks);

    // False if there is no room for it.
    bool put(int peer, const Head& head, const uint8_t* message);
    // The oldest message of a peer that was not taken. Throws std::runtime_error if there is none that can be.
    [[nodiscard]] std::optional<Head> first(int peer) const;
    // Take it; `num_bytes` are its own.
    void take(int peer, uint8_t* into, size_t num_bytes);
    // Say that a message of so many bytes, which was taken, is needed no longer.
    void release(int peer, size_t num_bytes);

    [[nodiscard]] uint64_t num_changes() const;
    // Let all threads of this rank that wait look again.
    void wake() { change(rank_); }
    // Wait until `num_changes` is no longer `seen`, at most so long, or for no reason; look for a moment before.
    void wait(uint64_t seen, double timeout_s, bool looks) const;
    [[nodiscard]] const Counts& counts(int peer) const { return counts_[static_cast<size_t>(peer)]; }

   private:
    uint8_t* memory_;
    int rank_, num_ranks_;
    std::chrono::nanoseconds spin_;
    std::vector<Counts> counts_;

    [[nodiscard]] uint64_t& changes(int rank) const;
    [[nodiscard]] uint8_t* ring(int from, int to) const;
    void change(int rank);
};

}  // namespace syncline
