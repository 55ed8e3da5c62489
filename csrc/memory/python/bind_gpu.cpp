// The Python face of GPU memory: bindings only, no logic. Addresses are numbers: whoever calls keeps what they are of alive.
#include "bind.h"

#include "memory/gpu.h"

namespace py = pybind11;

namespace monarch {

void bind_gpu_memory(py::module_& m) {
  using Release = py::call_guard<py::gil_scoped_release>;
  const auto at = [](std::uint64_t address) { return reinterpret_cast<const void*>(static_cast<std::uintptr_t>(address)); };

  py::register_exception<gpu::Failure>(m, "GpuFailure", PyExc_RuntimeError);
  m.def("gpu_open", &gpu::open, Release(), "Open the driver, CUDA's or HIP's; raises GpuFailure where there is none. Twice is as good as once.");
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
