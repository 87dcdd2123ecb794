// Calls and their slices for Python, which begins calls and hears of their ends.
#include <string>
#include <utility>
#include <vector>

#include "additions.hpp"
#include "bindings.hpp"
#include "slice_executor.hpp"

namespace py = pybind11;
using namespace pybind11::literals;

namespace syncline {

namespace {

std::vector<uint32_t> numbers_of(const py::handle& object, const char* name) {
    return object.attr(name).cast<std::vector<uint32_t>>();
}

// A `runtime.dataflow.Dataflow`; rank k of its call is rank members[k] of the transport.
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

Addition known_addition(const std::string& dtype, const std::string& op) {
    const Addition addition = addition_of(dtype, op);
    if (!addition) throw py::value_error("there is no " + op + " of " + dtype + " here");
    return addition;
}

void add(const std::string& dtype, const std::string& op, const py::object& into, const py::object& other) {
    const Addition addition = known_addition(dtype, op);
    const Memory sums = memory_of(into, PyBUF_WRITABLE), values = memory_of(other, PyBUF_SIMPLE);
    if (sums.num_bytes != values.num_bytes) throw py::value_error("what is added must be of the same size");
    addition(sums.data, values.data, static_cast<size_t>(sums.num_bytes));
}

std::shared_ptr<Layout> layout_of(const std::vector<std::shared_ptr<Dataflow>>& dataflows,
                                  std::vector<std::vector<size_t>> offsets, const std::string& dtype,
                                  const std::string& op) {
    const Addition addition = known_addition(dtype, op);
    if (dataflows.size() != offsets.size()) throw py::value_error("each slice has one dataflow");
    auto layout = std::make_shared<Layout>();
    for (size_t place = 0; place < offsets.size(); ++place)
        layout->slices.push_back(Slice{dataflows[place], std::move(offsets[place]), addition});
    return layout;
}

std::shared_ptr<CallRun> open_call(std::shared_ptr<SliceExecutor> executor, std::shared_ptr<Layout> layout,
                                   const py::object& buffer, uint64_t tag, uint64_t tag_step, uint32_t signature,
                                   int64_t urgency, int connection_class, int64_t number, const py::object& on_done) {
    return std::make_shared<CallRun>(std::move(executor), std::move(layout), memory_of(buffer, PyBUF_WRITABLE),
                                     MessageSettings{tag, signature, urgency, connection_class}, tag_step, number,
                                     reference_to(on_done));
}

void bind_order(py::module_& module) {
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
}

void bind_call(py::module_& module) {
    py::class_<CallRun, std::shared_ptr<CallRun>>(module, "CallRun")
        .def(py::init(&open_call), "executor"_a, "layout"_a, "buffer"_a, py::kw_only(), "tag"_a, "tag_step"_a,
             "signature"_a, "urgency"_a, "connection_class"_a, "number"_a, "on_done"_a)
        .def("start",
             [](CallRun& self) {
                 without_lock([&] { self.start(); });
                 self.transport().wake();
             })
        .def("stop",
             [](CallRun& self) {
                 self.stop();
                 settle(self.transport());
             })
        .def_property_readonly("has_more", &CallRun::has_more)
        .def("awaited_peers", &CallRun::awaited_peers)
        .def("open_peers", &CallRun::open_peers);
}

}  // namespace

void bind_slices(py::module_& module) {
    module.def(
        "can_add", [](const std::string& dtype, const std::string& op) { return addition_of(dtype, op) != nullptr; },
        "dtype"_a, "op"_a);
    module.def("add", &add, "dtype"_a, "op"_a, "into"_a, "other"_a);

    py::class_<Dataflow, std::shared_ptr<Dataflow>>(module, "Dataflow")
        .def(py::init(&dataflow_of), "dataflow"_a, "members"_a);

    py::class_<Layout, std::shared_ptr<Layout>>(module, "Layout")
        .def(py::init(&layout_of), "dataflows"_a, "offsets"_a, "dtype"_a, "op"_a);

    py::class_<TemporaryPool, std::shared_ptr<TemporaryPool>>(module, "TemporaryPool")
        .def(py::init<int64_t>(), "max_kept_bytes"_a)
        .def_readonly("used_bytes", &TemporaryPool::used_bytes)
        .def_readonly("kept_bytes", &TemporaryPool::kept_bytes);

    py::class_<SliceExecutor, std::shared_ptr<SliceExecutor>>(module, "SliceExecutor")
        .def(py::init<std::shared_ptr<NativeTransport>, std::shared_ptr<TemporaryPool>, int64_t>(),
             "native_transport"_a, "pool"_a, "max_inflight_bytes"_a)
        .def_property_readonly("inflight_bytes", &SliceExecutor::inflight_bytes)
        .def_readonly("num_active_slices", &SliceExecutor::num_active_slices);

    bind_order(module);
    bind_call(module);
}

}  // namespace syncline
