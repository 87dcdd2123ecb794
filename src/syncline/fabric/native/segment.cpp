// What `segment.hpp` declares.
#include "segment.hpp"

#include <algorithm>
#include <cstring>
#include <stdexcept>
#include <utility>

#include "shared_words.hpp"

namespace syncline {

namespace {

constexpr int ADD = -1;
constexpr size_t PIECE_BYTES = 16 << 10;  // what is added meanwhile stays in the cache nearest to the processor
constexpr size_t HEADER_PLACES[] = {64 / sizeof(uint64_t), 128 / sizeof(uint64_t)};

}  // namespace

SumOrder::SumOrder(const std::string& dtype, const std::string& op, std::vector<int> steps, int num_ranks)
    : addition_(addition_of(dtype, op)), steps_(std::move(steps)) {
    if (!addition_) throw std::invalid_argument("there is no " + op + " of " + dtype + " here");
    size_t depth = 0, deepest = 0;
    for (const int step : steps_) {
        if (step < ADD || step >= num_ranks || (step == ADD && depth < 2))
            throw std::invalid_argument("these steps are no sum");
        depth = step == ADD ? depth - 1 : depth + 1;
        deepest = std::max(deepest, depth);
    }
    if (depth != 1) throw std::invalid_argument("these steps are no sum");
    partial_.resize(deepest * PIECE_BYTES);
}

void SumOrder::add_up(uint8_t* into, const std::vector<const uint8_t*>& contributions, int own, size_t num_bytes) {
    for (size_t start = 0; start < num_bytes; start += PIECE_BYTES)
        add_up_piece(into + start, contributions, own, start, std::min(PIECE_BYTES, num_bytes - start));
}

void SumOrder::add_up_piece(uint8_t* into, const std::vector<const uint8_t*>& contributions, int own, size_t start,
                            size_t num_bytes) {
    terms_.clear();
    for (const int step : steps_) {
        if (step != ADD) {
            // What is added first may be added to where it is: nothing has been written there.
            const bool is_in_place = step == own && terms_.empty();
            terms_.push_back(is_in_place ? into : contributions[static_cast<size_t>(step)] + start);
            continue;
        }
        const uint8_t* other = terms_.back();
        terms_.pop_back();
        const size_t place = terms_.size() - 1;
        uint8_t* sum = place == 0 ? into : partial_.data() + place * PIECE_BYTES;
        if (terms_.back() != sum) std::memcpy(sum, terms_.back(), num_bytes);
        addition_(sum, other, num_bytes);
        terms_.back() = sum;
    }
    if (terms_.back() != into) std::memcpy(into, terms_.back(), num_bytes);
}

Segment::Segment(uint8_t* memory, int rank, int num_ranks, size_t payload_bytes, double spin_s)
    : memory_(memory),
      rank_(rank),
      num_ranks_(num_ranks),
      payload_bytes_(payload_bytes),
      spin_(static_cast<int64_t>(spin_s * 1e9)),
      contributions_(static_cast<size_t>(num_ranks)) {}

uint8_t* Segment::slot(int rank) const {
    return memory_ + SHARED_PAGE_BYTES + static_cast<size_t>(rank) * (SHARED_PAGE_BYTES + 2 * payload_bytes_);
}

uint64_t& Segment::word(int rank, size_t place) const { return reinterpret_cast<uint64_t*>(slot(rank))[place]; }

uint8_t* Segment::payload(int rank, uint64_t number) const {
    return slot(rank) + SHARED_PAGE_BYTES + (number & 1) * payload_bytes_;
}

uint64_t Segment::progress(int rank) const { return load(word(rank, 0)); }

bool Segment::has_header(int rank, uint64_t number, uint64_t signature) const {
    const size_t place = HEADER_PLACES[number & 1];
    return load(word(rank, place)) == number && load(word(rank, place + 1)) == signature;
}

bool Segment::is_free(uint64_t number) const {
    const uint64_t last = last_numbers_[number & 1];
    for (int rank = 0; last && rank < num_ranks_; ++rank)
        if (rank != rank_ && progress(rank) <= 2 * last) return false;
    return true;
}

void Segment::put_up(uint64_t number, uint64_t signature) {
    const size_t place = HEADER_PLACES[number & 1];
    last_numbers_[number & 1] = number;
    store(word(rank_, place + 1), signature);
    store(word(rank_, place), number);
    advance(2 * number);
}

void Segment::finish(uint64_t number) { store(word(rank_, 0), 2 * number + 1); }

void Segment::advance(uint64_t progress) {
    store(word(rank_, 0), progress);
    wake_all(word(rank_, 0));
}

void Segment::wait(int rank, uint64_t seen, double timeout_s) const { sleep_on(word(rank, 0), seen, timeout_s); }

std::optional<bool> Segment::make(uint64_t signature, SumOrder& order, uint8_t* buffer, size_t num_bytes) {
    if (num_bytes > payload_bytes_) throw std::invalid_argument("it is longer than a payload");
    if (!is_free(number + 1)) return std::nullopt;
    ++number;
    std::memcpy(payload(rank_, number), buffer, num_bytes);
    put_up(number, signature);
    const auto until = SteadyClock::now() + spin_;
    for (int rank = 0; rank < num_ranks_; ++rank) {
        contributions_[static_cast<size_t>(rank)] = payload(rank, number);
        if (rank == rank_) continue;
        const bool has_come = look_for([&] { return progress(rank) >= 2 * number; }, until);
        if (!has_come || !has_header(rank, number, signature)) return false;
    }
    order.add_up(buffer, contributions_, rank_, num_bytes);
    finish(number);
    return true;
}

}  // namespace syncline
