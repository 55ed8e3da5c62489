// Helpers of this folder. They use CPython's C API directly, because a record has no time for pybind11.
#pragma once
#define PY_SSIZE_T_CLEAN
#include <Python.h>
#include <structmember.h>

#include <utility>

#include "gil_mutex.h"

namespace monarch::records {

// A reference of ours; empty where an error is set.
class Owned {
 public:
  Owned() = default;
  Owned(Owned&& other) noexcept : seen_(other.release()) {}
  Owned& operator=(Owned&& other) noexcept {
    PyObject* before = std::exchange(seen_, other.release());
    Py_XDECREF(before);
    return *this;
  }
  ~Owned() { Py_XDECREF(seen_); }
  explicit operator bool() const { return seen_ != nullptr; }
  PyObject* get() const { return seen_; }
  PyObject* release() { return std::exchange(seen_, nullptr); }

 private:
  friend Owned own(PyObject* made);
  PyObject* seen_ = nullptr;
};

inline Owned own(PyObject* made) {
  Owned found;
  found.seen_ = made;
  return found;
}

inline Owned share(PyObject* seen) {
  Py_XINCREF(seen);
  return own(seen);
}

// The number, as a new reference, of the place in the program that runs now.
PyObject* current_call_site();

// Each puts its part into the module; false with an error.
bool add_call_sites(PyObject* module);
bool add_issue(PyObject* module);
bool add_execute(PyObject* module);

}  // namespace monarch::records
