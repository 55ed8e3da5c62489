#include "shm/python/fast_paths.h"

#include <algorithm>
#include <array>
#include <mutex>
#include <optional>
#include <utility>
#include <vector>

#include "gil_mutex.h"

namespace py = pybind11;

namespace monarch {

namespace {

// Names of attributes, made once for all fast paths, by set_up_fast_paths. Never freed, because the interpreter may end first.
struct Names {
  py::str shape{"shape"}, async_op{"asyncOp"}, reduce_op{"reduceOp"}, op{"op"}, root_rank{"rootRank"}, root_tensor{"rootTensor"},
      device{"device"}, device_ids{"device_ids"}, type{"type"}, cpu{"cpu"}, opts{"opts"}, outputs{"_outputs"},
      operation{"_operation"}, group{"_group"}, engine{"_engine"}, deferred{"_deferred"};
};

const Names& names() {
  static const auto* const all = new Names;
  return *all;
}

class Caller : public CompiledMethod {
 public:
  explicit Caller(FastPath fast_path)
      : CompiledMethod(fast_path.owner, fast_path.name),
        its_(std::move(fast_path)),
        engine_(its_.engine.cast<Engine&>()),
        n_(static_cast<std::uint64_t>(its_.group->size())) {
    its_.owner = py::none();  // which holds us
  }

 private:
  std::optional<py::object> in_short(PyObject* const* args, Py_ssize_t count, PyObject* keywords) override {
    constexpr std::array<Py_ssize_t, 5> counts{2, 3, 3, 5, 1};  // of arguments, by form
    if (keywords != nullptr) {
      const bool only_opts = its_.form == Form::nothing && count == 0 && PyTuple_GET_SIZE(keywords) == 1;
      if (!only_opts || !py::handle(PyTuple_GET_ITEM(keywords, 0)).equal(names().opts)) return std::nullopt;
      count = 1;
    }
    if (count != counts.at(static_cast<std::size_t>(its_.form))) return std::nullopt;
    PyObject* const opts = args[count - 1];
    if (reinterpret_cast<PyObject*>(Py_TYPE(opts)) != its_.options.ptr()) return std::nullopt;
    PyObject* const is_async = get(opts, names().async_op).ptr();  // True and False are never freed
    if ((is_async != Py_False && is_async != Py_True) || its_.torch.watched()) return std::nullopt;
    Tensors tensors;
    const auto operation = std::make_shared<Operation>();
    const bool same = its_.form == Form::nothing ? on_cpu(opts) : read(args, *operation, tensors);
    if (!same || !describe(opts, *operation)) return std::nullopt;
    const py::object options = py::reinterpret_borrow<py::object>(opts);
    if (is_async == Py_True) return start(operation, tensors, options);
    const auto failed = run_to_end(*its_.group, operation, its_.seconds, options);
    return failed ? its_.failed(failed, tensors.shown()) : work(*operation, state_of(tensors));
  }

  // References of our own: while the operation runs, other threads of Python may change the lists that were given.
  struct Tensors {
    std::vector<py::object> all, outputs;

    static py::list list_of(const std::vector<py::object>& objects) {
      py::list list(objects.size());
      for (std::size_t i = 0; i < objects.size(); ++i) list[i] = objects[i];
      return list;
    }
    py::list shown() const { return list_of(outputs); }
    std::shared_ptr<void> owners() const { return shared_reference(py::make_tuple(list_of(all), shown())); }
  };

  py::object start(const std::shared_ptr<Operation>& operation, const Tensors& tensors, const py::object& options) {
    if (!its_.group->is_small(*operation) && get(its_.backend.ptr(), names().deferred).is_none()) {
      return start_large(operation, tensors, options);
    }
    const bool is_small = begin(*its_.group, operation);
    if (!operation->done.load(std::memory_order_acquire)) {
      operation->keep = tensors.owners();
      return its_.pending(operation, tensors.shown(), options, is_small);
    }
    return operation->failure ? its_.failed(operation, tensors.shown()) : work(*operation, state_of(tensors));
  }

  // An operation that is not tried in the call. The time limit comes first: if a signal's handler raises there, nothing was
  // called.
  py::object start_large(const std::shared_ptr<Operation>& operation, const Tensors& tensors, const py::object& options) {
    operation->deadline = after(its_.seconds(options).cast<double>());
    operation->keep = tensors.owners();
    {
      const py::gil_scoped_release release;
      its_.group->submit(operation);
      engine_.submit_async(its_.group, operation, nullptr);
    }
    py::dict state = state_of(tensors);
    state[names().group] = its_.backend;
    state[names().operation] = py::cast(operation);
    state[names().engine] = its_.engine;
    return work(*operation, state);
  }

  static py::dict state_of(const Tensors& tensors) {
    py::dict state;
    state[names().outputs] = tensors.shown();
    return state;
  }

