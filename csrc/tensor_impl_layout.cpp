#include "tensor_impl_layout.h"

#include <atomic>
#include <cstddef>

#include "unmapped_guard.h"
#include "interpreter_exit.h"

namespace monarch {

namespace {

// Set once, by the module of Python that uses them, before other threads can import it.
PyTypeObject* tensor_type = nullptr;
PyObject* forbid_writing = nullptr;  // torch's
PyObject* error = nullptr;           // the class; its instances have a message without arguments
bool is_reserved = false;            // else tensors keep their address, which is null
Py_ssize_t to_impl = 0, to_storage = 0, to_address = 0, to_resizable = 0;

std::atomic<bool> is_called{false};  // whether `after_use` is going to be
std::atomic<bool> is_mains{false};   // whether the error is going to be the main thread's

bool has_gil() {
  // Not PyGILState_Check(): after a second interpreter has existed, it is always true.
#if PY_VERSION_HEX >= 0x030d0000
  const PyThreadState* running = PyThreadState_GetUnchecked();
#else
  const PyThreadState* running = _PyThreadState_UncheckedGet();
#endif
  return running != nullptr && running == PyGILState_GetThisThreadState();
}

bool raise_here() { return PyThreadState_SetAsyncExc(PyThread_get_thread_ident(), error) == 1; }

// On the main thread, between two instructions of Python.
int after_use(void*) {
  is_called = false;
  close_absent_memory();
  if (!is_mains.exchange(false)) return 0;
  PyErr_SetNone(error);
  return -1;
}

// In a signal handler, for an instruction of C++ that used the address: this thread holds no lock of CPython then, and
// nothing here allocates. A thread with the GIL gets the error itself, at its next Python instruction. A thread that
// has released the GIL would have to wait for it, possibly with locks held, and OpenMP's threads have no Python state:
// then the main thread gets the error.
ErrorTarget on_use() {
  if (Py_IsInitialized() == 0) return ErrorTarget::kNone;
  const bool is_raised = has_gil() && raise_here();
  if (!is_raised) is_mains = true;
  if (!is_called.exchange(true) && Py_AddPendingCall(after_use, nullptr) != 0) {
    is_called = false;
    if (!is_raised) return ErrorTarget::kNone;
  }
  return is_raised || on_main_thread() ? ErrorTarget::kThisThread : ErrorTarget::kAnotherThread;
}

template <class T = void*>
T* in(void* object, Py_ssize_t at) {
  return reinterpret_cast<T*>(static_cast<char*>(object) + at);
}

// Null where a tensor has none, or with an error.
void* storage_of(PyObject* tensor) {
  if (tensor_type == nullptr || !PyObject_TypeCheck(tensor, tensor_type)) {
    return PyErr_SetString(PyExc_TypeError, "no tensor"), nullptr;
  }
  void* impl = is_reserved ? *in(tensor, to_impl) : nullptr;
  return impl == nullptr ? nullptr : *in(impl, to_storage);
}

PyObject* set_up(PyObject*, PyObject* args) {
  PyObject *type, *forbid, *raised;
  if (!PyArg_ParseTuple(args, "O!OO", &PyType_Type, &type, &forbid, &raised)) return nullptr;
  if (!PyExceptionClass_Check(raised)) return PyErr_SetString(PyExc_TypeError, "no class of errors"), nullptr;
  Py_INCREF(args);  // never released: the module keeps the callbacks
  tensor_type = reinterpret_cast<PyTypeObject*>(type), forbid_writing = forbid, error = raised;
  Py_RETURN_NONE;
}

PyObject* reserve(PyObject*, PyObject* args) {
  if (!PyArg_ParseTuple(args, "nnnn", &to_impl, &to_storage, &to_address, &to_resizable)) return nullptr;
  if (error == nullptr) return PyErr_SetString(PyExc_RuntimeError, "set_up_tensor_address() comes first"), nullptr;
  is_reserved = reserve_absent_memory(on_use);
  return PyBool_FromLong(is_reserved);
}

PyObject* close(PyObject*, PyObject*) {
  close_absent_memory();
  Py_RETURN_NONE;
}

// `report` handles all other errors that Python cannot raise.
PyObject* on_unraisable(PyObject* report, PyObject* unraisable) {
  PyObject* type = PyObject_GetAttrString(unraisable, "exc_type");
  if (type == nullptr) return nullptr;
  const bool is_ours = type == error;
  Py_DECREF(type);
  if (is_ours && raise_here()) Py_RETURN_NONE;
  return PyObject_CallOneArg(report, unraisable);
}

PyMethodDef hook = {"raise_address_error_again", on_unraisable, METH_O, nullptr};

PyObject* new_hook(PyObject*, PyObject* report) { return PyCFunction_New(&hook, report); }

PyObject* no_pointer(PyObject*, PyObject* tensor) {
  close_absent_memory();  // in case the pending call was lost
  void* storage = storage_of(tensor);
  if (storage == nullptr && PyErr_Occurred() != nullptr) return nullptr;
  if (storage != nullptr && *in(storage, to_address) == nullptr) {
    *in(storage, to_address) = absent_address();
    *in<bool>(storage, to_resizable) = false;  // torch would copy from there
  }
  return PyObject_CallOneArg(forbid_writing, tensor);
}

PyObject* without_address(PyObject*, PyObject* tensor) {
  void* storage = storage_of(tensor);
  if (storage == nullptr && PyErr_Occurred() != nullptr) return nullptr;
  if (storage != nullptr && is_absent_address(*in(storage, to_address))) {
    *in(storage, to_address) = nullptr;
    *in<bool>(storage, to_resizable) = true;
  }
  Py_RETURN_NONE;
}

PyMethodDef functions[] = {
    {"set_up_tensor_address", set_up, METH_VARARGS, nullptr},
    {"reserve_tensor_address", reserve, METH_VARARGS, nullptr},
    {"close_absent_memory", close, METH_NOARGS, nullptr},
    {"unraisable_hook", new_hook, METH_O, nullptr},
    {"no_pointer", no_pointer, METH_O, nullptr},
    {"without_address", without_address, METH_O, nullptr},
    {nullptr, nullptr, 0, nullptr},
};

}  // namespace

bool add_tensor_address(PyObject* module) { return PyModule_AddFunctions(module, functions) == 0; }

}  // namespace monarch
