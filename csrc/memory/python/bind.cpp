// Python bindings of registered memory, without logic. Addresses are numbers; the caller keeps their memory alive.
#include "bind.h"

#include <pybind11/stl.h>

#include <algorithm>
#include <optional>

#include "memory/python/shapes.h"
#include "memory/registered_memory.h"

namespace py = pybind11;

namespace monarch {

namespace {

constexpr std::uint64_t min_gil_release_bytes = 64 << 10;  // bytes of a copy during which others may have the GIL

// Whether no other thread is needed: neither one of the owner nor a GPU's driver, which waits.
bool needs_no_thread(std::optional<CopyMethod> of_cpu) { return of_cpu == CopyMethod::mapped || of_cpu == CopyMethod::kernel; }

template <class Work>
PyResult with(Registered& memory, const std::string& token, const Ticket& ticket, std::uint64_t bytes, const CancelScope& scope, Work&& work) {
  std::shared_ptr<Peer> peer = memory.host().known(token);
  if (peer != nullptr && bytes < min_gil_release_bytes && needs_no_thread(memory.same_host().cpu_copy_method(*peer, ticket))) return result_of(work(peer));
  const py::gil_scoped_release release;
  if (peer == nullptr) peer = memory.connect_peer(token, scope);
  if (peer != nullptr) return result_of(work(peer));
  if (scope.is_cancelled()) return result_of({Outcome::cancelled});
  return result_of({Clock::now() >= scope.deadline ? Outcome::late : Outcome::lost});
}

// The memory of a Python object; keeps the object alive.
class View {
 public:
  explicit View(const py::object& object) {
    if (PyObject_GetBuffer(object.ptr(), &view_, PyBUF_RECORDS_RO) != 0) throw py::error_already_set();
  }
  ~View() { PyBuffer_Release(&view_); }
  View(const View&) = delete;
  View& operator=(const View&) = delete;

  std::uint64_t address() const { return reinterpret_cast<std::uintptr_t>(view_.buf); }
  std::uint64_t bytes() const { return static_cast<std::uint64_t>(view_.len); }
  bool readonly() const { return view_.readonly != 0; }
  bool contiguous() const { return PyBuffer_IsContiguous(&view_, 'C') != 0; }

 private:
  Py_buffer view_;
};

PyResult move(Registered& memory, const std::string& token, const PyTicket& ticket, bool write, const PySegments& parts, const CancelScope& scope) {
  const std::vector<Segment> segments = segments_of(parts);
  const Access access = write ? Access::write : Access::read;
  return with(memory, token, ticket_of(ticket), bytes_of(segments), scope,
                     [&](const auto& peer) { return memory.same_host().move(peer, ticket_of(ticket), access, segments, scope); });
}

PyResult change(Registered& memory, const std::string& token, const PyTicket& ticket, std::uint32_t access, std::uint64_t offset,
                std::uint64_t operand, std::uint64_t expected, const CancelScope& scope) {
  const std::shared_ptr<Peer> known = memory.host().known(token);
  const bool mapped = known != nullptr && memory.same_host().cpu_copy_method(*known, ticket_of(ticket)) == CopyMethod::mapped;
  const std::uint64_t weight = mapped ? 8 : min_gil_release_bytes;  // else another process's thread does it
  return with(memory, token, ticket_of(ticket), weight, scope, [&](const auto& peer) {
    return memory.same_host().change(peer, ticket_of(ticket), static_cast<Access>(access), offset, operand, expected, scope);
  });
}

// Copies that need no thread. Otherwise none of them runs, and `move` gives the reason.
class Copies {
 public:
  using PyCopy = std::tuple<std::string, PyTicket, bool, std::uint64_t, std::uint64_t, std::uint64_t>;  // token, ticket, writes, a segment

  Copies(std::shared_ptr<Registered> memory, const std::vector<PyCopy>& copies) : memory_(std::move(memory)) {
    for (const auto& [token, ticket, writes, offset, local, bytes] : copies) {
      copies_.push_back({token, ticket_of(ticket), writes ? Access::write : Access::read, {{offset, reinterpret_cast<char*>(local), bytes}}});
      bytes_ += bytes;
    }
  }

