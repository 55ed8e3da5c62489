#include "platform/timer.h"

#if defined(MONARCH_PORTABLE)
#include <algorithm>

#include <poll.h>
#else
#include <sys/timerfd.h>
#include <unistd.h>
#endif

namespace monarch {

#if !defined(MONARCH_PORTABLE)

Timer::Timer() : fd_(timerfd_create(CLOCK_MONOTONIC, TFD_CLOEXEC)) {
  if (fd_ < 0) throw system_failure("timerfd_create");
}

Timer::~Timer() { close(fd_); }

void Timer::start(std::int64_t nanoseconds) {
  const itimerspec once{{0, 0}, {0, nanoseconds}};
  timerfd_settime(fd_, 0, &once, nullptr);
}

void Timer::wait() {
  std::uint64_t expirations = 0;
  (void)!read(fd_, &expirations, sizeof expirations);
}

#else

// A pipe wakes the thread for each start, also when that is in vain: macOS has no timers that are descriptors.
Timer::Timer() = default;

Timer::~Timer() = default;

void Timer::start(std::int64_t nanoseconds) {
  due_.store(std::chrono::steady_clock::now() + std::chrono::nanoseconds(nanoseconds));
  started_.wake();
}

void Timer::wait() {
  for (;;) {
    Time due = due_.load();
    const Time now = std::chrono::steady_clock::now();
    if (due <= now) {
      if (due_.compare_exchange_strong(due, Time::max())) return;
      continue;
    }
    int timeout_ms = -1;
    if (due != Time::max()) {
      const auto left = std::chrono::ceil<std::chrono::milliseconds>(due - now).count();
      timeout_ms = static_cast<int>(std::min<std::int64_t>(left, 1'000'000));
    }
    pollfd started{started_.fd(), POLLIN, 0};
    if (poll(&started, 1, timeout_ms) > 0) started_.drain();
  }
}

#endif

}  // namespace monarch
