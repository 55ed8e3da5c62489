// How a thread waits for other processes: it watches memory for a moment, then sleeps until somebody rings.
//
// Each process has one Bell in its shared arena. Whoever changes memory that another process may wait for rings
// that process's bell afterwards; ringing costs one load while nobody sleeps. No timeouts and no polling: a waiter
// that sleeps is woken by a peer, by its own process (an operation finished, a peer died), or by its deadline.
#pragma once

#include <atomic>
#include <chrono>
#include <cstdint>

namespace monarch {

using Clock = std::chrono::steady_clock;

struct Bell {
  alignas(64) std::atomic<std::uint32_t> rung;
  alignas(64) std::atomic<std::uint32_t> sleepers;

  // After the change has been stored.
  void ring() {
    std::atomic_thread_fence(std::memory_order_seq_cst);
    if (sleepers.load(std::memory_order_relaxed) != 0) wake();
  }
  void wake();
};

// One wait: call `again` after every look that found nothing, until the look finds something; then `reset`.
class Patience {
 public:
  static constexpr int usual_yields = 100;
  // `yields`: how often the processor is offered to others before the sleep.
  Patience(Bell& bell, bool crowded, int yields = usual_yields) : bell_(bell), crowded_(crowded), yields_(yields) {}

  // Returns false when the deadline has passed. `look` is called once more between announcing the sleep and
  // sleeping, so that a change in between is not missed; it returns true if it found something.
  template <class Look>
  bool again(Look&& look, Clock::time_point deadline) {
    if (pause()) return true;
    const std::uint32_t heard = bell_.rung.load(std::memory_order_relaxed);
    bell_.sleepers.fetch_add(1, std::memory_order_seq_cst);
    std::atomic_thread_fence(std::memory_order_seq_cst);  // with ring's: one of us sees what the other has stored
    bool in_time = true;
    if (!look()) in_time = sleep(heard, deadline);
    bell_.sleepers.fetch_sub(1, std::memory_order_relaxed);
    return in_time;
  }
  void reset() { looks_ = 0; }
  // A signal ended the last sleep: whoever serves Python lets its handlers run.
  bool interrupted() const { return interrupted_; }

 private:
  bool pause();  // false when it is time to sleep
  bool sleep(std::uint32_t heard, Clock::time_point deadline);

  Bell& bell_;
  bool crowded_;  // more ranks than processors: spinning takes the processor from the one we wait for
  int yields_;
  int looks_ = 0;
  bool interrupted_ = false;
};

}  // namespace monarch
