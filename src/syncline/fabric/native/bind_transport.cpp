// The transport for Python: messages, connections, what happened and what was counted.
#include <optional>
#include <string>
#include <tuple>
#include <utility>
#include <vector>

#include "bindings.hpp"
#include "splices.hpp"

namespace py = pybind11;
using namespace pybind11::literals;

namespace syncline {

namespace {

using TransportClass = py::class_<NativeTransport, std::shared_ptr<NativeTransport>>;

[[noreturn]] void fail_assertion(const std::string& text) {
    PyErr_SetString(PyExc_AssertionError, text.c_str());
    throw py::error_already_set();
}

// What its end drops is released with it, as no later call may come.
void delete_transport(const NativeTransport* transport) {
    delete transport;
    if (PyGILState_Check()) release_dropped();
}

std::shared_ptr<NativeTransport> make_transport(std::shared_ptr<GrantScheduler> scheduler,
                                                std::shared_ptr<Kernel> kernel) {
    if (!kernel) kernel = std::make_shared<LinuxKernel>();
    return {new NativeTransport(std::move(scheduler), std::move(kernel)), &delete_transport};
}

Completion completion_of(const py::object& callback) { return {reference_to(callback), nullptr, 0}; }

void send(NativeTransport& self, int rank, uint64_t tag, const py::object& payload, uint32_t signature, int64_t urgency,
          int connection_class, const py::object& on_sent) {
    Sender& sender = self.peer(rank).sender;
    if (sender.is_announced(tag)) fail_assertion("message " + std::to_string(tag) + " is sent twice");
    sender.send({tag, signature, urgency, connection_class}, memory_of(payload, PyBUF_SIMPLE), completion_of(on_sent));
    settle(self);
}

void receive(NativeTransport& self, int rank, uint64_t tag, const py::object& destination, uint32_t signature,
             int64_t urgency, const py::object& on_received) {
    Receiver& receiver = self.peer(rank).receiver;
    if (receiver.is_posted(tag))
        fail_assertion("tag " + std::to_string(tag) + " of rank " + std::to_string(rank) + " is posted twice");
    receiver.receive({tag, signature, urgency, 0}, memory_of(destination, PyBUF_WRITABLE), completion_of(on_received));
    settle(self);
}

void cancel(NativeTransport& self, int rank, uint64_t tag) {
    self.peer(rank).receiver.cancel(tag);
    settle(self);
}

py::object event_of(NativeTransport& transport) {
    if (!transport.has_events()) return py::none();
    Event event = transport.next_event();
    const int kind = event.kind;
    if (event.callback) return py::make_tuple(kind, py::reinterpret_steal<py::object>(event.callback.release()));
    return py::make_tuple(kind, event.peer, event.tag, event.number, event.other, py::bytes(event.text));
}

int64_t resume(NativeTransport& self, int peer, int connection_class, int fd, uint64_t position) {
    const int64_t resent_bytes = self.peer(peer).resume(connection_class, fd, position);
    settle(self);
    return resent_bytes;
}

// The key of what is sent and of what is received, if frames are authenticated.
using Keys = std::optional<std::pair<py::bytes, py::bytes>>;

void use_keys(Connection& connection, const Keys& keys) {
    if (!keys) return;
    connection.sending.use_key(key_of(keys->first));
    connection.receiving.use_key(key_of(keys->second));
}

void attach_control(NativeTransport& self, int peer, int fd, const Keys& keys) {
    ControlConnection& control = self.peer(peer).connections.control;
    control.attach(fd);
    use_keys(control, keys);
    if (keys) control.beats->checks.use_key(key_of(keys->first));
}

void attach_data(NativeTransport& self, int peer, int fd, int64_t chunk_bytes, const Keys& keys) {
    PeerTransport& transport = self.peer(peer);
    transport.attach_data(fd, chunk_bytes);
    use_keys(*transport.connections.data.back(), keys);
}

// A method of one peer's transport by which Python asks for something.
template <typename... Arguments>
auto asking(void (PeerTransport::*method)(Arguments...)) {
    return [method](NativeTransport& self, int peer, Arguments... arguments) {
        (self.peer(peer).*method)(arguments...);
        settle(self);
    };
}

using Counters = std::vector<std::tuple<int, int64_t, int64_t, int64_t, int64_t, int64_t, int64_t, int64_t, int64_t>>;

Counters counters_of(NativeTransport& transport, int rank) {
    PeerTransport& peer = transport.peer(rank);
    Counters counters;
    const ControlConnection& control = peer.connections.control;
    if (control.is_attached())
        counters.emplace_back(CONTROL_CLASS, 0, 0, 0, 0, control.overhead_bytes, 0, control.num_resumed,
                              control.stream.resent_bytes);
    for (const auto& connection : peer.connections.data)
        counters.emplace_back(connection->connection_class, connection->sent_bytes, connection->sent_messages,
                              connection->received_bytes, connection->received_messages, connection->overhead_bytes,
                              peer.sender.queued_bytes[static_cast<size_t>(connection->connection_class)],
                              connection->num_resumed, connection->stream.resent_bytes);
    return counters;
}

void bind_connections(TransportClass& bound) {
    bound.def("add_peer", &NativeTransport::add_peer, "peer"_a, py::kw_only(), "eager_bytes"_a, "credit_bytes"_a)
        .def("attach_control", &attach_control, "peer"_a, "fd"_a, py::kw_only(), "keys"_a)
        .def("attach_data", &attach_data, "peer"_a, "fd"_a, py::kw_only(), "chunk_bytes"_a, "keys"_a)
        .def("start", asking(&PeerTransport::start), "peer"_a, "connection_class"_a)
        .def(
            "use",
            [](NativeTransport& self, int peer, int64_t eager_bytes, int64_t chunk_bytes) {
                self.peer(peer).use(eager_bytes, chunk_bytes);
            },
            "peer"_a, py::kw_only(), "eager_bytes"_a, "chunk_bytes"_a)
        .def("end", asking(&PeerTransport::end), "peer"_a)
        .def("close_peer", asking(&PeerTransport::close), "peer"_a)
        .def(
            "take_heard", [](NativeTransport& self, int peer) { return self.peer(peer).take_heard(); }, "peer"_a)
        .def(
            "let_read_us", [](NativeTransport& self, int peer) { self.peer(peer).sender.reads_us = true; }, "peer"_a)
        .def(
            "let_be_read", [](NativeTransport& self, int peer, int pid) { self.peer(peer).receiver.pid = pid; },
            "peer"_a, "pid"_a)
        .def(
            "keep_beating",
            [](NativeTransport& self, double interval_s, double limit_s) {
                self.state().heartbeat.start(interval_s, limit_s);
            },
            py::kw_only(), "interval_s"_a, "limit_s"_a)
        .def("beat_if_late", [](NativeTransport& self) { self.state().heartbeat.beat_if_late(); });
}

void bind_broken_connections(TransportClass& bound) {
    bound
        .def(
            "suspend",
            [](NativeTransport& self, int peer, int connection_class) { self.peer(peer).suspend(connection_class); },
            "peer"_a, "connection_class"_a)
        .def(
            "is_suspended",
            [](NativeTransport& self, int peer, int connection_class) {
                return self.peer(peer).connections.of_class(connection_class).is_suspended;
            },
            "peer"_a, "connection_class"_a)
        .def("forget_socket", asking(&PeerTransport::forget_socket), "peer"_a, "connection_class"_a)
        .def(
            "received_position",
            [](NativeTransport& self, int peer, int connection_class) {
                return self.peer(peer).connections.of_class(connection_class).received_bytes_of_stream;
            },
            "peer"_a, "connection_class"_a)
        .def("resume", &resume, "peer"_a, "connection_class"_a, "fd"_a, py::kw_only(), "position"_a);
}

void bind_messages(TransportClass& bound) {
    bound
        .def("send", &send, "peer"_a, "tag"_a, "payload"_a, py::kw_only(), "signature"_a, "urgency"_a,
             "connection_class"_a, "on_sent"_a = py::none())
        .def("receive", &receive, "peer"_a, "tag"_a, "destination"_a, py::kw_only(), "signature"_a, "urgency"_a,
             "on_received"_a)
        .def("cancel", &cancel, "peer"_a, "tag"_a)
        .def(
            "drop_streams",
            [](NativeTransport& self, int peer, uint64_t first, uint64_t stop) {
                self.peer(peer).receiver.drop_streams(first, stop);
            },
            "peer"_a, "first"_a, "stop"_a)
        .def("send_frame", asking(&PeerTransport::send_frame), "peer"_a, "kind"_a, py::kw_only(), "tag"_a = 0,
             "message_bytes"_a = 0, "payload"_a = std::string())
        .def("flush_control", asking(&PeerTransport::flush_control), "peer"_a);
}

void bind_counters(TransportClass& bound) {
    bound.def("counters", &counters_of, "peer"_a)
        .def(
            "memory_counters",
            [](NativeTransport& self, int rank) {
                const PeerTransport& peer = self.peer(rank);
                return std::tuple(peer.sender.fetched_bytes, peer.sender.num_fetched, peer.receiver.fetched_bytes,
                                  peer.receiver.num_fetched);
            },
            "peer"_a)
        .def(
            "credit_bytes",
            [](NativeTransport& self, int rank) {
                const PeerTransport& peer = self.peer(rank);
                return std::pair(peer.sender.credit_bytes(), peer.receiver.used_credit_bytes());
            },
            "peer"_a)
        .def("heard_s", &NativeTransport::heard_s, "peer"_a)
        .def(
            "progress", [](NativeTransport& self, int peer) { return self.peer(peer).progress; }, "peer"_a)
        .def(
            "num_unsent", [](NativeTransport& self, int peer) { return self.peer(peer).sender.num_unsent; }, "peer"_a)
        .def(
            "num_unacknowledged", [](NativeTransport& self, int peer) { return self.peer(peer).num_unacknowledged(); },
            "peer"_a)
        .def(
            "num_pending", [](NativeTransport& self, int peer) { return self.peer(peer).receiver.num_pending(); },
            "peer"_a)
        .def(
            "unexpected_bytes",
            [](NativeTransport& self, int peer) { return self.peer(peer).receiver.unexpected_bytes; }, "peer"_a)
        .def(
            "num_dropped", [](NativeTransport& self, int peer) { return self.peer(peer).receiver.num_dropped; },
            "peer"_a);
}

std::vector<std::pair<int, uint32_t>> wait_unlocked(int epoll_fd, double timeout_s,
                                                    const std::vector<NativeTransport*>& transports) {
    std::vector<std::pair<int, uint32_t>> found;
    without_lock([&] { found = wait(epoll_fd, timeout_s, transports); });
    return found;
}

void bind_splices(py::module_& module) {
    py::class_<Splices>(module, "Splices")
        .def(py::init<>())
        .def("add", &Splices::add, "one"_a, "other"_a)
        .def("take_ended", &Splices::take_ended)
        .def("fileno", &Splices::fileno)
        .def_property_readonly("num_open", &Splices::num_open)
        .def_property_readonly("num_bytes", &Splices::num_bytes)
        .def("close", &Splices::close);
}

}  // namespace

void bind_transport(py::module_& module) {
    TransportClass bound(module, "NativeTransport");
    bound.def(py::init(&make_transport), "scheduler"_a, py::kw_only(), "kernel"_a = py::none(), py::keep_alive<1, 3>())
        .def("fileno", &NativeTransport::fileno)
        .def("close",
             [](NativeTransport& self) {
                 self.close();
                 release_dropped();
             })
        .def_property(
            "tells_drained", [](NativeTransport& self) { return self.state().tells_drained; },
            [](NativeTransport& self, bool tells) { self.state().tells_drained = tells; })
        .def_readwrite("is_served", &NativeTransport::is_served)
        .def_property_readonly("has_events", &NativeTransport::has_events)
        .def("poll", [](NativeTransport& self) { without_lock([&] { self.poll(); }); })
        .def("finish",
             [](NativeTransport& self) {
                 without_lock([&] { self.finish(); });
                 self.wake();
             })
        .def("next_event", &event_of);
    bind_connections(bound);
    bind_broken_connections(bound);
    bind_messages(bound);
    bind_counters(bound);
    bind_splices(module);
    module.def("wait", &wait_unlocked, "epoll_fd"_a, "timeout_s"_a, "native_transports"_a);
}

}  // namespace syncline
