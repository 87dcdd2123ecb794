// Everything between this rank and one peer: its connections, what is sent, what is received, and how it ends.
#pragma once

#include <cstdint>
#include <exception>
#include <string>

#include "connections.hpp"
#include "receiver.hpp"
#include "sender.hpp"
#include "transport_state.hpp"

namespace syncline {

class PeerTransport final : public ConnectionOwner {
   public:
    PeerTransport(int rank, TransportState& state, int64_t eager_bytes, int64_t credit_bytes);

    const int rank;
    bool is_gone = false;
    uint64_t progress = 0;  // what the peer's last heartbeat carried
    Connections connections;
    Sender sender;
    Receiver receiver;

    // Sockets stay the caller's, who closes them after `close`.
    void attach_data(int fd, int64_t chunk_bytes);
    // Read and write one connection from now on.
    void start(int connection_class);
    // Send messages of these sizes from now on.
    void use(int64_t eager_bytes, int64_t chunk_bytes);
    // Say on every connection that nothing more comes.
    void end();
    void close();

    // Neither read nor write a connection until it goes on with another socket.
    void suspend(int connection_class);
    // Its old socket is not used even for what is said last.
    void forget_socket(int connection_class) { connections.of_class(connection_class).fd = -1; }
    // Go on with another socket, behind the first bytes, which the peer has; return how many bytes are sent again, or
    // -1 if it cannot have so many.
    int64_t resume(int connection_class, int fd, uint64_t position);

    void send_frame(uint8_t type, uint64_t tag, uint64_t message_bytes, const std::string& payload);
    void flush_control();
    // Return how many bytes of messages the peer is not known to have.
    int64_t num_unacknowledged() const;
    // Return whether anything was heard since this was asked last.
    bool take_heard();
    // As the receiver does; what no rule foresees costs this peer alone.
    int64_t fetch(const Fetch& next, int64_t limit_bytes);

    void on_readable(Connection& connection) override;
    bool on_writable(Connection& connection) override;
    void on_frame(const Header& frame, const uint8_t* payload) override;
    uint8_t* begin_chunk(const Header& frame) override;
    void end_chunk(const Header& frame) override;
    void on_end() override;
    void on_left(const OutgoingPtr& message) override { sender.finish(message); }

   private:
    TransportState& state_;

    void break_off(Connection& connection, int error);
    void suspend(Connection& connection);
    void interrupt(Connection& connection, const FrameError& error);
    void acknowledge(Connection& connection, uint64_t least_bytes);
    void acknowledge_all();
    void on_acknowledged(const Header& frame);
    void mute(Connection& connection);
    void give_up(Connection& connection, const std::exception& error);
};

}  // namespace syncline
