// The worker's side of a record: look up the operands by their ids, call, store the results under theirs. Python
// executes records of rare forms, records that have to wait, and failures.
#include <cstddef>
#include <memory>
#include <vector>

#include "py_handle.h"

namespace monarch::records {
namespace {

constexpr long kDelete = 0;  // as dtensor/_protocol.py: DELETE
enum Kind { kNone = 0, kOne = 1, kMany = 2 };  // as dtensor/_protocol.py: Kind

// One argument of a call.
struct Argument {
  enum Is { kConstant, kTensor, kNumber, kList } is;
  PyObject* constant = nullptr;  // owned by the call
  Py_ssize_t at = 0;             // among the operands
  std::vector<Argument> inner;
};

struct Call {
  PyObject_HEAD
  PyObject *function, *names;
  std::vector<Argument>* arguments;  // those with names last
  Py_ssize_t operands, results;
  int kind;
  int writes;  // whether it changes any of its operands
};

PyTypeObject* call_type;

void clear(Argument& argument) {
  Py_CLEAR(argument.constant);
  for (Argument& each : argument.inner) clear(each);
}

void call_free(PyObject* self) {
  auto* call = reinterpret_cast<Call*>(self);
  PyTypeObject* type = Py_TYPE(self);
  for (Argument& each : *call->arguments) clear(each);
  delete call->arguments;
  Py_CLEAR(call->function);
  Py_CLEAR(call->names);
  type->tp_free(self);
  Py_DECREF(type);
}

// From ("constant", value), ("tensor", at), ("number", at) or ("list", [...]).
bool parse(PyObject* said, Argument& argument) {
  const char* is;
  PyObject* what;
  if (!PyArg_ParseTuple(said, "sO", &is, &what)) return false;
  if (*is == 'c') {
    argument.is = Argument::kConstant;
    argument.constant = Py_NewRef(what);
  } else if (*is == 'l') {
    argument.is = Argument::kList;
    const Owned inner = own(PySequence_Fast(what, "a list"));
    if (!inner) return false;
    argument.inner.resize(PySequence_Fast_GET_SIZE(inner.get()));
    for (std::size_t i = 0; i < argument.inner.size(); ++i) {
      if (!parse(PySequence_Fast_GET_ITEM(inner.get(), i), argument.inner[i])) return false;
    }
  } else {
    argument.is = *is == 't' ? Argument::kTensor : Argument::kNumber;
    argument.at = PyLong_AsSsize_t(what);
  }
  return !PyErr_Occurred();
}

PyObject* call_new(PyTypeObject* type, PyObject* given, PyObject*) {
  PyObject *function, *arguments, *names;
  Py_ssize_t operands, results;
  int kind, writes;
  if (!PyArg_ParseTuple(given, "OO!O!nnip", &function, &PyList_Type, &arguments, &PyTuple_Type, &names, &operands,
                        &results, &kind, &writes)) {
    return nullptr;
  }
  Owned made = own(type->tp_alloc(type, 0));
  if (!made) return nullptr;
  auto* call = reinterpret_cast<Call*>(made.get());
  call->arguments = new std::vector<Argument>(PyList_GET_SIZE(arguments));
  call->function = Py_NewRef(function);
  call->names = PyTuple_GET_SIZE(names) ? Py_NewRef(names) : nullptr;
  call->operands = operands, call->results = results, call->kind = kind, call->writes = writes;
  for (std::size_t i = 0; i < call->arguments->size(); ++i) {
    if (!parse(PyList_GET_ITEM(arguments, i), (*call->arguments)[i])) return nullptr;
  }
  return made.release();
}

// The value for the function, as a new reference. words: the record's operands.
PyObject* value_of(const Argument& argument, PyObject** words, PyObject* tensors) {
  switch (argument.is) {
    case Argument::kConstant:
      return Py_NewRef(argument.constant);
    case Argument::kNumber:
      return Py_NewRef(words[argument.at]);
    case Argument::kTensor: {
      if (!PyDict_CheckExact(tensors)) return PyObject_GetItem(tensors, words[argument.at]);
      PyObject* found = new_reference_to_value(tensors, words[argument.at]);
      if (found == nullptr && !PyErr_Occurred()) PyErr_SetObject(PyExc_KeyError, words[argument.at]);
      return found;
    }
    case Argument::kList:
      break;
  }
  Owned list = own(PyList_New(static_cast<Py_ssize_t>(argument.inner.size())));
  for (std::size_t i = 0; list && i < argument.inner.size(); ++i) {
    PyObject* each = value_of(argument.inner[i], words, tensors);
    if (each == nullptr) return nullptr;
    PyList_SET_ITEM(list.get(), static_cast<Py_ssize_t>(i), each);
  }
  return list.release();
}

// Python code may replace the function while another thread calls it.
Owned function_of(Call* call) {
  const ObjectLock lock(reinterpret_cast<PyObject*>(call));
  return share(call->function);
}

PyObject* result_of(Call* call, PyObject** words, PyObject* tensors) {
  constexpr std::size_t kFew = 12;
  const std::size_t count = call->arguments->size();
  PyObject* few[kFew + 1];
  std::unique_ptr<PyObject*[]> many(count > kFew ? new PyObject*[count + 1] : nullptr);
  PyObject** given = (many ? many.get() : few) + 1;  // one in front, which Python may use
  std::size_t done = 0;
  while (done < count && (given[done] = value_of((*call->arguments)[done], words, tensors)) != nullptr) ++done;
  PyObject* result = nullptr;
  if (done == count) {
    const std::size_t named = call->names == nullptr ? 0 : static_cast<std::size_t>(PyTuple_GET_SIZE(call->names));
    const Owned function = function_of(call);
    result = PyObject_Vectorcall(function.get(), given, (count - named) | PY_VECTORCALL_ARGUMENTS_OFFSET, call->names);
  }
  while (done > 0) Py_DECREF(given[--done]);
  return result;
}

bool keep(PyObject* result, Call* call, PyObject** words, PyObject* tensors) {
  if (call->kind == kNone) return true;
  if (call->kind == kOne) return PyObject_SetItem(tensors, words[call->operands], result) == 0;
  for (Py_ssize_t i = 0; i < call->results; ++i) {
    PyObject* id = words[call->operands + i];
    if (PyLong_AsLong(id) == 0) continue;
    const Owned each = own(PySequence_GetItem(result, i));
    if (!each || PyObject_SetItem(tensors, id, each.get()) < 0) return false;
  }
  return true;
}

// call.run(tensors, words, i): execute one record. tensors: any mapping.
PyObject* call_run(PyObject* self, PyObject* args) {
  PyObject *tensors, *words;
  Py_ssize_t i;
  auto* call = reinterpret_cast<Call*>(self);
  if (!PyArg_ParseTuple(args, "OO!n", &tensors, &PyList_Type, &words, &i)) return nullptr;
  if (i < 0 || i + 2 + call->operands + call->results > PyList_GET_SIZE(words)) {
    return PyErr_SetString(PyExc_IndexError, "there is no such record"), nullptr;
  }
  PyObject** mine = reinterpret_cast<PyListObject*>(words)->ob_item + i + 2;
  const Owned result = own(result_of(call, mine, tensors));
  if (!result || !keep(result.get(), call, mine, tensors)) return nullptr;
  Py_RETURN_NONE;
}

// call.given(tensors, words, i): the arguments of its function, as (args, kwargs).
PyObject* call_given(PyObject* self, PyObject* args) {
  PyObject *tensors, *words;
  Py_ssize_t i;
  auto* call = reinterpret_cast<Call*>(self);
  if (!PyArg_ParseTuple(args, "OO!n", &tensors, &PyList_Type, &words, &i)) return nullptr;
  if (i < 0 || i + 2 + call->operands > PyList_GET_SIZE(words)) {
    return PyErr_SetString(PyExc_IndexError, "there is no such record"), nullptr;
  }
  PyObject** mine = reinterpret_cast<PyListObject*>(words)->ob_item + i + 2;
  const auto count = static_cast<Py_ssize_t>(call->arguments->size());
  const Py_ssize_t plain = count - (call->names == nullptr ? 0 : PyTuple_GET_SIZE(call->names));
  Owned positional = own(PyTuple_New(plain)), named = own(PyDict_New());
  for (Py_ssize_t k = 0; positional && named && k < count; ++k) {
    Owned each = own(value_of((*call->arguments)[k], mine, tensors));
    if (!each) return nullptr;
    if (k < plain) {
      PyTuple_SET_ITEM(positional.get(), k, each.release());
    } else if (PyDict_SetItem(named.get(), PyTuple_GET_ITEM(call->names, k - plain), each.get()) < 0) {
      return nullptr;
    }
  }
  return positional && named ? PyTuple_Pack(2, positional.get(), named.get()) : nullptr;
}

// 1 if one of these waits for something; -1 with an error.
int waits(PyObject** ids, Py_ssize_t count, PyObject* pending) {
  for (Py_ssize_t i = 0; i < count; ++i) {
    const int found = PyDict_Contains(pending, ids[i]);  // numbers that are no ids are floats, or wait without need
    if (found) return found;
  }
  return 0;
}

bool drop(PyObject** ids, Py_ssize_t count, PyObject* tensors) {
  for (Py_ssize_t i = 0; i < count; ++i) {
    if (PyDict_DelItem(tensors, ids[i]) == 0) continue;
    if (!PyErr_ExceptionMatches(PyExc_KeyError)) return false;
    PyErr_Clear();
  }
  return true;
}

struct Batch {
  PyObject *words, *calls, *tensors, *pending, *cursor;
};

// Number of words of the record at i; 0 if Python must execute it, -1 with an error.
Py_ssize_t execute_one(const Batch& batch, PyObject** words, Py_ssize_t left) {
  const Owned call = own(new_reference_to_value(batch.calls, words[0]));
  const bool may_wait = PyDict_GET_SIZE(batch.pending) > 0;
  if (!call) {
    if (PyErr_Occurred()) return -1;
    if (left < 2 || PyLong_AsLong(words[0]) != kDelete) return PyErr_Occurred() ? -1 : 0;
    const Py_ssize_t count = PyLong_AsSsize_t(words[1]);
    if (may_wait || count < 0 || count > left - 2) return PyErr_Occurred() ? -1 : 0;
    return drop(words + 2, count, batch.tensors) ? 2 + count : -1;
  }
  auto* known = reinterpret_cast<Call*>(call.get());
  const Py_ssize_t length = 2 + known->operands + known->results;
  if (Py_TYPE(call.get()) != call_type || length > left) return 0;
  if (may_wait) {
    if (known->writes) return 0;  // a collective in progress may read this operand
    const int waiting = waits(words + 2, known->operands, batch.pending);
    if (waiting) return waiting < 0 ? -1 : 0;
  }
  const Owned result = own(result_of(known, words + 2, batch.tensors));
  return result && keep(result.get(), known, words + 2, batch.tensors) ? length : -1;
}

// execute(words, i, calls, tensors, pending, cursor): execute records from word i on. Return the index of the first
// record that is not among the calls, or of the end. On an error cursor[0] is the index of its record.
PyObject* execute(PyObject*, PyObject* args) {
  Batch batch;
  Py_ssize_t i;
  if (!PyArg_ParseTuple(args, "O!nO!O!O!O!", &PyList_Type, &batch.words, &i, &PyDict_Type, &batch.calls, &PyDict_Type,
                        &batch.tensors, &PyDict_Type, &batch.pending, &PyList_Type, &batch.cursor)) {
    return nullptr;
  }
  if (i < 0) return PyErr_SetString(PyExc_IndexError, "execute() begins at a word"), nullptr;
  // The words are a batch that does not change, and only this thread has it. A tuple would guarantee that, but cost a copy.
  for (Py_ssize_t end; i < (end = PyList_GET_SIZE(batch.words));) {
    PyObject** words = reinterpret_cast<PyListObject*>(batch.words)->ob_item + i;
    const Py_ssize_t past = execute_one(batch, words, end - i);
    if (past == 0) break;
    if (past < 0) {
      PyObject *type, *value, *trace;
      PyErr_Fetch(&type, &value, &trace);
      PyObject* at = PyLong_FromSsize_t(i);
      if (at != nullptr) PyList_SetItem(batch.cursor, 0, at);
      PyErr_Restore(type, value, trace);
      return nullptr;
    }
    i += past;
  }
  return PyLong_FromSsize_t(i);
}

PyMethodDef functions[] = {
    {"execute", execute, METH_VARARGS, nullptr},
    {nullptr, nullptr, 0, nullptr},
};

}  // namespace

bool add_execute(PyObject* module) {
  static PyMethodDef methods[] = {
      {"run", call_run, METH_VARARGS, nullptr},
      {"given", call_given, METH_VARARGS, nullptr},
      {nullptr, nullptr, 0, nullptr},
  };
  static PyMemberDef members[] = {
      {"function", T_OBJECT, offsetof(Call, function), 0, nullptr},
      {nullptr, 0, 0, 0, nullptr},
  };
  PyType_Slot slots[] = {
      {Py_tp_methods, methods},
      {Py_tp_members, members},
      {Py_tp_new, reinterpret_cast<void*>(call_new)},
      {Py_tp_dealloc, reinterpret_cast<void*>(call_free)},
      {0, nullptr},
  };
  PyType_Spec spec{"monarch_backend._native.Call", sizeof(Call), 0, Py_TPFLAGS_DEFAULT, slots};
  call_type = reinterpret_cast<PyTypeObject*>(PyType_FromSpec(&spec));
  return call_type != nullptr && PyModule_AddType(module, call_type) == 0 &&
         PyModule_AddFunctions(module, functions) == 0;
}

}  // namespace monarch::records
