// Mutex for state that the GIL protects on ordinary builds of CPython. There it is empty and costs nothing; on the build
// without a GIL it is a PyMutex.
//
// PyMutex, because calls of CPython may detach a thread that holds the lock. A thread that waits for it is detached,
// too, so that it cannot block a stop of all threads. Never call Python code with the lock: not for its own sake, and
// because a GilMutex is not recursive.
#pragma once

#include <Python.h>

namespace monarch {

class GilMutex {
 public:
  GilMutex() = default;
  GilMutex(const GilMutex&) = delete;
  GilMutex& operator=(const GilMutex&) = delete;

#if defined(Py_GIL_DISABLED)
  void lock() { PyMutex_Lock(&mutex_); }
  void unlock() { PyMutex_Unlock(&mutex_); }

 private:
  PyMutex mutex_{};
#else
  void lock() {}
  void unlock() {}
#endif
};

// A lock on an object, as the methods of lists and dicts take it. CPython suspends it while the thread is detached.
class ObjectLock {
 public:
  ObjectLock(const ObjectLock&) = delete;
  ObjectLock& operator=(const ObjectLock&) = delete;
#if defined(Py_GIL_DISABLED)
  explicit ObjectLock(PyObject* object) { PyCriticalSection_Begin(&section_, object); }
  ~ObjectLock() { PyCriticalSection_End(&section_); }

 private:
  PyCriticalSection section_;
#else
  explicit ObjectLock(PyObject*) {}
  ~ObjectLock() {}
#endif
};

// An item of a list as a new reference; nullptr without an error behind its end.
inline PyObject* new_reference_to_item(PyObject* list, Py_ssize_t i) {
#if defined(Py_GIL_DISABLED)
  PyObject* const item = PyList_GetItemRef(list, i);
  if (item == nullptr) PyErr_Clear();  // the list has become shorter
  return item;
#else
  if (i >= PyList_GET_SIZE(list)) return nullptr;
  PyObject* const item = PyList_GET_ITEM(list, i);
  Py_INCREF(item);
  return item;
#endif
}

// The value of a key of a dict as a new reference; nullptr with an error, or without one where the key is not there.
inline PyObject* new_reference_to_value(PyObject* dict, PyObject* key) {
#if PY_VERSION_HEX >= 0x030d0000
  PyObject* value = nullptr;
  PyDict_GetItemRef(dict, key, &value);
  return value;
#else
  PyObject* const value = PyDict_GetItemWithError(dict, key);
  Py_XINCREF(value);
  return value;
#endif
}

}  // namespace monarch
