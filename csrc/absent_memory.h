// Addresses for memory that is in other processes, and what this process does when its C++ uses one. Knows no Python
// and no torch.
#pragma once

#include <string>

namespace monarch {

enum class Told { kNobody, kThisThread, kAnotherThread };

// What is told that such an address was used, and says who is going to have the error. Called in a signal handler, on the
// thread that used it: it allocates nothing and takes no lock that this thread can have.
using OnAbsentUse = Told (*)();

// Addresses that nothing is mapped at, for all memory that is elsewhere: the first of them, with a lot before and behind;
// null where the kernel gives none. Whoever uses one has zeros there, from then on; `on_use` is told, and the thread goes
// on, with words on stderr if another one is going to have the error. If nobody can be told, or nothing can be mapped, the
// signal takes its course. The first call counts.
void* absent_memory(OnAbsentUse on_use);

// Nothing is mapped there any more, and what was written is gone: the next use is told as the first was. From any thread.
void close_absent_memory();

// Has the handler of SIGSEGV and SIGBUS that does this. Where the process does not go on, it writes the pid, the address
// and `note` to stderr, also for an address near 0, which nothing is ever mapped at; then the signal takes its course, with
// the handler that was there before (Python's faulthandler, a debugger's). A second call does nothing; `note` is cut at
// 1,000 bytes. Raises std::system_error if the kernel refuses.
void explain_absent_memory(const std::string& note);

}  // namespace monarch