  bool run() const {
    if (bytes_ < min_gil_release_bytes) return run_all();
    const py::gil_scoped_release release;
    return run_all();
  }

 private:
  struct Copy {
    std::string token;
    Ticket ticket;
    Access access;
    std::vector<Segment> segment;  // one
  };

  // Check all before the first copy: another route then does all of them.
  bool run_all() const {
    static const CancelScope forever;
    std::vector<std::shared_ptr<Peer>> peers;
    peers.reserve(copies_.size());
    for (const Copy& copy : copies_) {
      peers.push_back(memory_->host().known(copy.token));
      if (peers.back() == nullptr || !needs_no_thread(memory_->same_host().cpu_copy_method(*peers.back(), copy.ticket))) return false;
    }
    for (std::size_t i = 0; i < copies_.size(); ++i) {
      const Copy& copy = copies_[i];
      if (memory_->same_host().move(peers[i], copy.ticket, copy.access, copy.segment, forever).outcome != Outcome::done) return false;
    }
    return true;
  }

  std::shared_ptr<Registered> memory_;
  std::vector<Copy> copies_;
  std::uint64_t bytes_ = 0;
};

// `device`: the GPU of both addresses. Return the driver's text on failure.
std::string move_bytes(int device, void* to, const void* from, std::uint64_t bytes) {
  if (device == gpu::none) {
    std::memmove(to, from, bytes);
    return {};
  }
  try {
    gpu::copy(device, to, from, bytes);
    return {};
  } catch (const gpu::Failure& failure) {
    return failure.what();
  }
}

// The same in this very process.
PyResult move_local(Registered& memory, const PyTicket& py_ticket, bool write, const PySegments& parts) {
  const Ticket ticket = ticket_of(py_ticket);
  const py::gil_scoped_release release;
  for (const auto& [offset, address, bytes] : parts) {
    char* there = nullptr;
    const Refusal refusal = memory.table().hold(ticket, offset, bytes, write ? Access::write : Access::read, &there);
    if (refusal != Refusal::none) return result_of({Outcome::refused, refusal});
    char* here = reinterpret_cast<char*>(address);
    const std::string failure = move_bytes(memory.table().device(ticket), write ? there : here, write ? here : there, bytes);
    memory.table().release(ticket);
    if (!failure.empty()) return result_of({Outcome::failed, Refusal::none, 0, 0, failure});
  }
  return result_of({});
}

PyResult change_local(Registered& memory, const PyTicket& py_ticket, std::uint32_t access, std::uint64_t offset, std::uint64_t operand,
                     std::uint64_t expected) {
  const Ticket ticket = ticket_of(py_ticket);
  char* there = nullptr;
  const Refusal refusal = memory.table().hold(ticket, offset, 8, static_cast<Access>(access), &there);
  if (refusal != Refusal::none) return result_of({Outcome::refused, refusal});
  const std::uint64_t found = do_atomic(there, static_cast<Access>(access), operand, expected);
  memory.table().release(ticket);
  return result_of({Outcome::done, Refusal::none, 0, found});
}

}  // namespace

void bind_memory(py::module_& m) {
  py::class_<CancelScope, std::shared_ptr<CancelScope>>(m, "CancelScope", "Deadline and cancellation of a transfer.")
      .def(py::init([](std::optional<double> seconds) {
             if (!seconds || *seconds >= 1e8) return std::make_shared<CancelScope>();
             return std::make_shared<CancelScope>(Clock::now() + std::chrono::duration_cast<Clock::duration>(std::chrono::duration<double>(*seconds)));
           }),
           py::arg("seconds") = py::none())
      .def("cancel", &CancelScope::cancel)
      .def("outcome", [](const CancelScope& scope) {
        if (scope.is_cancelled()) return static_cast<std::uint32_t>(Outcome::cancelled);
        return static_cast<std::uint32_t>(Clock::now() >= scope.deadline ? Outcome::late : Outcome::done);
      });

  py::class_<View>(m, "View", "The memory of an object with the buffer protocol; keeps the object alive.")
      .def(py::init<const py::object&>())
      .def_property_readonly("address", &View::address)
      .def_property_readonly("nbytes", &View::bytes)
      .def_property_readonly("readonly", &View::readonly)
      .def_property_readonly("contiguous", &View::contiguous);

  py::class_<Copies>(m, "Copies", "A reusable list of copies between this process and others of its host.")
      .def(py::init<std::shared_ptr<Registered>, const std::vector<Copies::PyCopy>&>())
      .def("run", &Copies::run);

  py::class_<Registered, std::shared_ptr<Registered>>(m, "Memory", "Registered memory of this process, and access to that of other processes of the host.")
      .def(py::init<std::shared_ptr<Host>, bool, bool, unsigned>(), py::arg("host"), py::arg("kernel") = true, py::arg("ipc") = true,
           py::arg("threads") = 1)
      .def("add", [](Registered& memory, std::uint64_t address, std::uint64_t bytes, bool writable) {
        const Ticket ticket = memory.table().add(reinterpret_cast<void*>(address), bytes, writable);
        return PyTicket{ticket.slot, ticket.epoch, ticket.key};
      }, py::call_guard<py::gil_scoped_release>())
      .def("why_not_mapped", [](Registered& memory, const std::string& token, const PyTicket& ticket) {
        const auto peer = memory.host().known(token);
        return peer == nullptr ? std::string() : memory.same_host().why_not(*peer, ticket_of(ticket));
      }, py::call_guard<py::gil_scoped_release>())
      .def("add_external_mapping", [](Registered& memory, const std::string& token, const PyTicket& ticket, std::uint64_t address) {
        const auto peer = memory.host().known(token);
        if (peer != nullptr) memory.same_host().mappings()->add_external(peer, ticket_of(ticket), reinterpret_cast<char*>(address));
        return peer != nullptr;
      }, py::call_guard<py::gil_scoped_release>())
      .def("take_unused_mappings", [](Registered& memory) { return memory.same_host().mappings()->take_unused_external(); }, py::call_guard<py::gil_scoped_release>())
      .def("sweep", [](Registered& memory) { memory.same_host().mappings()->sweep(); }, py::call_guard<py::gil_scoped_release>())
      .def("mapped", [](Registered& memory) { return memory.same_host().mappings()->count(); })
      .def("drop", [](Registered& memory, const PyTicket& ticket, double seconds) {
        return static_cast<int>(memory.table().drop(ticket_of(ticket), seconds));
      }, py::call_guard<py::gil_scoped_release>())
      .def("user_of", [](Registered& memory, const PyTicket& ticket) { return memory.table().user_of(ticket_of(ticket)); })
      .def("check", [](Registered& memory, const PyTicket& ticket, std::uint64_t offset, std::uint64_t bytes, std::uint32_t access) {
        char* data = nullptr;
        const Refusal refusal = memory.table().hold(ticket_of(ticket), offset, bytes, static_cast<Access>(access), &data);
        if (refusal == Refusal::none) memory.table().release(ticket_of(ticket));
        return static_cast<std::uint32_t>(refusal);
      })
      .def("count", [](Registered& memory) { return memory.table().count(); })
      .def("move", &move)
      .def("at_once", [](std::shared_ptr<Registered> memory, const std::string& token, const PyTicket& ticket, bool write, std::uint64_t offset,
                         std::uint64_t local, std::uint64_t bytes) {
        return Copies(std::move(memory), {{token, ticket, write, offset, local, bytes}}).run();
      })
      .def("change", &change)
      .def("move_local", &move_local)
      .def("change_local", &change_local)
      .def("copy_method", [](Registered& memory, const std::string& token, const PyTicket& ticket) {
        const auto peer = memory.host().known(token);
        if (peer == nullptr) return -1;
        if (const auto of_cpu = memory.same_host().cpu_copy_method(*peer, ticket_of(ticket))) return static_cast<int>(*of_cpu);
        const py::gil_scoped_release release;
        return static_cast<int>(memory.same_host().copy_method(*peer, ticket_of(ticket)));
      });
}

}  // namespace monarch
