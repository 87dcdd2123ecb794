// What the peers of one transport share.
#pragma once

#include <cstdint>
#include <memory>

#include "events.hpp"
#include "fetch_queue.hpp"
#include "grants.hpp"
#include "heartbeat.hpp"
#include "process_memory.hpp"
#include "reactor.hpp"

namespace syncline {

struct TransportState {
    explicit TransportState(std::shared_ptr<GrantScheduler> scheduler) : scheduler(std::move(scheduler)) {}

    const std::shared_ptr<GrantScheduler> scheduler;
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
