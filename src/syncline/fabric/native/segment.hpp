// Memory that the ranks of one machine share, as one of them sees it, and small sums made in it by the calling thread.
//
// What lies where `runtime/shared_memory/segment.py` says, and `collectives.py` beside it by which rule ranks meet
// and why nothing is read too early, too late or half written.
#pragma once

#include <chrono>
#include <cstddef>
#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "additions.hpp"

namespace syncline {

// In which order contributions are added: `steps` are ranks, whose contribution comes next, and -1, which adds the last
// of what is there to what lies before it.
class SumOrder {
   public:
    // Throws std::invalid_argument where `dtype` has no such `op`, or where the steps are no sum.
    SumOrder(const std::string& dtype, const std::string& op, std::vector<int> steps, int num_ranks);

    // Make `into`, which holds the contribution of rank `own`, the sum of all; rank k's lies at `contributions[k]`.
    void add_up(uint8_t* into, const std::vector<const uint8_t*>& contributions, int own, size_t num_bytes);

   private:
    Addition addition_;
    std::vector<int> steps_;
    std::vector<const uint8_t*> terms_;
    std::vector<uint8_t> partial_;  // sums within the sum, but for the first, which lies where the result does

    void add_up_piece(uint8_t* into, const std::vector<const uint8_t*>& contributions, int own, size_t start,
                      size_t num_bytes);
};

class Segment {
   public:
    // `memory` stays where it is as long as this lives. Who makes a call looks for the others for `spin_s`.
    Segment(uint8_t* memory, int rank, int num_ranks, size_t payload_bytes, double spin_s);

    uint64_t number = 0;  // of the last call of this rank

    [[nodiscard]] uint64_t progress(int rank) const;
    [[nodiscard]] bool has_header(int rank, uint64_t number, uint64_t signature) const;
    [[nodiscard]] bool is_free(uint64_t number) const;
    void put_up(uint64_t number, uint64_t signature);
    void pass_by(uint64_t number) { advance(2 * number + 1); }
    void finish(uint64_t number);
    void wait(int rank, uint64_t seen, double timeout_s) const;

    // Put up the next call with the contribution in `buffer`, which is to become the sum. True: it has; false: the
    // others had not all put up the same call soon enough; none: this rank's last but one is still read, so nothing has
    // begun.
    std::optional<bool> make(uint64_t signature, SumOrder& order, uint8_t* buffer, size_t num_bytes);

   private:
    uint8_t* memory_;
    int rank_, num_ranks_;
    size_t payload_bytes_;
    std::chrono::nanoseconds spin_;
    uint64_t last_numbers_[2] = {0, 0};
    std::vector<const uint8_t*> contributions_;

    [[nodiscard]] uint8_t* slot(int rank) const;
    [[nodiscard]] uint64_t& word(int rank, size_t place) const;
    [[nodiscard]] uint8_t* payload(int rank, uint64_t number) const;
    void advance(uint64_t progress);
};

}  // namespace syncline
