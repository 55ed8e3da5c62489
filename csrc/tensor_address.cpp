#include "tensor_address.h"

#include <atomic>
#include <cstddef>

#include "absent_memory.h"

namespace monarch {

namespace {

// Set once, with the GIL.
PyTypeObject* tensor_type = nullptr;
PyObject* forbid_writing = nullptr;  // torch's
PyObject* error = nullptr;           // the class; without arguments it says what there is to say
void* address = nullptr;             // null: tensors keep theirs, which is null
Py_ssize_t to_impl = 0, to_storage = 0, to_address = 0;

unsigned long main_thread = 0;

std::atomic<bool> is_called{false};  // whether `raise_in_main_thread` is going to be

// Between two instructions of Python.
int raise_in_main_thread(void*) {
  is_called = false;
  PyErr_SetNone(error);
  return -1;
}

// In a signal handler, of a signal that came at an instruction of C++ that used the address: no lock of CPython's is
// this thread's then, and what is called here allocates nothing.
// A thread that has the GIL gets the error itself, as soon as C++ comes back. One that has released it can't be given it
// without waiting for the GIL, with who knows what locks; one of OpenMP's has no Python: the main thread has the error.
Told on_use() {
  if (Py_IsInitialized() == 0) return Told::kNobody;
  const unsigned long thread = PyThread_get_thread_ident();
  const bool is_told = PyGILState_Check() == 1 && PyThreadState_SetAsyncExc(thread, error) == 1;
  if (is_told) return Told::kThisThread;
  if (!is_called.exchange(true) && Py_AddPendingCall(raise_in_main_thread, nullptr) != 0) {
    is_called = false;
    return Told::kNobody;
  }
  return thread == main_thread ? Told::kThisThread : Told::kAnotherThread;
}

void** in(void* object, Py_ssize_t at) { return reinterpret_cast<void**>(static_cast<char*>(object) + at); }

PyObject* set_up(PyObject*, PyObject* args) {
  PyObject *type, *forbid, *raised;
  if (!PyArg_ParseTuple(args, "O!OO", &PyType_Type, &type, &forbid, &raised)) return nullptr;
  if (tensor_type != nullptr) return PyErr_SetString(PyExc_RuntimeError, "set up already"), nullptr;
  if (!PyExceptionClass_Check(raised)) return PyErr_SetString(PyExc_TypeError, "no class of errors"), nullptr;
  tensor_type = reinterpret_cast<PyTypeObject*>(Py_NewRef(type));
  forbid_writing = Py_NewRef(forbid), error = Py_NewRef(raised);
  Py_RETURN_NONE;
}

PyObject* reserve(PyObject*, PyObject* args) {
  if (!PyArg_ParseTuple(args, "knnn", &main_thread, &to_impl, &to_storage, &to_address)) return nullptr;
  if (error == nullptr) return PyErr_SetString(PyExc_RuntimeError, "set_up_tensor_address() comes first"), nullptr;
  address = absent_memory(on_use);
  return PyBool_FromLong(address != nullptr);
}

PyObject* close(PyObject*, PyObject*) {
  close_absent_memory();
  Py_RETURN_NONE;
}

PyObject* no_pointer(PyObject*, PyObject* tensor) {
  if (tensor_type == nullptr || !PyObject_TypeCheck(tensor, tensor_type)) {
    return PyErr_SetString(PyExc_TypeError, "no tensor"), nullptr;
  }
  PyObject* forbidden = PyObject_CallOneArg(forbid_writing, tensor);
  if (forbidden == nullptr || address == nullptr) return forbidden;
  void* impl = *in(tensor, to_impl);
  void* storage = impl == nullptr ? nullptr : *in(impl, to_storage);
  if (storage != nullptr && *in(storage, to_address) == nullptr) *in(storage, to_address) = address;
  return forbidden;
}

PyMethodDef functions[] = {
    {"set_up_tensor_address", set_up, METH_VARARGS, nullptr},
    {"reserve_tensor_address", reserve, METH_VARARGS, nullptr},
    {"close_absent_memory", close, METH_NOARGS, nullptr},
    {"no_pointer", no_pointer, METH_O, nullptr},
    {nullptr, nullptr, 0, nullptr},
};

}  // namespace

bool add_tensor_address(PyObject* module) { return PyModule_AddFunctions(module, functions) == 0; }

}  // namespace monarch
