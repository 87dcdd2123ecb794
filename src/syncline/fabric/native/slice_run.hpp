// One slice of one call on its way, without the interpreter. What it does, and why in this order, stands in the Python
// modules `runtime/dataflow.py` and `runtime/python_slice_executor.py`; both sides must leave the same bits.
#pragma once

#include <cstdint>
#include <memory>
#include <set>
#include <vector>

#include "dataflow.hpp"
#include "temporary_pool.hpp"
#include "transport.hpp"

namespace syncline {

class CallRun;

// Executes a dataflow on one slice of a call, and tells the call once, when every operation has ended.
class SliceRun : public Listener, public std::enable_shared_from_this<SliceRun> {
   public:
    SliceRun(std::shared_ptr<NativeTransport> transport, std::shared_ptr<const Slice> slice,
             std::shared_ptr<TemporaryPool> pool, Memory buffer, MessageSettings settings,
             std::shared_ptr<CallRun> call);

    // Begin what waits for nothing.
    void start() { step(dataflow_->first); }
    void stop();
    const Slice& slice() const { return *slice_; }
    void ended(uint32_t number) override;
    bool can_use(uint32_t number) const override;
    bool use(uint32_t number, const MessageReader& message) override;
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

    std::shared_ptr<NativeTransport> transport_;
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
    size_t size_of(const Operation& operation) const {
        return slice_->offsets[operation.last] - slice_->offsets[operation.first];
    }
    uint8_t* part(uint32_t landing, const Operation& apply) const;
    uint8_t* sum_for(uint32_t apply, uint32_t landing) const;
    bool add_message(const MessageReader& message, size_t start, uint8_t* into, const Operation& apply);

    MessageSettings settings_of(const Operation& operation) const;
    void step(const std::vector<uint32_t>& ready);
    void begin(uint32_t number);
    void send(uint32_t number);
    void post(uint32_t number);
    void go_on(uint32_t number);
    void apply(uint32_t number);
    void add(uint8_t* own, uint32_t landing, const Operation& apply);
    void release(uint32_t landing);
};

}  // namespace syncline
