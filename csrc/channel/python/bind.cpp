// Python bindings of the mailbox, without logic. Python defines the meaning of the bytes.
#include "bind.h"

#include <pybind11/stl.h>

#include <algorithm>
#include <cstring>
#include <optional>
#include <tuple>

#include <unistd.h>

#include "channel/mailbox.h"
#include "interpreter_exit.h"

namespace py = pybind11;

namespace monarch {

namespace {

using Release = py::call_guard<py::gil_scoped_release>;

constexpr std::uint64_t min_retained_bytes = 64 << 10;   // bytes of a block below which a copy is cheaper than holding on to it
constexpr std::uint64_t min_gil_release_bytes = 32 << 10;  // bytes of a copy during which others may have the GIL

// Python's buffers for as long as C++ looks at them.
class BufferViews {
 public:
  ~BufferViews() {
    for (Py_buffer& view : views_) PyBuffer_Release(&view);
  }
  Slice add(py::handle object) {
    if (PyBytes_CheckExact(object.ptr())) {
      return {PyBytes_AS_STRING(object.ptr()), static_cast<std::uint64_t>(PyBytes_GET_SIZE(object.ptr()))};
    }
    Py_buffer view;
    if (PyObject_GetBuffer(object.ptr(), &view, PyBUF_SIMPLE) != 0) throw py::error_already_set();
    views_.push_back(view);
    return {static_cast<const char*>(view.buf), static_cast<std::uint64_t>(view.len)};
  }
  std::vector<Slice> add_all(py::handle objects) {
    if (objects.is_none()) return {};
    if (PyBytes_CheckExact(objects.ptr())) return {add(objects)};
    std::vector<Slice> slices;
    for (py::handle object : objects) {
#if defined(Py_GIL_DISABLED)
      items_.push_back(py::reinterpret_borrow<py::object>(object));  // another thread may take it out of a list
#endif
      slices.push_back(add(object));
    }
    return slices;
  }

