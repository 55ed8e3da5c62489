#include "interpreter_exit.h"

#include <Python.h>

#include <cstdlib>
#include <exception>
#include <mutex>

#include <pthread.h>
#if defined(__linux__)
#include <sys/syscall.h>
#endif
#include <unistd.h>

namespace monarch {

namespace {

std::terminate_handler previous = nullptr;

bool interpreter_is_ending() {
#if PY_VERSION_HEX >= 0x030d0000
  return Py_IsFinalizing() != 0 || Py_IsInitialized() == 0;
#else
  return _Py_IsFinalizing() != 0 || Py_IsInitialized() == 0;
#endif
}

[[noreturn]] void on_terminate() {
  // pthread_exit unwinds without an exception object; an uncaught exception has one.
  if (!std::current_exception() && !on_main_thread() && interpreter_is_ending()) {
    for (;;) pause();
  }
  if (previous != nullptr) previous();
  std::abort();
}

}  // namespace

bool on_main_thread() {
#if defined(__linux__)
  return syscall(SYS_gettid) == getpid();
#else
  return pthread_main_np() != 0;
#endif
}

void park_threads_at_exit() {
  static std::mutex installing;
  const std::lock_guard lock(installing);
  if (std::get_terminate() == on_terminate) return;
  previous = std::get_terminate();  // before a thread can need it
  std::set_terminate(on_terminate);
}

}  // namespace monarch
