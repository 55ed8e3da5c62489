// Python bindings of the recording. Functions that run for each message use the C interface: a call takes less time.
#include <pybind11/pybind11.h>

#include <bit>

#include "bind.h"
#include "telemetry/recording.h"
#include "telemetry/stack_signal.h"

namespace py = pybind11;

namespace monarch {
namespace {

using namespace telemetry;

std::uint64_t integer(PyObject* value) { return PyLong_AsUnsignedLongLongMask(value); }

// In a fork the slot and its cells are still the parent's.
bool is_recording() { return slot.load(std::memory_order_relaxed) != nullptr; }

bool has(Py_ssize_t count, Py_ssize_t wanted, const char* name) {
  if (count == wanted) return true;
  PyErr_Format(PyExc_TypeError, "%s takes %zd arguments, not %zd", name, wanted, count);
  return false;
}

// record_event(kind, status, name, detail, start_ns, reference, value, trace): start_ns 0 is an event without duration.
PyObject* record_event(PyObject*, PyObject* const* args, Py_ssize_t count) {
  if (!has(count, 8, "record_event")) return nullptr;
  const std::uint64_t now = now_ns(), start = integer(args[4]);
  const std::uint64_t value =
      PyFloat_Check(args[6]) ? std::bit_cast<std::uint64_t>(PyFloat_AS_DOUBLE(args[6])) : integer(args[6]);
  const Entry entry{.kind = static_cast<Kind>(integer(args[0])),
                    .status = static_cast<std::uint16_t>(integer(args[1])),
                    .name = static_cast<std::uint32_t>(integer(args[2])),
                    .detail = static_cast<std::uint32_t>(integer(args[3])),
                    .end_ns = now,
                    .duration_ns = start == 0 ? 0 : now - start,
                    .reference = integer(args[5]),
                    .value = value,
                    .trace = integer(args[7])};
  if (PyErr_Occurred()) return nullptr;
  record(entry);
  Py_RETURN_NONE;
}

// begin_activity(cell, state, detail, reference, waiting, value, trace, since_ns): cell 0 has no effect. since_ns may be
// left out: the activity begins now.
PyObject* begin_activity(PyObject*, PyObject* const* args, Py_ssize_t count) {
  if (count != 8 && !has(count, 7, "begin_activity")) return nullptr;
  auto* const cell = reinterpret_cast<Cell*>(integer(args[0]));
  if (owns(cell)) {
    update(*cell, [&](Cell& fields) {
      fields.state = static_cast<std::uint16_t>(integer(args[1]));
      fields.detail = static_cast<std::uint32_t>(integer(args[2]));
      fields.reference = integer(args[3]);
      fields.waiting = static_cast<std::uint32_t>(integer(args[4]));
      fields.value = integer(args[5]);
      fields.trace = integer(args[6]);
      fields.since_ns = count == 8 ? integer(args[7]) : now_ns();
    });
  }
  if (PyErr_Occurred()) return nullptr;
  Py_RETURN_NONE;
}

// Show the length of a queue in a cell, from any thread. Only this field changes, so readers see the rest as it is.
void show_queue(Cell* cell, std::uint32_t waiting) {
  // An actor that has ended meanwhile has released its cell.
  if (owns(cell) && cell->kind == static_cast<std::uint16_t>(Kind::message)) __atomic_store_n(&cell->waiting, waiting, __ATOMIC_RELAXED);
}

// note_queue(cell, waiting): from any thread.
PyObject* note_queue(PyObject*, PyObject* const* args, Py_ssize_t count) {
  if (!has(count, 2, "note_queue")) return nullptr;
  auto* const cell = reinterpret_cast<Cell*>(integer(args[0]));
  const auto waiting = static_cast<std::uint32_t>(integer(args[1]));
  if (PyErr_Occurred()) return nullptr;
  show_queue(cell, waiting);
  Py_RETURN_NONE;
}

// note_arrival(cell, waiting, name, detail, reference, value, trace): note_queue, and an event of the message that waits.
PyObject* note_arrival(PyObject*, PyObject* const* args, Py_ssize_t count) {
  if (!has(count, 7, "note_arrival")) return nullptr;
  if (!is_recording()) Py_RETURN_NONE;
  auto* const cell = reinterpret_cast<Cell*>(integer(args[0]));
  const auto waiting = static_cast<std::uint32_t>(integer(args[1]));
  const Entry entry{.kind = Kind::queue,
                    .name = static_cast<std::uint32_t>(integer(args[2])),
                    .detail = static_cast<std::uint32_t>(integer(args[3])),
                    .end_ns = now_ns(),
                    .reference = integer(args[4]),
                    .value = integer(args[5]),
                    .trace = integer(args[6])};
  if (PyErr_Occurred()) return nullptr;
  show_queue(cell, waiting);
  record(entry);
  Py_RETURN_NONE;
}

// count_ended(cell): count an activity that ended elsewhere. On the thread that changes the cell.
PyObject* count_ended(PyObject*, PyObject* const* args, Py_ssize_t count) {
  if (!has(count, 1, "count_ended")) return nullptr;
  auto* const cell = reinterpret_cast<Cell*>(integer(args[0]));
  if (PyErr_Occurred()) return nullptr;
  if (owns(cell)) update(*cell, [](Cell& fields) { ++fields.count; });
  Py_RETURN_NONE;
}

// end_activity(cell, status): the cell is idle, and an event of its kind says what has ended.
PyObject* end_activity(PyObject*, PyObject* const* args, Py_ssize_t count) {
  if (!has(count, 2, "end_activity")) return nullptr;
  auto* const cell = reinterpret_cast<Cell*>(integer(args[0]));
  const auto status = static_cast<std::uint16_t>(integer(args[1]));
  if (PyErr_Occurred()) return nullptr;
  if (owns(cell)) {
    const std::uint64_t now = now_ns();
    record({.kind = static_cast<Kind>(cell->kind),
            .status = status,
            .name = cell->name,
            .detail = cell->detail,
            .end_ns = now,
            .duration_ns = now - cell->since_ns,
            .reference = cell->reference,
            .value = cell->value,
            .trace = cell->kind == static_cast<std::uint16_t>(Kind::collective) ? cell->waiting : cell->trace});
    update(*cell, [&](Cell& fields) {
      fields.state = 0;
      fields.since_ns = now;
      ++fields.count;
    });
  }
  Py_RETURN_NONE;
}

PyObject* this_thread(PyObject*, PyObject*) { return PyLong_FromUnsignedLong(thread_number()); }

PyMethodDef functions[] = {
    {"thread_number", this_thread, METH_NOARGS, "thread_number(): the number of this thread in events."},
    {"record_event", reinterpret_cast<PyCFunction>(reinterpret_cast<void*>(record_event)), METH_FASTCALL,
     "record_event(kind, status, name, detail, start_ns, reference, value, trace): append an event to the ring."},
    {"begin_activity", reinterpret_cast<PyCFunction>(reinterpret_cast<void*>(begin_activity)), METH_FASTCALL,
     "begin_activity(cell, state, detail, reference, waiting, value, trace, since_ns=now): show in the cell what goes on."},
    {"note_queue", reinterpret_cast<PyCFunction>(reinterpret_cast<void*>(note_queue)), METH_FASTCALL,
     "note_queue(cell, waiting): show how many messages wait behind the one that the cell shows."},
    {"note_arrival", reinterpret_cast<PyCFunction>(reinterpret_cast<void*>(note_arrival)), METH_FASTCALL,
     "note_arrival(cell, waiting, name, detail, reference, value, trace): note_queue, and the event of a message that waits."},
    {"count_ended", reinterpret_cast<PyCFunction>(reinterpret_cast<void*>(count_ended)), METH_FASTCALL,
     "count_ended(cell): count one more activity as ended."},
    {"end_activity", reinterpret_cast<PyCFunction>(reinterpret_cast<void*>(end_activity)), METH_FASTCALL,
     "end_activity(cell, status): append the event of what the cell shows, and make the cell idle."},
    {nullptr, nullptr, 0, nullptr}};

std::uintptr_t take(int kind, const std::string& name, std::uint32_t rank, std::uint64_t trace) {
  return reinterpret_cast<std::uintptr_t>(take_cell(static_cast<Kind>(kind), intern(name), rank, trace));
}

std::size_t number_of(std::uintptr_t cell) {
  const Slot* const here = slot.load(std::memory_order_acquire);
  if (here == nullptr || cell == 0) return 0;
  return static_cast<std::size_t>(reinterpret_cast<const Cell*>(cell) - here->cells) + 1;
}

void release(std::uintptr_t cell) { release_cell(reinterpret_cast<Cell*>(cell)); }

}  // namespace

void bind_telemetry(py::module_& m) {
  if (PyModule_AddFunctions(m.ptr(), functions) != 0) throw py::error_already_set();
  m.def("use_recording", &use_slot, py::arg("descriptor"), py::arg("slot"), py::arg("label"),
        "Record what this process does into a slot of a recording area.");
  m.def("set_recording_identity", &set_identity, py::arg("identity"));
  m.def("pause_recording", &pause_recording, "Record nothing until resume_recording.");
  m.def("resume_recording", &resume_recording);
  m.def("is_recording", &is_recording);
  m.def("intern_name", &intern, py::arg("name"), "Number of a name in the slot; 0 without room or without a slot.");
  m.def("record_text", &record_text, py::arg("text"), "Number of a text that later texts overwrite, in place of a name's.");
  m.def("take_cell", &take, py::arg("kind"), py::arg("name"), py::arg("rank"), py::arg("trace") = 0,
        "A cell that shows what goes on now; 0 if there is none. An address, for begin_activity and end_activity.");
  m.def("cell_number", &number_of, py::arg("cell"), "The place of a cell in the slot, from 1; 0 for no cell.");
  m.def("release_cell", &release, py::arg("cell"));
  m.def("monotonic_ns", &now_ns, "The time of events, in nanoseconds.");
  m.def("ignore_unhandled", &ignore_unhandled, py::arg("signal"),
        "Ignore a signal that has no handler; False if the program has one.");
  m.def("wrap_dump_handler", &wrap_dump_handler, py::arg("signal"), py::arg("descriptor"),
        "Let the handler of the signal, which writes stacks to this descriptor, run with the GIL only.");
  m.def("set_request_handler", [](const py::object& handler) { set_request_handler(handler.ptr()); }, py::arg("handler"),
        "Call this with the sender's pid when the stack signal is sent with a value.");
  m.attr("dump_marks") = py::make_tuple(dump_begin, dump_end);
  py::dict layout;
  layout["version"] = layout_version;
  layout["header_bytes"] = header_bytes;
  layout["slot_bytes"] = slot_bytes;
  layout["cells_offset"] = offsetof(Slot, cells);
  layout["cell_count"] = cell_count;
  layout["names_offset"] = offsetof(Slot, names);
  layout["names_bytes"] = names_bytes;
  layout["events_offset"] = offsetof(Slot, events);
  layout["event_count"] = event_count;
  layout["texts_offset"] = offsetof(Slot, texts);
  layout["text_count"] = text_count;
  layout["text_bytes"] = text_bytes;
  m.attr("recording_layout") = layout;
}

}  // namespace monarch
