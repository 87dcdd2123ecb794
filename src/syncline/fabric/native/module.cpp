// `syncline.fabric._native`: what `exchange.hpp` and `grants.hpp` have, for Python.
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <string>
#include <unordered_map>
#include <utility>
#include <vector>

#include "crc32.hpp"
#include "exchange.hpp"
#include "grants.hpp"

namespace py = pybind11;
using namespace pybind11::literals;
using namespace syncline;

namespace {

Memory hold(const py::handle& object, int flags) {
    Memory memory;
    if (PyObject_GetBuffer(object.ptr(), &memory.view, flags) < 0) throw py::error_already_set();
    return memory;
}

[[noreturn]] void fail_assertion(const std::string& text) {
    PyErr_SetString(PyExc_AssertionError, text.c_str());
    throw py::error_already_set();
}

PyObject* keep(const py::object& callback) { return callback.is_none() ? nullptr : callback.inc_ref().ptr(); }

// A `grant_window.GrantWindow`, by its numbers.
GrantWindow window_of(const py::object& window) {
    return {window.attr("most_bytes").cast<int64_t>(), window.attr("least_bytes").cast<int64_t>(),
            window.attr("bytes_per_s").cast<double>()};
}

// The same `link_share.LinkShare` of several senders becomes one share of them all.
std::unordered_map<int, GrantScheduler::Shares> shares_of(const py::dict& shares) {
    std::unordered_map<const PyObject*, std::shared_ptr<LinkShare>> known;
    std::unordered_map<int, GrantScheduler::Shares> found;
    for (const auto& [peer, links] : shares)
        for (const py::handle link : links) {
            auto& share = known[link.ptr()];
            if (!share)
                share = std::make_shared<LinkShare>(link.attr("part_bytes").cast<int64_t>(),
                                                    link.attr("most_bytes").cast<int64_t>(),
                                                    link.attr("target_s").cast<double>());
            found[peer.cast<int>()].push_back(share);
        }
    return found;
}

py::object event_of(Exchange& exchange) {
    if (!exchange.has_events()) return py::none();
    Event event = exchange.next_event();
    if (event.object) return py::make_tuple(int{event.kind}, py::reinterpret_steal<py::object>(event.object));
    return py::make_tuple(int{event.kind}, event.peer, event.tag, event.number, event.other, py::bytes(event.text),
                          event.serial);
}

using Counters = std::vector<std::tuple<int, int64_t, int64_t, int64_t, int64_t, int64_t, int64_t>>;

Counters counters_of(const Peer& peer) {
    Counters counters;
    if (peer.control.fd >= 0) counters.emplace_back(CONTROL_CLASS, 0, 0, 0, 0, peer.control.overhead_bytes, 0);
    for (const auto& connection : peer.data)
        counters.emplace_back(connection->connection_class, connection->sent_bytes, connection->sent_messages,
                              connection->received_bytes, connection->received_messages, connection->overhead_bytes,
                              peer.queued_bytes[static_cast<size_t>(connection->connection_class)]);
    return counters;
}

int64_t num_pending(const Peer& peer) {
    auto pending = static_cast<int64_t>(peer.posted.size());
    for (const auto& [tag, receive] : peer.arriving) pending += !receive.is_cancelled;
    for (const auto& [tag, target] : peer.eager) pending += target.where == EagerTarget::TO_RECEIVE;
    return pending;
}

}  // namespace

