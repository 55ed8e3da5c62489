#include "shm/futex_waiter.h"

#include <cerrno>
#include <climits>

#include <linux/futex.h>
#include <sched.h>
#include <sys/syscall.h>
#include <unistd.h>

namespace monarch {

namespace {

// A look at memory and the pause after it take 20 to 50 ns: some microseconds of spinning, then at most some hundred of
// yielding, then sleep. A late rank costs its peers no more processor time than that. Fewer yields, and ranks that share
// processors sleep where they were a few microseconds early.
constexpr int spins = 200;

long futex(std::atomic<std::uint32_t>* word, int operation, std::uint32_t value, const timespec* timeout) {
  return syscall(SYS_futex, word, operation, value, timeout, nullptr, FUTEX_BITSET_MATCH_ANY);
}

void relax() {
#if defined(__x86_64__)
  __builtin_ia32_pause();
#elif defined(__aarch64__)
  asm volatile("isb");
#endif
}

}  // namespace

void Doorbell::wake() {
  ring_count.fetch_add(1, std::memory_order_seq_cst);
  futex(&ring_count, FUTEX_WAKE, INT_MAX, nullptr);
}

bool FutexWaiter::pause() {
  ++looks_;
  if (!oversubscribed_ && looks_ <= spins) {
    relax();
    return true;
  }
  if (looks_ <= spins + yields_) {
    if (looks_ <= spins) looks_ = spins + 1;
    sched_yield();
    return true;
  }
  return false;
}

bool FutexWaiter::sleep(std::uint32_t seen, Clock::time_point deadline) {
  const auto left = deadline.time_since_epoch();
  const auto seconds = std::chrono::duration_cast<std::chrono::seconds>(left);
  // FUTEX_WAIT_BITSET takes an absolute time of CLOCK_MONOTONIC, which steady_clock is.
  const timespec until{seconds.count(), (left - seconds).count()};
  interrupted_ = futex(&doorbell_.ring_count, FUTEX_WAIT_BITSET, seen, &until) != 0 && errno == EINTR;
  return Clock::now() < deadline;
}

}  // namespace monarch
