#include "shm/stress/fixture.h"

#include "platform/system.h"

#if !defined(MONARCH_PORTABLE)

#include <algorithm>
#include <cstring>

#include <sys/uio.h>
#include <sys/wait.h>
#include <unistd.h>

extern "C" {
ssize_t __real_process_vm_readv(pid_t pid, const iovec* to, unsigned long tos, const iovec* from, unsigned long froms, unsigned long flags);
ssize_t __wrap_process_vm_readv(pid_t pid, const iovec* to, unsigned long tos, const iovec* from, unsigned long froms, unsigned long flags);
}

ssize_t __wrap_process_vm_readv(pid_t pid, const iovec* to, unsigned long tos, const iovec* from, unsigned long froms, unsigned long flags) {
  if (pid != getpid() || tos != 1 || froms != 1) return __real_process_vm_readv(pid, to, tos, from, froms, flags);
  const std::size_t bytes = std::min(to->iov_len, from->iov_len);
  std::memcpy(to->iov_base, from->iov_base, bytes);
  return static_cast<ssize_t>(bytes);
}

namespace monarch::stress {

bool can_read(bool threads) {
  if (threads) return true;
  const int secret = 42;
  const pid_t reader = fork();
  if (reader == 0) {
    int seen = 0;
    const iovec here{&seen, sizeof seen}, there{const_cast<int*>(&secret), sizeof secret};
    _exit(process_vm_readv(getppid(), &here, 1, &there, 1, 0) == sizeof seen && seen == secret ? 0 : 1);
  }
  int status = 0;
  return waitpid(reader, &status, 0) == reader && status == 0;
}

}  // namespace monarch::stress

#else

namespace monarch::stress {

bool can_read(bool) { return false; }

}  // namespace monarch::stress

#endif
