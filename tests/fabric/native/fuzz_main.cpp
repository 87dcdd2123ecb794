// Runs a fuzz target on a range of seeds: `fuzz checksums|frames|grants|slices NUM_INPUTS [FIRST_SEED]`.
//
// Ends at the first input that breaks a rule, and names its seed; one at which a sanitizer aborts is named too.
#include <csignal>
#include <cstdlib>
#include <iostream>
#include <map>
#include <string>

#include "fuzzing.hpp"
#include "python_reference.hpp"

// There is no interpreter here, and so nothing of Python's is ever owned.
void syncline::PythonReference::reset() noexcept {
    if (object_) std::abort();
}

namespace {

std::string target;
uint64_t seed = 0;

void name_seed(int) { std::cerr << "fuzz " << target << " 1 " << seed << " replays this" << '\n' << std::flush; }

}  // namespace

int main(int num_arguments, char** arguments) {
    const std::map<std::string, void (*)(uint64_t, fuzzing::Outcomes&)> targets = {
        {"checksums", fuzzing::run_checksums},
        {"frames", fuzzing::run_frames},
        {"grants", fuzzing::run_grants},
        {"slices", fuzzing::run_slices}};
    if (num_arguments < 3 || !targets.count(arguments[1])) {
        std::cerr << "usage: fuzz checksums|frames|grants|slices NUM_INPUTS [FIRST_SEED]" << '\n';
        return 2;
    }
    target = arguments[1];
    const uint64_t first = num_arguments > 3 ? std::strtoull(arguments[3], nullptr, 10) : 0;
    const uint64_t stop = first + std::strtoull(arguments[2], nullptr, 10);
    std::signal(SIGABRT, name_seed);
    fuzzing::Outcomes outcomes;
    try {
        for (seed = first; seed < stop; ++seed) targets.at(target)(seed, outcomes);
    } catch (const std::exception& error) {
        std::cerr << error.what() << '\n';
        name_seed(0);
        return 1;
    }
    std::cout << stop - first << " inputs of " << target << ", seeds " << first << " to " << stop - 1 << ":";
    for (const auto& [name, count] : outcomes) std::cout << " " << name << " " << count;
    std::cout << '\n';
    return 0;
}
