// `syncline.fabric._native`: one rank's messages with all its peers, without the interpreter.
//
// Where to begin reading: `transport.hpp` says what all of it is for, and the README beside this file in which order
// the others follow.
#include "bindings.hpp"
#include "crc32.hpp"

namespace py = pybind11;
using namespace pybind11::literals;

PYBIND11_MODULE(_native, module) {
    module.doc() = "One rank's messages with all its peers, without the interpreter.";
    module.def(
        "crc32",
        [](const py::buffer& data, uint32_t before) {
            const py::buffer_info info = data.request();
            return syncline::crc32(info.ptr, static_cast<size_t>(info.size * info.itemsize), before);
        },
        "data"_a, "before"_a = 0);
    syncline::bind_kernel(module);
    syncline::bind_grants(module);
    syncline::bind_transport(module);
    syncline::bind_slices(module);
}
