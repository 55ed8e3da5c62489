#include "telemetry/stack_signal.h"

#include <Python.h>
#include <pthread.h>
#include <semaphore.h>
#include <signal.h>
#include <unistd.h>

#include <array>
#include <atomic>
#include <cerrno>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <thread>

#include "platform/system.h"

namespace monarch::telemetry {
namespace {

constexpr std::size_t max_waiting_requests = 64;  // of further ones, the requesters get no answer

std::atomic<int> file{-1};
std::atomic<void (*)(int)> write_dump{nullptr};
std::atomic<int> dump_signal{0};
sem_t dump_wanted;  // never destroyed
pid_t helped = 0;   // the process that has the thread
std::array<std::atomic<std::uint64_t>, max_waiting_requests> requests{};  // 0 is a free place
PyObject* request_handler = nullptr;  // protected by the GIL

void write_mark(const char* mark) {
  [[maybe_unused]] const ssize_t written = write(file.load(), mark, std::strlen(mark));
}

// Only calls that a signal handler may make. The thread has the GIL.
void dump() {
  write_mark(dump_begin);
  write_dump.load()(dump_signal.load());
  write_mark(dump_end);
}

// Not PyGILState_Check, which is always true in a process with subinterpreters.
bool has_gil() {
#if PY_VERSION_HEX >= 0x030D0000
  PyThreadState* const current = PyThreadState_GetUnchecked();
#else
  PyThreadState* const current = _PyThreadState_UncheckedGet();
#endif
  return current != nullptr && current == PyGILState_GetThisThreadState();
}

// The sender's pid and the value that it has sent, as one number: a place is written at once.
std::uint64_t packed(pid_t from, int value) {
  return static_cast<std::uint64_t>(static_cast<std::uint32_t>(from)) << 32 | static_cast<std::uint32_t>(value);
}

// Only calls that a signal handler may make: several threads may be in it. Returns false if all places are taken.
bool keep_request(std::uint64_t request) {
  for (auto& place : requests) {
    std::uint64_t free = 0;
    if (place.compare_exchange_strong(free, request)) return true;
  }
  return false;
}

std::uint64_t next_request() {
  for (auto& place : requests) {
    if (const std::uint64_t request = place.exchange(0)) return request;
  }
  return 0;
}

void on_signal(int, siginfo_t* info, void*) {
  const int error = errno;
  if (info->si_code == SI_QUEUE) {
    if (keep_request(packed(info->si_pid, info->si_value.sival_int))) sem_post(&dump_wanted);
  } else if (has_gil()) {
    dump();
  } else {
    sem_post(&dump_wanted);
  }
  errno = error;
}

void handle_request(std::uint64_t request) {
  if (request_handler == nullptr) return;
  const auto from = static_cast<int>(request >> 32), value = static_cast<int>(request & 0xffffffff);
  PyObject* const result = PyObject_CallFunction(request_handler, "ii", from, value);
  if (result == nullptr) PyErr_WriteUnraisable(request_handler);
  Py_XDECREF(result);
}

void dump_when_wanted() {
  while (true) {
    if (sem_wait(&dump_wanted) != 0) continue;
    const PyGILState_STATE state = PyGILState_Ensure();
    if (const std::uint64_t request = next_request()) {
      handle_request(request);
    } else {
      dump();
    }
    PyGILState_Release(state);
  }
}

void start_helper() {
  if (helped == getpid()) return;
  for (auto& place : requests) place.store(0);  // those of a parent
  if (sem_init(&dump_wanted, 0, 0) != 0) throw system_failure("making the semaphore of stack dumps");
  sigset_t all, before;
  sigfillset(&all);
  pthread_sigmask(SIG_SETMASK, &all, &before);
  try {
    std::thread(dump_when_wanted).detach();
  } catch (...) {
    pthread_sigmask(SIG_SETMASK, &before, nullptr);
    throw;
  }
  pthread_sigmask(SIG_SETMASK, &before, nullptr);
  helped = getpid();
}

}  // namespace

bool ignore_unhandled(int number) {
  struct sigaction present = {};
  if (sigaction(number, nullptr, &present) != 0) throw system_failure("reading the handler of the stack signal");
  if (present.sa_handler == SIG_IGN || present.sa_sigaction == on_signal) return true;
  if (present.sa_handler != SIG_DFL) return false;
  present.sa_handler = SIG_IGN;
  if (sigaction(number, &present, nullptr) != 0) throw system_failure("ignoring the stack signal");
  return true;
}

void set_request_handler(PyObject* handler) { Py_XSETREF(request_handler, Py_NewRef(handler)); }

void wrap_dump_handler(int number, int descriptor) {
  start_helper();
  struct sigaction present = {};
  if (sigaction(number, nullptr, &present) != 0) throw system_failure("reading the handler of the stack signal");
  file.store(descriptor);
  dump_signal.store(number);
  if (present.sa_sigaction == on_signal) return;
  write_dump.store(present.sa_handler);
  present.sa_sigaction = on_signal;
  present.sa_flags |= SA_RESTART | SA_SIGINFO;
  if (sigaction(number, &present, nullptr) != 0) throw system_failure("installing the handler of the stack signal");
}

}  // namespace monarch::telemetry
