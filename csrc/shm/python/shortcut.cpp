#include "shm/python/shortcut.h"

#include <structmember.h>

#include <array>
#include <cstddef>
#include <optional>
#include <utility>
#include <vector>

namespace py = pybind11;

namespace monarch {

namespace {

// Attributes by names that are made once.
struct Names {
  py::str is_cpu{"is_cpu"}, layout{"layout"}, dtype{"dtype"}, is_contiguous{"is_contiguous"}, is_neg{"is_neg"},
      data_ptr{"data_ptr"}, nbytes{"nbytes"}, shape{"shape"}, async_op{"asyncOp"}, reduce_op{"reduceOp"}, op{"op"},
      root_rank{"rootRank"}, device{"device"}, device_ids{"device_ids"}, type{"type"}, cpu{"cpu"}, opts{"opts"},
      is_profiler_enabled{"_is_profiler_enabled"};
};

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

std::uint64_t number(const py::object& value) {
  const unsigned long long result = PyLong_AsUnsignedLongLong(value.ptr());
  if (result == static_cast<unsigned long long>(-1) && PyErr_Occurred() != nullptr) throw py::error_already_set();
  return result;
}

bool is_list_of(PyObject* list, Py_ssize_t count) { return PyList_CheckExact(list) && PyList_GET_SIZE(list) == count; }

struct Plain {
  std::uintptr_t address;
  std::uint64_t bytes;
  PyObject* dtype;  // lives as long as torch
};

class Shortcut {
 public:
  Shortcut(std::shared_ptr<Group> group, Collective collective, Form form, const py::object& owner, std::string name,
           py::object options, py::object finish, TorchNames torch)
      : group_(std::move(group)),
        n_(static_cast<std::uint64_t>(group_->size())),
        collective_(collective),
        form_(form),
        owner_(owner),
        method_(std::move(name)),
        options_(std::move(options)),
        finish_(std::move(finish)),
        torch_(std::move(torch)) {}

  PyObject* call(PyObject* const* args, Py_ssize_t count, PyObject* names) {
    auto result = in_short(args, count, names);
    return result ? result->release().ptr() : at_length(args, count, names);
  }

 private:
  // The result; nothing where the call is anything else than what this is for.
  std::optional<py::object> in_short(PyObject* const* args, Py_ssize_t count, PyObject* names) {
    constexpr std::array<Py_ssize_t, 5> counts{2, 3, 3, 5, 1};  // of arguments, by form
    if (names != nullptr) {
      const bool only_opts = form_ == Form::nothing && count == 0 && PyTuple_GET_SIZE(names) == 1;
      if (!only_opts || !py::handle(PyTuple_GET_ITEM(names, 0)).equal(names_.opts)) return std::nullopt;
      count = 1;
    }
    if (count != counts.at(static_cast<std::size_t>(form_))) return std::nullopt;
    PyObject* const opts = args[count - 1];
    if (reinterpret_cast<PyObject*>(Py_TYPE(opts)) != options_.ptr()) return std::nullopt;
    if (get(opts, names_.async_op).ptr() != Py_False || watched()) return std::nullopt;
    const auto operation = std::make_shared<Operation>();
    PyObject* shown = nullptr;  // what the work's future shows: a list, or its only tensor
    const bool same = form_ == Form::nothing ? on_cpu(opts) : read(args, *operation, shown) && describe(opts, *operation);
    if (!same) return std::nullopt;
    const auto left = run_at_once(*group_, operation);
    if (!left) return py::none();
    py::list outputs;
    if (shown != nullptr && !PyList_CheckExact(shown)) outputs.append(py::handle(shown));
    return finish_(left, shown != nullptr && PyList_CheckExact(shown) ? py::reinterpret_borrow<py::object>(shown) : outputs, py::handle(opts));
  }

