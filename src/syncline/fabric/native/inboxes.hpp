// Messages between ranks of one machine, through memory that they share: written by the thread that sends, and read by
// the one that receives, with nobody between them. Of a large one only an *offer* passes through, which says where it
// lies in its sender's memory; who receives copies it from there, and answers that it was taken.
//
// Each rank has a ring for what each other one sends it. In a ring's first page the sender keeps how many bytes it has
// ever put in, and the receiver how many it has taken out, and how many of these it needs no longer: what was taken
// and not asked for yet lies in its memory, so a sender puts in no more than BUDGET_BYTES ahead of that. A message is
// HEAD_BYTES and its own, and ends at a multiple of 8 bytes. Each word has one writer, but for `num_changes` of a rank,
// on which its waiting threads sleep: it rises with each message for it, and whenever its own process says so.
//
// In its own page a rank says by which number others know its process, and where a token lies in its memory that is in
// the page too: who finds the same there can read its memory, and reads that of no other process. It also says whether
// it has asked for messages and lets nobody wait for them: then whoever offers it one must call it.
//
// A rank's threads call this one at a time, but for `wait` and `copy`. What is read is checked, as a peer may be
// broken.
#pragma once

#include <chrono>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <optional>
#include <vector>

namespace syncline {

class Inboxes {
   public:
    enum Kind : uint8_t { MESSAGE, OFFER, TAKEN };
    struct Head {
        uint64_t kind;  // a Kind, where it is one
        int64_t tag;
        uint64_t number;
        size_t num_bytes;
        uint64_t address;  // of a message that is offered

        // How much of the message follows.
        [[nodiscard]] size_t inline_bytes() const { return kind == MESSAGE ? num_bytes : 0; }
    };
    struct Counts {
        uint64_t sent_messages = 0, sent_bytes = 0, received_messages = 0, received_bytes = 0;
    };

    static constexpr size_t RING_BYTES = 256 << 10;
    static constexpr size_t BUDGET_BYTES = 4 << 20;

    // `memory` stays where it is as long as this lives, and is all zero when the first rank begins.
    Inboxes(uint8_t* memory, int rank, int num_ranks, double spin_s);
    static size_t size_bytes(int num_ranks);

    // False if there is no room for it. `message` is what follows the head, if anything does.
    bool put(int peer, const Head& head, const uint8_t* message);
    // The oldest message of a peer that was not taken. Throws std::runtime_error if there is none that can be.
    [[nodiscard]] std::optional<Head> first(int peer) const;
    // Take it; `num_bytes` are its own, or 0 of what is no message, and needed no longer.
    void take(int peer, uint8_t* into, size_t num_bytes);
    // Copy a message that a peer has offered; false if it cannot be read.
    bool copy(int peer, uint64_t address, uint8_t* into, size_t num_bytes);
    // Let nobody read this rank's memory any more; whoever does right now finds out.
    void withdraw();
    // Say whether messages that are offered to this rank wait for a call; ask whether a peer's do.
    void be_called(bool is_so);
    [[nodiscard]] bool must_call(int peer) const;
    // Say that a message of so many bytes, which was taken, is needed no longer.
    void release(int peer, size_t num_bytes);

    [[nodiscard]] uint64_t num_changes() const;
    // Let all threads of this rank that wait look again.
    void wake() { change(rank_); }
    // Wait until `num_changes` is no longer `seen`, at most so long, or for no reason; look for a moment before, and
    // for as long as it takes to copy what is waited for.
    void wait(uint64_t seen, double timeout_s, size_t num_bytes) const;
    [[nodiscard]] const Counts& counts(int peer) const { return counts_[static_cast<size_t>(peer)]; }

   private:
    uint8_t* memory_;
    int rank_, num_ranks_;
    std::chrono::nanoseconds spin_;
    std::unique_ptr<uint64_t> token_;
    std::vector<Counts> counts_;

    [[nodiscard]] uint64_t& page_word(int rank, size_t place) const;
    [[nodiscard]] uint64_t& changes(int rank) const { return page_word(rank, 0); }
    [[nodiscard]] uint8_t* ring(int from, int to) const;
    void change(int rank);
    void count_sent(int peer, size_t num_bytes);
    void count_received(int peer, size_t num_bytes);
};

}  // namespace syncline
