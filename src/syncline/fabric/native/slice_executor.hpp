// Calls under way: their slices begin as there is room, without the interpreter. Python begins calls, and hears of
// their ends.
#pragma once

#include <cstdint>
#include <memory>
#include <set>
#include <vector>

#include "slice_order.hpp"
#include "slice_run.hpp"

namespace syncline {

class CallRun;

// Executes the slices of all calls of one engine.
class SliceExecutor {
   public:
    SliceExecutor(std::shared_ptr<NativeTransport> transport, std::shared_ptr<TemporaryPool> pool,
                  int64_t max_inflight_bytes)
        : transport(std::move(transport)), pool(std::move(pool)), order_(max_inflight_bytes) {}

    const std::shared_ptr<NativeTransport> transport;
    const std::shared_ptr<TemporaryPool> pool;
    int64_t num_active_slices = 0;

    int64_t inflight_bytes() const { return order_.inflight_bytes(); }
    void add(const std::shared_ptr<CallRun>& call);
    void slice_ended(const std::shared_ptr<CallRun>& call, int64_t num_bytes);
    void forget(const std::shared_ptr<CallRun>& call);

   private:
    SliceOrder order_;
    bool is_filling_ = false;

    void fill();
};

class CallRun : public Sliced, public std::enable_shared_from_this<CallRun> {
   public:
    // Message k of slice s has the tag settings.tag + s * tag_step + k; `on_done` is told by the transport.
    CallRun(std::shared_ptr<SliceExecutor> executor, std::shared_ptr<const Layout> layout, Memory buffer,
            MessageSettings settings, uint64_t tag_step, int64_t number, PythonReference on_done);

    // Begin what there is room for; the messages have left when this returns, as far as they may.
    void start();
    // After this nothing is written to the buffer any more, whatever arrives.
    void stop();
    std::shared_ptr<SliceRun> next_run();
    void slice_ended(const SliceRun* run);

    std::set<int> awaited_peers() const;
    std::set<int> open_peers() const;
    NativeTransport& transport() { return *executor_->transport; }

   private:
    std::shared_ptr<SliceExecutor> executor_;
    std::shared_ptr<const Layout> layout_;
    Memory buffer_;
    const MessageSettings settings_;
    const uint64_t tag_step_;
    PythonReference on_done_;
    std::vector<std::shared_ptr<SliceRun>> runs_;
};

}  // namespace syncline
