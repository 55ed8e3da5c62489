// Dump of the stacks of all Python threads on a signal, by faulthandler.
//
// A dump reads the frames of other threads, so it needs the GIL: without it, a thread that runs meanwhile frees what is
// read, and the process crashes. The signal's handler dumps if its thread has the GIL. Otherwise it wakes a thread that
// takes the GIL first. If that thread never gets it, another thread keeps it in C code: readers signal each thread.
//
// A signal that was sent with a value (sigqueue) is a request: that thread calls the request handler instead.
#pragma once

#include <Python.h>

namespace monarch::telemetry {

// Marks around a dump. Readers take what is between them: _telemetry/stacks.py.
inline constexpr const char* dump_begin = "\n== stacks\n";
inline constexpr const char* dump_end = "\n== complete\n";

// Ignore a signal that has no handler, so that it ends no process once Python has removed its handler. Returns false if
// the program has a handler of its own. Throws std::system_error.
bool ignore_unhandled(int signal);

// Replace the present handler of this signal, faulthandler's, which writes to this descriptor, by one that calls it as
// described above. It adds the marks, and lets system calls be repeated. Throws
// std::system_error.
void wrap_dump_handler(int signal, int descriptor);

// Call this with the pid of the sender, and with the value that it has sent, for each request. It must not block: stacks
// are dumped by the same thread.
void set_request_handler(PyObject* handler);

}  // namespace monarch::telemetry
