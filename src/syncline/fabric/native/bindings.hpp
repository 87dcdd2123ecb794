// What the files that offer this code to Python share: each `bind_*` adds its classes to the module.
//
// Every function that Python calls holds the interpreter lock when it begins and when it returns. Those that may run
// long let go of it in between, in `without_lock`, and touch no Python object there.
#pragma once

#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <algorithm>
#include <memory>
#include <string>

#include "memory.hpp"
#include "python_reference.hpp"
#include "transport.hpp"

namespace syncline {

void bind_kernel(pybind11::module_& module);
void bind_checks(pybind11::module_& module);
void bind_codec(pybind11::module_& module);
void bind_grants(pybind11::module_& module);
void bind_transport(pybind11::module_& module);
void bind_slices(pybind11::module_& module);
void bind_segment(pybind11::module_& module);

// A Python buffer, which stays where it is as long as the memory is held; `flags` as PyObject_GetBuffer takes them.
inline Memory memory_of(const pybind11::handle& object, int flags) {
    Py_buffer view;
    if (PyObject_GetBuffer(object.ptr(), &view, flags) < 0) throw pybind11::error_already_set();
    return {static_cast<uint8_t*>(view.buf), view.len, std::make_shared<PythonBuffer>(view)};
}

// The 16 bytes of a key.
inline Aes::Block key_of(const std::string& bytes) {
    Aes::Block key;
    if (bytes.size() != key.size()) throw pybind11::value_error("a key of frames has 16 bytes");
    std::copy(bytes.begin(), bytes.end(), key.begin());
    return key;
}

// A new reference; none for None.
inline PythonReference reference_to(const pybind11::object& object) {
    return object.is_none() ? PythonReference() : PythonReference(object.inc_ref().ptr());
}

// Run what touches no Python object, and then release what it is done with.
template <typename Action>
void without_lock(Action action) {
    {
        const pybind11::gil_scoped_release unlocked;
        action();
    }
    release_dropped();
}

// After Python has asked for something: no loop sleeps before that is done and told.
inline void settle(NativeTransport& transport) {
    transport.wake();
    release_dropped();
}

}  // namespace syncline