  // The tensors; false where these are not what the collective takes from plain ones in equal pieces.
  bool read(PyObject* const* args, Operation& operation, PyObject*& shown) const {
    PyObject *out = args[0], *in = args[1];
    if (form_ == Form::in_place || form_ == Form::gathering) {
      if (!is_list_of(out, 1)) return false;
      shown = form_ == Form::in_place ? out : PyList_GET_ITEM(out, 0);
      out = PyList_GET_ITEM(out, 0);
    } else {
      shown = out;
    }
    if (form_ == Form::in_place) in = out;
    if (form_ == Form::gathering) {
      if (!is_list_of(in, 1) || !is_list_of(out, static_cast<Py_ssize_t>(n_))) return false;
      return read_row(out, PyList_GET_ITEM(in, 0), operation);
    }
    if (form_ == Form::exchange && !(is_list_of(args[2], 0) && is_list_of(args[3], 0) && rows(out) && rows(in))) return false;
    const auto to = plain(out), from = in == out ? to : plain(in);
    const bool scatters = collective_ == Collective::reduce_scatter, gathers = collective_ == Collective::all_gather;
    if (!to || !from || to->dtype != from->dtype || to->bytes * (scatters ? n_ : 1) != from->bytes * (gathers ? n_ : 1)) return false;
    const bool exchanges = form_ == Form::exchange;
    operation.in = pieces(*from, scatters || exchanges ? n_ : 1);
    operation.out = pieces(*to, gathers || exchanges ? n_ : 1);
    operation.header.bytes = exchanges ? 0 : gathers ? from->bytes : to->bytes;
    return set_dtype(to->dtype, operation);
  }

  bool read_row(PyObject* row, PyObject* in, Operation& operation) const {
    const auto from = plain(in);
    if (!from) return false;
    operation.in = pieces(*from, 1);
    for (std::uint64_t r = 0; r < n_; ++r) {
      const auto to = plain(PyList_GET_ITEM(row, static_cast<Py_ssize_t>(r)));
      if (!to || to->dtype != from->dtype || to->bytes != from->bytes) return false;
      operation.out.push_back({reinterpret_cast<char*>(to->address), to->bytes});
    }
    operation.header.bytes = from->bytes;
    return set_dtype(from->dtype, operation);
  }

  static std::vector<Span> pieces(const Plain& tensor, std::uint64_t n) {
    std::vector<Span> result(n);
    for (std::uint64_t i = 0; i < n; ++i) result[i] = {reinterpret_cast<char*>(tensor.address) + i * (tensor.bytes / n), tensor.bytes / n};
    return result;
  }

  bool set_dtype(PyObject* dtype, Operation& operation) const {
    PyObject* const code = PyDict_GetItem(torch_.dtypes.ptr(), dtype);
    if (code != nullptr) operation.header.dtype = static_cast<Dtype>(PyLong_AsLong(code));
    return code != nullptr;
  }

  // What the options say of it; false where it takes more than this.
  bool describe(PyObject* opts, Operation& operation) const {
    Header& header = operation.header;
    header.collective = collective_;
    header.root = -1;
    if (has_root(collective_)) {
      const std::uint64_t root = number(get(opts, names_.root_rank));
      if (root >= n_) return false;
      header.root = static_cast<std::int32_t>(root);
    }
    const bool reduces = collective_ == Collective::all_reduce || collective_ == Collective::reduce || collective_ == Collective::reduce_scatter;
    if (!reduces) return true;
    const py::object op = get(opts, names_.reduce_op);
    if (op.equal(torch_.sum)) {
      header.op = ReduceOp::sum;
    } else {
      const py::object kind = py::reinterpret_steal<py::object>(PyNumber_Long(get(op.ptr(), names_.op).ptr()));
      PyObject* const code = kind ? PyDict_GetItem(torch_.ops.ptr(), kind.ptr()) : throw py::error_already_set();
      if (code == nullptr) return false;
      header.op = static_cast<ReduceOp>(PyLong_AsLong(code));
    }
    return reduce_kernel(header.dtype, header.op) != nullptr;
  }

  // Of a barrier, which has no tensors.
  bool on_cpu(PyObject* opts) const {
    const py::object device = get(opts, names_.device);
    return (device.is_none() && py::len(get(opts, names_.device_ids)) == 0) || (!device.is_none() && get(device.ptr(), names_.type).equal(names_.cpu));
  }

  // Whether each rank has as many rows of it.
  bool rows(PyObject* tensor) const {
    if (!is_plain(tensor)) return false;
    const py::object shape = get(tensor, names_.shape);
    return PyTuple_Check(shape.ptr()) && PyTuple_GET_SIZE(shape.ptr()) != 0 && PyLong_AsUnsignedLongLong(PyTuple_GET_ITEM(shape.ptr(), 0)) % n_ == 0;
  }

  bool is_plain(PyObject* tensor) const {
    PyObject* const type = reinterpret_cast<PyObject*>(Py_TYPE(tensor));
    return type == torch_.tensor.ptr() || type == torch_.parameter.ptr();
  }

