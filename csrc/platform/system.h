// Which implementation of csrc/platform/ is compiled, and errors of system calls.
//
// MONARCH_PORTABLE selects the one that needs only what macOS has, too. It is defined wherever the system is not Linux.
// On Linux setup.py defines it with MONARCH_BUILD_PORTABLE=1, so that it is tested there.
#pragma once

#include <cerrno>
#include <system_error>

#if !defined(__linux__) && !defined(MONARCH_PORTABLE)
#define MONARCH_PORTABLE 1
#endif

namespace monarch {

#if defined(MONARCH_PORTABLE)
inline constexpr bool is_portable = true;
#else
inline constexpr bool is_portable = false;
#endif

// What the last system call failed with.
inline std::system_error system_failure(const char* what) { return {errno, std::generic_category(), what}; }

}  // namespace monarch
