// The kernel for Python, which takes the machine's place where jobs are simulated.
//
// Who calls it may have let go of the interpreter lock: each method takes it.
#include <algorithm>
#include <string>
#include <utility>
#include <vector>

#include "bindings.hpp"
#include "kernel.hpp"

namespace py = pybind11;
using namespace pybind11::literals;

namespace syncline {

namespace {

class PythonKernel final : public Kernel {
   public:
    double now_s() const override { return ask<double>("now_s"); }
    bool has_threads() const override { return false; }  // nothing that is done here may depend on which runs first
    ssize_t receive(int fd, iovec* parts, size_t num_parts) override { return move("receive", fd, parts, num_parts); }
    ssize_t send(int fd, iovec* parts, size_t num_parts) override { return move("send", fd, parts, num_parts); }
    void wake_at(int fd, int num_bytes) override { tell("wake_at", fd, num_bytes); }
    int64_t resent_segments(int) const override { return 0; }
    int fileno() const override { return ask<int>("fileno"); }
    void watch(int fd, bool, uint32_t events) override { tell("watch", fd, events); }
    void forget(int fd) override { tell("forget", fd); }
    void wake() override { tell("wake"); }
    void close() override { tell("close"); }

    int wait(int set_fd, epoll_event* ready, int max_ready, int) override {
        const auto found = ask<std::vector<std::pair<int, uint32_t>>>("wait", set_fd);
        const int num_ready = std::min(max_ready, static_cast<int>(found.size()));
        for (int place = 0; place < num_ready; ++place) {
            ready[place].data.fd = found[static_cast<size_t>(place)].first;
            ready[place].events = found[static_cast<size_t>(place)].second;
        }
        return num_ready;
    }

   private:
    template <typename Answer, typename... Arguments>
    Answer ask(const char* name, const Arguments&... arguments) const {
        const py::gil_scoped_acquire locked;
        const py::function method = py::get_override(static_cast<const Kernel*>(this), name);
        if (!method) throw py::type_error(std::string("a Kernel needs a method ") + name);
        return method(arguments...).template cast<Answer>();
    }

    template <typename... Arguments>
    void tell(const char* name, const Arguments&... arguments) const {
        const py::gil_scoped_acquire locked;
        ask<py::object>(name, arguments...);
    }

    ssize_t move(const char* name, int fd, const iovec* parts, size_t num_parts) {
        const py::gil_scoped_acquire locked;
        py::list views;
        for (size_t place = 0; place < num_parts; ++place)
            views.append(
                py::memoryview::from_memory(parts[place].iov_base, static_cast<py::ssize_t>(parts[place].iov_len)));
        return ask<ssize_t>(name, fd, views);
    }
};

}  // namespace

void bind_kernel(py::module_& module) {
    py::class_<Kernel, PythonKernel, std::shared_ptr<Kernel>>(module, "Kernel").def(py::init_alias<>());
}

}  // namespace syncline
