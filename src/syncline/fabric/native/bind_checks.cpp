// Checksums and codes of frames for the tests, which make frames by hand, and what makes them fast.
#include <string>

#include "bindings.hpp"
#include "crc32.hpp"
#include "frame_checks.hpp"
#include "processor.hpp"

namespace py = pybind11;
using namespace pybind11::literals;

namespace syncline {

namespace {

const uint8_t* header_in(const Memory& memory, size_t num_bytes) {
    if (memory.num_bytes < static_cast<int64_t>(num_bytes)) throw py::value_error("a header is larger");
    return memory.data;
}

void add(FrameChecks& self, const py::object& part) {
    const Memory bytes = memory_of(part, PyBUF_SIMPLE);
    self.add(bytes.data, static_cast<size_t>(bytes.num_bytes));
}

py::dict named_instruction_sets() {
    const InstructionSets& sets = instruction_sets();
    return py::dict("aes"_a = sets.aes, "crc32_folding"_a = sets.crc32_folding,
                    "wide_crc32_folding"_a = sets.wide_crc32_folding, "avx2"_a = sets.avx2, "f16c"_a = sets.f16c);
}

}  // namespace

void bind_checks(py::module_& module) {
    module.def(
        "crc32",
        [](const py::object& data, uint32_t before) {
            const Memory bytes = memory_of(data, PyBUF_SIMPLE);
            return crc32(bytes.data, static_cast<size_t>(bytes.num_bytes), before);
        },
        "data"_a, "before"_a = 0);
    module.def(
        "umac32",
        [](const py::bytes& key, uint64_t nonce, const py::object& message) {
            const Memory bytes = memory_of(message, PyBUF_SIMPLE);
            return Umac(key_of(key)).code_of(bytes.data, static_cast<size_t>(bytes.num_bytes), nonce);
        },
        "key"_a, "nonce"_a, "message"_a);
    module.def("instruction_sets", &named_instruction_sets);

    py::class_<FrameChecks>(module, "KeyedChecks")
        .def(py::init([](const py::bytes& key) {
                 auto checks = std::make_unique<FrameChecks>();
                 checks->use_key(key_of(key));
                 return checks;
             }),
             "key"_a)
        .def("add", &add, "part"_a)
        .def(
            "payload_field",
            [](FrameChecks& self, const py::object& rest) {
                add(self, rest);
                return self.payload_field();
            },
            "rest"_a)
        .def(
            "header_field",
            [](FrameChecks& self, const py::object& body) {
                return self.header_field(header_in(memory_of(body, PyBUF_SIMPLE), HEADER_CRC_PLACE));
            },
            "body"_a)
        .def("next_frame", &FrameChecks::next_frame);
}

}  // namespace syncline
