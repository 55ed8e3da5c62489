// What module.cpp puts into monarch_backend._native besides its own.
#pragma once

#include <pybind11/pybind11.h>

namespace monarch {

void bind_records(pybind11::module_& m);        // csrc/records/
void bind_shared_memory(pybind11::module_& m);  // csrc/shm/
void bind_channels(pybind11::module_& m);       // csrc/channel/
void bind_telemetry(pybind11::module_& m);      // csrc/telemetry/
void bind_memory(pybind11::module_& m);         // csrc/memory/
void bind_memory_streams(pybind11::module_& m);  // access over TCP
void bind_gpu_memory(pybind11::module_& m);      // its part that knows GPUs
void bind_verbs(pybind11::module_& m);           // csrc/verbs/, Linux only: it reads its own memory through the kernel

}  // namespace monarch
