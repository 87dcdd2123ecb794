// `syncline.fabric._native`: what `exchange.hpp` and `grants.hpp` have, for Python.
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <string>
#include <unordered_map>
#include <utility>
#include <vector>

#include "calls.hpp"
#include "crc32.hpp"
#include "exchange.hpp"
#include "grants.hpp"

namespace py = pybind11;
using namespace pybind11::literals;
using namespace syncline;

namespace {

Memory hold(const py::handle& object, int flags) {
    Py_buffer view;
    if (PyObject_GetBuffer(object.ptr(), &view, flags) < 0) throw py::error_already_set();
    return {static_cast<uint8_t*>(view.buf), view.len, std::make_shared<Hold>(view)};
}

[[noreturn]] void fail_assertion(const std::string& text) {
    PyErr_SetString(PyExc_AssertionError, text.c_str());
    throw py::error_already_set();
}

Completion call(const py::object& callback) {
    Completion completion;
    if (!callback.is_none()) completion.object = callback.inc_ref().ptr();
    return completion;
}

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

std::vector<uint32_t> numbers_of(const py::handle& object, const char* name) {
    return object.attr(name).cast<std::vector<uint32_t>>();
}

// A `runtime.dataflow.Dataflow`; rank k of its call is rank members[k] of the exchange.
std::shared_ptr<Dataflow> dataflow_of(const py::object& described, const std::vector<int>& members) {
    auto dataflow = std::make_shared<Dataflow>();
    for (const py::handle each : described.attr("operations")) {
        const int peer = each.attr("peer").cast<int>();
        dataflow->operations.push_back({
            static_cast<Kind>(py::int_(each.attr("kind")).cast<int>()),
            each.attr("first").cast<size_t>(),
            each.attr("last").cast<size_t>(),
            peer,
            peer < 0 ? -1 : members.at(static_cast<size_t>(peer)),
            static_cast<uint64_t>(each.attr("index").cast<int64_t>()),
            numbers_of(each, "then"),
            numbers_of(each, "applies"),
            numbers_of(each, "before"),
            numbers_of(each, "after"),
            each.attr("replaces").cast<bool>(),
        });
    }
    dataflow->num_waits = numbers_of(described, "num_waits");
    dataflow->first = numbers_of(described, "first");
    return dataflow;
}

std::shared_ptr<Layout> layout_of(const std::vector<std::shared_ptr<Dataflow>>& dataflows,
                                  std::vector<std::vector<size_t>> offsets, const std::string& dtype) {
    const Addition addition = addition_of(dtype);
    if (!addition) throw py::value_error("numbers of " + dtype + " are not added here");
    if (dataflows.size() != offsets.size()) throw py::value_error("each slice has one dataflow");
    auto layout = std::make_shared<Layout>();
    for (size_t place = 0; place < offsets.size(); ++place)
        layout->slices.push_back(Slice{dataflows[place], std::move(offsets[place]), addition});
    return layout;
}

std::shared_ptr<CallRun> open_call(std::shared_ptr<Walker> walker, std::shared_ptr<Layout> layout,
                                   const py::object& buffer, uint64_t tag, uint64_t tag_step, uint32_t signature,
                                   int64_t urgency, int connection_class, int64_t number, const py::object& on_done) {
    return std::make_shared<CallRun>(std::move(walker), std::move(layout), hold(buffer, PyBUF_WRITABLE),
                                     MessageSettings{tag, signature, urgency, connection_class}, tag_step, number,
                                     on_done.inc_ref().ptr());
}

// Run what touches no Python object, and then release what it is done with.
template <typename Action>
void without_lock(Action action) {
    {
        py::gil_scoped_release unlocked;
        action();
    }
    garbage().sweep();
}

// After Python has asked for something: no loop sleeps before that is done and told.
void settle(Exchange& exchange) {
    exchange.stir();
    garbage().sweep();
}

// A method by which Python asks for something.
template <typename... Arguments>
auto asking(void (Exchange::*method)(Arguments...)) {
    return [method](Exchange& self, Arguments... arguments) {
        (self.*method)(arguments...);
        settle(self);
    };
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
            const py::buffer_info info = data.request();
            return crc32(info.ptr, static_cast<size_t>(info.size * info.itemsize), before);
        },
        "data"_a, "before"_a = 0);

    module.def(
        "wait",
        [](int epoll_fd, double timeout_s, const std::vector<Exchange*>& exchanges) {
            std::vector<std::pair<int, uint32_t>> found;
            without_lock([&] { found = wait(epoll_fd, timeout_s, exchanges); });
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

    module.def("can_add", [](const std::string& dtype) { return addition_of(dtype) != nullptr; }, "dtype"_a);

    py::class_<Dataflow, std::shared_ptr<Dataflow>>(module, "Dataflow")
        .def(py::init(&dataflow_of), "dataflow"_a, "members"_a);

    py::class_<Layout, std::shared_ptr<Layout>>(module, "Layout")
        .def(py::init(&layout_of), "dataflows"_a, "offsets"_a, "dtype"_a);

    py::class_<TemporaryPool, std::shared_ptr<TemporaryPool>>(module, "TemporaryPool")
        .def(py::init<int64_t>(), "max_kept_bytes"_a)
        .def_readonly("used_bytes", &TemporaryPool::used_bytes)
        .def_readonly("kept_bytes", &TemporaryPool::kept_bytes);

    py::class_<Sliced, SlicedPtr>(module, "Sliced")
        .def(py::init<int64_t, int, int64_t, size_t>(), "urgency"_a, py::kw_only(), "connection_class"_a, "number"_a,
             "num_slices"_a)
        .def_property_readonly("has_more", &Sliced::has_more)
        .def_readonly("num_active", &Sliced::num_active);

    py::class_<SliceOrder>(module, "SliceOrder")
        .def(py::init<int64_t>(), "max_inflight_bytes"_a)
        .def_property_readonly("inflight_bytes", &SliceOrder::inflight_bytes)
        .def("add", &SliceOrder::add, "call"_a)
        .def("began", &SliceOrder::began, "call"_a, "num_bytes"_a)
        .def("ended", &SliceOrder::ended, "call"_a, "num_bytes"_a)
        .def("next", &SliceOrder::next);

    py::class_<Walker, std::shared_ptr<Walker>>(module, "SliceExecutor")
        .def(py::init<std::shared_ptr<Exchange>, std::shared_ptr<TemporaryPool>, int64_t>(), "exchange"_a, "pool"_a,
             "max_inflight_bytes"_a)
        .def_property_readonly("inflight_bytes", &Walker::inflight_bytes)
        .def_readonly("num_active_slices", &Walker::num_active_slices);

    py::class_<CallRun, std::shared_ptr<CallRun>>(module, "CallRun")
        .def(py::init(&open_call), "walker"_a, "layout"_a, "buffer"_a, py::kw_only(), "tag"_a, "tag_step"_a,
             "signature"_a, "urgency"_a, "connection_class"_a, "number"_a, "on_done"_a)
        .def("start",
             [](CallRun& self) {
                 without_lock([&] { self.start(); });
                 self.exchange().stir();
             })
        .def("stop",
             [](CallRun& self) {
                 self.stop();
                 settle(self.exchange());
             })
        .def_property_readonly("has_more", &CallRun::has_more)
        .def("awaited_peers", &CallRun::awaited_peers)
        .def("open_peers", &CallRun::open_peers);

    py::class_<Exchange, std::shared_ptr<Exchange>>(module, "NativeTransport")
        .def(py::init<std::shared_ptr<GrantScheduler>>(), "scheduler"_a)
        .def("fileno", &Exchange::fileno)
        .def("close", &Exchange::close)
        .def_readwrite("tells_drained", &Exchange::tells_drained)
        .def_readwrite("is_served", &Exchange::is_served)
        .def_property_readonly("has_events", &Exchange::has_events)
        .def("add_peer", &Exchange::add_peer, "peer"_a, py::kw_only(), "eager_bytes"_a, "credit_bytes"_a)
        .def("attach_control", &Exchange::attach_control, "peer"_a, "fd"_a)
        .def("attach_data", &Exchange::attach_data, "peer"_a, "fd"_a, py::kw_only(), "chunk_bytes"_a)
        .def("start", asking(&Exchange::start), "peer"_a, "connection_class"_a)
        .def("use", &Exchange::use, "peer"_a, py::kw_only(), "eager_bytes"_a, "chunk_bytes"_a)
        .def("end", asking(&Exchange::end), "peer"_a)
        .def("close_peer", asking(&Exchange::close_peer), "peer"_a)
        .def(
            "send",
            [](Exchange& self, int peer, uint64_t tag, const py::object& payload, uint32_t signature, int64_t urgency,
               int connection_class, const py::object& on_sent) {
                if (self.peer(peer).asked.count(tag))
                    fail_assertion("message " + std::to_string(tag) + " is sent twice");
                self.send(peer, tag, hold(payload, PyBUF_SIMPLE), signature, urgency, connection_class, call(on_sent));
                settle(self);
            },
            "peer"_a, "tag"_a, "payload"_a, py::kw_only(), "signature"_a, "urgency"_a, "connection_class"_a,
            "on_sent"_a = py::none())
        .def(
            "receive",
            [](Exchange& self, int peer, uint64_t tag, const py::object& destination, uint32_t signature,
               int64_t urgency, const py::object& on_received) {
                const Peer& from = self.peer(peer);
                const auto arriving = from.arriving.find(tag);
                if (from.posted.count(tag) || (arriving != from.arriving.end()))
                    fail_assertion("tag " + std::to_string(tag) + " of rank " + std::to_string(peer) +
                                   " is posted twice");
                self.receive(peer, tag, hold(destination, PyBUF_WRITABLE), signature, urgency, call(on_received));
                settle(self);
            },
            "peer"_a, "tag"_a, "destination"_a, py::kw_only(), "signature"_a, "urgency"_a, "on_received"_a)
        .def("cancel", asking(&Exchange::cancel), "peer"_a, "tag"_a)
        .def("send_frame", asking(&Exchange::send_frame), "peer"_a, "kind"_a, py::kw_only(), "tag"_a = 0,
             "message_bytes"_a = 0, "payload"_a = std::string())
        .def("flush_control", asking(&Exchange::flush_control), "peer"_a)
        .def("take_heard", &Exchange::take_heard, "peer"_a)
        .def("poll", [](Exchange& self) { without_lock([&] { self.poll(); }); })
        .def("finish",
             [](Exchange& self) {
                 without_lock([&] { self.finish(); });
                 self.stir();
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
                 settle(self);
                 return rest;
             })
        .def("counters", [](Exchange& self, int peer) { return counters_of(self.peer(peer)); })
        .def("memory_counters",
             [](Exchange& self, int rank) {
                 const Peer& peer = self.peer(rank);
                 return std::tuple(peer.sent_fetched_bytes, peer.num_sent_fetched, peer.fetched_bytes, peer.num_fetched);
             })
        .def("heard_s", &Exchange::heard_s, "peer"_a)
        .def("keep_beating",
             [](Exchange& self, double interval_s, double limit_s) { self.heartbeat.start(interval_s, limit_s); },
             py::kw_only(), "interval_s"_a, "limit_s"_a)
        .def("progress", [](Exchange& self, int peer) { return self.peer(peer).progress; }, "peer"_a)
        .def("num_unsent", [](Exchange& self, int peer) { return self.peer(peer).num_unsent; })
        .def("num_pending", [](Exchange& self, int peer) { return num_pending(self.peer(peer)); })
        .def("unexpected_bytes", [](Exchange& self, int peer) { return self.peer(peer).unexpected_bytes; });
}
