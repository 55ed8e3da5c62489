#include "platform/shared_memory.h"

#include <fcntl.h>
#include <sys/mman.h>
#include <unistd.h>

#if defined(MONARCH_PORTABLE)
#include <cstdint>
#include <cstdio>

#include "platform/random.h"
#endif

namespace monarch {

#if !defined(MONARCH_PORTABLE)

int new_shared_memory(std::size_t size) {
  const int fd = memfd_create("monarch", MFD_CLOEXEC | MFD_ALLOW_SEALING);
  if (fd < 0) throw system_failure("memfd_create");
  if (ftruncate(fd, static_cast<off_t>(size)) != 0 || fcntl(fd, F_ADD_SEALS, F_SEAL_SHRINK | F_SEAL_GROW | F_SEAL_SEAL) != 0) {
    const auto error = system_failure("sizing shared memory");
    close(fd);
    throw error;
  }
  return fd;
}

void discard_pages(char* start, std::size_t bytes) { madvise(start, bytes, MADV_REMOVE); }

void prefer_huge_pages(char* start, std::size_t bytes) { madvise(start, bytes, MADV_HUGEPAGE); }

#else

// The name exists for a moment only. macOS permits 30 letters, sets the size once, and sets close-on-exec itself.
int new_shared_memory(std::size_t size) {
  int fd = -1;
  char name[30];
  do {
    std::uint64_t number = 0;
    if (!fill_random(&number, sizeof number)) throw system_failure("random numbers for shared memory");
    std::snprintf(name, sizeof name, "/monarch-%016llx", static_cast<unsigned long long>(number));
    fd = shm_open(name, O_RDWR | O_CREAT | O_EXCL, 0600);
  } while (fd < 0 && errno == EEXIST);
  if (fd < 0) throw system_failure("shm_open");
  shm_unlink(name);
  if (ftruncate(fd, static_cast<off_t>(size)) != 0) {
    const auto error = system_failure("sizing shared memory");
    close(fd);
    throw error;
  }
  return fd;
}

void discard_pages(char*, std::size_t) {}

void prefer_huge_pages(char*, std::size_t) {}

#endif

}  // namespace monarch
