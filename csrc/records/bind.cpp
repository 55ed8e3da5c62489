#include "../bind.h"

#include "py_handle.h"

namespace monarch {

void bind_records(pybind11::module_& m) {
  if (!records::add_call_sites(m.ptr()) || !records::add_issue(m.ptr()) || !records::add_execute(m.ptr())) {
    throw pybind11::error_already_set();
  }
}

}  // namespace monarch
