// The Python face of the stand-in of table.cpp; goes with it.
#include "bind.h"

#include <pybind11/stl.h>

#include <tuple>

#include "memory/table.h"

namespace py = pybind11;

namespace monarch {

void bind_memory_table(py::module_& m) {
  using Numbers = std::tuple<std::uint32_t, std::uint64_t, std::uint64_t>;
  py::class_<Table, std::shared_ptr<Table>>(m, "Table")
      .def(py::init<std::shared_ptr<Host>>())
      .def("add", [](Table& table, std::uintptr_t data, std::uint64_t bytes, bool writable) {
        const Ticket ticket = table.add(reinterpret_cast<void*>(data), bytes, writable);
        return Numbers{ticket.slot, ticket.epoch, ticket.key};
      })
      .def("drop", [](Table& table, const Numbers& numbers, double seconds) {
        const py::gil_scoped_release release;
        return static_cast<int>(table.drop({std::get<0>(numbers), std::get<1>(numbers), std::get<2>(numbers)}, seconds));
      });
}

}  // namespace monarch
