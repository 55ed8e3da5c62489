// Hot path of a command in the controller: makes a key from the arguments, looks up the cached entry, and appends the
// record's words. Python handles misses and all questions to torch.
//
// The words of a record are appended in one step: no other thread's words come in between, and no batch ends there. The
// same step checks that no other thread has forgotten the signature since it was looked up. With a GIL the step is the
// code between two calls of Python code; without one, `records_lock` makes it one.
#include "py_handle.h"

#include <array>
#include <atomic>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <limits>
#include <mutex>
#include <new>
#include <unordered_map>
#include <vector>

#include <pthread.h>

namespace monarch::records {
namespace {

constexpr long kDelete = 0;                 // as dtensor/_protocol.py: DELETE
enum Kind { kNone = 0, kOne = 1, kMany = 2 };  // as dtensor/_protocol.py: Kind

// Types ------------------------------------------------------------------------------------------------------------

// Buffer of the words of one worker set. Python accesses the lists, too.
struct Sink {
  PyObject_HEAD
  PyObject *words, *unreachable, *ids, *wake, *full;
  Py_ssize_t limit, records;
  long long made, most;  // bytes of results since what is unreachable was last deleted; from `most` on that is done first
  char debug;
};

struct Ref {
  PyObject_HEAD
  PyObject *workers, *unreachable, *id, *nbytes;
};

struct Entry {
  PyObject_HEAD
  PyObject *workers, *outs, *number, *sequence, *returns, *host, *parts;
  PyObject *sink, *forms;  // once there was a record: the Sink, and of each result what makes the tensor
  int kind;
  long long bytes;  // of its results, on a rank
  Py_ssize_t at;  // position of the argument that it changes and returns; -1: `returns` finds it
  std::int64_t used;
  bool forgotten;  // with `records_lock`: the workers are about to forget it
};

struct Plan {
  PyObject_HEAD
  PyObject *entries, *target, *special, *named;  // named: the arguments that are scalars, by name
  unsigned long long scalars;                    // and by position
};

template <class T>
PyObject* empty(PyTypeObject* type) {
  auto* made = PyObject_GC_New(T, type);
  if (made == nullptr) return nullptr;
  std::memset(reinterpret_cast<char*>(made) + sizeof(PyObject), 0, sizeof(T) - sizeof(PyObject));
  PyObject_GC_Track(made);
  return reinterpret_cast<PyObject*>(made);
}

PyTypeObject *sink_type, *ref_type, *entry_type, *plan_type;
GilMutex records_lock;  // of all words that this file appends, of Sink, and of the part of Entry that `prepare` sets

// Layout of the objects of one struct: the offsets of their references.
template <class T>
struct Members;
template <>
struct Members<Sink> {
  static auto of(Sink* s) { return std::array{&s->words, &s->unreachable, &s->ids, &s->wake, &s->full}; }
};
template <>
struct Members<Ref> {
  static auto of(Ref* r) { return std::array{&r->workers, &r->unreachable, &r->id, &r->nbytes}; }
};
template <>
struct Members<Entry> {
  static auto of(Entry* e) {
    return std::array{&e->workers, &e->outs, &e->number, &e->sequence, &e->returns,
                      &e->host, &e->parts, &e->sink, &e->forms};
  }
};
template <>
struct Members<Plan> {
  static auto of(Plan* p) { return std::array{&p->entries, &p->target, &p->special, &p->named}; }
};

template <class T>
int traverse(PyObject* self, visitproc visit, void* arg) {
  Py_VISIT(Py_TYPE(self));
  for (PyObject** each : Members<T>::of(reinterpret_cast<T*>(self))) Py_VISIT(*each);
  return 0;
}

template <class T>
int clear(PyObject* self) {
  for (PyObject** each : Members<T>::of(reinterpret_cast<T*>(self))) Py_CLEAR(*each);
  return 0;
}

template <class T>
void free_of(PyObject* self) {
  PyTypeObject* type = Py_TYPE(self);
  PyObject_GC_UnTrack(self);
  clear<T>(self);
  type->tp_free(self);
  Py_DECREF(type);
}

// Sink -------------------------------------------------------------------------------------------------------------

PyObject* sink_new(PyTypeObject* type, PyObject* args, PyObject*) {
  PyObject *words, *unreachable, *ids, *wake, *full;
  Py_ssize_t limit;
  if (!PyArg_ParseTuple(args, "O!O!OOOn", &PyList_Type, &words, &PyList_Type, &unreachable, &ids, &wake, &full, &limit)) {
    return nullptr;
  }
  auto* made = reinterpret_cast<Sink*>(empty<Sink>(type));
  if (made == nullptr) return nullptr;
  made->words = Py_NewRef(words), made->unreachable = Py_NewRef(unreachable), made->ids = Py_NewRef(ids);
  made->wake = Py_NewRef(wake), made->full = Py_NewRef(full), made->limit = limit;
  made->most = std::numeric_limits<long long>::max();
  return reinterpret_cast<PyObject*>(made);
}

PyMemberDef sink_members[] = {
    {"limit", T_PYSSIZET, offsetof(Sink, limit), 0, nullptr},
    {"records", T_PYSSIZET, offsetof(Sink, records), 0, nullptr},
    {"made", T_LONGLONG, offsetof(Sink, made), 0, nullptr},
    {"most", T_LONGLONG, offsetof(Sink, most), 0, nullptr},
    {"debug", T_BOOL, offsetof(Sink, debug), 0, nullptr},
    {nullptr, 0, 0, 0, nullptr},
};

// Ref --------------------------------------------------------------------------------------------------------------

PyObject* make_ref(PyObject* workers, PyObject* unreachable, PyObject* id) {
  auto* made = reinterpret_cast<Ref*>(empty<Ref>(ref_type));
  if (made == nullptr) return nullptr;
  made->workers = Py_NewRef(workers), made->unreachable = Py_NewRef(unreachable), made->id = Py_NewRef(id);
  return reinterpret_cast<PyObject*>(made);
}

PyObject* ref_new(PyTypeObject*, PyObject* args, PyObject*) {
  PyObject *workers, *id;
  if (!PyArg_ParseTuple(args, "OO!", &workers, &PyLong_Type, &id)) return nullptr;
  const Owned unreachable = own(PyObject_GetAttrString(workers, "unreachable"));
  if (!unreachable) return nullptr;
  if (!PyList_CheckExact(unreachable.get())) {
    PyErr_SetString(PyExc_TypeError, "unreachable must be a list");
    return nullptr;
  }
  return make_ref(workers, unreachable.get(), id);
}

int ref_clear(PyObject* self) {
  auto* ref = reinterpret_cast<Ref*>(self);
  if (ref->unreachable != nullptr && PyList_Append(ref->unreachable, ref->id) < 0) PyErr_WriteUnraisable(ref->id);
  return clear<Ref>(self);
}

void ref_free(PyObject* self) {
  PyTypeObject* type = Py_TYPE(self);
  PyObject_GC_UnTrack(self);
  ref_clear(self);
  type->tp_free(self);
  Py_DECREF(type);
}

PyMemberDef ref_members[] = {
    {"workers", T_OBJECT_EX, offsetof(Ref, workers), READONLY, nullptr},
    {"id", T_OBJECT_EX, offsetof(Ref, id), READONLY, nullptr},
    {"nbytes", T_OBJECT_EX, offsetof(Ref, nbytes), 0, nullptr},
    {nullptr, 0, 0, 0, nullptr},
};

// Entry, Plan ------------------------------------------------------------------------------------------------------

std::atomic<std::int64_t> now{0};  // the number of records so far

PyObject* entry_new(PyTypeObject* type, PyObject*, PyObject*) {
  PyObject* made = empty<Entry>(type);
  if (made == nullptr) return nullptr;
  auto* entry = reinterpret_cast<Entry*>(made);
  entry->at = -1, entry->used = now.load(std::memory_order_relaxed);
  return made;
}

PyMemberDef entry_members[] = {
    {"workers", T_OBJECT, offsetof(Entry, workers), 0, nullptr},
    {"number", T_OBJECT, offsetof(Entry, number), 0, nullptr},
    {"kind", T_INT, offsetof(Entry, kind), 0, nullptr},
    {"outs", T_OBJECT, offsetof(Entry, outs), 0, nullptr},
    {"sequence", T_OBJECT, offsetof(Entry, sequence), 0, nullptr},
    {"returns", T_OBJECT, offsetof(Entry, returns), 0, nullptr},
    {"host", T_OBJECT, offsetof(Entry, host), 0, nullptr},
    {"parts", T_OBJECT, offsetof(Entry, parts), 0, nullptr},
    {"at", T_PYSSIZET, offsetof(Entry, at), 0, nullptr},
    {"used", T_LONGLONG, offsetof(Entry, used), READONLY, nullptr},
    {nullptr, 0, 0, 0, nullptr},
};

PyObject* plan_new(PyTypeObject* type, PyObject* args, PyObject*) {
  PyObject *target, *special, *named;
  unsigned long long scalars;
  if (!PyArg_ParseTuple(args, "OOKO!", &target, &special, &scalars, &PyFrozenSet_Type, &named)) return nullptr;
  PyObject* entries = PyDict_New();
  if (entries == nullptr) return nullptr;
  auto* made = reinterpret_cast<Plan*>(empty<Plan>(type));
  if (made == nullptr) return Py_DECREF(entries), nullptr;
  made->entries = entries, made->scalars = scalars;
  made->target = Py_NewRef(target), made->special = Py_NewRef(special), made->named = Py_NewRef(named);
  return reinterpret_cast<PyObject*>(made);
}

// plan.forget(key): remove an entry. Later words of this process do not use it.
PyObject* plan_forget(PyObject* self, PyObject* key) {
  PyObject* const entries = reinterpret_cast<Plan*>(self)->entries;
  const Owned entry = own(new_reference_to_value(entries, key));
  if (!entry) return PyErr_Occurred() ? nullptr : Py_NewRef(Py_None);
  if (PyDict_DelItem(entries, key) < 0) {
    if (!PyErr_ExceptionMatches(PyExc_KeyError)) return nullptr;
    PyErr_Clear();  // another thread was faster
  }
  if (Py_TYPE(entry.get()) == entry_type) {
    const std::lock_guard lock(records_lock);
    reinterpret_cast<Entry*>(entry.get())->forgotten = true;
  }
  Py_RETURN_NONE;
}

PyMethodDef plan_methods[] = {
    {"forget", plan_forget, METH_O, nullptr},
    {nullptr, nullptr, 0, nullptr},
};

PyMemberDef plan_members[] = {
    {"entries", T_OBJECT, offsetof(Plan, entries), READONLY, nullptr},
    {"target", T_OBJECT, offsetof(Plan, target), READONLY, nullptr},
    {"special", T_OBJECT, offsetof(Plan, special), READONLY, nullptr},
    {nullptr, 0, 0, 0, nullptr},
};

// Functions of Python ------------------------------------------------------------------------------------------------

// Set once, by the module of Python that uses them, before other threads can import it.
struct Callbacks {
  PyObject *tensor, *make, *no_pointer, *is_inference;  // of torch
  PyObject *constants;                                  // the types of arguments that are themselves in a key
  PyObject *part, *not_plain, *with_host, *missing, *plan_of;
  PyObject *yes, *no;  // True and False in a key: 1 == True, and they are not the same argument
} callbacks;

PyObject *name_ref, *name_meta, *name_form, *name_sink, *name_nbytes;
std::unordered_map<PyObject*, Plan*>& plans() {  // operators are never freed, and their own hash is slow
  static auto* known = new std::unordered_map<PyObject*, Plan*>;
  return *known;
}
GilMutex plans_lock;

// Keys -------------------------------------------------------------------------------------------------------------

// The operands of a record: ids of tensors, and numbers.
class Operands {
 public:
  Operands() = default;
  Operands(const Operands&) = delete;
  ~Operands() {
    for (PyObject* each : *this) Py_DECREF(each);
  }
  void add(PyObject* stolen) {
    if (count_ < few_.size()) {
      few_[count_++] = stolen;
      return;
    }
    if (more_.empty()) more_.assign(few_.begin(), few_.end());
    more_.push_back(stolen);
  }
  Py_ssize_t size() const { return static_cast<Py_ssize_t>(more_.empty() ? count_ : more_.size()); }
  PyObject** begin() { return more_.empty() ? few_.data() : more_.data(); }
  PyObject** end() { return more_.empty() ? few_.data() + count_ : more_.data() + more_.size(); }