  std::optional<Plain> plain(PyObject* tensor) const {
    if (!is_plain(tensor)) return std::nullopt;
    if (get(tensor, names_.is_cpu).ptr() != Py_True || get(tensor, names_.layout).ptr() != torch_.strided.ptr()) return std::nullopt;
    if (ask(tensor, names_.is_contiguous).ptr() != Py_True || ask(tensor, names_.is_neg).ptr() != Py_False) return std::nullopt;
    return Plain{number(ask(tensor, names_.data_ptr)), number(get(tensor, names_.nbytes)), get(tensor, names_.dtype).ptr()};
  }

  bool watched() const {
    for (const py::handle watch : torch_.watches) {
      if (watch().cast<bool>()) return true;
    }
    return PyDict_GetItem(torch_.profiler.ptr(), names_.is_profiler_enabled.ptr()) != Py_False;
  }

  PyObject* at_length(PyObject* const* args, Py_ssize_t count, PyObject* names) {
    const py::object owner = owner_();
    if (owner.is_none()) throw py::type_error("the process group of this method is gone");
    const py::object method = get(reinterpret_cast<PyObject*>(Py_TYPE(owner.ptr())), method_);
    std::vector<PyObject*> all{owner.ptr()};
    all.insert(all.end(), args, args + count + (names == nullptr ? 0 : PyTuple_GET_SIZE(names)));
    return PyObject_Vectorcall(method.ptr(), all.data(), static_cast<std::size_t>(count) + 1, names);
  }

  std::shared_ptr<Group> group_;
  std::uint64_t n_;
  Collective collective_;
  Form form_;
  py::weakref owner_;  // who holds us
  py::str method_;
  py::object options_, finish_;
  TorchNames torch_;
  Names names_;
};

// A type of its own: a built-in function in the place of an override would mean to pybind11 that there is none, and C++
// callers of the group would miss the method.
struct Callable {
  PyObject_HEAD
  vectorcallfunc vectorcall;
  Shortcut* shortcut;
};

PyObject* call(PyObject* self, PyObject* const* args, std::size_t count, PyObject* names) {
  try {
    return reinterpret_cast<Callable*>(self)->shortcut->call(args, PyVectorcall_NARGS(count), names);
  } catch (py::error_already_set& error) {
    error.restore();
  } catch (const py::builtin_exception& error) {
    error.set_error();
  } catch (const std::exception& error) {
    PyErr_SetString(PyExc_RuntimeError, error.what());
  }
  return nullptr;
}

void free_callable(PyObject* self) {
  PyTypeObject* const type = Py_TYPE(self);
  delete reinterpret_cast<Callable*>(self)->shortcut;
  type->tp_free(self);
  Py_DECREF(type);
}

PyTypeObject* callable_type() {
  static PyMemberDef members[] = {
      {"__vectorcalloffset__", T_PYSSIZET, offsetof(Callable, vectorcall), READONLY, nullptr}, {nullptr, 0, 0, 0, nullptr}};
  static PyType_Slot slots[] = {{Py_tp_call, reinterpret_cast<void*>(PyVectorcall_Call)},
                                {Py_tp_dealloc, reinterpret_cast<void*>(free_callable)},
                                {Py_tp_members, members},
                                {0, nullptr}};
  static PyType_Spec spec{"monarch_backend._native.Shortcut", sizeof(Callable), 0, Py_TPFLAGS_DEFAULT | Py_TPFLAGS_HAVE_VECTORCALL, slots};
  static auto* const type = reinterpret_cast<PyTypeObject*>(PyType_FromSpec(&spec));
  if (type == nullptr) throw py::error_already_set();
  return type;
}

}  // namespace

std::shared_ptr<Operation> run_at_once(Group& group, std::shared_ptr<Operation> operation) {
  constexpr auto soon = std::chrono::milliseconds(2);
  const py::gil_scoped_release release;
  group.submit(operation);
  group.wait_a_little(*operation, soon);
  if (operation->done.load(std::memory_order_acquire) && !operation->failure) return nullptr;
  return operation;
}

py::object make_shortcut(std::shared_ptr<Group> group, Collective collective, Form form, const py::object& owner, std::string name,
                         py::object options, py::object finish, TorchNames torch) {
  auto shortcut = std::make_unique<Shortcut>(std::move(group), collective, form, owner, std::move(name), std::move(options),
                                             std::move(finish), std::move(torch));
  PyTypeObject* const type = callable_type();
  auto* const self = reinterpret_cast<Callable*>(type->tp_alloc(type, 0));
  if (self == nullptr) throw py::error_already_set();
  self->vectorcall = call;
  self->shortcut = shortcut.release();
  return py::reinterpret_steal<py::object>(reinterpret_cast<PyObject*>(self));
}

}  // namespace monarch
