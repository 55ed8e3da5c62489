#include "shm/python/compiled_method.h"

#include <structmember.h>

#include <cstddef>
#include <utility>

#include "gil_mutex.h"

namespace py = pybind11;

namespace monarch {

namespace {

// Names of attributes, made once. Never freed, because the interpreter may end first.
struct Names {
  py::str is_cpu{"is_cpu"}, layout{"layout"}, dtype{"dtype"}, is_contiguous{"is_contiguous"}, is_neg{"is_neg"},
      data_ptr{"data_ptr"}, nbytes{"nbytes"}, is_profiler_enabled{"_is_profiler_enabled"};
};

const Names& names() {
  static const auto* const all = new Names;
  return *all;
}

std::uint64_t number(const py::object& value) {
  const unsigned long long result = PyLong_AsUnsignedLongLong(value.ptr());
  if (result == static_cast<unsigned long long>(-1) && PyErr_Occurred() != nullptr) throw py::error_already_set();
  return result;
}

// A type of its own: a built-in function in the place of an override would mean to pybind11 that there is none, and C++
// callers of the group would miss the method.
struct Callable {
  PyObject_HEAD
  vectorcallfunc vectorcall;
  CompiledMethod* method;
};

CompiledMethod& method_of(PyObject* self) { return *reinterpret_cast<Callable*>(self)->method; }

PyObject* call(PyObject* self, PyObject* const* args, std::size_t count, PyObject* keywords) {
  return guarded([&] { return method_of(self).call(args, PyVectorcall_NARGS(count), keywords); });
}

PyObject* end(PyObject* self, PyObject*) {
  method_of(self).end();
  Py_RETURN_NONE;
}

// All other attributes are the method's: its name, its documentation, and by `__wrapped__` its signature.
PyObject* attribute(PyObject* self, PyObject* name) {
  return guarded([&]() -> PyObject* {
    const std::string text = py::str(name);
    if (text == "__wrapped__") return method_of(self).method().release().ptr();
    if (text == "end" || text == "__class__") return PyObject_GenericGetAttr(self, name);
    return PyObject_GetAttr(method_of(self).method().ptr(), name);
  });
}

void free_callable(PyObject* self) {
  PyTypeObject* const type = Py_TYPE(self);
  delete reinterpret_cast<Callable*>(self)->method;
  type->tp_free(self);
  Py_DECREF(type);
}

PyTypeObject* callable_type = nullptr;

PyTypeObject* make_callable_type() {
  static PyMemberDef members[] = {
      {"__vectorcalloffset__", T_PYSSIZET, offsetof(Callable, vectorcall), READONLY, nullptr}, {nullptr, 0, 0, 0, nullptr}};
  static PyMethodDef methods[] = {{"end", end, METH_NOARGS, "From now on every call takes the method."}, {nullptr, nullptr, 0, nullptr}};
  static PyType_Slot slots[] = {{Py_tp_call, reinterpret_cast<void*>(PyVectorcall_Call)},
                                {Py_tp_dealloc, reinterpret_cast<void*>(free_callable)},
                                {Py_tp_members, members},
                                {Py_tp_methods, methods},
                                {Py_tp_getattro, reinterpret_cast<void*>(attribute)},
                                {0, nullptr}};
  static PyType_Spec spec{"monarch_backend._native.FastPath", sizeof(Callable), 0, Py_TPFLAGS_DEFAULT | Py_TPFLAGS_HAVE_VECTORCALL, slots};
  auto* const type = reinterpret_cast<PyTypeObject*>(PyType_FromSpec(&spec));
  if (type == nullptr) throw py::error_already_set();
  return type;
}

}  // namespace

py::object get(PyObject* from, const py::str& name) {
  PyObject* value = PyObject_GetAttr(from, name.ptr());
  if (value == nullptr) throw py::error_already_set();
  return py::reinterpret_steal<py::object>(value);
}

py::object ask(PyObject* whom, const py::str& method) {
  PyObject* value = PyObject_CallMethodNoArgs(whom, method.ptr());
  if (value == nullptr) throw py::error_already_set();
  return py::reinterpret_steal<py::object>(value);
}

bool is_list_of(PyObject* list, Py_ssize_t count) { return PyList_CheckExact(list) && PyList_GET_SIZE(list) == count; }

py::object only_item_of(PyObject* list) {
  return is_list_of(list, 1) ? py::reinterpret_steal<py::object>(new_reference_to_item(list, 0)) : py::object();
}

TorchNames::TorchNames(const py::tuple& all)
    : tensor(all[0]), parameter(all[1]), strided(all[2]), sum(all[3]), ops(all[4]), dtypes(all[5]), watches(all[6]), profiler(all[7]) {}

bool TorchNames::is_plain(PyObject* given) const {
  PyObject* const type = reinterpret_cast<PyObject*>(Py_TYPE(given));
  return type == tensor.ptr() || type == parameter.ptr();
}

std::optional<Plain> TorchNames::plain(PyObject* given) const {
  if (!is_plain(given)) return std::nullopt;
  if (get(given, names().is_cpu).ptr() != Py_True || get(given, names().layout).ptr() != strided.ptr()) return std::nullopt;
  if (ask(given, names().is_contiguous).ptr() != Py_True || ask(given, names().is_neg).ptr() != Py_False) return std::nullopt;
  const Plain found{number(ask(given, names().data_ptr)), number(get(given, names().nbytes)), get(given, names().dtype).ptr()};
  return found.address == 0 && found.bytes != 0 ? std::nullopt : std::optional(found);
}

bool TorchNames::set_dtype(PyObject* dtype, Header& header) const {
  PyObject* const code = PyDict_GetItem(dtypes.ptr(), dtype);  // a dict that does not change
  if (code != nullptr) header.dtype = static_cast<Dtype>(PyLong_AsLong(code));
  return code != nullptr;
}

bool TorchNames::watched() const {
  for (const py::handle watch : watches) {
    if (watch().cast<bool>()) return true;
  }
  return PyDict_GetItem(profiler.ptr(), names().is_profiler_enabled.ptr()) != Py_False;  // only compared
}

PyObject* CompiledMethod::call(PyObject* const* args, Py_ssize_t count, PyObject* keywords) {
  auto result = ended_.load(std::memory_order_relaxed) ? std::nullopt : in_short(args, count, keywords);
  if (result) return result->release().ptr();
  return PyObject_Vectorcall(method().ptr(), args, static_cast<std::size_t>(count), keywords);
}

py::object CompiledMethod::method() const {
  const py::object owner = owner_();
  if (owner.is_none()) throw py::type_error("the process group of this method is gone");
  return py::reinterpret_steal<py::object>(PyMethod_New(get(reinterpret_cast<PyObject*>(Py_TYPE(owner.ptr())), name_).ptr(), owner.ptr()));
}

py::object make_callable(std::unique_ptr<CompiledMethod> method) {
  auto* const self = reinterpret_cast<Callable*>(callable_type->tp_alloc(callable_type, 0));
  if (self == nullptr) throw py::error_already_set();
  self->vectorcall = call;
  self->method = method.release();
  return py::reinterpret_steal<py::object>(reinterpret_cast<PyObject*>(self));
}

void set_up_compiled_methods() {
  names();
  callable_type = make_callable_type();
}

}  // namespace monarch
