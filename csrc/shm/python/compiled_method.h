// What fast paths have in common: the callable that stands in the place of a method, and how plain tensors are read.
#pragma once

#include <atomic>
#include <cstdint>
#include <memory>
#include <optional>
#include <string>

#include <pybind11/pybind11.h>

#include "shm/operation.h"

namespace monarch {

pybind11::object get(PyObject* from, const pybind11::str& name);
pybind11::object ask(PyObject* whom, const pybind11::str& method);  // without arguments
bool is_list_of(PyObject* list, Py_ssize_t count);
// The only item of a list; empty if it is no such list.
pybind11::object only_item_of(PyObject* list);

// Python's exceptions for C++'s.
template <class Body>
PyObject* guarded(Body&& body) {
  try {
    return body();
  } catch (pybind11::error_already_set& error) {
    error.restore();
  } catch (const pybind11::builtin_exception& error) {
    error.set_error();
  } catch (const std::exception& error) {
    PyErr_SetString(PyExc_RuntimeError, error.what());
  }
  return nullptr;
}

// Without a GIL, another thread may get a reference to an object of pybind11 at any time.
#if defined(Py_GIL_DISABLED)
inline constexpr bool reuses_works = false;
#else
inline constexpr bool reuses_works = true;
#endif
inline constexpr std::uint64_t most_kept_bytes = 64 << 10;  // of tensors that a work which is used again keeps alive

// A tensor that the core takes as it is.
struct Plain {
  std::uintptr_t address;
  std::uint64_t bytes;
  PyObject* dtype;  // lives as long as torch
};

// What it must know of torch (which this library is built without), from process_group/_c10d_internals.py.
struct TorchNames {
  explicit TorchNames(const pybind11::tuple& all);

  bool is_plain(PyObject* tensor) const;  // only its type
  std::optional<Plain> plain(PyObject* tensor) const;
  // False if it is not among `dtypes`.
  bool set_dtype(PyObject* dtype, Header& header) const;
  // Whether torch's dispatcher has observers, which must see every operation.
  bool watched() const;

  pybind11::object tensor, parameter;  // the types of plain tensors
  pybind11::object strided;            // the layout
  pybind11::object sum;                // the ReduceOp
  pybind11::dict ops;                  // value of any ReduceOp.RedOpType -> ReduceOp
  pybind11::dict dtypes;               // dtype -> Dtype, of those that the core takes as they are
  pybind11::list watches;              // callables that return false while torch's dispatcher has no observers
  pybind11::dict profiler;             // a module's, with `_is_profiler_enabled`
};

class CompiledMethod {
 public:
  // For `owner`'s method `name`.
  CompiledMethod(const pybind11::object& owner, const std::string& name) : owner_(owner), name_(name) {}
  virtual ~CompiledMethod() = default;

  PyObject* call(PyObject* const* args, Py_ssize_t count, PyObject* keywords);
  // From now on every call takes the method.
  void end() { ended_.store(true, std::memory_order_relaxed); }
  // The method that this replaces.
  pybind11::object method() const;

 protected:
  // The result; nothing if the method must handle the call.
  virtual std::optional<pybind11::object> in_short(PyObject* const* args, Py_ssize_t count, PyObject* keywords) = 0;

 private:
  pybind11::weakref owner_;
  pybind11::str name_;
  std::atomic<bool> ended_{false};
};

pybind11::object make_callable(std::unique_ptr<CompiledMethod> method);

// When the module is made: Python code that runs in the initialisation of a static variable could wait for a thread that
// waits for the same variable.
void set_up_compiled_methods();

}  // namespace monarch
