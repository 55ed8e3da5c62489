#include "platform/address_wait.h"

#include <cerrno>
#include <climits>

#if defined(__linux__)
#include <linux/futex.h>
#include <sys/syscall.h>
#include <unistd.h>
#elif defined(__APPLE__)
// Part of libSystem since macOS 11, and of no header: sys/ulock.h of Darwin's sources. libc++ waits with them, too.
extern "C" {
int __ulock_wait2(std::uint32_t operation, void* address, std::uint64_t value, std::uint64_t timeout_ns, std::uint64_t value2);
int __ulock_wake(std::uint32_t operation, void* address, std::uint64_t wake_value);
}
#endif

namespace monarch {

#if defined(__linux__)

namespace {

long futex(std::atomic<std::uint32_t>* word, int operation, std::uint32_t value, const timespec* timeout) {
  return syscall(SYS_futex, word, operation, value, timeout, nullptr, FUTEX_BITSET_MATCH_ANY);
}

}  // namespace

bool wait_on_address(std::atomic<std::uint32_t>& word, std::uint32_t value, std::chrono::steady_clock::time_point deadline) {
  const auto left = deadline.time_since_epoch();
  const auto seconds = std::chrono::duration_cast<std::chrono::seconds>(left);
  // FUTEX_WAIT_BITSET takes an absolute time of CLOCK_MONOTONIC, which steady_clock is.
  const timespec until{seconds.count(), (left - seconds).count()};
  return futex(&word, FUTEX_WAIT_BITSET, value, &until) != 0 && errno == EINTR;
}

void wake_address(std::atomic<std::uint32_t>& word) { futex(&word, FUTEX_WAKE, INT_MAX, nullptr); }

bool has_address_wait() {
  std::atomic<std::uint32_t> word{0};
  return futex(&word, FUTEX_WAKE, 1, nullptr) == 0;
}

#elif defined(__APPLE__)

namespace {

constexpr std::uint32_t compare_and_wait_shared = 3, wake_all = 0x100, return_errno = 0x01000000;

}  // namespace

bool wait_on_address(std::atomic<std::uint32_t>& word, std::uint32_t value, std::chrono::steady_clock::time_point deadline) {
  using Nanoseconds = std::chrono::nanoseconds;
  std::uint64_t timeout_ns = 0;  // none
  if (deadline != std::chrono::steady_clock::time_point::max()) {
    const auto left = std::chrono::duration_cast<Nanoseconds>(deadline - std::chrono::steady_clock::now()).count();
    if (left <= 0) return false;
    timeout_ns = static_cast<std::uint64_t>(left);
  }
  return __ulock_wait2(compare_and_wait_shared | return_errno, &word, value, timeout_ns, 0) == -EINTR;
}

// Fails if no thread sleeps there, which is no error.
void wake_address(std::atomic<std::uint32_t>& word) { __ulock_wake(compare_and_wait_shared | wake_all | return_errno, &word, 0); }

bool has_address_wait() {
  std::atomic<std::uint32_t> word{0};
  return __ulock_wake(compare_and_wait_shared | wake_all | return_errno, &word, 0) == -ENOENT;
}

#else
#error "csrc/platform/address_wait.cpp has no implementation for this system"
#endif

}  // namespace monarch
