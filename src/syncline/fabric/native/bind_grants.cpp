// The grant scheduler for Python, which gives it its sizes; its events and grants are for tests.
#include <string>
#include <tuple>
#include <unordered_map>
#include <utility>
#include <vector>

#include "bindings.hpp"
#include "eager_credit.hpp"
#include "grants.hpp"

namespace py = pybind11;
using namespace pybind11::literals;

namespace syncline {

namespace {

// A `sizing.GrantWindow`, by its numbers.
GrantWindow window_of(const py::object& window) {
    return {window.attr("most_bytes").cast<int64_t>(), window.attr("least_bytes").cast<int64_t>(),
            window.attr("bytes_per_s").cast<double>()};
}

// The same `sizing.LinkShare` of several senders becomes one share of them all.
std::unordered_map<int, GrantScheduler::Shares> shares_of(const py::dict& shares) {
    std::unordered_map<const PyObject*, std::shared_ptr<LinkShare>> known;
    std::unordered_map<int, GrantScheduler::Shares> found;
    for (const auto& [peer, links] : shares)
        for (const py::handle link : links) {
            auto& share = known[link.ptr()];
            if (!share)
                share = std::make_shared<LinkShare>(
                    link.attr("part_bytes").cast<int64_t>(), link.attr("most_bytes").cast<int64_t>(),
                    link.attr("least_bytes").cast<int64_t>(), link.attr("target_s").cast<double>(),
                    link.attr("tolerated_share").cast<double>(), link.attr("least_judged_bytes").cast<int64_t>());
            found[peer.cast<int>()].push_back(share);
        }
    return found;
}

std::vector<std::tuple<int, uint64_t, int64_t>> grants_of(GrantScheduler& scheduler, double now_s) {
    std::vector<std::tuple<int, uint64_t, int64_t>> found;
    for (const Grant& grant : scheduler.grants(now_s)) found.emplace_back(grant.peer, grant.tag, grant.limit_bytes);
    return found;
}

}  // namespace

void bind_grants(py::module_& module) {
    py::class_<EagerCredit>(module, "EagerCredit")
        .def(py::init<int64_t>(), "credit_bytes"_a)
        .def_readonly("credit_bytes", &EagerCredit::credit_bytes)
        .def_property_readonly("used_bytes", &EagerCredit::used_bytes)
        .def("take", &EagerCredit::take, "cost_bytes"_a)
        .def("consume", &EagerCredit::consume, "cost_bytes"_a);

    py::class_<GrantScheduler, std::shared_ptr<GrantScheduler>>(module, "GrantScheduler")
        .def(py::init([](const py::object& window, int64_t quantum_bytes, std::unordered_map<int, int64_t> sender_bytes,
                         const py::dict& shares) {
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
        .def("lost", &GrantScheduler::lost, "peer"_a, "num_segments"_a)
        .def("forget", &GrantScheduler::forget, "peer"_a, "tag"_a)
        .def("forget_peer", &GrantScheduler::forget_peer, "peer"_a, py::kw_only(), "underway"_a)
        .def("grants", &grants_of, py::kw_only(), "now_s"_a);
}

}  // namespace syncline
