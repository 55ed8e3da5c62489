#include "shm/python/work_wait.h"

#include <structmember.h>

#include <chrono>
#include <cstddef>

#include "shm/python/compiled_method.h"
#include "shm/python/fast_paths.h"

namespace py = pybind11;

namespace monarch {

namespace {

struct Names {
  py::str operation{"_operation"}, group{"_group"}, engine{"_engine"}, native{"native"}, future{"_future"}, wait_at_length{"wait_at_length"};
  py::object timedelta = py::module_::import("datetime").attr("timedelta"), no_timeout = timedelta(0);  // c10d's kNoTimeout
};

const Names& names() {
  static const auto* const all = new Names;
  return *all;
}

constexpr auto soon = std::chrono::milliseconds(2);
constexpr auto most_sleep = std::chrono::seconds(1);  // a signal may come just before the thread sleeps

bool is_done(const Operation& operation) { return operation.done.load(std::memory_order_acquire); }

PyObject* item(PyObject* state, const py::str& name) { return PyDict_GetItemWithError(state, name.ptr()); }

py::object wait(PyObject* self) {
  const auto state = py::reinterpret_steal<py::object>(PyObject_GenericGetDict(self, nullptr));
  if (!state) throw py::error_already_set();
  PyObject* const held = item(state.ptr(), names().operation);
  if (held == nullptr) return py::bool_(true);  // done when it was made
  const auto operation = py::handle(held).cast<std::shared_ptr<Operation>>();
  if (!is_done(*operation)) {
    const py::object native = get(get(self, names().group).ptr(), names().native);
    auto& group = native.cast<Group&>();
    wait_briefly(group, *operation);
    wait_on(group, *operation);
  }
  PyObject* const engine = item(state.ptr(), names().engine);
  if (operation->failure || engine == nullptr || item(state.ptr(), names().future) != nullptr) return ask(self, names().wait_at_length);
  {
    Engine& thread = py::handle(engine).cast<Engine&>();
    const py::gil_scoped_release release;
    thread.take_back(*operation);
  }
  forget(*operation);
  return py::bool_(true);
}

// A type of its own, as that of fast paths, for C++ callers of a work.
struct WaitMethod {
  PyObject_HEAD
  vectorcallfunc vectorcall;
  PyObject* method;  // the one in Python that this replaces
};

// C++ callers always give a timeout, which is zero for none.
bool has_no_timeout(PyObject* const* args, Py_ssize_t count) {
  return count == 1 || (count == 2 && reinterpret_cast<PyObject*>(Py_TYPE(args[1])) == names().timedelta.ptr() &&
                        py::handle(args[1]).equal(names().no_timeout));
}

PyObject* call_wait(PyObject*, PyObject* const* args, std::size_t count, PyObject* keywords) {
  return guarded([&]() -> PyObject* {
    if (PyVectorcall_NARGS(count) == 0) throw py::type_error("wait() is a method of a work");
    if (keywords == nullptr && has_no_timeout(args, PyVectorcall_NARGS(count))) return wait(args[0]).release().ptr();
    return PyObject_VectorcallMethod(names().wait_at_length.ptr(), args, count, keywords);
  });
}

PyObject* bind_wait(PyObject* self, PyObject* work, PyObject*) {
  if (work == nullptr) return Py_NewRef(self);
  return PyMethod_New(self, work);
}

// All attributes are the method's: its name, its documentation, and by `__wrapped__` its signature.
PyObject* attribute(PyObject* self, PyObject* name) {
  PyObject* const method = reinterpret_cast<WaitMethod*>(self)->method;
  if (PyUnicode_CompareWithASCIIString(name, "__wrapped__") == 0) return Py_NewRef(method);
  if (PyUnicode_CompareWithASCIIString(name, "__class__") == 0) return PyObject_GenericGetAttr(self, name);
  return PyObject_GetAttr(method, name);
}

void free_wait(PyObject* self) {
  PyTypeObject* const type = Py_TYPE(self);
  Py_XDECREF(reinterpret_cast<WaitMethod*>(self)->method);
  type->tp_free(self);
  Py_DECREF(type);
}

PyTypeObject* make_wait_type() {
  static PyMemberDef members[] = {
      {"__vectorcalloffset__", T_PYSSIZET, offsetof(WaitMethod, vectorcall), READONLY, nullptr}, {nullptr, 0, 0, 0, nullptr}};
  static PyType_Slot slots[] = {{Py_tp_call, reinterpret_cast<void*>(PyVectorcall_Call)},
                                {Py_tp_dealloc, reinterpret_cast<void*>(free_wait)},
                                {Py_tp_descr_get, reinterpret_cast<void*>(bind_wait)},
                                {Py_tp_getattro, reinterpret_cast<void*>(attribute)},
                                {Py_tp_members, members},
                                {0, nullptr}};
  static PyType_Spec spec{"monarch_backend._native.WaitMethod", sizeof(WaitMethod), 0,
                          Py_TPFLAGS_DEFAULT | Py_TPFLAGS_HAVE_VECTORCALL | Py_TPFLAGS_METHOD_DESCRIPTOR, slots};
  auto* const type = reinterpret_cast<PyTypeObject*>(PyType_FromSpec(&spec));
  if (type == nullptr) throw py::error_already_set();
  return type;
}

PyTypeObject* wait_type = nullptr;

}  // namespace

void hand_over(Engine& engine, const std::shared_ptr<Group>& group, const std::shared_ptr<Operation>& operation) {
  const py::gil_scoped_release release;
  engine.submit_async(group, operation, nullptr);
}

void wait_briefly(Group& group, Operation& operation) {
  const py::gil_scoped_release release;
  group.wait_briefly(operation, soon);
}

void wait_on(Group& group, Operation& operation) {
  while (!is_done(operation)) {
    if (PyErr_CheckSignals() != 0) throw py::error_already_set();
    const py::gil_scoped_release release;
    group.wait_asleep(operation, Clock::now() + most_sleep);
  }
}

py::object make_work_wait(const py::object& method) {
  auto* const self = reinterpret_cast<WaitMethod*>(wait_type->tp_alloc(wait_type, 0));
  if (self == nullptr) throw py::error_already_set();
  self->vectorcall = call_wait;
  self->method = py::object(method).release().ptr();
  return py::reinterpret_steal<py::object>(reinterpret_cast<PyObject*>(self));
}

void set_up_work_wait() {
  names();
  wait_type = make_wait_type();
}

}  // namespace monarch
