// Other processes of this host: their end, their identity, their memory.
#pragma once

#include <cstdint>
#include <string>

#include <sys/types.h>
#include <sys/uio.h>

#include "platform/system.h"

namespace monarch {

// Return a descriptor that is readable once the process has ended; -1 if there is none. The caller closes it.
int open_process(int pid);

// Describe the end of a process that has closed its connection, as "killed by signal 9". `process` is from open_process.
std::string describe_end(int pid, int process);

// Start time of a process, in a unit of the system. 0 if it does not access memory any more: it has ended, or is a zombie
// without other threads. `unknown_start` if that cannot be determined.
std::uint64_t start_of(std::uint32_t pid);
inline constexpr std::uint64_t unknown_start = 1;  // no process starts so early

// How many processors this process may use.
int processors();

// Let the calling thread run only while no other thread wants its processor. Return false if it keeps its priority.
bool run_when_idle();

// Memory of another process, as process_vm_readv and process_vm_writev; -1 where the system has no such call.
inline ssize_t read_process(int pid, const iovec* here, std::size_t parts, const iovec* there, std::size_t their_parts) {
#if defined(MONARCH_PORTABLE)
  (void)pid, (void)here, (void)parts, (void)there, (void)their_parts;
  errno = ENOSYS;
  return -1;
#else
  return process_vm_readv(pid, here, parts, there, their_parts, 0);
#endif
}

inline ssize_t write_process(int pid, const iovec* here, std::size_t parts, const iovec* there, std::size_t their_parts) {
#if defined(MONARCH_PORTABLE)
  return read_process(pid, here, parts, there, their_parts);
#else
  return process_vm_writev(pid, here, parts, there, their_parts, 0);
#endif
}

}  // namespace monarch
