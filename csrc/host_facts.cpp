#include "host_facts.h"

#include <array>
#include <cstdint>

#include <unistd.h>

#include "platform/address_wait.h"
#include "platform/system.h"

#if !defined(MONARCH_PORTABLE)
#include <cerrno>
#include <csignal>
#include <fstream>

#include <sys/syscall.h>
#include <sys/uio.h>
#include <sys/wait.h>
#elif defined(__APPLE__)
#include <sys/sysctl.h>
#endif
#if defined(__aarch64__) && defined(__linux__)
#include <asm/hwcap.h>
#include <sys/auxv.h>
#endif

namespace monarch {

#if !defined(MONARCH_PORTABLE)

std::string boot_id() {
  std::ifstream file("/proc/sys/kernel/random/boot_id");
  std::string line;
  std::getline(file, line);
  return line;  // empty if there is no such file: then no two processes are on the same host
}

namespace {

bool close_if_open(long fd) {
  if (fd < 0) return false;
  close(static_cast<int>(fd));
  return true;
}

// Reading a child's memory is what a peer does; reading our own would pass where ptrace rules forbid peers.
// The child is a plain fork that only sleeps in read(), so it is safe from any thread.
bool can_read_child_memory() {
  static volatile std::uint64_t source = 0x6d6f6e61726368;
  std::array<int, 2> hold{};
  if (pipe(hold.data()) != 0) return false;
  const pid_t child = fork();
  if (child == 0) {
    char byte;
    close(hold[1]);
    (void)!read(hold[0], &byte, 1);
    _exit(0);
  }
  close(hold[0]);
  std::uint64_t copy = 0;
  iovec local{&copy, sizeof copy};
  iovec remote{const_cast<std::uint64_t*>(&source), sizeof copy};
  const bool ok = child > 0 && process_vm_readv(child, &local, 1, &remote, 1, 0) == sizeof copy && copy == source;
  close(hold[1]);
  if (child > 0) {
    kill(child, SIGKILL);  // another child that was forked meanwhile may hold the pipe open
    while (waitpid(child, nullptr, 0) < 0 && errno == EINTR) {
    }
  }
  return ok;
}

}  // namespace

std::string ipc_namespace() {
  std::array<char, 64> target{};
  const ssize_t length = readlink("/proc/self/ns/ipc", target.data(), target.size());
  return length > 0 ? std::string(target.data(), static_cast<std::size_t>(length)) : std::string();
}

std::map<std::string, bool> kernel_features() {
  return {
      {"memfd_create", close_if_open(syscall(SYS_memfd_create, "monarch-probe", 1u /* MFD_CLOEXEC */))},
      {"pidfd_open", close_if_open(syscall(434 /* SYS_pidfd_open */, getpid(), 0u))},
      {"process_vm_readv", can_read_child_memory()},
      {"futex", has_address_wait()},
  };
}

#else

std::string boot_id() {
  std::array<char, 256> text{};
#if defined(__APPLE__)
  std::size_t bytes = text.size() - 1;
  if (sysctlbyname("kern.bootsessionuuid", text.data(), &bytes, nullptr, 0) != 0) return {};
#else
  if (gethostname(text.data(), text.size() - 1) != 0) return {};
#endif
  return text.data();
}

std::string ipc_namespace() { return {}; }

std::map<std::string, bool> kernel_features() {
  return {{"memfd_create", false}, {"pidfd_open", false}, {"process_vm_readv", false}, {"futex", has_address_wait()}};
}

#endif

std::vector<std::string> cpu_features() {
  std::vector<std::string> found;
  const auto add = [&found](bool present, const char* name) {
    if (present) found.emplace_back(name);
  };
#if defined(__x86_64__)
  __builtin_cpu_init();
  add(__builtin_cpu_supports("avx2"), "avx2");
  add(__builtin_cpu_supports("fma"), "fma");
  add(__builtin_cpu_supports("avx512f"), "avx512f");
  add(__builtin_cpu_supports("avx512bw"), "avx512bw");
#elif defined(__aarch64__) && defined(__linux__)
  add(getauxval(AT_HWCAP) & HWCAP_ASIMD, "asimd");
  add(getauxval(AT_HWCAP) & HWCAP_SVE, "sve");
#elif defined(__aarch64__)
  add(true, "asimd");
#endif
  return found;
}

}  // namespace monarch
