// Codes of numbers for Python: `codec.hpp` says what they are.
#include "bindings.hpp"
#include "codec.hpp"

namespace py = pybind11;
using namespace pybind11::literals;

namespace syncline {

namespace {

struct Numbers {
    float* data;
    size_t count;
};

Numbers numbers_in(const Memory& memory) {
    if (reinterpret_cast<uintptr_t>(memory.data) % alignof(float)) throw py::value_error("numbers are aligned");
    return {reinterpret_cast<float*>(memory.data), static_cast<size_t>(memory.num_bytes) / sizeof(float)};
}

void check_codes(int bits, const Memory& codes, const Numbers& numbers) {
    if (!encoder_of(bits)) throw py::value_error("there are codes of 4, 8 and 16 bits");
    if (static_cast<size_t>(codes.num_bytes) != coded_bytes(bits, numbers.count))
        throw py::value_error("there are other numbers than codes");
}

void encode(int bits, const py::object& values, const py::object& error, const py::object& codes) {
    const Memory from = memory_of(values, PyBUF_SIMPLE), lacking = memory_of(error, PyBUF_WRITABLE);
    const Memory to = memory_of(codes, PyBUF_WRITABLE);
    const Numbers numbers = numbers_in(from), errors = numbers_in(lacking);
    if (errors.count != numbers.count) throw py::value_error("each number has an error");
    check_codes(bits, to, numbers);
    without_lock([&] { encoder_of(bits)(numbers.data, errors.data, numbers.count, to.data); });
}

void decode(int bits, const py::object& codes, const py::object& into) {
    const Memory from = memory_of(codes, PyBUF_SIMPLE), sums = memory_of(into, PyBUF_WRITABLE);
    const Numbers numbers = numbers_in(sums);
    check_codes(bits, from, numbers);
    without_lock([&] { decoder_of(bits)(from.data, numbers.count, numbers.data); });
}

}  // namespace

void bind_codec(py::module_& module) {
    module.def("coded_bytes", &coded_bytes, "bits"_a, "count"_a);
    module.def("encode", &encode, "bits"_a, "values"_a, "error"_a, "codes"_a);
    module.def("decode", &decode, "bits"_a, "codes"_a, "into"_a);
}

}  // namespace syncline
