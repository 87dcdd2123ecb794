// What the transport owns of Python's: objects and buffers, each with exactly one owner.
//
// The transport runs without the interpreter lock and may lose its last use of an object there. Destructors therefore
// touch nothing of Python's: they queue what they owned, and `release_dropped` gives it back where the lock is held.
#pragma once

#define PY_SSIZE_T_CLEAN
#include <Python.h>

#include <utility>

namespace syncline {

// Owns one reference to a Python object, or none. Move-only: nothing is counted twice, and nothing is counted here.
class PythonReference {
   public:
    PythonReference() = default;
    // Takes over a reference that the caller owns.
    explicit PythonReference(PyObject* owned) noexcept : object_(owned) {}
    PythonReference(PythonReference&& other) noexcept : object_(std::exchange(other.object_, nullptr)) {}
    PythonReference& operator=(PythonReference&& other) noexcept {
        if (this != &other) {
            reset();
            object_ = std::exchange(other.object_, nullptr);
        }
        return *this;
    }
    PythonReference(const PythonReference&) = delete;
    PythonReference& operator=(const PythonReference&) = delete;
    ~PythonReference() { reset(); }

    explicit operator bool() const noexcept { return object_ != nullptr; }
    void reset() noexcept;
    // Hands the reference to the caller, who owns it from now on.
    [[nodiscard]] PyObject* release() noexcept { return std::exchange(object_, nullptr); }

   private:
    PyObject* object_ = nullptr;
};

// Owns a view of Python's memory, which stays where it is for so long.
class PythonBuffer {
   public:
    explicit PythonBuffer(const Py_buffer& view) : view_(view) {}
    ~PythonBuffer();
    PythonBuffer(const PythonBuffer&) = delete;
    PythonBuffer& operator=(const PythonBuffer&) = delete;
    PythonBuffer(PythonBuffer&&) = delete;
    PythonBuffer& operator=(PythonBuffer&&) = delete;

   private:
    Py_buffer view_;
};

// Give back to Python what was dropped since the last time, by any thread. The caller holds the interpreter lock.
void release_dropped();

}  // namespace syncline
