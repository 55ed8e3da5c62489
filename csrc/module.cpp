// The Python face of the core: bindings only, no logic. monarch_backend/_native.pyi mirrors it.
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include "bind.h"
#include "interpreter_exit.h"
#include "machine.h"

PYBIND11_MODULE(_native, m) {
  m.doc() = "monarch_backend's compiled core; knows no torch";
  m.def("boot_id", &monarch::boot_id, "Identity of the running kernel; empty where it has none.");
  m.def("ipc_namespace", &monarch::ipc_namespace, "Identity of this process's IPC namespace; empty where there are none.");
  m.def("kernel_features", &monarch::kernel_features, pybind11::call_guard<pybind11::gil_scoped_release>(),
        "Abilities of the kernel, each tried: memfd_create, pidfd_open, process_vm_readv, futex.");
  m.def("cpu_features", &monarch::cpu_features, "Vector extensions of this processor that the core can use.");
  m.def("park_threads_at_exit", &monarch::park_threads_at_exit,
        "From now on a C++ thread that wants the GIL of an ending interpreter sleeps instead of aborting the process.");
  m.def("keep_for_ever", [](pybind11::object instance) { instance.release(); },
        "Never free this object, also not while the interpreter ends.");
#if defined(__linux__)
  monarch::bind_shared_memory(m);
  monarch::bind_channels(m);
  monarch::bind_memory(m);
  monarch::bind_memory_streams(m);
  monarch::bind_gpu_memory(m);
#endif
}