  // Making a work costs as much as the operation. So works of small tensors are kept and used again, without their
  // earlier state, once no other reference exists.
  py::object work(const Operation& operation, const py::dict& state) {
    const bool keeps = reuses_works && operation.header.bytes * n_ <= most_kept_bytes && its_.form != Form::exchange;
    const bool again = keeps && spare_ && Py_REFCNT(spare_.ptr()) == 1;
    py::object work = again ? spare_ : its_.work();
    if (PyObject_GenericSetDict(work.ptr(), state.ptr(), nullptr) != 0) throw py::error_already_set();
    if (keeps) spare_ = work;
    return work;
  }

  // The tensors; false where these are not what the collective takes from plain ones in equal pieces.
  bool read(PyObject* const* args, Operation& operation, Tensors& tensors) const {
    const Form form = its_.form;
    const auto own = [&](py::object tensor) { return tensors.all.emplace_back(std::move(tensor)).ptr(); };
    PyObject *out = args[0], *in = args[1];
    if (form == Form::gathering) {
      const py::object row = only_item_of(out), input = only_item_of(in);
      if (!row || !input || !is_list_of(row.ptr(), static_cast<Py_ssize_t>(n_))) return false;
      in = own(input);
      for (std::uint64_t r = 0; r < n_; ++r) {
        auto output = py::reinterpret_steal<py::object>(new_reference_to_item(row.ptr(), static_cast<Py_ssize_t>(r)));
        if (!output) return false;
        tensors.outputs.push_back(std::move(output));
      }
      return read_row(tensors.outputs, in, operation);
    }
    if (form == Form::in_place) {
      py::object tensor = only_item_of(out);
      if (!tensor) return false;
      in = out = own(std::move(tensor));
    } else {
      own(py::reinterpret_borrow<py::object>(in));
    }
    tensors.outputs.push_back(py::reinterpret_borrow<py::object>(out));
    if (form == Form::exchange && !(is_list_of(args[2], 0) && is_list_of(args[3], 0) && rows(out) && rows(in))) return false;
    const auto to = its_.torch.plain(out), from = in == out ? to : its_.torch.plain(in);
    const bool scatters = its_.collective == Collective::reduce_scatter, gathers = its_.collective == Collective::all_gather;
    if (!to || !from || to->dtype != from->dtype || to->bytes * (scatters ? n_ : 1) != from->bytes * (gathers ? n_ : 1)) return false;
    if (form != Form::in_place && meet(*from, *to) && !in_slot(*from, *to)) return false;
    const bool exchanges = form == Form::exchange;
    operation.in = pieces(*from, scatters || exchanges ? n_ : 1);
    operation.out = pieces(*to, gathers || exchanges ? n_ : 1);
    operation.header.bytes = exchanges ? 0 : gathers ? from->bytes : to->bytes;
    return its_.torch.set_dtype(to->dtype, operation.header);
  }

  bool read_row(const std::vector<py::object>& row, PyObject* in, Operation& operation) const {
    const auto from = its_.torch.plain(in);
    if (!from) return false;
    operation.in = pieces(*from, 1);
    for (const py::object& out : row) {
      const auto to = its_.torch.plain(out.ptr());
      if (!to || to->dtype != from->dtype || to->bytes != from->bytes) return false;
      operation.out.push_back({reinterpret_cast<char*>(to->address), to->bytes});
    }
    operation.header.bytes = from->bytes;
    return are_apart(operation) && its_.torch.set_dtype(from->dtype, operation.header);
  }

  // Whether two ranges share memory. The method knows what is to be done then (process_group/_overlap.py).
  static bool meet(const Plain& a, const Plain& b) { return a.address < b.address + b.bytes && b.address < a.address + a.bytes; }

  // Whether the smaller tensor is the slice of this rank in the larger one, where reading and writing do not collide.
  bool in_slot(const Plain& a, const Plain& b) const {
    const auto& [small, large] = std::minmax(a, b, [](const Plain& x, const Plain& y) { return x.bytes < y.bytes; });
    return small.bytes * n_ == large.bytes && small.address == large.address + static_cast<std::uint64_t>(its_.group->rank()) * small.bytes;
  }

  // Whether no output of a row shares memory with another output, nor with the input, which may be the output of this rank.
  bool are_apart(const Operation& operation) const {
    const Span& in = operation.in[0];
    std::vector<const char*> places(operation.out.size());
    for (std::size_t r = 0; r < places.size(); ++r) {
      const char* const out = places[r] = operation.out[r].data;
      const bool own = out == in.data && static_cast<int>(r) == its_.group->rank();
      if (!own && out < in.data + in.bytes && in.data < out + in.bytes) return false;
    }
    if (!std::is_sorted(places.begin(), places.end())) std::sort(places.begin(), places.end());
    const auto overlap = [&](const char* low, const char* high) { return high < low + in.bytes; };
    return std::adjacent_find(places.begin(), places.end(), overlap) == places.end();
  }

