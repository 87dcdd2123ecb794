// One slice of one call on its way, without the interpreter. What it does, and why in this order, stands in the Python
// modules `runtime/dataflow.py` and `runtime/slicerun.py`; both sides must leave the same bits.
#pragma once

#include <cstdint>
#include <map>
#include <memory>
#include <set>
#include <string>
#include <vector>

#include "exchange.hpp"

namespace syncline {

enum class Kind { SEND = 0, COPY = 1, LAND = 2, APPLY = 3 };

struct Operation {
    Kind kind;
    size_t first, last;  // atoms
    int peer;            // as the call numbers its ranks
    int member;          // as the exchange does
    uint64_t index;
    std::vector<uint32_t> then, applies, before, after;
    bool replaces;
};

// What one rank does with one slice.
struct Dataflow {
    std::vector<Operation> operations;
    std::vector<uint32_t> num_waits, first;
};

// Adds `num_bytes` of numbers to as many, each in its place.
using Addition = void (*)(uint8_t* into, const uint8_t* other, size_t num_bytes);

// Returns how numbers of `dtype` are added; null if not here.
Addition addition_of(const std::string& dtype);

// A slice before any call: what is done with it, and where its atoms lie in the buffer, in bytes.
struct Slice {
    std::shared_ptr<const Dataflow> dataflow;
    std::vector<size_t> offsets;
    Addition addition;

    int64_t num_bytes() const { return static_cast<int64_t>(offsets.back() - offsets.front()); }
};

// Temporaries in which contributions land: blocks in sizes of powers of two, the last one used first.
class TemporaryPool {
   public:
    explicit TemporaryPool(int64_t max_kept_bytes) : max_kept_bytes_(max_kept_bytes) {}

    using Block = std::unique_ptr<uint8_t[]>;
    Block take(size_t num_bytes);
    void give_back(Block block, size_t num_bytes);

    int64_t used_bytes = 0, kept_bytes = 0;

   private:
    int64_t max_kept_bytes_;
    std::map<size_t, std::vector<Block>> free_;

    static size_t size_of(size_t num_bytes);
};

// How the messages of a call are sent.
struct MessageSettings {
    uint64_t tag;
    uint32_t signature;
    int64_t urgency;
    int connection_class;
};

class CallRun;

// Walks a dataflow with one slice of a call, and tells the call once, when every operation has ended.
class SliceRun : public Listener, public std::enable_shared_from_this<SliceRun> {
   public:
    SliceRun(std::shared_ptr<Exchange> exchange, std::shared_ptr<const Slice> slice, std::shared_ptr<TemporaryPool> pool,
             Memory buffer, MessageSettings settings, std::shared_ptr<CallRun> call);

    // Begin what waits for nothing.
    void start() { step(dataflow_->first); }
    void stop();
    const Slice& slice() const { return *slice_; }
    void ended(uint32_t number) override;
    std::set<int> awaited_peers() const;
    std::set<int> open_peers() const;

   private:
    struct Landing {
        TemporaryPool::Block block;
        size_t num_bytes = 0;
        int num_uses = 0;
    };
    struct State {
        uint32_t num_waits = 0;
        uint32_t num_used = 0;  // of an apply: contributions that are in, the own one among them
        bool is_open = true, is_posted = false;
        bool has_arrived = false;  // of a landing
        bool is_cleared = false;   // of an apply: nothing else reads or writes its range
    };

    std::shared_ptr<Exchange> exchange_;
    std::shared_ptr<const Slice> slice_;
    const Dataflow* dataflow_;
    std::shared_ptr<TemporaryPool> pool_;
    Memory buffer_;
    MessageSettings settings_;
    std::shared_ptr<CallRun> call_;  // until this is over
    std::vector<State> states_;
    std::vector<Landing> landings_;
    std::vector<uint32_t> settled_;
    size_t num_open_;
    bool is_stepping_ = false, is_stopped_ = false;

    const Operation& operation(uint32_t number) const { return dataflow_->operations[number]; }
    size_t start_of(const Operation& operation) const { return slice_->offsets[operation.first]; }
    size_t size_of(const Operation& operation) const { return slice_->offsets[operation.last] - slice_->offsets[operation.first]; }
    uint8_t* part(uint32_t landing, const Operation& apply);

    void step(const std::vector<uint32_t>& ready);
    void begin(uint32_t number);
    void post(uint32_t number);
    void go_on(uint32_t number);
    void apply(uint32_t number);
    void add(uint8_t* own, uint32_t landing, const Operation& apply);
    void release(uint32_t landing);
};

}  // namespace syncline
