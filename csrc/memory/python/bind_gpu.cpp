// Python bindings of GPU memory, without logic. Addresses are numbers; the caller keeps their memory alive.
#include "bind.h"

#include <pybind11/stl.h>

#include "memory/gpu.h"
#include "memory/python/shapes.h"

namespace py = pybind11;

namespace monarch {

void bind_gpu_memory(py::module_& m) {
  using Release = py::call_guard<py::gil_scoped_release>;
  const auto at = [](std::uint64_t address) { return reinterpret_cast<const void*>(static_cast<std::uintptr_t>(address)); };

  py::register_exception<gpu::Failure>(m, "GpuFailure", PyExc_RuntimeError);
  py::class_<gpu::Pinned, std::shared_ptr<gpu::Pinned>>(m, "PinnedMemory", py::buffer_protocol(),
                                                        "Memory of the host that GPUs' drivers copy to and from straight.")
      .def(py::init([](int device, std::uint64_t bytes) {
             const py::gil_scoped_release release;
             return std::make_shared<gpu::Pinned>(device, bytes);
           }),
           py::arg("device"), py::arg("nbytes"))
      .def_property_readonly("address", [](const gpu::Pinned& pinned) { return reinterpret_cast<std::uintptr_t>(pinned.data()); })
      .def_property_readonly("nbytes", &gpu::Pinned::bytes)
      .def_buffer([](gpu::Pinned& pinned) {
        return py::buffer_info(reinterpret_cast<unsigned char*>(pinned.data()), static_cast<py::ssize_t>(pinned.bytes()));
      });
  py::class_<gpu::Copies>(m, "GpuCopies", "Copies between a GPU's memory and the host's, on two streams.")
      .def(py::init<int>(), py::arg("device"))
      .def_readonly_static("streams", &gpu::Copies::stream_count)
      .def("begin", [](gpu::Copies& copies, int stream, bool write, std::uint64_t host, const PySegments& parts) {
        for (const Segment& part : segments_of(parts)) {
          char* const there = reinterpret_cast<char*>(host);
          copies.begin(stream, write ? part.local : there, write ? there : part.local, part.bytes);
          host += part.bytes;
        }
      }, Release(), py::arg("stream"), py::arg("to_gpu"), py::arg("host"), py::arg("parts"))
      .def("finish", &gpu::Copies::finish, Release(), py::arg("stream"));
  m.def("gpu_open", &gpu::open, Release(), py::arg("libraries"), "Open the first driver library that works, CUDA's or HIP's. Later calls do nothing.");
  m.def("gpu_library", &gpu::library, "The driver's library that was opened, or an empty string.");
  m.def("gpu_device_of", [at](std::uint64_t address) { return gpu::device_of(at(address)); }, py::arg("address"),
        "The number of the GPU whose memory that is, -1 for none; before gpu_open nobody has any.");
  m.def("gpu_allocation_of", [at](std::uint64_t address) {
    const gpu::Range range = gpu::allocation_of(at(address));
    return py::make_tuple(range.address, range.bytes);
  }, py::arg("address"), "Address and bytes of the allocation that this lies in.");
  m.def("gpu_wait_for_stream", &gpu::wait_for_stream, Release(), py::arg("device"), py::arg("stream"), "Until it is done with what it was asked for.");
  m.def("gpu_dma_buf", [](std::uint64_t address, std::uint64_t bytes) { return gpu::dma_buf_of({address, bytes}); }, py::arg("address"),
        py::arg("nbytes"), "A new descriptor of the dma-buf of this range, of whole pages.");
}

}  // namespace monarch