  static std::vector<Span> pieces(const Plain& tensor, std::uint64_t n) {
    std::vector<Span> result(n);
    for (std::uint64_t i = 0; i < n; ++i) result[i] = {reinterpret_cast<char*>(tensor.address) + i * (tensor.bytes / n), tensor.bytes / n};
    return result;
  }

  // Read the options; false if they need the method.
  bool describe(PyObject* opts, Operation& operation) const {
    Header& header = operation.header;
    const Collective collective = its_.collective;
    header.collective = collective;
    header.root = -1;
    if (collective == Collective::barrier) header.dtype = Dtype::u8;  // as process_group/_shm/shm_backend.py has it
    if (has_root(collective)) {
      const py::object root = get(opts, names().root_rank);
      header.root = static_cast<std::int32_t>(PyLong_AsLong(root.ptr()));
      if (header.root < 0 || header.root >= static_cast<std::int32_t>(n_)) return false;
      if (PyLong_AsLong(get(opts, names().root_tensor).ptr()) != 0) return false;
    }
    if (!reduces(collective)) return true;
    const py::object op = get(opts, names().reduce_op);
    if (op.equal(its_.torch.sum)) {
      header.op = ReduceOp::sum;
    } else {
      const py::object kind = py::reinterpret_steal<py::object>(PyNumber_Long(get(op.ptr(), names().op).ptr()));
      PyObject* const code = kind ? PyDict_GetItem(its_.torch.ops.ptr(), kind.ptr()) : throw py::error_already_set();
      if (code == nullptr) return false;
      header.op = static_cast<ReduceOp>(PyLong_AsLong(code));
    }
    return reduce_kernel(header.dtype, header.op) != nullptr;
  }

  // Of a barrier, which has no tensors.
  bool on_cpu(PyObject* opts) const {
    const py::object device = get(opts, names().device);
    return (device.is_none() && py::len(get(opts, names().device_ids)) == 0) || (!device.is_none() && get(device.ptr(), names().type).equal(names().cpu));
  }

  // Whether each rank has as many rows of it.
  bool rows(PyObject* tensor) const {
    if (!its_.torch.is_plain(tensor)) return false;
    const py::object shape = get(tensor, names().shape);
    return PyTuple_Check(shape.ptr()) && PyTuple_GET_SIZE(shape.ptr()) != 0 && PyLong_AsUnsignedLongLong(PyTuple_GET_ITEM(shape.ptr(), 0)) % n_ == 0;
  }

  FastPath its_;
  Engine& engine_;
  std::uint64_t n_;
  py::object spare_;
};

}  // namespace

Clock::time_point after(double seconds) {
  constexpr double year = 3e7;
  return Clock::now() + std::chrono::duration_cast<Clock::duration>(std::chrono::duration<double>(std::min(seconds, year)));
}

bool begin(Group& group, const std::shared_ptr<Operation>& operation) {
  const bool is_small = group.is_small(*operation);
  const py::gil_scoped_release release;
  group.submit(operation);
  if (is_small) group.spin(*operation);
  return is_small;
}

// The owner's reference may end on another thread at the same time, and outside of the lock.
void forget(Operation& operation) {
  static GilMutex forgetting;
  std::shared_ptr<void> kept;
  const std::lock_guard lock(forgetting);
  kept.swap(operation.keep);
}

std::shared_ptr<void> shared_reference(py::object object) {
  return {object.release().ptr(), [](void* pointer) {
            const py::gil_scoped_acquire acquire;
            Py_DECREF(static_cast<PyObject*>(pointer));
          }};
}

std::shared_ptr<Operation> run_to_end(Group& group, std::shared_ptr<Operation> operation, const py::object& seconds,
                                      const py::object& options) {
  constexpr auto soon = std::chrono::milliseconds(2);
  {
    const py::gil_scoped_release release;
    group.submit(operation);
    group.wait_briefly(*operation, soon);
  }
  if (!operation->done.load(std::memory_order_acquire)) {
    std::optional<py::error_already_set> raised;  // for example by a signal handler
    std::optional<double> limit;
    for (int tries = 0; !limit && tries < 100; ++tries) {
      try {
        limit = seconds(options).cast<double>();
      } catch (py::error_already_set& error) {
        raised.emplace(std::move(error));
      }
    }
    {
      const py::gil_scoped_release release;
      group.finish_by(*operation, after(limit.value_or(0)));
    }
    if (raised) throw py::error_already_set(std::move(*raised));
  }
  return operation->failure ? operation : nullptr;
}

void set_up_fast_paths() {
  names();
  set_up_compiled_methods();
}

py::object make_fast_path(FastPath fast_path) { return make_callable(std::make_unique<Caller>(std::move(fast_path))); }

}  // namespace monarch
