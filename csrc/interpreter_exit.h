// What keeps a process that ends with live C++ threads from ending with SIGABRT. Knows Python, no torch.
#pragma once

namespace monarch {

// Whether this is the thread that the process began with, or was forked with.
bool on_main_thread();

// Until Python 3.14 a thread that waits for the GIL while the interpreter ends is ended by pthread_exit. Its stack
// is unwound, and where a noexcept function stands on it (the destructor of a tensor, in one of Gloo's threads)
// C++ calls std::terminate: a script that did everything right ends with SIGABRT. From here on such a thread
// sleeps until the process is gone, as Python 3.14 has it. All other calls of std::terminate stay what they are.
// From any thread; a second call does nothing.
void park_threads_at_exit();

}  // namespace monarch
