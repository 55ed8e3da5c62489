// A timer that one thread sleeps on. Starting it does not wake that thread before the time is over.
#pragma once

#include <cstdint>

#include "platform/system.h"

#if defined(MONARCH_PORTABLE)
#include <atomic>
#include <chrono>

#include "platform/descriptors.h"
#endif

namespace monarch {

class Timer {
 public:
  Timer();  // throws std::system_error
  ~Timer();
  Timer(const Timer&) = delete;
  Timer& operator=(const Timer&) = delete;

  // Expire once, that many nanoseconds from now, and not at an earlier time that was set. More than 0.
  void start(std::int64_t nanoseconds);
  // Sleep until it expires, or has since the last call.
  void wait();

 private:
#if defined(MONARCH_PORTABLE)
  using Time = std::chrono::steady_clock::time_point;
  std::atomic<Time> due_{Time::max()};
  Wakeup started_;
#else
  int fd_;
#endif
};

}  // namespace monarch
