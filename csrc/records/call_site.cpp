// Places in the program: the innermost of its frames, and the number that they have together.
#include <array>
#include <atomic>
#include <cstdint>
#include <mutex>
#include <unordered_map>

#include "py_handle.h"

// Declares PyFrame_GetBack on Python 3.10. It needs Python.h, which py_handle.h includes.
#include <frameobject.h>

namespace monarch::records {
namespace {

constexpr int kLines = 3;

struct Key {
  std::array<std::uintptr_t, 2 * kLines> words{};
  bool operator==(const Key&) const = default;
};

struct Hash {
  std::size_t operator()(const Key& key) const {
    std::size_t found = 0;
    for (const auto word : key.words) found = (found ^ word) * 0x9E3779B97F4A7C15ull + (found >> 29);
    return found;
  }
};

// Never freed, and neither are the code objects: Python keeps them.
std::atomic<PyObject*> is_internal{nullptr};  // called once for each code object
std::atomic<PyObject*> number_of{nullptr};    // called once for each call site
GilMutex known_lock;                          // of the two maps
std::unordered_map<PyObject*, bool>& internal() {
  static auto* known = new std::unordered_map<PyObject*, bool>;
  return *known;
}
std::unordered_map<Key, PyObject*, Hash>& numbers() {
  static auto* known = new std::unordered_map<Key, PyObject*, Hash>;
  return *known;
}

Owned back_of(const Owned& frame) {
  return own(reinterpret_cast<PyObject*>(PyFrame_GetBack(reinterpret_cast<PyFrameObject*>(frame.get()))));
}

long last_of(const Owned& frame) {
#if PY_VERSION_HEX >= 0x030B0000
  return PyFrame_GetLasti(reinterpret_cast<PyFrameObject*>(frame.get()));
#else
  const Owned found = own(PyObject_GetAttrString(frame.get(), "f_lasti"));
  return found ? PyLong_AsLong(found.get()) : -1;
#endif
}

// 1 or 0; -1 with an error.
int query_internal(PyObject* code) {
  {
    const std::lock_guard lock(known_lock);
    const auto known = internal().find(code);
    if (known != internal().end()) return known->second;
  }
  PyObject* const call = is_internal;
  if (call == nullptr) return PyErr_SetString(PyExc_RuntimeError, "set_up_call_sites() comes first"), -1;
  const Owned answer = own(PyObject_CallOneArg(call, code));
  if (!answer) return -1;
  const bool found = PyObject_IsTrue(answer.get()) == 1;
  const std::lock_guard lock(known_lock);
  return internal()[code] = found;
}

// A new reference; nullptr if the call site is new.
PyObject* known_number(const Key& key) {
  const std::lock_guard lock(known_lock);
  const auto known = numbers().find(key);
  return known != numbers().end() ? Py_NewRef(known->second) : nullptr;
}

PyObject* query_number(const Key& key, const std::array<Owned, kLines>& codes, int count) {
  const Owned call_sites = own(PyTuple_New(count));
  if (!call_sites) return nullptr;
  for (int i = 0; i < count; ++i) {
    PyObject* site = Py_BuildValue("On", codes[i].get(), static_cast<Py_ssize_t>(key.words[2 * i + 1]));
    if (site == nullptr) return nullptr;
    PyTuple_SET_ITEM(call_sites.get(), i, site);
  }
  Owned number = own(PyObject_CallOneArg(number_of, call_sites.get()));
  if (!number) return nullptr;
  const std::lock_guard lock(known_lock);
  const auto [kept, is_new] = numbers().emplace(key, number.get());
  if (is_new) number.release();  // else another thread was here meanwhile
  return Py_NewRef(kept->second);
}

PyObject* set_up(PyObject*, PyObject* args) {
  PyObject *internal_now, *number_now;
  if (!PyArg_ParseTuple(args, "OO", &internal_now, &number_now)) return nullptr;
  Py_INCREF(args);  // never released: another thread may be in an earlier callback
  number_of = number_now, is_internal = internal_now;
  Py_RETURN_NONE;
}

PyObject* here(PyObject*, PyObject*) { return current_call_site(); }

PyMethodDef functions[] = {
    {"set_up_call_sites", set_up, METH_VARARGS, nullptr},
    {"current_call_site", here, METH_NOARGS, nullptr},
    {nullptr, nullptr, 0, nullptr},
};

}  // namespace

PyObject* current_call_site() {
  Key key;
  std::array<Owned, kLines> codes;
  int count = 0;
  Owned frame = share(reinterpret_cast<PyObject*>(PyEval_GetFrame()));
  for (; frame && count < kLines; frame = back_of(frame)) {
    Owned code = own(reinterpret_cast<PyObject*>(PyFrame_GetCode(reinterpret_cast<PyFrameObject*>(frame.get()))));
    const int skip = query_internal(code.get());
    if (skip < 0) return nullptr;
    if (skip) continue;
    key.words[2 * count] = reinterpret_cast<std::uintptr_t>(code.get());
    key.words[2 * count + 1] = static_cast<std::uintptr_t>(last_of(frame));
    codes[count++] = std::move(code);
  }
  PyObject* const number = known_number(key);
  return number != nullptr ? number : query_number(key, codes, count);
}

bool add_call_sites(PyObject* module) { return PyModule_AddFunctions(module, functions) == 0; }

}  // namespace monarch::records
