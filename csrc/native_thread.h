// How every thread of the core begins: with a name of at most 15 letters. Knows no Python and no torch; Linux only.
#pragma once

#include <csignal>

#include <pthread.h>

namespace monarch {

// Signals are for the threads of Python. Not those of a fault, which are of the thread that has it: blocked, they end the
// process before any handler has said why.
inline void begin_native_thread(const char* name) {
  sigset_t signals;
  sigfillset(&signals);
  for (const int fault : {SIGSEGV, SIGBUS, SIGFPE, SIGILL, SIGTRAP}) sigdelset(&signals, fault);
  pthread_sigmask(SIG_BLOCK, &signals, nullptr);
  pthread_setname_np(pthread_self(), name);
}

}  // namespace monarch
