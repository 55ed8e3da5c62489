// What a process says when its C++ reads at address 0 and ends. Knows no Python and no torch.
#pragma once

#include <string>

namespace monarch {

// From here on SIGSEGV and SIGBUS at an address that nothing is ever mapped at write the pid, the address and `note` to stderr;
// then the signal takes its course, with the handler that was there before (Python's faulthandler, a debugger's). A
// second call does nothing; `note` is cut at 1,000 bytes. Raises std::system_error if the kernel refuses.
void explain_null_reads(const std::string& note);

}  // namespace monarch