 private:
  std::vector<Py_buffer> views_;
#if defined(Py_GIL_DISABLED)
  std::vector<py::object> items_;
#endif
};

Payload payload_of(BufferViews& views, py::handle prefix, py::handle body, py::handle buffers) {
  Payload payload{views.add(prefix), views.add_all(body), views.add_all(buffers)};
  if (payload.buffers.size() > most_buffers) throw py::value_error("a frame has at most 65535 buffers");
  return payload;
}

bool deliver(Mailbox& mailbox, const FrameHeader& header, const Payload& payload, const std::vector<Receiver>& to) {
  std::uint64_t bytes = 0;
  for (const Slice& slice : payload.body) bytes += slice.bytes;
  for (const Slice& slice : payload.buffers) bytes += slice.bytes;
  if (bytes < min_gil_release_bytes) return mailbox.send(header, payload, to);
  const py::gil_scoped_release release;
  return mailbox.send(header, payload, to);
}

bool send(Mailbox& mailbox, std::uint32_t link, std::uint8_t kind, std::uint64_t target, std::uint64_t ref, std::uint64_t seq,
          std::uint32_t rank, std::uint32_t epoch, py::handle prefix, py::handle body, py::handle buffers) {
  BufferViews views;
  FrameHeader header;
  header.kind = kind, header.target = target, header.ref = ref;
  return deliver(mailbox, header, payload_of(views, prefix, body, buffers), {{link, seq, rank, epoch}});
}

bool multicast(Mailbox& mailbox, const std::vector<std::tuple<std::uint32_t, std::uint64_t, std::uint32_t, std::uint32_t>>& to,
          std::uint8_t kind, std::uint64_t target, std::uint64_t ref, py::handle prefix, py::handle body, py::handle buffers) {
  BufferViews views;
  FrameHeader header;
  header.kind = kind, header.target = target, header.ref = ref;
  std::vector<Receiver> receivers;
  receivers.reserve(to.size());
  for (const auto& [link, seq, rank, epoch] : to) receivers.push_back({link, seq, rank, epoch});
  return deliver(mailbox, header, payload_of(views, prefix, body, buffers), receivers);
}

py::bytes bytes_of(const char* data, std::uint64_t size) { return py::bytes(data, size); }

py::object copy_of(const char* data, std::uint64_t size) {
  PyObject* copy = PyByteArray_FromStringAndSize(nullptr, static_cast<Py_ssize_t>(size));
  if (copy == nullptr) throw py::error_already_set();
  char* to = PyByteArray_AS_STRING(copy);
  if (size < min_gil_release_bytes) {
    std::memcpy(to, data, size);
  } else {
    const py::gil_scoped_release release;
    std::memcpy(to, data, size);
  }
  return py::reinterpret_steal<py::object>(copy);
}

py::object part_of(const py::object& whole, std::uint64_t start, std::uint64_t size) {
  const py::slice range(static_cast<py::ssize_t>(start), static_cast<py::ssize_t>(start + size), 1);
  return whole[range];
}

py::tuple frame_of(Event& event) {
  const FrameHeader& header = event.header;
  const char* data = event.payload();
  py::object whole;  // a view of the block, if it stays where it is
  if (event.block && event.block->bytes() >= min_retained_bytes && event.block->retain()) {
    whole = py::reinterpret_steal<py::object>(PyMemoryView_FromObject(py::cast(event.block).ptr()));
  }
  std::uint64_t size = event.length(0);
  std::uint64_t at = sizeof size * (1 + std::uint64_t{header.buffers});
  py::bytes prefix = bytes_of(data + at, header.prefix);
  at += header.prefix;
  py::object body = whole ? part_of(whole, at, size) : py::object(bytes_of(data + at, size));
  at += size;
  py::object buffers = py::none();
  if (header.buffers != 0) {
    py::list list;
    for (std::size_t i = 1; i <= header.buffers; ++i) {
      size = event.length(i);
      at = whole_lines(at);
      list.append(whole ? part_of(whole, at, size) : copy_of(data + at, size));
      at += size;
    }
    buffers = std::move(list);
  }
  return py::make_tuple(event.link, header.kind, header.target, header.ref, header.seq, header.rank, header.epoch,
                        std::move(prefix), std::move(body), std::move(buffers));
}

// Python's signal handlers run on its main thread. A thread may spin and yield for milliseconds, and a signal in that
// time would be noticed only after the following sleep. False: a handler has raised, and the error is set.
bool run_signal_handlers() {
  if (!on_main_thread()) return true;
  const py::gil_scoped_acquire gil;
  return PyErr_CheckSignals() == 0;
}

py::list receive(Mailbox& mailbox, std::optional<double> seconds, bool standby) {
  std::vector<Event> events;
  {
    const py::gil_scoped_release release;
    const double longest = 1e8;  // three years: what the clock can surely add
    const double wait = seconds ? std::clamp(*seconds, 0.0, longest) : longest;
    const auto deadline = Clock::now() + std::chrono::duration_cast<Clock::duration>(std::chrono::duration<double>(wait));
    events = mailbox.receive(deadline, standby, run_signal_handlers);
  }
  if (PyErr_Occurred() != nullptr) throw py::error_already_set();  // and no event was there
  py::list result;
  for (Event& event : events) {
    switch (event.kind) {
      case Event::frame:
        result.append(frame_of(event));
        break;
      case Event::connected:
        result.append(py::make_tuple(event.link, -1, event.text, event.pid));
        break;
      case Event::disconnected:
        result.append(py::make_tuple(event.link, -2, event.text, event.clean));
        break;
      case Event::refused:
        result.append(py::make_tuple(event.link, -3, event.text));
        break;
    }
  }
  return result;
}

}  // namespace

void bind_channels(py::module_& m) {
  py::class_<Block, std::shared_ptr<Block>>(m, "Block", py::buffer_protocol(), "A message's memory in its sender's arena.")
      .def_buffer([](Block& block) {
        return py::buffer_info(block.data(), 1, py::format_descriptor<std::uint8_t>::format(), 1, {block.bytes()}, {1});
      });

  py::class_<Mailbox, std::shared_ptr<Mailbox>>(m, "Mailbox", "Frames to and from the other processes of this host.")
      .def(py::init<std::shared_ptr<Host>, bool, std::uint64_t>(), py::arg("host"), py::arg("oversubscribed"), py::arg("share") = UINT64_MAX)
      .def("connect", &Mailbox::connect, Release())
      .def("send", &send)
      .def("multicast", &multicast)
      .def("drop", &Mailbox::drop)
      .def("acquire_turn", &Mailbox::acquire_turn, Release())
      .def("release_turn", &Mailbox::release_turn)
      .def("receive", &receive, py::arg("seconds"), py::arg("standby") = false)
      .def("acquire_turn_as_standby", &Mailbox::acquire_turn_as_standby, Release())
      .def("is_turn_wanted", &Mailbox::is_turn_wanted)
      .def("unread", &Mailbox::unread)
      .def("wake", &Mailbox::wake)
      .def("close", &Mailbox::close)
      .def("set_oversubscribed", &Mailbox::set_oversubscribed)
      .def("kept_back", &Mailbox::backlog_bytes);
}

}  // namespace monarch
