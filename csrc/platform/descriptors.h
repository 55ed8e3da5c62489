// Descriptors that exec closes: sockets, wake-ups, and waiting for several of them.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>

#include <poll.h>
#include <sys/socket.h>

#include "platform/system.h"

#if defined(MONARCH_PORTABLE)
#include <mutex>
#include <vector>
#endif

namespace monarch {

// Of send(), and of poll() for the end of a connection on which nothing is sent. Where send() has no such flag, sockets
// that come from here have the option.
#if defined(MONARCH_PORTABLE)
inline constexpr int no_signal = 0;
inline constexpr short hung_up = POLLIN;
#else
inline constexpr int no_signal = MSG_NOSIGNAL;
inline constexpr short hung_up = POLLRDHUP;
#endif

// As socket() and accept(): -1 and errno for an error.
int new_socket(int domain, int type, int protocol = 0);
int accept_socket(int listener);

// A descriptor that is readable from a wake-up until it is drained.
class Wakeup {
 public:
  Wakeup();  // throws std::system_error
  ~Wakeup() { close(); }
  Wakeup(const Wakeup&) = delete;
  Wakeup& operator=(const Wakeup&) = delete;

  int fd() const { return read_end_; }
  void wake() const;
  void drain() const;
  void close();  // for a forked child

 private:
  int read_end_ = -1, write_end_ = -1;  // of an eventfd the same
};

// Descriptors, each with a key. One thread waits until some are readable or hung up; any thread may add one.
class DescriptorSet {
 public:
  using Keys = std::array<std::uint64_t, 64>;

  DescriptorSet();  // throws std::system_error
  ~DescriptorSet() { close(); }
  DescriptorSet(const DescriptorSet&) = delete;
  DescriptorSet& operator=(const DescriptorSet&) = delete;

  bool add(int fd, std::uint64_t key);
  void remove(int fd);  // before it is closed
  // Return how many keys were written. 0 after the timeout, and in vain after a signal; -1 is no timeout.
  std::size_t wait(Keys& keys, int timeout_ms);
  void close();  // for a forked child

 private:
#if defined(MONARCH_PORTABLE)
  struct Entry {
    int fd;
    std::uint64_t key;
  };
  std::mutex mutex_;
  std::vector<Entry> entries_;
  Wakeup changed_;
  std::vector<Entry> waiting_entries_;  // the waiting thread's copy of entries_
  std::vector<pollfd> polled_;
#else
  int fd_ = -1;
#endif
};

}  // namespace monarch
