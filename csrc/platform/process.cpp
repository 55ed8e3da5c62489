#include "platform/process.h"

#include <csignal>
#include <cstdio>
#include <cstring>

#include <poll.h>
#include <sys/wait.h>
#include <unistd.h>

#if !defined(MONARCH_PORTABLE)
#include <fstream>
#include <sstream>

#include <sched.h>
#include <sys/ioctl.h>
#include <sys/syscall.h>
#else
#include <iterator>
#include <optional>
#include <thread>
#if defined(__APPLE__)
#include <sys/sysctl.h>
#endif
#endif

namespace monarch {

namespace {

constexpr int zombie_ms = 50;  // the socket closes a moment before the process is a zombie

constexpr const char* closed = "closed its link to this process";
constexpr const char* gone = "gone (how it ended is not known here)";

std::string describe_status(int status) {
  if (WIFSIGNALED(status)) return "killed by signal " + std::to_string(WTERMSIG(status));
  return "exited with status " + std::to_string(WEXITSTATUS(status));
}

}  // namespace

#if !defined(MONARCH_PORTABLE)

int open_process(int pid) { return static_cast<int>(syscall(434 /* pidfd_open */, pid, 0)); }

namespace {

// The wait status of a process that is not our child. A zombie shows it in /proc; once it is reaped, the pidfd
// remembers it (Linux 6.15).
bool status_of(int pid, int pidfd, int& status) {
  std::ifstream file("/proc/" + std::to_string(pid) + "/stat");
  std::string line;
  if (std::getline(file, line)) {
    std::istringstream fields(line.substr(line.rfind(')') + 1));
    std::string state, field, last;
    fields >> state;
    while (fields >> field) last = field;
    if (state == "Z" && !last.empty()) {
      status = std::stoi(last);
      return true;
    }
  }
  struct {  // struct pidfd_info, whose header is newer than most
    std::uint64_t mask, cgroup;
    std::uint32_t pid, tgid, ppid, ids[8];
    std::int32_t exit_code;
    std::uint32_t more[8];
  } info{};
  info.mask = 1u << 3;  // PIDFD_INFO_EXIT
  if (pidfd >= 0 && ioctl(pidfd, _IOC(_IOC_READ | _IOC_WRITE, 0xFF, 11, 64), &info) == 0 && (info.mask & (1u << 3))) {
    status = info.exit_code;
    return true;
  }
  return false;
}

}  // namespace

std::string describe_end(int pid, int process) {
  if (process >= 0) {
    pollfd end{process, POLLIN, 0};
    if (poll(&end, 1, zombie_ms) == 0) return closed;
  }
  int status = 0;
  return status_of(pid, process, status) ? describe_status(status) : gone;
}

std::uint64_t start_of(std::uint32_t pid) {
  char path[32];
  std::snprintf(path, sizeof path, "/proc/%u/stat", pid);
  errno = 0;
  std::FILE* file = std::fopen(path, "re");
  if (file == nullptr) {
    // Without free descriptors the process may well exist.
    const bool none = (errno == ENOENT || errno == ESRCH) && kill(static_cast<pid_t>(pid), 0) != 0 && errno == ESRCH;
    return none ? 0 : unknown_start;
  }
  char text[1024];
  const std::size_t bytes = std::fread(text, 1, sizeof text - 1, file);
  const bool gone = bytes == 0 && errno == ESRCH;
  std::fclose(file);
  text[bytes] = 0;
  const char* at = std::strrchr(text, ')');  // its name may hold anything
  char state = 0;
  long threads = 0;
  unsigned long long started = 0;
  const char* fields = "%c %*s %*s %*s %*s %*s %*s %*s %*s %*s %*s %*s %*s %*s %*s %*s %*s %ld %*s %llu";
  if (at == nullptr || std::sscanf(at + 2, fields, &state, &threads, &started) != 3) return gone ? 0 : unknown_start;
  return (state == 'Z' || state == 'X') && threads <= 1 ? 0 : started;
}

int processors() {
  cpu_set_t set;
  return sched_getaffinity(0, sizeof set, &set) == 0 ? CPU_COUNT(&set) : 1;
}

#else

int open_process(int) { return -1; }

namespace {

#if defined(__APPLE__)

bool find_process(int pid, kinfo_proc& found) {
  int name[] = {CTL_KERN, KERN_PROC, KERN_PROC_PID, pid};
  std::size_t bytes = sizeof found;
  return sysctl(name, std::size(name), &found, &bytes, nullptr, 0) == 0 && bytes != 0;
}

std::optional<int> zombie_status(int pid) {
  kinfo_proc found{};
  if (!find_process(pid, found) || found.kp_proc.p_stat != SZOMB) return {};
  return found.kp_proc.p_xstat;
}

#else

// Without /proc: only a parent knows how a process has ended.
std::optional<int> zombie_status(int pid) {
  siginfo_t end{};
  if (waitid(P_PID, static_cast<id_t>(pid), &end, WEXITED | WNOHANG | WNOWAIT) != 0 || end.si_pid != pid) return {};
  return end.si_code == CLD_EXITED ? end.si_status << 8 : end.si_status;
}

#endif

}  // namespace

std::string describe_end(int pid, int) {
  for (int waited_ms = 0;; ++waited_ms) {
    if (const std::optional<int> status = zombie_status(pid)) return describe_status(*status);
    if (kill(pid, 0) != 0 && errno == ESRCH) return gone;
    if (waited_ms == zombie_ms) return closed;
    usleep(1000);
  }
}

std::uint64_t start_of(std::uint32_t pid) {
  if ((kill(static_cast<pid_t>(pid), 0) != 0 && errno == ESRCH) || zombie_status(static_cast<int>(pid))) return 0;
#if defined(__APPLE__)
  kinfo_proc found{};
  if (!find_process(static_cast<int>(pid), found)) return unknown_start;
  const timeval& started = found.kp_proc.p_starttime;
  return static_cast<std::uint64_t>(started.tv_sec) * 1'000'000 + static_cast<std::uint64_t>(started.tv_usec);
#else
  return unknown_start;
#endif
}

int processors() { return static_cast<int>(std::thread::hardware_concurrency()); }

#endif

}  // namespace monarch
