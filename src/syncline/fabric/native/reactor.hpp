// The event loop over the sockets of one transport: which can be read and written, and which wait to be written.
//
// A tick reads what arrived on all connections; then this rank grants, and then it writes, control connections before
// data: together, since each small frame of its own would cost a packet. It has no thread. Whoever has a reactor calls
// `poll_once`, or waits for its descriptor, which is readable when a connection is, and when `wake` was called.
#pragma once

#include <unordered_map>
#include <vector>

#include "connection.hpp"
#include "kernel.hpp"

namespace syncline {

class Reactor {
   public:
    explicit Reactor(Kernel& kernel) : kernel(kernel) {}
    Reactor(const Reactor&) = delete;
    Reactor& operator=(const Reactor&) = delete;
    void close();
    bool is_closed() const { return is_closed_; }
    int fileno() const { return kernel.fileno(); }

    Kernel& kernel;

    // Tell the connection's owner when it can be read. Throws std::system_error.
    void add(Connection& connection);
    void remove(Connection& connection);

    // Write at the end of this tick; the most important connections first.
    void schedule_write(Connection& connection);
    bool has_writes() const { return !to_write_.empty(); }
    // Write what was scheduled, once each.
    void write_scheduled();
    // Write now, and when the kernel takes more.
    void write(Connection& connection);

    // Serve what is ready now; false if nothing is.
    bool poll_once();
    // Make the descriptor readable, for a loop that asks for nothing else.
    void wake() { kernel.wake(); }

   private:
    bool is_closed_ = false;
    std::unordered_map<int, Connection*> watched_;  // by their descriptors
    std::vector<Connection*> to_write_;

    void watch_writer(Connection& connection, bool is_watching);
};

}  // namespace syncline
