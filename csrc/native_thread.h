// Start of every thread of the core: a name of at most 15 letters, and its signal mask. Independent of Python and torch.
#pragma once

#include <csignal>

#include <pthread.h>

namespace monarch {

// Signals are handled by Python's threads. Signals of a fault belong to the thread that has it: blocked, they would end
// the process before any handler reports the fault.
inline void begin_native_thread(const char* name) {
  sigset_t signals;
  sigfillset(&signals);
  for (const int fault : {SIGSEGV, SIGBUS, SIGFPE, SIGILL, SIGTRAP}) sigdelset(&signals, fault);
  pthread_sigmask(SIG_BLOCK, &signals, nullptr);
#if defined(__APPLE__)
  pthread_setname_np(name);
#else
  pthread_setname_np(pthread_self(), name);
#endif
}

}  // namespace monarch
