// What `python_reference.hpp` declares, and the only part of the transport that gives Python something back.
#include "python_reference.hpp"

#include <mutex>
#include <vector>

namespace syncline {

namespace {

struct Dropped {
    std::mutex mutex;
    std::vector<PyObject*> objects;
    std::vector<Py_buffer> views;
};

// Never destroyed: at the end of the process, others may still drop what they own.
Dropped& dropped() {
    static auto& all = *new Dropped;
    return all;
}

}  // namespace

void PythonReference::reset() noexcept {
    if (!object_) return;
    const std::lock_guard<std::mutex> guard(dropped().mutex);
    dropped().objects.push_back(release());
}

PythonBuffer::~PythonBuffer() {
    const std::lock_guard<std::mutex> guard(dropped().mutex);
    dropped().views.push_back(view_);
}

void release_dropped() {
    std::vector<PyObject*> objects;
    std::vector<Py_buffer> views;
    {
        const std::lock_guard<std::mutex> guard(dropped().mutex);
        objects.swap(dropped().objects);
        views.swap(dropped().views);
    }
    // Neither may be done under the mutex: both can run Python code, which can drop more.
    for (auto& view : views) PyBuffer_Release(&view);
    for (auto* object : objects) Py_DECREF(object);
}

}  // namespace syncline
