// What `slice_executor.hpp` declares.
#include "slice_executor.hpp"

#include <algorithm>
#include <utility>

namespace syncline {

void SliceExecutor::add(const std::shared_ptr<CallRun>& call) {
    order_.add(call);
    fill();
}

void SliceExecutor::slice_ended(const std::shared_ptr<CallRun>& call, int64_t num_bytes) {
    --num_active_slices;
    order_.ended(call, num_bytes);
    fill();
}

void SliceExecutor::forget(const std::shared_ptr<CallRun>& call) {
    num_active_slices -= static_cast<int64_t>(call->num_active);
    order_.forget(call);
}

// Begin slices while there is room. One that ends at once comes back here.
void SliceExecutor::fill() {
    if (is_filling_) return;
    is_filling_ = true;
    while (const SlicedPtr next = order_.next()) {
        const auto run = std::static_pointer_cast<CallRun>(next)->next_run();
        ++num_active_slices;
        order_.began(next, run->slice().num_bytes());
        run->start();
    }
    is_filling_ = false;
}

CallRun::CallRun(std::shared_ptr<SliceExecutor> executor, std::shared_ptr<const Layout> layout, Memory buffer,
                 MessageSettings settings, uint64_t tag_step, int64_t number, PythonReference on_done)
    : Sliced(settings.urgency, settings.connection_class, number, layout->slices.size()),
      executor_(std::move(executor)),
      layout_(std::move(layout)),
      buffer_(std::move(buffer)),
      settings_(settings),
      tag_step_(tag_step),
      on_done_(std::move(on_done)) {}

void CallRun::start() {
    executor_->add(shared_from_this());
    transport().finish();
}

void CallRun::stop() {
    executor_->forget(shared_from_this());
    for (const auto& run : std::exchange(runs_, {})) run->stop();
    on_done_.reset();
    buffer_.drop();  // messages that are still leaving hold it themselves
}

std::shared_ptr<SliceRun> CallRun::next_run() {
    const size_t place = layout_->slices.size() - num_left;
    const std::shared_ptr<const Slice> slice(layout_, &layout_->slices[place]);
    MessageSettings settings = settings_;
    settings.tag += place * tag_step_;
    runs_.push_back(std::make_shared<SliceRun>(executor_->transport, slice, executor_->pool, buffer_, settings,
                                               shared_from_this()));
    return runs_.back();
}

void CallRun::slice_ended(const SliceRun* run) {
    const auto alive = shared_from_this();
    const auto found = std::find_if(runs_.begin(), runs_.end(), [run](const auto& each) { return each.get() == run; });
    const int64_t num_bytes = (*found)->slice().num_bytes();
    runs_.erase(found);
    if (runs_.empty() && !has_more()) {
        buffer_.drop();
        transport().tell_done(std::move(on_done_));
    }
    executor_->slice_ended(alive, num_bytes);
}

std::set<int> CallRun::awaited_peers() const {
    std::set<int> peers;
    for (const auto& run : runs_) peers.merge(run->awaited_peers());
    return peers;
}

std::set<int> CallRun::open_peers() const {
    std::set<int> peers;
    for (const auto& run : runs_) peers.merge(run->open_peers());
    return peers;
}

}  // namespace syncline
