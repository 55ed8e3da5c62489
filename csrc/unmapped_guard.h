// Addresses for memory that is in other processes, and what this process does when its C++ uses one. Knows no Python
// and no torch.
#pragma once

#include <string>

namespace monarch {

enum class Told { kNobody, kThisThread, kAnotherThread };

// What is told that such an address was used, and says who is going to have the error. Called in a signal handler, on the
// thread that used it: it allocates nothing and takes no lock that this thread can have.
using OnAbsentUse = Told (*)();

// Reserves addresses that nothing is mapped at, a TiB or more; false where there are not as many. Whoever uses one has
// zeros there until close_absent_memory; `on_use` is told, and the thread goes on, with words on stderr if another one is
// going to have the error. If nobody can be told, or nothing can be mapped, the signal takes its course. The first call
// counts; explain_absent_memory has the handler.
bool reserve_absent_memory(OnAbsentUse on_use);

// One of them, after reserve_absent_memory has said true: another one than the last 8,000 or more, so that who uses two
// tensors is told of both, with 64 MiB before it and half of all behind.
void* absent_address();
bool is_absent_address(const void* address);

// Nothing is mapped there any more, and what was written is gone: the next use is told as the first was. From any thread,
// at any time, for a use just comes again; costs nothing if nothing is open.
void close_absent_memory();

// Has the handler of SIGSEGV and SIGBUS that does this, unless it is there. Where the process does not go on, it writes the
// pid, the address and `note` to stderr, also for an address near 0, which nothing is ever mapped at; then the signal takes
// its course, with the handler that was there before (Python's faulthandler, a debugger's). Called again, for another
// handler may have come since, it keeps the first `note`, which is cut at 1,000 bytes. With the GIL, or from one thread.
// Raises std::system_error if the kernel refuses.
void explain_absent_memory(const std::string& note);

}  // namespace monarch
