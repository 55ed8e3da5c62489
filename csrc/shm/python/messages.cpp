#include "shm/python/messages.h"

#include <climits>
#include <optional>
#include <utility>

#include "shm/python/fast_paths.h"
#include "shm/python/work_wait.h"

namespace py = pybind11;

namespace monarch {

namespace {

struct Names {
  py::str outputs{"_outputs"}, source{"_source"}, operation{"_operation"}, group{"_group"}, engine{"_engine"};
};

const Names& names() {
  static const auto* const all = new Names;
  return *all;
}

bool is_done(const Operation& operation) { return operation.done.load(std::memory_order_acquire); }

// The value of an integer; nothing if it is another object, or out of range.
std::optional<int> integer(PyObject* object) {
  if (!PyLong_CheckExact(object)) return std::nullopt;
  int overflow = 0;
  const long value = PyLong_AsLongAndOverflow(object, &overflow);
  if (overflow != 0 || value < INT_MIN || value > INT_MAX) return std::nullopt;
  return static_cast<int>(value);
}

bool contains(const py::tuple& codes, PyObject* code) {
  for (Py_ssize_t i = 0; i < PyTuple_GET_SIZE(codes.ptr()); ++i) {
    if (PyTuple_GET_ITEM(codes.ptr(), i) == code) return true;
  }
  return false;
}

class Messenger : public CompiledMethod {
 public:
  explicit Messenger(MessagePath path)
      : CompiledMethod(path.owner, path.name), its_(std::move(path)), engine_(its_.engine.cast<Engine&>()) {
    its_.owner = py::none();  // which holds us
  }

 private:
  std::optional<py::object> in_short(PyObject* const* args, Py_ssize_t count, PyObject* keywords) override {
    const Py_ssize_t at_tag = its_.kind == MessageKind::recv_any ? 1 : 2;
    if (keywords != nullptr || (count != at_tag && count != at_tag + 1)) return std::nullopt;
    const auto other = at_tag == 1 ? -1 : integer(args[1]), tag = count > at_tag ? integer(args[at_tag]) : 0;
    const bool names_other = at_tag == 1 || (other && *other >= 0 && *other < its_.group->size() && *other != its_.group->rank());
    if (!names_other || !tag || its_.torch.watched()) return std::nullopt;
    const py::object tensor = only_item_of(args[0]);
    const auto plain = tensor ? its_.torch.plain(tensor.ptr()) : std::nullopt;
    if (!plain) return std::nullopt;
    const auto operation = std::make_shared<Operation>();
    operation->header.bytes = plain->bytes;
    operation->header.root = *other;
    operation->header.collective = sends() ? Collective::send : Collective::recv;
    operation->tag = *tag;
    if (!its_.torch.set_dtype(plain->dtype, operation->header)) return std::nullopt;
    (sends() ? operation->in : operation->out).push_back({reinterpret_cast<char*>(plain->address), plain->bytes});
    return run(operation, tensor);
  }

  py::object run(const std::shared_ptr<Operation>& operation, const py::object& tensor) {
    {
      const py::gil_scoped_release release;
      its_.group->submit(operation);
      its_.group->advance();
    }
    if (!is_done(*operation)) {
      operation->keep = shared_reference(tensor);
      if (!is_waited_for()) return pending(operation, tensor);
      try {
        wait(*operation);
      } catch (...) {
        hand_over(engine_, its_.group, operation);
        throw;
      }
    }
    if (operation->failure) return its_.failed(operation, outputs(tensor));
    py::dict state;
    state[names().outputs] = outputs(tensor);
    state[names().source] = py::int_(operation->source);
    return work(*operation, state);
  }

  bool sends() const { return its_.kind == MessageKind::send; }

  static py::list outputs(const py::object& tensor) {
    py::list list(1);
    list[0] = tensor;
    return list;
  }

  // To the end, at most for the group's time limit, which costs more to ask for than a small message.
  void wait(Operation& operation) {
    wait_briefly(*its_.group, operation);
    if (is_done(operation)) return;
    operation.deadline = after(its_.seconds().cast<double>());
    wait_on(*its_.group, operation);
  }

  py::object pending(const std::shared_ptr<Operation>& operation, const py::object& tensor) {
    std::optional<py::error_already_set> raised;  // for example by a signal handler
    try {
      operation->deadline = after(its_.seconds().cast<double>());
    } catch (py::error_already_set& error) {
      raised.emplace(std::move(error));
    }
    hand_over(engine_, its_.group, operation);
    if (raised) throw py::error_already_set(std::move(*raised));
    py::dict state;
    state[names().outputs] = outputs(tensor);
    state[names().group] = its_.backend;
    state[names().operation] = py::cast(operation);
    state[names().engine] = its_.engine;
    return work(*operation, state);
  }

  // Making a work costs as much as a small message. So works of small tensors are kept and used again, once no other
  // reference exists.
  py::object work(const Operation& operation, const py::dict& state) {
    const bool keeps = reuses_works && operation.header.bytes <= most_kept_bytes;
    py::object work = keeps && spare_ && Py_REFCNT(spare_.ptr()) == 1 ? spare_ : its_.work();
    if (PyObject_GenericSetDict(work.ptr(), state.ptr(), nullptr) != 0) throw py::error_already_set();
    if (keeps) spare_ = work;
    return work;
  }

  // As _c10d_internals.is_waited_for.
  bool is_waited_for() const {
    auto frame = py::reinterpret_borrow<py::object>(reinterpret_cast<PyObject*>(PyEval_GetFrame()));
    while (frame) {
      auto* const its_frame = reinterpret_cast<PyFrameObject*>(frame.ptr());
      const auto code = py::reinterpret_steal<py::object>(reinterpret_cast<PyObject*>(PyFrame_GetCode(its_frame)));
      if (contains(its_.waiting, code.ptr())) return true;
      if (!contains(its_.passing, code.ptr())) return false;
      frame = py::reinterpret_steal<py::object>(reinterpret_cast<PyObject*>(PyFrame_GetBack(its_frame)));
    }
    return false;
  }

  MessagePath its_;
  Engine& engine_;
  py::object spare_;
};

}  // namespace

py::object make_message_path(MessagePath path) { return make_callable(std::make_unique<Messenger>(std::move(path))); }

void set_up_messages() { names(); }

}  // namespace monarch
