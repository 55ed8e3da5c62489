#include "stress/ranks.h"

#include <cerrno>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <map>
#include <mutex>
#include <thread>
#include <vector>

#include <signal.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <unistd.h>

// The seam: one mapping for each memfd and process, with nothing around it ---------------------------------------------

extern "C" {
void* __real_mmap(void* address, std::size_t length, int protection, int flags, int fd, off_t offset);
int __real_munmap(void* address, std::size_t length);
void* __wrap_mmap(void* address, std::size_t length, int protection, int flags, int fd, off_t offset);
int __wrap_munmap(void* address, std::size_t length);
}

namespace {

constexpr std::size_t guard_bytes = std::size_t{1} << 30;

struct Shared {
  char* base;
  int users;
};
std::mutex shared_mutex;
std::map<ino_t, Shared> shared_mappings;  // all memfds are files of one file system

char* map_with_guards(std::size_t length, int protection, int flags, int fd, off_t offset) {
  void* guarded = __real_mmap(nullptr, length + 2 * guard_bytes, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (guarded == MAP_FAILED) return nullptr;
  char* base = static_cast<char*>(guarded) + guard_bytes;
  return __real_mmap(base, length, protection, flags | MAP_FIXED, fd, offset) == base ? base : nullptr;
}

}  // namespace

void* __wrap_mmap(void* address, std::size_t length, int protection, int flags, int fd, off_t offset) {
  struct stat file{};
  if (fd < 0 || (flags & MAP_SHARED) == 0 || fstat(fd, &file) != 0) {
    return __real_mmap(address, length, protection, flags, fd, offset);
  }
  const std::lock_guard lock(shared_mutex);
  Shared& shared = shared_mappings[file.st_ino];
  if (shared.users == 0) shared.base = map_with_guards(length, protection, flags, fd, offset);
  if (shared.base == nullptr) return MAP_FAILED;
  ++shared.users;
  return shared.base;
}

int __wrap_munmap(void* address, std::size_t length) {
  const std::lock_guard lock(shared_mutex);
  for (auto entry = shared_mappings.begin(); entry != shared_mappings.end(); ++entry) {
    if (entry->second.base != address) continue;
    if (--entry->second.users != 0) return 0;
    shared_mappings.erase(entry);
    return __real_munmap(static_cast<char*>(address) - guard_bytes, length + 2 * guard_bytes);
  }
  return __real_munmap(address, length);
}

namespace monarch::stress {

namespace {

RankSync* current_sync = nullptr;
std::vector<pid_t> pids;  // of forked ranks; 0: no more

void print_error(const char* text) { (void)!write(STDERR_FILENO, text, std::strlen(text)); }

void print_notes() {
  for (const auto& callers : current_sync->notes) {
    for (const auto& note : callers) {
      if (note[0] == 0) continue;
      print_error("  was at: ");
      print_error(note.data());
      print_error("\n");
    }
  }
}

void kill_ranks() {
  for (const pid_t pid : pids) {
    if (pid > 0) kill(pid, SIGKILL);
  }
}

void on_alarm(int) {
  print_error("stress: the ranks hang\n");
  print_notes();
  kill_ranks();
  _exit(3);
}

void fork_ranks(int ranks, int may_die, const std::function<void(int)>& body) {
  std::fflush(nullptr);
  pids.clear();
  for (int rank = 0; rank < ranks; ++rank) {
    const pid_t pid = fork();
    if (pid < 0) die("fork failed");
    if (pid == 0) {
      alarm(0);  // the parent's watch
      pids.clear();
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
    while (rank < ranks && pids[static_cast<std::size_t>(rank)] != pid) ++rank;
    if (rank < ranks) pids[static_cast<std::size_t>(rank)] = 0;
    const bool planned = rank == may_die && WIFSIGNALED(status) && WTERMSIG(status) == SIGKILL;
    if (planned || (WIFEXITED(status) && WEXITSTATUS(status) == 0)) continue;
    kill_ranks();
    print_notes();
    die("rank " + std::to_string(rank) + " ended with wait status " + std::to_string(status));
  }
}

}  // namespace

void die(const std::string& text) {
  print_error(("stress: " + text + "\n").c_str());
  _exit(1);
}

void* shared_memory(std::size_t bytes) {
  void* memory = __real_mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
  if (memory == MAP_FAILED) die("no memory");
  return memory;
}

void RankSync::await(int barrier, int ranks) const {
  while (barriers.at(static_cast<std::size_t>(barrier)).load(std::memory_order_acquire) < ranks) usleep(100);
}

void RankSync::note(int rank, int caller, const std::string& text) {
  auto& note = notes.at(static_cast<std::size_t>(rank)).at(static_cast<std::size_t>(caller));
  std::snprintf(note.data(), note.size(), "rank %d, caller %d, %s", rank, caller, text.c_str());
}

void run_ranks(RankSync& rank_sync, bool threads, int ranks, int may_die, int seconds, const std::function<void(int)>& body) {
  current_sync = &rank_sync;
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