 private:
  std::array<PyObject*, 16> few_;
  std::size_t count_ = 0;
  std::vector<PyObject*> more_;
};

bool fits(PyObject* number) {
  int overflow = 0;
  PyLong_AsLongLongAndOverflow(number, &overflow);
  return overflow == 0;
}

// nullptr: another thread has changed a list or dict of arguments during the call.
PyObject* changed_arguments() {
  PyErr_SetString(PyExc_RuntimeError, "a list or dict of arguments was changed during the call");
  return nullptr;
}

// An item of a list or tuple; empty behind the end of a list that another thread has made shorter.
Owned item_of(PyObject* sequence, Py_ssize_t i) {
  return PyList_Check(sequence) ? own(new_reference_to_item(sequence, i)) : share(PyTuple_GET_ITEM(sequence, i));
}

PyObject* part_of_list(PyObject* list, Operands& operands);

// The part of the key for an argument, as a new reference. is_scalar: the metadata do not depend on an int.
PyObject* part_of(PyObject* value, bool is_scalar, Operands& operands) {
  PyTypeObject* type = Py_TYPE(value);
  if (reinterpret_cast<PyObject*>(type) == callbacks.tensor) {
    const Owned ref = own(PyObject_GetAttr(value, name_ref));
    if (!ref) return nullptr;
    if (Py_TYPE(ref.get()) != ref_type) return PyErr_SetString(PyExc_TypeError, "_ref is no Ref"), nullptr;
    PyObject* meta = PyObject_GetAttr(value, name_meta);
    if (meta != nullptr) operands.add(Py_NewRef(reinterpret_cast<Ref*>(ref.get())->id));
    return meta;
  }
  if (type == &PyLong_Type) {
    if (!is_scalar || !fits(value)) return Py_NewRef(value);
    operands.add(Py_NewRef(value));
    return Py_NewRef(reinterpret_cast<PyObject*>(&PyLong_Type));
  }
  if (value == Py_None || type == &PyUnicode_Type) return Py_NewRef(value);
  if (type == &PyFloat_Type) {
    operands.add(Py_NewRef(value));
    return Py_NewRef(reinterpret_cast<PyObject*>(&PyFloat_Type));
  }
  if (type == &PyBool_Type) return Py_NewRef(value == Py_True ? callbacks.yes : callbacks.no);
  if (type == &PyList_Type || type == &PyTuple_Type) return part_of_list(value, operands);
  for (Py_ssize_t i = 0; i < PyTuple_GET_SIZE(callbacks.constants); ++i) {
    if (reinterpret_cast<PyObject*>(type) == PyTuple_GET_ITEM(callbacks.constants, i)) return Py_NewRef(value);
  }
  return PyObject_CallOneArg(callbacks.part, value);
}

PyObject* part_of_list(PyObject* list, Operands& operands) {
  const Py_ssize_t size = PySequence_Fast_GET_SIZE(list);
  Owned found = own(PyTuple_New(size));
  if (!found) return nullptr;
  for (Py_ssize_t i = 0; i < size; ++i) {
    const Owned item = item_of(list, i);
    if (!item) return changed_arguments();
    PyObject* each = part_of(item.get(), false, operands);
    if (each == nullptr) return nullptr;
    PyTuple_SET_ITEM(found.get(), i, each);
  }
  return found.release();
}

// workers: of an operation that has no tensor among its arguments, else None.
Owned key_of(Plan* plan, PyObject* args, PyObject* kwargs, PyObject* workers, Operands& operands) {
  const Py_ssize_t count = PySequence_Fast_GET_SIZE(args), first = workers == Py_None ? 0 : 1;
  const Py_ssize_t named = kwargs == Py_None ? 0 : PyDict_GET_SIZE(kwargs);
  Owned key = own(PyTuple_New(first + count + 2 * named));
  if (!key) return key;
  Py_ssize_t at = 0;
  if (first) PyTuple_SET_ITEM(key.get(), at++, Py_NewRef(workers));
  for (Py_ssize_t i = 0; i < count; ++i) {
    const bool is_scalar = i < 64 && (plan->scalars >> i & 1);
    const Owned item = item_of(args, i);
    if (!item) return own(changed_arguments());
    PyObject* part = part_of(item.get(), is_scalar, operands);
    if (part == nullptr) return {};
    PyTuple_SET_ITEM(key.get(), at++, part);
  }
  if (!named) return key;
  const ObjectLock lock(kwargs);
  PyObject *found, *other;
  for (Py_ssize_t next = 0; at < PyTuple_GET_SIZE(key.get()) && PyDict_Next(kwargs, &next, &found, &other);) {
    Owned name = share(found);
    const Owned value = share(other);
    PyObject* part = part_of(value.get(), PySet_Contains(plan->named, name.get()) == 1, operands);
    if (part == nullptr) return {};
    PyTuple_SET_ITEM(key.get(), at++, name.release());
    PyTuple_SET_ITEM(key.get(), at++, part);
  }
  return at == PyTuple_GET_SIZE(key.get()) ? std::move(key) : own(changed_arguments());
}

// Results ----------------------------------------------------------------------------------------------------------

// A tensor of these workers. Python makes it in inference mode: a view of a tensor from outside must be as that one is.
Owned tensor_of(PyObject* form, PyObject* meta, const Owned& ref) {
  const Owned inference = own(PyObject_CallNoArgs(callbacks.is_inference));
  if (!inference) return {};
  if (inference.get() == Py_True) {
    PyObject* const given[] = {meta, ref.get()};
    return own(PyObject_Vectorcall(callbacks.tensor, given, 2, nullptr));
  }
  Owned made = own(PyObject_Call(callbacks.make, form, nullptr));
  if (!made || !own(PyObject_CallOneArg(callbacks.no_pointer, made.get()))) return {};
  if (PyObject_SetAttr(made.get(), name_ref, ref.get()) < 0 || PyObject_SetAttr(made.get(), name_meta, meta) < 0) {
    return {};
  }
  return made;
}

// Only `used` orders entries, so it need not be exact.
void note_use(Entry* entry) {
#if defined(Py_GIL_DISABLED)
  const std::int64_t next = now.fetch_add(1, std::memory_order_relaxed) + 1;
#else
  const std::int64_t next = now.load(std::memory_order_relaxed) + 1;
  now.store(next, std::memory_order_relaxed);
#endif
  __atomic_store_n(&entry->used, next, __ATOMIC_RELAXED);
}

Sink* sink_of(Entry* entry) { return reinterpret_cast<Sink*>(entry->sink); }

bool add_bytes(PyObject* meta, long long& total) {
  if (meta == Py_None) return true;
  const Owned bytes = own(PyObject_GetAttr(meta, name_nbytes));
  total += bytes ? PyLong_AsLongLong(bytes.get()) : 0;
  return PyErr_Occurred() == nullptr;
}

// Once for each entry.
bool prepare(Entry* entry) {
  if (entry->workers == nullptr) return PyErr_SetString(PyExc_TypeError, "an entry without workers"), false;
  Owned sink = own(PyObject_GetAttr(entry->workers, name_sink));
  if (!sink) return false;
  const bool is_right = Py_TYPE(sink.get()) == sink_type && entry->outs != nullptr && PyTuple_Check(entry->outs) &&
                        (entry->kind != kOne || PyTuple_GET_SIZE(entry->outs) == 1);
  if (!is_right) return PyErr_SetString(PyExc_TypeError, "an entry has a Sink, and a tuple of results"), false;
  const Py_ssize_t count = PyTuple_GET_SIZE(entry->outs);
  Owned forms = own(PyTuple_New(count));
  long long bytes = 0;
  for (Py_ssize_t i = 0; forms && i < count; ++i) {
    PyObject* meta = PyTuple_GET_ITEM(entry->outs, i);
    if (!add_bytes(meta, bytes)) return false;
    PyObject* form = meta == Py_None ? Py_NewRef(Py_None) : PyObject_GetAttr(meta, name_form);
    if (form == nullptr) return false;
    PyTuple_SET_ITEM(forms.get(), i, form);
  }
  if (!forms) return false;
  const std::lock_guard lock(records_lock);
  if (entry->sink != nullptr) return true;  // another thread was faster
  entry->bytes = bytes;
  entry->forms = forms.release();
  entry->sink = sink.release();
  return true;
}

bool is_prepared(Entry* entry) {
  const std::lock_guard lock(records_lock);
  return entry->sink != nullptr;
}

// Remove all items of a list, and return them as a new list. One step for other threads.
Owned take_all(PyObject* list) {
  const ObjectLock lock(list);
  const Py_ssize_t count = PyList_GET_SIZE(list);
  Owned taken = own(PyList_GetSlice(list, 0, count));
  if (taken && PyList_SetSlice(list, 0, count, nullptr) < 0) return {};
  return taken;
}

// Append words in one step.
bool append_all(PyObject* words, PyObject* more) {
  const Py_ssize_t end = PY_SSIZE_T_MAX;  // wherever it is now
  return PyList_SetSlice(words, end, end, more) == 0;
}

// Delete unreachable tensors after all words so far and before new ones: otherwise a batch of large results would keep
// all of them in memory at once.
bool delete_first(Sink* sink) {
  sink->made = 0;
  const Owned dead = take_all(sink->unreachable);
  if (!dead) return false;
  const Py_ssize_t count = PyList_GET_SIZE(dead.get());
  if (count == 0) return true;
  const Owned head = own(Py_BuildValue("[ln]", kDelete, count));
  return head && append_all(head.get(), dead.get()) && append_all(sink->words, head.get());
}

// The ids of the results are Refs from here on: after any error, the workers delete unreferenced results.
#if defined(Py_GIL_DISABLED)
bool append_record(Entry* entry, PyObject* site, Operands& operands, Operands& refs) {
  const Owned record = own(PyTuple_New(2 + operands.size() + refs.size()));
  if (!record) return false;
  Py_ssize_t at = 0;
  const auto add = [&](PyObject* word) { PyTuple_SET_ITEM(record.get(), at++, Py_NewRef(word)); };
  add(entry->number);
  add(site);
  for (PyObject* each : operands) add(each);
  for (PyObject* each : refs) add(Py_TYPE(each) == ref_type ? reinterpret_cast<Ref*>(each)->id : each);
  return append_all(sink_of(entry)->words, record.get());
}
#else
bool append_record(Entry* entry, PyObject* site, Operands& operands, Operands& refs) {
  Sink* sink = sink_of(entry);
  PyObject* words = sink->words;
  bool done = PyList_Append(words, entry->number) == 0 && PyList_Append(words, site) == 0;
  for (PyObject* each : operands) done = done && PyList_Append(words, each) == 0;
  for (PyObject* each : refs) {
    done = done && PyList_Append(words, Py_TYPE(each) == ref_type ? reinterpret_cast<Ref*>(each)->id : each) == 0;
  }
  return done;
}
#endif

bool make_refs(Entry* entry, Operands& refs) {
  const Py_ssize_t count = PyTuple_GET_SIZE(entry->outs);
  for (Py_ssize_t i = 0; i < count; ++i) {
    if (PyTuple_GET_ITEM(entry->outs, i) == Py_None) {
      refs.add(PyLong_FromLong(0));
      continue;
    }
    const Owned id = own(PyIter_Next(sink_of(entry)->ids));
    PyObject* ref = id ? make_ref(entry->workers, sink_of(entry)->unreachable, id.get()) : nullptr;
    if (ref == nullptr) return false;
    refs.add(ref);
  }
  return true;
}

PyObject* results_of(Entry* entry, Operands& refs, PyObject* args, PyObject* kwargs) {
  const auto tensor = [&](Py_ssize_t i, PyObject* ref) {
    return tensor_of(PyTuple_GET_ITEM(entry->forms, i), PyTuple_GET_ITEM(entry->outs, i), share(ref)).release();
  };
  if (entry->kind == kOne) return tensor(0, *refs.begin());
  if (entry->kind == kNone) {
    if (entry->at >= 0 && entry->at < PySequence_Fast_GET_SIZE(args)) {
      if (Owned changed = item_of(args, entry->at)) return changed.release();
    }
    if (entry->returns == nullptr || entry->returns == Py_None) Py_RETURN_NONE;
    const Owned named = kwargs == Py_None ? own(PyDict_New()) : share(kwargs);
    return named ? PyObject_CallFunctionObjArgs(entry->returns, args, named.get(), nullptr) : nullptr;
  }
  const Py_ssize_t count = PyTuple_GET_SIZE(entry->outs);
  const bool is_list = entry->sequence == reinterpret_cast<PyObject*>(&PyList_Type);
  Owned found = own(is_list ? PyList_New(count) : PyTuple_New(count));
  for (Py_ssize_t i = 0; found && i < count; ++i) {
    PyObject* ref = refs.begin()[i];
    PyObject* each = Py_TYPE(ref) == ref_type ? tensor(i, ref) : Py_NewRef(Py_None);
    if (each == nullptr) return nullptr;
    if (is_list) {
      PyList_SET_ITEM(found.get(), i, each);
    } else {
      PyTuple_SET_ITEM(found.get(), i, each);
    }
  }
  return found.release();
}

// nullptr with `is_stale`, and without an error, if another thread has forgotten the entry since it was looked up.
PyObject* emit(const Owned& held, const Owned& site, Operands& operands, PyObject* args, PyObject* kwargs, bool& is_stale) {
  auto* entry = reinterpret_cast<Entry*>(held.get());
  note_use(entry);
  if (entry->number == nullptr || !PyLong_Check(entry->number)) return PyErr_SetString(PyExc_TypeError, "an entry without a number"), nullptr;
  if (PyLong_AsLong(entry->number) == 0) return Py_NewRef(entry->host == nullptr ? Py_None : entry->host);
  if (!is_prepared(entry) && !prepare(entry)) return nullptr;
  Sink* sink = sink_of(entry);
  Operands refs;
  if (!make_refs(entry, refs)) return nullptr;
  bool is_first = false;
  {
    const std::lock_guard lock(records_lock);
    is_stale = entry->forgotten;
    if (is_stale) return nullptr;
    is_first = PyList_GET_SIZE(sink->words) == 0;
    if (entry->bytes != 0 && (sink->made += entry->bytes) >= sink->most && !delete_first(sink)) return nullptr;
    if (!append_record(entry, site.get(), operands, refs)) return nullptr;
    // Another thread may have taken the earlier words since the first look.
    is_first = is_first || PyList_GET_SIZE(sink->words) <= 2 + operands.size() + refs.size();
    ++sink->records;
  }
  if (is_first && !own(PyObject_CallNoArgs(sink->wake))) return nullptr;
  if ((PyList_GET_SIZE(sink->words) > sink->limit || sink->debug) && !own(PyObject_CallNoArgs(sink->full))) {
    return nullptr;
  }
  return results_of(entry, refs, args, kwargs);
}

// Operations -------------------------------------------------------------------------------------------------------

PyObject* run(Plan* plan, PyObject* args, PyObject* kwargs, PyObject* workers) {
  const Owned site = own(current_call_site());
  if (!site) return nullptr;
  Operands operands;
  const Owned key = key_of(plan, args, kwargs, workers, operands);
  if (!key) {
    if (!PyErr_ExceptionMatches(callbacks.not_plain)) return nullptr;
    PyErr_Clear();
    return PyObject_CallFunctionObjArgs(callbacks.with_host, plan, args, kwargs, nullptr);
  }
  for (;;) {
    Owned entry = own(new_reference_to_value(plan->entries, key.get()));
    if (!entry) {
      if (PyErr_Occurred()) return nullptr;
      entry = own(PyObject_CallFunctionObjArgs(callbacks.missing, plan, key.get(), args, kwargs, workers, nullptr));
      if (!entry) return nullptr;
    }
    if (Py_TYPE(entry.get()) != entry_type) return PyErr_SetString(PyExc_TypeError, "no Entry"), nullptr;
    bool is_stale = false;
    PyObject* const result = emit(entry, site, operands, args, kwargs, is_stale);
    if (!is_stale) return result;
  }
}

bool are_arguments(PyObject* args, PyObject* kwargs) {
  if (callbacks.tensor == nullptr) return PyErr_SetString(PyExc_RuntimeError, "set_up_issue() comes first"), false;
  if ((PyTuple_Check(args) || PyList_Check(args)) && (kwargs == Py_None || PyDict_Check(kwargs))) return true;
  PyErr_SetString(PyExc_TypeError, "arguments are a sequence and a dict, or None");
  return false;
}

Plan* known_plan(PyObject* op) {
  const std::lock_guard lock(plans_lock);
  const auto known = plans().find(op);
  return known == plans().end() ? nullptr : known->second;
}

// A borrowed reference: plans are never freed. nullptr with an error.
Plan* plan_of(PyObject* op) {
  if (Plan* const known = known_plan(op)) return known;
  Owned plan = own(PyObject_CallOneArg(callbacks.plan_of, op));
  if (!plan) return nullptr;
  if (Py_TYPE(plan.get()) != plan_type) return PyErr_SetString(PyExc_TypeError, "no Plan"), nullptr;
  const std::lock_guard lock(plans_lock);
  const auto [kept, is_new] = plans().emplace(op, reinterpret_cast<Plan*>(plan.get()));
  if (is_new) {  // else another thread was faster
    Py_INCREF(op);
    plan.release();
  }
  return kept->second;
}

PyObject* dispatch(PyObject*, PyObject* const* given, Py_ssize_t count) {
  if (count != 3 || !are_arguments(given[1], given[2])) {
    return PyErr_Occurred() ? nullptr : (PyErr_SetString(PyExc_TypeError, "dispatch(func, args, kwargs)"), nullptr);
  }
  Plan* const plan = plan_of(given[0]);
  if (plan == nullptr) return nullptr;
  if (plan->special == Py_None) return run(plan, given[1], given[2], Py_None);
  const Owned named = given[2] == Py_None ? own(PyDict_New()) : share(given[2]);
  return named ? PyObject_CallFunctionObjArgs(plan->special, given[0], given[1], named.get(), nullptr) : nullptr;
}

PyObject* issue(PyObject*, PyObject* const* given, Py_ssize_t count) {
  if (count != 4 || Py_TYPE(given[0]) != plan_type || !are_arguments(given[1], given[2])) {
    if (!PyErr_Occurred()) PyErr_SetString(PyExc_TypeError, "issue(plan, args, kwargs, workers)");
    return nullptr;
  }
  return run(reinterpret_cast<Plan*>(given[0]), given[1], given[2], given[3]);
}

PyObject* set_up(PyObject*, PyObject* args) {
  if (!PyArg_ParseTuple(args, "OOOOO!OOOOOOO", &callbacks.tensor, &callbacks.make, &callbacks.no_pointer, &callbacks.is_inference,
                        &PyTuple_Type, &callbacks.constants, &callbacks.part, &callbacks.not_plain, &callbacks.with_host, &callbacks.missing,
                        &callbacks.plan_of, &callbacks.yes, &callbacks.no)) {
    return nullptr;
  }
  Py_INCREF(args);  // never released: the module keeps the callbacks
  Py_RETURN_NONE;
}

PyObject* take_all_words(PyObject*, PyObject* list) {
  if (!PyList_CheckExact(list)) return PyErr_SetString(PyExc_TypeError, "take_all() takes a list"), nullptr;
  return take_all(list).release();
}

PyMethodDef functions[] = {
    {"take_all", take_all_words, METH_O, nullptr},
    {"set_up_issue", set_up, METH_VARARGS, nullptr},
    {"dispatch", reinterpret_cast<PyCFunction>(reinterpret_cast<void (*)()>(dispatch)), METH_FASTCALL, nullptr},
    {"issue", reinterpret_cast<PyCFunction>(reinterpret_cast<void (*)()>(issue)), METH_FASTCALL, nullptr},
    {nullptr, nullptr, 0, nullptr},
};

PyMethodDef no_methods[] = {{nullptr, nullptr, 0, nullptr}};

template <class T>
PyTypeObject* add_type(PyObject* module, const char* name, newfunc make, PyMemberDef* members,
                       inquiry clear_it = clear<T>, destructor free_it = free_of<T>, PyMethodDef* methods = no_methods) {
  PyType_Slot slots[] = {
      {Py_tp_new, reinterpret_cast<void*>(make)},
      {Py_tp_members, members},
      {Py_tp_methods, methods},
      {Py_tp_traverse, reinterpret_cast<void*>(traverse<T>)},
      {Py_tp_clear, reinterpret_cast<void*>(clear_it)},
      {Py_tp_dealloc, reinterpret_cast<void*>(free_it)},
      {0, nullptr},
  };
  PyType_Spec spec{name, static_cast<int>(sizeof(T)), 0, Py_TPFLAGS_DEFAULT | Py_TPFLAGS_HAVE_GC, slots};
  auto* type = reinterpret_cast<PyTypeObject*>(PyType_FromSpec(&spec));
  if (type != nullptr && PyModule_AddType(module, type) < 0) Py_CLEAR(type);
  return type;
}

}  // namespace

bool add_issue(PyObject* module) {
#if defined(Py_GIL_DISABLED)
  // A thread that holds the lock may be detached, and its process forked, while it waits for the lock of a list.
  pthread_atfork(nullptr, nullptr, [] { new (&records_lock) GilMutex; });
#endif
  name_ref = PyUnicode_InternFromString("_ref");
  name_meta = PyUnicode_InternFromString("_meta");
  name_form = PyUnicode_InternFromString("form");
  name_sink = PyUnicode_InternFromString("sink");
  name_nbytes = PyUnicode_InternFromString("nbytes");
  sink_type = add_type<Sink>(module, "monarch_backend._native.Sink", sink_new, sink_members);
  ref_type = add_type<Ref>(module, "monarch_backend._native.Ref", ref_new, ref_members, ref_clear, ref_free);
  entry_type = add_type<Entry>(module, "monarch_backend._native.Entry", entry_new, entry_members);
  plan_type = add_type<Plan>(module, "monarch_backend._native.Plan", plan_new, plan_members, clear<Plan>, free_of<Plan>,
                             plan_methods);
  return name_sink && name_nbytes && sink_type && ref_type && entry_type && plan_type && PyModule_AddFunctions(module, functions) == 0;
}

}  // namespace monarch::records
