#include "shm/futex_waiter.h"

#include <sched.h>

#include "platform/address_wait.h"

namespace monarch {

namespace {

// A look at memory and the pause after it take 20 to 50 ns: some microseconds of spinning, then at most some hundred of
// yielding, then sleep. A late rank costs its peers no more processor time than that. Fewer yields, and ranks that share
// processors sleep where they were a few microseconds early.
constexpr int spins = 200;

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
  wake_address(ring_count);
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
  interrupted_ = wait_on_address(doorbell_.ring_count, seen, deadline);
  return Clock::now() < deadline;
}

}  // namespace monarch
