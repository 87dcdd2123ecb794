// Memory that ranks of one machine share, for Python, which opens it and says who meets in which call.
#include <bit>
#include <optional>
#include <string>
#include <tuple>
#include <vector>

#include "bindings.hpp"
#include "inboxes.hpp"
#include "segment.hpp"

namespace py = pybind11;
using namespace pybind11::literals;

namespace syncline {

namespace {

uint8_t* start_of(const py::buffer& memory) { return static_cast<uint8_t*>(memory.request(true).ptr); }

std::optional<bool> make(Segment& self, uint64_t signature, SumOrder& order, uintptr_t address, size_t num_bytes) {
    const py::gil_scoped_release unlocked;
    return self.make(signature, order, std::bit_cast<uint8_t*>(address), num_bytes);
}

bool put(Inboxes& self, int peer, int64_t tag, uint64_t number, uintptr_t address, size_t num_bytes) {
    return self.put(peer, {Inboxes::MESSAGE, tag, number, num_bytes, 0}, std::bit_cast<const uint8_t*>(address));
}

bool offer(Inboxes& self, int peer, int64_t tag, uint64_t number, const py::buffer& message) {
    const auto view = message.request();
    const auto num_bytes = static_cast<size_t>(view.size * view.itemsize);
    return self.put(peer, {Inboxes::OFFER, tag, number, num_bytes, std::bit_cast<uintptr_t>(view.ptr)}, nullptr);
}

bool answer(Inboxes& self, int peer, uint64_t number, size_t num_bytes) {
    return self.put(peer, {Inboxes::TAKEN, 0, number, num_bytes, 0}, nullptr);
}

std::optional<std::tuple<uint64_t, int64_t, uint64_t, size_t, uint64_t>> first(Inboxes& self, int peer) {
    const auto found = self.first(peer);
    if (!found) return std::nullopt;
    return std::make_tuple(found->kind, found->tag, found->number, found->num_bytes, found->address);
}

bool read(Inboxes& self, int peer, uint64_t address, const py::buffer& into) {
    const auto view = into.request(true);
    const py::gil_scoped_release unlocked;
    return self.copy(peer, address, static_cast<uint8_t*>(view.ptr), static_cast<size_t>(view.size * view.itemsize));
}

void take(Inboxes& self, int peer, const py::buffer& into) {
    const auto view = into.request(true);
    self.take(peer, static_cast<uint8_t*>(view.ptr), static_cast<size_t>(view.size * view.itemsize));
}

std::tuple<uint64_t, uint64_t, uint64_t, uint64_t> counts(const Inboxes& self, int peer) {
    const auto& counted = self.counts(peer);
    return {counted.sent_messages, counted.sent_bytes, counted.received_messages, counted.received_bytes};
}

}  // namespace

void bind_segment(py::module_& module) {
    py::class_<SumOrder>(module, "SumOrder")
        .def(py::init<const std::string&, const std::string&, std::vector<int>, int>(), "dtype"_a, "op"_a, "steps"_a,
             "num_ranks"_a);

    py::class_<Segment>(module, "Segment")
        .def(py::init([](const py::buffer& memory, int rank, int num_ranks, size_t payload_bytes, double spin_s) {
                 return Segment(start_of(memory), rank, num_ranks, payload_bytes, spin_s);
             }),
             "memory"_a, py::kw_only(), "rank"_a, "num_ranks"_a, "payload_bytes"_a, "spin_s"_a, py::keep_alive<1, 2>())
        .def_readwrite("number", &Segment::number)
        .def("progress", &Segment::progress, "rank"_a)
        .def("has_header", &Segment::has_header, "rank"_a, "number"_a, "signature"_a)
        .def("is_free", &Segment::is_free, "number"_a)
        .def("put_up", &Segment::put_up, "number"_a, "signature"_a)
        .def("pass_by", &Segment::pass_by, "number"_a)
        .def("finish", &Segment::finish, "number"_a)
        .def("wait", &Segment::wait, "rank"_a, "seen"_a, "timeout_s"_a, py::call_guard<py::gil_scoped_release>())
        .def("make", &make, "signature"_a, "order"_a, "address"_a, "num_bytes"_a);

    py::class_<Inboxes>(module, "Inboxes")
        .def(py::init([](const py::buffer& memory, int rank, int num_ranks, double spin_s) {
                 return Inboxes(start_of(memory), rank, num_ranks, spin_s);
             }),
             "memory"_a, py::kw_only(), "rank"_a, "num_ranks"_a, "spin_s"_a, py::keep_alive<1, 2>())
        .def_static("size_bytes", &Inboxes::size_bytes, "num_ranks"_a)
        .def_property_readonly("num_changes", &Inboxes::num_changes)
        .def("put", &put, "peer"_a, "tag"_a, "number"_a, "address"_a, "num_bytes"_a)
        .def("first", &first, "peer"_a)
        .def("offer", &offer, "peer"_a, "tag"_a, "number"_a, "message"_a)
        .def("answer", &answer, "peer"_a, "number"_a, "num_bytes"_a)
        .def("take", &take, "peer"_a, "into"_a)
        .def(
            "skip", [](Inboxes& self, int peer) { self.take(peer, nullptr, 0); }, "peer"_a)
        .def("read", &read, "peer"_a, "address"_a, "into"_a)
        .def("withdraw", &Inboxes::withdraw)
        .def("be_called", &Inboxes::be_called, "is_so"_a)
        .def("must_call", &Inboxes::must_call, "peer"_a)
        .def("release", &Inboxes::release, "peer"_a, "num_bytes"_a)
        .def("wake", &Inboxes::wake)
        .def("wait", &Inboxes::wait, "seen"_a, "timeout_s"_a, py::kw_only(), "num_bytes"_a = 0,
             py::call_guard<py::gil_scoped_release>())
        .def("counts", &counts, "peer"_a);
}

}  // namespace syncline