PYBIND11_MODULE(_native, module) {
    module.doc() = "One rank's messages with all its peers, without the interpreter.";

    module.def(
        "crc32",
        [](const py::buffer& data, uint32_t before) {
            Memory memory = hold(data, PyBUF_SIMPLE);
            const uint32_t crc = crc32(memory.data(), static_cast<size_t>(memory.num_bytes()), before);
            PyBuffer_Release(&memory.view);
            return crc;
        },
        "data"_a, "before"_a = 0);

    module.def(
        "wait",
        [](int epoll_fd, double timeout_s, const std::vector<Exchange*>& exchanges) {
            std::vector<std::pair<int, uint32_t>> found;
            {
                py::gil_scoped_release unlocked;
                found = wait(epoll_fd, timeout_s, exchanges);
            }
            for (Exchange* exchange : exchanges) exchange->garbage().sweep();
            return found;
        },
        "epoll_fd"_a, "timeout_s"_a, "exchanges"_a);

    py::class_<GrantScheduler, std::shared_ptr<GrantScheduler>>(module, "GrantScheduler")
        .def(py::init([](const py::object& window, int64_t quantum_bytes,
                         std::unordered_map<int, int64_t> sender_bytes, const py::dict& shares) {
                 return std::make_shared<GrantScheduler>(window_of(window), quantum_bytes, std::move(sender_bytes),
                                                         shares_of(shares));
             }),
             py::kw_only(), "window"_a, "quantum_bytes"_a, "sender_bytes"_a = std::unordered_map<int, int64_t>{},
             "shares"_a = py::dict())
        .def(
            "resize",
            [](GrantScheduler& self, const py::object& window, int64_t quantum_bytes,
               std::unordered_map<int, int64_t> sender_bytes) {
                self.resize(window_of(window), quantum_bytes, std::move(sender_bytes));
            },
            py::kw_only(), "window"_a, "quantum_bytes"_a, "sender_bytes"_a)
        .def_property_readonly("window_bytes", &GrantScheduler::window_bytes)
        .def_property_readonly("quantum_bytes", &GrantScheduler::quantum_bytes)
        .def_property_readonly("has_wishes", &GrantScheduler::has_wishes)
        .def_readonly("underway_bytes", &GrantScheduler::underway_bytes)
        .def("wish", &GrantScheduler::wish, "peer"_a, "tag"_a, py::kw_only(), "num_bytes"_a, "urgency"_a)
        .def("arrived", &GrantScheduler::arrived, "peer"_a, py::kw_only(), "num_bytes"_a, "urgency"_a, "now_s"_a)
        .def("forget", &GrantScheduler::forget, "peer"_a, "tag"_a)
        .def("forget_peer", &GrantScheduler::forget_peer, "peer"_a, py::kw_only(), "underway"_a)
        .def(
            "grants",
            [](GrantScheduler& self, double now_s) {
                std::vector<std::tuple<int, uint64_t, int64_t>> found;
                for (const Grant& grant : self.grants(now_s)) found.emplace_back(grant.peer, grant.tag, grant.limit_bytes);
                return found;
            },
            py::kw_only(), "now_s"_a);

    py::class_<Exchange>(module, "Exchange")
        .def(py::init<std::shared_ptr<GrantScheduler>>(), "scheduler"_a)
        .def("fileno", &Exchange::fileno)
        .def("close", &Exchange::close)
        .def_readwrite("tells_drained", &Exchange::tells_drained)
        .def_readwrite("is_served", &Exchange::is_served)
        .def_property_readonly("has_work", &Exchange::has_work)
        .def_property_readonly("has_events", &Exchange::has_events)
        .def("add_peer", &Exchange::add_peer, "peer"_a, py::kw_only(), "eager_bytes"_a, "credit_bytes"_a)
        .def("attach_control", &Exchange::attach_control, "peer"_a, "fd"_a)
        .def("attach_data", &Exchange::attach_data, "peer"_a, "fd"_a, py::kw_only(), "chunk_bytes"_a)
        .def("start", &Exchange::start, "peer"_a, "connection_class"_a)
        .def("use", &Exchange::use, "peer"_a, py::kw_only(), "eager_bytes"_a, "chunk_bytes"_a)
        .def("end", &Exchange::end, "peer"_a)
        .def("close_peer",
             [](Exchange& self, int peer) {
                 self.close_peer(peer);
                 self.garbage().sweep();
             })
        .def(
            "send",
            [](Exchange& self, int peer, uint64_t tag, const py::object& payload, uint32_t signature, int64_t urgency,
               int connection_class, const py::object& on_sent) {
                if (self.peer(peer).asked.count(tag))
                    fail_assertion("message " + std::to_string(tag) + " is sent twice");
                self.send(peer, tag, hold(payload, PyBUF_SIMPLE), signature, urgency, connection_class, keep(on_sent));
            },
            "peer"_a, "tag"_a, "payload"_a, py::kw_only(), "signature"_a, "urgency"_a, "connection_class"_a,
            "on_sent"_a)
        .def(
            "receive",
            [](Exchange& self, int peer, uint64_t tag, const py::object& destination, uint32_t signature,
               int64_t urgency, const py::object& on_received) {
                const Peer& from = self.peer(peer);
                const auto arriving = from.arriving.find(tag);
                if (from.posted.count(tag) || (arriving != from.arriving.end()))
                    fail_assertion("tag " + std::to_string(tag) + " of rank " + std::to_string(peer) +
                                   " is posted twice");
                self.receive(peer, tag, hold(destination, PyBUF_WRITABLE), signature, urgency, keep(on_received));
            },
            "peer"_a, "tag"_a, "destination"_a, py::kw_only(), "signature"_a, "urgency"_a, "on_received"_a)
        .def("cancel",
             [](Exchange& self, int peer, uint64_t tag) {
                 self.cancel(peer, tag);
                 self.garbage().sweep();
             })
        .def("send_frame", &Exchange::send_frame, "peer"_a, "kind"_a, py::kw_only(), "tag"_a, "message_bytes"_a,
             "payload"_a)
        .def("flush_control", &Exchange::flush_control, "peer"_a)
        .def("take_heard", &Exchange::take_heard, "peer"_a)
        .def("poll",
             [](Exchange& self, int timeout_ms) {
                 {
                     py::gil_scoped_release unlocked;
                     self.poll(timeout_ms);
                 }
                 self.garbage().sweep();
             })
        .def("finish",
             [](Exchange& self) {
                 {
                     py::gil_scoped_release unlocked;
                     self.finish();
                 }
                 self.garbage().sweep();
             })
        .def("next_event", &event_of)
        .def("let_read_us", [](Exchange& self, int peer) { self.peer(peer).reads_us = true; })
        .def("let_be_read", [](Exchange& self, int peer) { self.peer(peer).can_be_read = true; })
        .def("fetch_target",
             [](Exchange& self, int peer, uint64_t tag, int64_t serial, int64_t limit_bytes) -> py::object {
                 auto [data, start, num_bytes] = self.fetch_target(peer, tag, serial, limit_bytes);
                 if (!data) return py::none();
                 return py::make_tuple(py::memoryview::from_memory(data, num_bytes), start);
             })
        .def("fetched",
             [](Exchange& self, int peer, uint64_t tag, int64_t serial, int64_t num_bytes) {
                 const int64_t rest = self.fetched(peer, tag, serial, num_bytes);
                 self.garbage().sweep();
                 return rest;
             })
        .def("counters", [](Exchange& self, int peer) { return counters_of(self.peer(peer)); })
        .def("memory_counters",
             [](Exchange& self, int rank) {
                 const Peer& peer = self.peer(rank);
                 return std::tuple(peer.sent_fetched_bytes, peer.num_sent_fetched, peer.fetched_bytes, peer.num_fetched);
             })
        .def("num_unsent", [](Exchange& self, int peer) { return self.peer(peer).num_unsent; })
        .def("num_pending", [](Exchange& self, int peer) { return num_pending(self.peer(peer)); })
        .def("unexpected_bytes", [](Exchange& self, int peer) { return self.peer(peer).unexpected_bytes; });
}
