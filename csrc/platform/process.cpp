#include "platform/process.h"

#include <csignal>
#include <cstdio>
#include <cstring>
#include <iterator>
#include <optional>

#include <poll.h>
#include <sys/wait.h>
#include <unistd.h>

#if defined(__APPLE__)
#include <sys/sysctl.h>
#endif
#if defined(MONARCH_PORTABLE)
#include <thread>
#else
#include <sched.h>
#include <sys/ioctl.h>
#include <sys/syscall.h>
#endif

namespace monarch {

namespace {

constexpr int zombie_ms = 50;  // the socket closes a moment before the process is a zombie

#if defined(__APPLE__)

bool find_process(int pid, kinfo_proc& found) {
  int name[] = {CTL_KERN, KERN_PROC, KERN_PROC_PID, pid};
  std::size_t bytes = sizeof found;
  return sysctl(name, std::size(name), &found, &bytes, nullptr, 0) == 0 && bytes != 0;
}

// The wait status of a zombie, whose parent may be any process.
std::optional<int> zombie_status(int pid) {
  kinfo_proc found{};
  if (!find_process(pid, found) || found.kp_proc.p_stat != SZOMB) return {};
  return found.kp_proc.p_xstat;
}

#else

// The fields of /proc/PID/stat behind the name, which may hold anything; nullptr if there are none.
const char* stat_fields(std::uint32_t pid, char (&text)[1024]) {
  char path[32];
  std::snprintf(path, sizeof path, "/proc/%u/stat", pid);
  errno = 0;
  std::FILE* file = std::fopen(path, "re");
  if (file == nullptr) return nullptr;
  const std::size_t bytes = std::fread(text, 1, sizeof text - 1, file);
  const int error = errno;
  std::fclose(file);
  errno = error;
  text[bytes] = 0;
  const char* end_of_name = std::strrchr(text, ')');
  return end_of_name != nullptr && end_of_name[1] == ' ' ? end_of_name + 2 : nullptr;
}

// The wait status of a zombie, whose parent may be any process.
std::optional<int> zombie_status(int pid) {
  char text[1024];
  const char* fields = stat_fields(static_cast<std::uint32_t>(pid), text);
  const char* last = fields != nullptr && *fields == 'Z' ? std::strrchr(fields, ' ') : nullptr;
  int status = 0;
  if (last == nullptr || std::sscanf(last, "%d", &status) != 1) return {};
  return status;
}

#endif

#if !defined(MONARCH_PORTABLE)

// Once the process is reaped, the pidfd remembers its wait status (Linux 6.15).
std::optional<int> status_of(int pidfd) {
  struct {  // struct pidfd_info, whose header is newer than most
    std::uint64_t mask, cgroup;
    std::uint32_t pid, tgid, ppid, ids[8];
    std::int32_t exit_code;
    std::uint32_t more[8];
  } info{};
  info.mask = 1u << 3;  // PIDFD_INFO_EXIT
  const bool is_known = pidfd >= 0 && ioctl(pidfd, _IOC(_IOC_READ | _IOC_WRITE, 0xFF, 11, 64), &info) == 0;
  if (!is_known || (info.mask & (1u << 3)) == 0) return {};
  return info.exit_code;
}

// False if the process has closed its connection only.
bool wait_for_end(int, int process) {
  pollfd end{process, POLLIN, 0};
  return process < 0 || poll(&end, 1, zombie_ms) != 0;
}

#else

std::optional<int> status_of(int) { return {}; }

bool wait_for_end(int pid, int) {
  for (int waited_ms = 0; waited_ms < zombie_ms; ++waited_ms) {
    if (start_of(static_cast<std::uint32_t>(pid)) == 0) return true;
    usleep(1000);
  }
  return false;
}

#endif

}  // namespace

std::string describe_end(int pid, int process) {
  if (!wait_for_end(pid, process)) return "closed its link to this process";
  std::optional<int> status = zombie_status(pid);
  if (!status) status = status_of(process);
  if (!status) return "gone (how it ended is not known here)";
  if (WIFSIGNALED(*status)) return "killed by signal " + std::to_string(WTERMSIG(*status));
  return "exited with status " + std::to_string(WEXITSTATUS(*status));
}

#if defined(__APPLE__)

std::uint64_t start_of(std::uint32_t pid) {
  kinfo_proc found{};
  if (!find_process(static_cast<int>(pid), found)) return kill(static_cast<pid_t>(pid), 0) != 0 && errno == ESRCH ? 0 : unknown_start;
  if (found.kp_proc.p_stat == SZOMB) return 0;
  const timeval& started = found.kp_proc.p_starttime;
  return static_cast<std::uint64_t>(started.tv_sec) * 1'000'000 + static_cast<std::uint64_t>(started.tv_usec);
}

#else

std::uint64_t start_of(std::uint32_t pid) {
  char text[1024];
  const char* fields = stat_fields(pid, text);
  if (fields == nullptr) {
    // Without free descriptors the process may well exist.
    const bool none = (errno == ENOENT || errno == ESRCH) && kill(static_cast<pid_t>(pid), 0) != 0 && errno == ESRCH;
    return none ? 0 : unknown_start;
  }
  char state = 0;
  long threads = 0;
  unsigned long long started = 0;
  const char* form = "%c %*s %*s %*s %*s %*s %*s %*s %*s %*s %*s %*s %*s %*s %*s %*s %*s %ld %*s %llu";
  if (std::sscanf(fields, form, &state, &threads, &started) != 3) return unknown_start;
  return (state == 'Z' || state == 'X') && threads <= 1 ? 0 : started;
}

#endif

#if !defined(MONARCH_PORTABLE)

int open_process(int pid) { return static_cast<int>(syscall(434 /* pidfd_open */, pid, 0)); }

int processors() {
  cpu_set_t set;
  return sched_getaffinity(0, sizeof set, &set) == 0 ? CPU_COUNT(&set) : 1;
}

bool run_when_idle() {
  const sched_param none{};
  return syscall(SYS_sched_setscheduler, 0, SCHED_IDLE, &none) == 0;  // musl's own function always fails
}

#else

int open_process(int) { return -1; }

bool run_when_idle() { return false; }

int processors() { return static_cast<int>(std::thread::hardware_concurrency()); }

#endif

}  // namespace monarch
