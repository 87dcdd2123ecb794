// Memory that ranks of one machine share, for Python, which opens it and says who meets in which call.
#include <bit>
#include <optional>
#include <string>
#include <vector>

#include "bindings.hpp"
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
}

}  // namespace syncline
