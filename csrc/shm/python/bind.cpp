// Python bindings of shared memory groups, without logic. Tensors are passed as addresses and sizes. The caller keeps
// them alive until an operation is done; messages keep their owner themselves.
#include "bind.h"

#include <pybind11/functional.h>
#include <pybind11/stl.h>

#include <array>
#include <tuple>

#include "shm/engine.h"
#include "shm/python/fast_paths.h"
#include "shm/python/messages.h"
#include "shm/python/work_wait.h"

namespace py = pybind11;

namespace monarch {

namespace {

using Release = py::call_guard<py::gil_scoped_release>;
using Addresses = std::vector<std::pair<std::uintptr_t, std::uint64_t>>;  // address, bytes
using FailureTuple = std::optional<std::tuple<std::string, int, std::string>>;   // kind, rank of the culprit, what happened

bool is_done(const Operation& op) { return op.done.load(std::memory_order_acquire); }

// A thread that moves the operation writes its failure and its source before it is done.
FailureTuple failure_of(const Operation& op) {
  constexpr std::array kinds{"dead", "left", "late", "mismatch", "closed", "full", "unreadable"};
  if (!is_done(op) || !op.failure) return std::nullopt;
  return std::tuple(std::string(kinds.at(op.failure->kind)), op.failure->rank, op.failure->text);
}

std::vector<Span> spans(const Addresses& addresses) {
  std::vector<Span> result;
  result.reserve(addresses.size());
  for (const auto& [address, bytes] : addresses) result.push_back({reinterpret_cast<char*>(address), bytes});
  return result;
}

std::shared_ptr<Operation> make_operation(int collective, int dtype, int op, int root, std::uint64_t bytes,
                                          std::vector<Span> in, std::vector<Span> out) {
  if (collective < 0 || collective >= static_cast<int>(Collective::send) || dtype < 0 ||
      dtype >= static_cast<int>(Dtype::count) || op < 0 || op >= static_cast<int>(ReduceOp::count)) {
    throw py::value_error("unknown collective, dtype or reduce op");
  }
  auto operation = std::make_shared<Operation>();
  operation->header = {bytes, root, static_cast<Collective>(collective), static_cast<Dtype>(dtype), static_cast<ReduceOp>(op), Offer::stage};
  const bool reduces = operation->header.op != ReduceOp::none;
  if (reduces && reduce_kernel(operation->header.dtype, operation->header.op) == nullptr) {
    throw py::value_error(std::string(name_of(operation->header.op)) + " is not defined for " + name_of(operation->header.dtype));
  }
  operation->in = std::move(in);
  operation->out = std::move(out);
  return operation;
}

std::shared_ptr<Operation> make_message(bool send, int dtype, int other, int tag, std::uintptr_t address, std::uint64_t bytes, int size) {
  if (dtype < 0 || dtype >= static_cast<int>(Dtype::count) || other < (send ? 0 : -1) || other >= size) {
    throw py::value_error("unknown dtype or rank");
  }
  auto operation = std::make_shared<Operation>();
  operation->header = {bytes, other, send ? Collective::send : Collective::recv, static_cast<Dtype>(dtype), ReduceOp::none, Offer::stage};
  operation->tag = tag;
  (send ? operation->in : operation->out) = {{reinterpret_cast<char*>(address), bytes}};
  return operation;
}

// Call Python's callback at an operation's end. No code could catch its exceptions.
std::function<void()> reporting(std::function<void()> then) {
  return [then = std::move(then)] {
    try {
      then();
    } catch (py::error_already_set& error) {
      const py::gil_scoped_acquire acquire;
      error.discard_as_unraisable("monarch_backend: the end of an operation");
    }
  };
}

std::unique_ptr<ArenaBuffer> make_arena_buffer(std::shared_ptr<Host> host, std::size_t bytes) {
  if (bytes == 0) throw py::value_error("an arena buffer has at least one byte");
  auto buffer = std::make_unique<ArenaBuffer>(std::move(host), bytes);
  if (buffer->data() == nullptr) throw std::bad_alloc();
  return buffer;
}

std::shared_ptr<Group> make_group(std::shared_ptr<Host> host, int rank, std::vector<std::shared_ptr<Peer>> peers,
                                  std::vector<std::uint64_t> control_blocks, std::uint64_t read_from, std::string label) {
  for (std::size_t r = 0; r < peers.size(); ++r) {
    if ((static_cast<int>(r) == rank) == (peers[r] != nullptr)) throw py::value_error("a peer for every rank but one's own");
  }
  const py::gil_scoped_release release;  // not a call guard: that would cover pybind11's table of instances, too
  return std::make_shared<Group>(std::move(host), rank, std::move(peers), std::move(control_blocks), read_from, std::move(label));
}

// Names and properties of the collectives, for a test that Python has the same.
py::tuple collectives() {
  py::list rows;
  for (int c = 0; c < static_cast<int>(Collective::send); ++c) {
    const CollectiveTraits& its = collective_traits[static_cast<std::size_t>(c)];
    rows.append(py::make_tuple(its.name, its.has_root, its.reduces));
  }
  return py::tuple(rows);
}

}  // namespace

void bind_shared_memory(py::module_& m) {
  set_up_fast_paths();
  set_up_messages();
  set_up_work_wait();
  m.def("work_wait", &make_work_wait, "`wait` for a class of works of fast paths, see csrc/shm/python/work_wait.h.");
  m.def("collectives", &collectives, "Of each collective the name, whether it has a root, and whether it reduces.");
  py::class_<Peer, std::shared_ptr<Peer>>(m, "Peer", "Another process of this host, alive or not.");

  py::class_<Host, std::shared_ptr<Host>>(m, "Host", "This process among those of its host: its arena and its peers.")
      .def(py::init([](std::size_t arena_bytes, const std::string& token) {
             if (!token.empty() && token.size() != 32) throw py::value_error("a token has 32 hexadecimal digits");
             return std::make_shared<Host>(arena_bytes, token);
           }),
           py::arg("arena_bytes"), py::arg("token") = "")
      .def_property_readonly("token", &Host::token)
      .def("connect", [](Host& host, const std::string& token, double seconds) { return host.connect(token, seconds); },
           py::arg("token"), py::arg("seconds") = 1.0, Release())
      .def("accepted", &Host::accepted, Release())
      .def("allocate_control_block", &Group::allocate_control_block, Release())
      .def("free_control_block", [](Host& host, std::uint64_t offset) { host.arena().release(offset); })
      .def("used", [](Host& host) { return host.arena().used(); })
      .def("size", [](Host& host) { return host.arena().mapping().size(); })
      .def("prefault", &Host::prefault)
      .def("return_idle_memory", &Host::return_idle_memory)
      .def("die_with_peer", &Host::die_with_peer, Release())
      .def("leave", &Host::leave)
      .def("abandon", &Host::abandon);

  py::class_<ArenaBuffer>(m, "ArenaBuffer", py::buffer_protocol(), "Memory in the arena, which all peers have mapped.")
      .def(py::init(&make_arena_buffer), py::arg("host"), py::arg("size"))
      .def_buffer([](ArenaBuffer& buffer) {
        return py::buffer_info(buffer.data(), 1, py::format_descriptor<std::uint8_t>::format(), 1, {buffer.size()}, {1});
      });

  py::class_<Operation, std::shared_ptr<Operation>>(m, "Operation", "An operation under way.")
      .def_property_readonly("done", &is_done)
      .def_property_readonly("source", [](const Operation& op) { return is_done(op) ? op.source : -1; })
      .def_property_readonly("failure", &failure_of)
      .def("set_time", [](Operation& op, double seconds) { op.deadline = after(seconds); })
      .def("forget", &forget);

  py::class_<Group, std::shared_ptr<Group>>(m, "ShmGroup", "A group of ranks on this host.")
      .def(py::init(&make_group), py::arg("host"), py::arg("rank"), py::arg("peers"), py::arg("control_blocks"),
           py::arg("read_from"), py::arg("label"))
      .def("run",
           [](Group& group, int collective, int dtype, int op, int root, std::uint64_t bytes, const Addresses& in,
              const Addresses& out, const py::object& seconds, const py::object& options) {
             auto operation = make_operation(collective, dtype, op, root, bytes, spans(in), spans(out));
             return run_to_end(group, std::move(operation), seconds, options);
           })
      .def("fast_path",
           [](std::shared_ptr<Group> group, int collective, int form, py::object owner, std::string name, py::object options,
              py::object work, py::object failed, py::object pending, py::object seconds, py::object backend, py::object engine,
              const py::tuple& torch) {
             return make_fast_path({std::move(group), static_cast<Collective>(collective), static_cast<Form>(form), std::move(owner),
                                   std::move(name), std::move(options), std::move(work), std::move(failed), std::move(pending),
                                   std::move(seconds), std::move(backend), std::move(engine), TorchNames(torch)});
           })
      .def("message_path",
           [](std::shared_ptr<Group> group, int kind, py::object owner, std::string name, py::object work, py::object failed,
              py::object seconds, py::object backend, py::object engine, py::tuple waiting, py::tuple passing, const py::tuple& torch) {
             return make_message_path({std::move(group), static_cast<MessageKind>(kind), std::move(owner), std::move(name), std::move(work),
                                      std::move(failed), std::move(seconds), std::move(backend), std::move(engine), std::move(waiting),
                                      std::move(passing), TorchNames(torch)});
           })
      .def("begin",
           [](Group& group, int collective, int dtype, int op, int root, std::uint64_t bytes, const Addresses& in,
              const Addresses& out, py::object owner) {
             auto operation = make_operation(collective, dtype, op, root, bytes, spans(in), spans(out));
             operation->keep = shared_reference(std::move(owner));
             const bool is_small = begin(group, operation);
             return py::make_tuple(std::move(operation), is_small);
           })
      .def("poll",
           [](Group& group, const Operation& operation) {
             group.advance();
             return is_done(operation);
           },
           Release())
      .def_property_readonly("sequence", &Group::sequence)
      .def_property_readonly("waiting_thread", &Group::waiting_thread)
      .def("record_as", &Group::record_as, py::arg("name"), py::arg("rank"), py::arg("identity"))
      .def("message",
           [](Group& group, bool send, int dtype, int other, int tag, std::uintptr_t address, std::uint64_t bytes, py::object owner) {
             auto operation = make_message(send, dtype, other, tag, address, bytes, group.size());
             operation->keep = shared_reference(std::move(owner));
             const py::gil_scoped_release release;
             group.submit(operation);
             group.spin(*operation);
             return operation;
           })
      .def("finish",
           [](Group& group, Operation& operation, double seconds) {
             {
               const py::gil_scoped_release release;
               group.finish_by(operation, after(seconds));
             }
             return failure_of(operation);
           })
      .def("wait",
           [](Group& group, Operation& op, double seconds) {
             group.wait(op, after(seconds));
             return is_done(op);
           },
           Release())
      // Without the lock of the interpreter: the end of an operation takes it while the group is locked.
      .def("set_reason", &Group::set_reason, Release())
      .def("set_place", &Group::set_place, Release())
      .def("places",
           [](Group& group, std::uint64_t sequence) {
             std::vector<std::string> places;
             {
               const py::gil_scoped_release release;
               places = group.places(sequence);
             }
             py::list found;
             for (const std::string& text : places) found.append(py::bytes(text));
             return found;
           })
      .def("close", &Group::close, Release());

  py::class_<Engine, std::shared_ptr<Engine>>(m, "Engine", "The progress thread of asynchronous operations.")
      .def(py::init<std::shared_ptr<Host>>())
      .def("take_back", &Engine::take_back, Release())
      .def("submit_async",
           [](Engine& engine, std::shared_ptr<Group> group, std::shared_ptr<Operation> operation, std::function<void()> then) {
             const py::gil_scoped_release release;
             engine.submit_async(std::move(group), std::move(operation), reporting(std::move(then)));
           })
      .def("stop", &Engine::stop, Release());
}

}  // namespace monarch
