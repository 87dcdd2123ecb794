// What the peers of one transport share.
#pragma once

#include <cstdint>
#include <memory>

#include "events.hpp"
#include "fetch_queue.hpp"
#include "grants.hpp"
#include "heartbeat.hpp"
#include "kernel.hpp"
#include "process_memory.hpp"
#include "reactor.hpp"

namespace syncline {

struct TransportState {
    TransportState(std::shared_ptr<GrantScheduler> scheduler, std::shared_ptr<Kernel> kernel)
        : scheduler(std::move(scheduler)),
          kernel(std::move(kernel)),
          reactor(*this->kernel),
          heartbeat(*this->kernel) {}

    const std::shared_ptr<GrantScheduler> scheduler;
    const std::shared_ptr<Kernel> kernel;
    Reactor reactor;
    Heartbeat heartbeat;
    EventQueue events;
    FetchQueue fetches;
    MemoryReader read_memory = &syncline::read_memory;
    bool tells_drained = false;
    bool must_grant = false;  // the scheduler may have grants to give
    int64_t num_fetches = 0;
};

}  // namespace syncline
