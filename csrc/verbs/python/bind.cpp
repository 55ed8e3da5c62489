// Python bindings of libibverbs queues, without logic.
#include "bind.h"

#include <algorithm>
#include <array>
#include <mutex>
#include <system_error>
#include <vector>

#include "gil_mutex.h"
#include "verbs/queue_pairs.h"

namespace py = pybind11;

namespace monarch {

namespace {

using verbs::CompletionQueue;
using verbs::QueuePair;

constexpr int most_polled = 64;

// Of all queues: nothing uses one between `forget` and its destruction. A call of the device takes less than a
// microsecond.
GilMutex queues;

// An object's memory after its header, as words.
std::span<const std::uintptr_t> words_of(py::handle object) {
  constexpr std::size_t head = sizeof(PyObject) / sizeof(std::uintptr_t);
  const auto bytes = static_cast<std::size_t>(Py_TYPE(object.ptr())->tp_basicsize);
  const auto* const words = reinterpret_cast<const std::uintptr_t*>(object.ptr());
  return {words + head, std::max(bytes / sizeof(std::uintptr_t), head) - head};
}

// With the lock. An error has its number and text, as Python's own.
template <class Call>
auto with_os_error(Call&& call) -> decltype(call()) {
  try {
    const std::lock_guard lock(queues);
    return call();
  } catch (const std::system_error& error) {
    PyErr_SetObject(PyExc_OSError, py::make_tuple(error.code().value(), error.what()).ptr());
    throw py::error_already_set();
  }
}

template <class T>
T number(PyObject* work, Py_ssize_t place) {
  return static_cast<T>(PyLong_AsUnsignedLongLongMask(PyTuple_GET_ITEM(work, place)));
}

verbs::Work work_of(py::handle object) {
  PyObject* const work = object.ptr();
  if (!PyTuple_Check(work) || PyTuple_GET_SIZE(work) != 10) throw py::type_error("a work request is a tuple of ten numbers");
  return {number<std::uint64_t>(work, 0), number<int>(work, 1),           number<int>(work, 2) != 0,      number<std::uint64_t>(work, 3),
          number<std::uint32_t>(work, 4), number<std::uint32_t>(work, 5), number<std::uint64_t>(work, 6), number<std::uint32_t>(work, 7),
          number<std::uint64_t>(work, 8), number<std::uint64_t>(work, 9)};
}

// The GIL is kept: posting takes less time than a release of the GIL, and the caller holds the engine's lock.
void post(QueuePair& pair, const py::sequence& works) {
  if (works.size() == 1) {
    const py::object only = works[0];
    const verbs::Work work = work_of(only);
    if (PyErr_Occurred() != nullptr) throw py::error_already_set();
    return with_os_error([&] { pair.post({&work, 1}); });
  }
  std::vector<verbs::Work> all;
  all.reserve(works.size());
  for (std::size_t i = 0; i < works.size(); ++i) {
    const py::object work = works[i];  // which a sequence may make only now
    all.push_back(work_of(work));
  }
  if (PyErr_Occurred() != nullptr) throw py::error_already_set();
  with_os_error([&] { pair.post(all); });
}

// Not into memory of the queue's: to make a tuple may call a finalizer, which may poll it, too.
py::list poll(CompletionQueue& queue, int most) {
  std::array<verbs::Wc, most_polled> found;
  const auto room = static_cast<std::size_t>(std::clamp(most, 0, most_polled));
  const std::size_t count = with_os_error([&] { return queue.poll(std::span(found).first(room)); });
  py::list completions(count);
  for (std::size_t i = 0; i < count; ++i) {
    completions[i] = py::make_tuple(found[i].wr_id, found[i].status, found[i].qp_num, found[i].vendor_err);
  }
  return completions;
}

}  // namespace

void bind_verbs(py::module_& m) {
  py::class_<CompletionQueue, std::shared_ptr<CompletionQueue>>(m, "VerbsCompletionQueue", "A package's completion queue.")
      .def_static("find", [](const py::object& object, int fd, int entries) { return CompletionQueue::find(words_of(object), fd, entries); },
                  py::arg("owner"), py::arg("fd"), py::arg("entries"), "Of this object of a package; None where that can't be told.")
      .def("arm", [](CompletionQueue& queue) { with_os_error([&] { queue.arm(); }); })
      .def("poll", &poll, py::arg("most"))
      .def("forget", [](CompletionQueue& queue) { with_os_error([&] { queue.forget(); }); });
  py::class_<QueuePair, std::shared_ptr<QueuePair>>(m, "VerbsQueuePair", "A package's queue pair.")
      .def_static("find", [](const py::object& object, std::uint32_t number, const std::shared_ptr<CompletionQueue>& queue) {
        return with_os_error([&] { return QueuePair::find(words_of(object), number, queue); });
      }, py::arg("owner"), py::arg("number"), py::arg("queue"), "Of this object of a package; None where that can't be told.")
      .def("post", &post, py::arg("works"))
      .def("forget", [](QueuePair& pair) { with_os_error([&] { pair.forget(); }); });
}

}  // namespace monarch
