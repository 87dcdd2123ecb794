// `syncline.fabric._native`: one rank's messages with all its peers, without the interpreter.
//
// Where to begin reading: `transport.hpp` says what all of it is for, and the README beside this file in which order
// the others follow.
#include "bindings.hpp"

PYBIND11_MODULE(_native, module) {
    module.doc() = "One rank's messages with all its peers, without the interpreter.";
    syncline::bind_checks(module);
    syncline::bind_codec(module);
    syncline::bind_kernel(module);
    syncline::bind_grants(module);
    syncline::bind_transport(module);
    syncline::bind_slices(module);
    syncline::bind_segment(module);
}
