#include "shm/stress/world.h"

#include <algorithm>
#include <cerrno>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <map>
#include <mutex>
#include <new>
#include <thread>
#include <vector>

#include <signal.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <sys/uio.h>
#include <sys/wait.h>
#include <unistd.h>

// The seam: one mapping for each memfd and process --------------------------------------------------------------------

extern "C" {
void* __real_mmap(void* address, std::size_t length, int protection, int flags, int fd, off_t offset);
int __real_munmap(void* address, std::size_t length);
void* __wrap_mmap(void* address, std::size_t length, int protection, int flags, int fd, off_t offset);
int __wrap_munmap(void* address, std::size_t length);
ssize_t __real_process_vm_readv(pid_t pid, const iovec* to, unsigned long tos, const iovec* from, unsigned long froms, unsigned long flags);
ssize_t __wrap_process_vm_readv(pid_t pid, const iovec* to, unsigned long tos, const iovec* from, unsigned long froms, unsigned long flags);
}

namespace {

struct Shared {
  void* base;
  int users;
};
std::mutex shared_mutex;
std::map<ino_t, Shared> shared_mappings;  // all memfds are files of one file system

}  // namespace

void* __wrap_mmap(void* address, std::size_t length, int protection, int flags, int fd, off_t offset) {
  struct stat file{};
  if (fd < 0 || (flags & MAP_SHARED) == 0 || fstat(fd, &file) != 0) {
    return __real_mmap(address, length, protection, flags, fd, offset);
  }
  const std::lock_guard lock(shared_mutex);
  Shared& shared = shared_mappings[file.st_ino];
  if (shared.users++ == 0) shared.base = __real_mmap(address, length, protection, flags, fd, offset);
  return shared.base;
}

int __wrap_munmap(void* address, std::size_t length) {
  const std::lock_guard lock(shared_mutex);
  for (auto entry = shared_mappings.begin(); entry != shared_mappings.end(); ++entry) {
    if (entry->second.base != address) continue;
    if (--entry->second.users != 0) return 0;
    shared_mappings.erase(entry);
    break;
  }
  return __real_munmap(address, length);
}

ssize_t __wrap_process_vm_readv(pid_t pid, const iovec* to, unsigned long tos, const iovec* from, unsigned long froms, unsigned long flags) {
  if (pid != getpid() || tos != 1 || froms != 1) return __real_process_vm_readv(pid, to, tos, from, froms, flags);
  const std::size_t bytes = std::min(to->iov_len, from->iov_len);
  std::memcpy(to->iov_base, from->iov_base, bytes);
  return static_cast<ssize_t>(bytes);
}

namespace monarch::stress {

namespace {

World* the_world = nullptr;

void say(const char* text) { (void)!write(STDERR_FILENO, text, std::strlen(text)); }

void print_notes() {
  for (int rank = 0; rank < max_ranks; ++rank) {
    for (int lane = 0; lane < max_lanes; ++lane) {
      const char* note = the_world->notes[rank][lane].data();
      if (*note == 0) continue;
      say("  was at: ");
      say(note);
      say("\n");
    }
  }
}

void on_alarm(int) {
  say("stress: the ranks hang\n");
  print_notes();
  _exit(3);
}

void fork_ranks(int ranks, int may_die, const std::function<void(int)>& body) {
  std::vector<pid_t> pids;
  std::fflush(nullptr);
  for (int rank = 0; rank < ranks; ++rank) {
    const pid_t pid = fork();
    if (pid < 0) die("fork failed");
    if (pid == 0) {
      alarm(0);  // the parent's watch
      body(rank);
      std::exit(0);  // not _exit: the leak check runs then
    }
    pids.push_back(pid);
  }
  for (int left = ranks; left > 0; --left) {
    int status = 0;
    pid_t pid;
    while ((pid = wait(&status)) < 0 && errno == EINTR) {
    }
    int rank = 0;
    while (rank < ranks && pids[rank] != pid) ++rank;
    const bool planned = rank == may_die && WIFSIGNALED(status) && WTERMSIG(status) == SIGKILL;
    if (planned || (WIFEXITED(status) && WEXITSTATUS(status) == 0)) continue;
    for (const pid_t other : pids) {
      if (other != pid) kill(other, SIGKILL);
    }
    print_notes();
    die("rank " + std::to_string(rank) + " ended with wait status " + std::to_string(status));
  }
}

}  // namespace

void die(const std::string& text) {
  say(("stress: " + text + "\n").c_str());
  _exit(1);
}

World& World::make(Coverage& coverage) {
  void* memory = __real_mmap(nullptr, sizeof(World), PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
  if (memory == MAP_FAILED) die("no memory");
  World& world = *new (memory) World{};
  world.coverage = &coverage;
  return world;
}

bool can_read_others() {
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

void World::await(int meeting, int ranks) const {
  while (meetings.at(meeting).load(std::memory_order_acquire) < ranks) usleep(100);
}

void World::note(int rank, int lane, const std::string& text) {
  auto& note = notes[rank][lane];
  std::snprintf(note.data(), note.size(), "rank %d, lane %d, %s", rank, lane, text.c_str());
}

void run_ranks(World& world, bool threads, int ranks, int may_die, int seconds, const std::function<void(int)>& body) {
  the_world = &world;
  signal(SIGALRM, on_alarm);
  alarm(static_cast<unsigned>(seconds));
  if (threads) {
    std::vector<std::thread> running;
    for (int rank = 0; rank < ranks; ++rank) running.emplace_back([&body, rank] { body(rank); });
    for (auto& thread : running) thread.join();
  } else {
    fork_ranks(ranks, may_die, body);
  }
  alarm(0);
}

}  // namespace monarch::stress
