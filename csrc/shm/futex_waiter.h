// Waiting for other processes: a thread polls memory for a moment, then sleeps on a futex until its doorbell is rung.
//
// Each process has one Doorbell in its shared arena. A process that changes memory for which another one may wait rings
// that process's doorbell afterwards. Ringing costs one load while no thread sleeps. There are no timeouts and no
// periodic polling: a sleeping thread is woken by a peer, by its own process (an operation finished, a peer died), or
// by its deadline.
#pragma once

#include <atomic>
#include <chrono>
#include <cstdint>

namespace monarch {

using Clock = std::chrono::steady_clock;

struct Doorbell {
  alignas(64) std::atomic<std::uint32_t> ring_count;
  alignas(64) std::atomic<std::uint32_t> sleepers;

  // After the change has been stored.
  void ring() {
    std::atomic_thread_fence(std::memory_order_seq_cst);
    if (sleepers.load(std::memory_order_relaxed) != 0) wake();
  }
  void wake();
};

// One wait: call `wait` after every look that found nothing, until the look finds something; then `reset`.
class FutexWaiter {
 public:
  static constexpr int default_yields = 100;
  // `yields`: how often the processor is offered to others before the sleep.
  FutexWaiter(Doorbell& doorbell, bool oversubscribed, int yields = default_yields) : doorbell_(doorbell), oversubscribed_(oversubscribed), yields_(yields) {}

  // Returns false when the deadline has passed. `look` is called once more between announcing the sleep and
  // sleeping, so that a change in between is not missed; it returns true if it found something.
  template <class Look>
  bool wait(Look&& look, Clock::time_point deadline) {
    if (pause()) return true;
    const std::uint32_t seen = doorbell_.ring_count.load(std::memory_order_relaxed);
    doorbell_.sleepers.fetch_add(1, std::memory_order_seq_cst);
    std::atomic_thread_fence(std::memory_order_seq_cst);  // pairs with the fence in ring(): one of the two sees the other's store
    bool in_time = true;
    if (!look()) in_time = sleep(seen, deadline);
    doorbell_.sleepers.fetch_sub(1, std::memory_order_relaxed);
    return in_time;
  }
  void reset() { looks_ = 0; }
  void sleep_next() { looks_ = 1 << 20; }  // neither spin nor yield before
  // A signal ended the last sleep: a caller with Python signal handlers must run them.
  bool interrupted() const { return interrupted_; }

 private:
  bool pause();  // false when it is time to sleep
  bool sleep(std::uint32_t seen, Clock::time_point deadline);

  Doorbell& doorbell_;
  bool oversubscribed_;  // more ranks than processors: spinning takes the processor from the one we wait for
  int yields_;
  int looks_ = 0;
  bool interrupted_ = false;
};

}  // namespace monarch
