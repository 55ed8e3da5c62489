// Python bindings of the core, without logic. monarch_backend/_native.pyi has the same contents.
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <array>
#include <cstring>
#include <stdexcept>

#include "unmapped_guard.h"
#include "bind.h"
#include "interpreter_exit.h"
#include "host_facts.h"
#include "mt19937.h"
#include "platform/system.h"
#include "tensor_impl_layout.h"

namespace {

// Words as 64-bit integers with 32 bits in each, as torch stores them.
int skip_mt19937(const pybind11::buffer& state, int left, std::uint64_t count) {
  const pybind11::buffer_info info = state.request(/*writable=*/true);
  std::array<std::uint64_t, monarch::kMtWords> wide;
  if (info.size * info.itemsize != static_cast<pybind11::ssize_t>(sizeof(wide)) || left < 1 || left > monarch::kMtWords) {
    throw std::invalid_argument("the state of an mt19937 is 624 64-bit words, of which 1 to 624 are left");
  }
  std::memcpy(wide.data(), info.ptr, sizeof(wide));
  {
    const pybind11::gil_scoped_release others_run;
    std::array<std::uint32_t, monarch::kMtWords> words;
    for (int i = 0; i < monarch::kMtWords; ++i) words[i] = static_cast<std::uint32_t>(wide[i]);
    left = monarch::skip_mt19937(words.data(), left, count);
    for (int i = 0; i < monarch::kMtWords; ++i) wide[i] = words[i];
  }
  std::memcpy(info.ptr, wide.data(), sizeof(wide));
  return left;
}

}  // namespace

PYBIND11_MODULE(_native, m, pybind11::mod_gil_not_used()) {
  m.doc() = "monarch_backend's compiled core; knows no torch";
  m.attr("is_portable") = monarch::is_portable;
  m.def("boot_id", &monarch::boot_id, "Identity of the running kernel; empty where it has none.");
  m.def("ipc_namespace", &monarch::ipc_namespace, "Identity of this process's IPC namespace; empty where there are none.");
  m.def("kernel_features", &monarch::kernel_features, pybind11::call_guard<pybind11::gil_scoped_release>(),
        "Abilities of the kernel, each tried: memfd_create, pidfd_open, process_vm_readv, futex.");
  m.def("cpu_features", &monarch::cpu_features, "Vector extensions of this processor that the core can use.");
  m.def("park_threads_at_exit", &monarch::park_threads_at_exit,
        "From now on a C++ thread that wants the GIL of an ending interpreter sleeps instead of aborting the process.");
  m.def("explain_absent_memory", &monarch::explain_absent_memory, pybind11::arg("note"),
        "From now on a process that ends since it used memory that is elsewhere says this on stderr before.");
  if (!monarch::add_tensor_address(m.ptr())) throw pybind11::error_already_set();
  m.def("keep_for_ever", [](pybind11::object instance) { instance.release(); },
        "Never free this object, also not while the interpreter ends.");
  m.def("skip_mt19937", &skip_mt19937, pybind11::arg("words"), pybind11::arg("left"), pybind11::arg("count"),
        "Moves a Mersenne Twister's 624 words, changed in place, behind so many draws; returns how many are left then.");
  monarch::bind_records(m);
  monarch::bind_shared_memory(m);
  monarch::bind_channels(m);
  monarch::bind_telemetry(m);
  monarch::bind_memory(m);
  monarch::bind_memory_streams(m);
  monarch::bind_gpu_memory(m);
#if !defined(MONARCH_PORTABLE)
  monarch::bind_verbs(m);
#endif
}
