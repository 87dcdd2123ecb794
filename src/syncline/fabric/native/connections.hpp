// All connections to one peer, and how control frames get onto them.
#pragma once

#include <algorithm>
#include <memory>
#include <vector>

#include "control_connection.hpp"
#include "data_connection.hpp"
#include "reactor.hpp"

namespace syncline {

struct Connections {
    Connections(ConnectionOwner& owner, Heartbeat& heartbeat, Reactor& reactor)
        : control(owner, reactor.kernel, heartbeat), reactor(reactor) {}

    ControlConnection control;
    std::vector<std::unique_ptr<DataConnection>> data;
    Reactor& reactor;

    Connection& of_class(int connection_class) {
        if (connection_class == CONTROL_CLASS) return control;
        return *data.at(static_cast<size_t>(connection_class));
    }

    template <typename Each>
    void each(Each each) {
        if (!control.is_attached()) return;
        each(static_cast<Connection&>(control));
        for (auto& connection : data) each(static_cast<Connection&>(*connection));
    }

    bool have_ended() const {
        if (!control.is_attached() || !control.has_ended) return false;
        return std::all_of(data.begin(), data.end(), [](const auto& connection) { return connection->has_ended; });
    }

    void send_header(const Header& header, const void* payload = nullptr, uint32_t num_bytes = 0) {
        if (!control.is_attached() || control.is_closed) return;
        control.queue(header, payload, num_bytes);
        reactor.schedule_write(control);
    }
};

}  // namespace syncline
