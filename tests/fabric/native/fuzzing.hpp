// What the fuzz targets share. An input is a seed: everything that a run does follows from it, so its number replays
// it.
#pragma once

#include <cstdint>
#include <map>
#include <stdexcept>
#include <string>

namespace fuzzing {

// A rule of the code under test is broken.
struct RuleBroken : std::logic_error {
    using std::logic_error::logic_error;
};

inline void require(bool holds, const char* rule) {
    if (!holds) throw RuleBroken(rule);
}

// SplitMix64 (G. Steele, D. Lea, C. Flood, 2014): the same numbers everywhere, from any seed.
class Random {
   public:
    explicit Random(uint64_t seed) : state_(seed) {}

    uint64_t next() {
        uint64_t mixed = state_ += 0x9E3779B97F4A7C15u;
        mixed = (mixed ^ (mixed >> 30)) * 0xBF58476D1CE4E5B9u;
        mixed = (mixed ^ (mixed >> 27)) * 0x94D049BB133111EBu;
        return mixed ^ (mixed >> 31);
    }
    // A number below `limit`, which is not 0.
    template <typename Number>
    Number below(Number limit) {
        return static_cast<Number>(next() % static_cast<uint64_t>(limit));
    }
    bool chance(double share) { return static_cast<double>(next() >> 11) < share * static_cast<double>(1ULL << 53); }
    template <typename Choices>
    const auto& of(const Choices& choices) {
        return choices[below(choices.size())];
    }

   private:
    uint64_t state_;
};

// How many inputs ended how.
using Outcomes = std::map<std::string, uint64_t>;

// Each runs one input, adds its outcome, and throws RuleBroken, or is stopped by a sanitizer.
void run_checksums(uint64_t seed, Outcomes& outcomes);
void run_frames(uint64_t seed, Outcomes& outcomes);
void run_grants(uint64_t seed, Outcomes& outcomes);
void run_slices(uint64_t seed, Outcomes& outcomes);

}  // namespace fuzzing
