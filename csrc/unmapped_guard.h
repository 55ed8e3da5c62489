// Addresses for memory that is in other processes, and what this process does when its C++ uses one. Knows no Python
// and no torch.
#pragma once

#include <string>

namespace monarch {

enum class ErrorTarget { kNone, kThisThread, kAnotherThread };

// Called when such an address was used, in a signal handler on the thread that used it. Returns which thread gets the
// error. It allocates nothing and takes no lock that this thread can hold.
using OnAbsentUse = ErrorTarget (*)();

// Reserve unmapped addresses, a TiB or more; false if there is not enough address space. A thread that uses one reads
// zeros there until close_absent_memory. `on_use` is called, and the thread continues; stderr gets a note if another
// thread gets the error. If no thread can get it, or mapping fails, the signal is passed on. Only the first call has an
// effect; explain_absent_memory installs the handler.
bool reserve_absent_memory(OnAbsentUse on_use);

// One of them, after reserve_absent_memory has returned true. It differs from the last 8,000 or more, so that uses of
// two tensors are both reported. 64 MiB before it and half of all addresses behind it are unmapped.
void* absent_address();
bool is_absent_address(const void* address);

// Unmap what was used, so that the next use is reported again; written bytes are lost. From any thread, at any time,
// because a concurrent use just faults again. Costs nothing if nothing is mapped.
void close_absent_memory();

// Install the handler of SIGSEGV and SIGBUS that does this, unless it is installed. If the process cannot continue, the
// handler writes the pid, the address and `note` to stderr, and passes the signal to the earlier handler (Python's
// faulthandler, a debugger's). So does a fault at an address near 0, which is never mapped. Call it again if
// another handler may have been installed since: it keeps the first `note`, which is cut at 1,000 bytes. From any
// thread. Raises std::system_error if the kernel refuses.
void explain_absent_memory(const std::string& note);

}  // namespace monarch
