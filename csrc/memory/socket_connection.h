// A connection to another host, with or without TLS: bytes that move as far as they can, and waiting that can be ended.
//
// Nothing here holds memory while it waits, so that whoever owns it need not wait for a network. What the bytes mean is the
// server's and the client's.
#pragma once

#include <atomic>
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <optional>
#include <stdexcept>
#include <string>
#include <vector>

#include "memory/status.h"
#include "memory/tls.h"

namespace monarch {

// Why a connection can't be used any more.
class LinkError : public std::runtime_error {
 public:
  LinkError(Outcome outcome, const std::string& text) : std::runtime_error(text), outcome(outcome) {}
  Outcome outcome;
};

// A descriptor.
class Descriptor {
 public:
  explicit Descriptor(int fd = -1) : fd_(fd) {}
  ~Descriptor();
  Descriptor(Descriptor&& other) noexcept : fd_(other.fd_) { other.fd_ = -1; }
  Descriptor& operator=(Descriptor&&) = delete;
  int get() const { return fd_; }

 private:
  int fd_;
};

// The descriptors of connections, for a forked child to close: whatever else their owner keeps may be half-written there.
class Inheritance {
 public:
  explicit Inheritance(std::size_t most);
  std::size_t add(int fd);  // where; the caller sees to it that there are never more than `most`
  void remove(std::size_t at) { open_[at].store(-1); }
  void close_all();  // in the child

 private:
  std::size_t most_;
  std::unique_ptr<std::atomic<int>[]> open_;
};

// Ends waits, of any number of threads, once and for all.
class Cancel {
 public:
  Cancel();  // throws std::system_error
  void set();
  bool is_set() const { return set_.load(std::memory_order_acquire); }
  int descriptor() const { return event_.get(); }  // readable once it is set
 private:
  Descriptor event_;
  std::atomic<bool> set_{false};
};

using Moment = std::chrono::steady_clock::time_point;

// How long to wait, and for what not to.
struct Limits {
  Moment deadline = Moment::max();
  const Cancel* cancel = nullptr;
  const Cancel* closed = nullptr;  // of whoever waits
  // Throws LinkError if there is no reason to wait any longer.
  void check() const;
};

class Link {
 public:
  explicit Link(Descriptor socket);  // makes it non-blocking, and says what TCP is to do
  int fd() const { return socket_.get(); }

  // To an address and port, names too. Throws LinkError, as all below.
  static std::unique_ptr<Link> connect(const std::string& address, std::uint16_t port, const Limits& limits);
  // Whether the other side has hung up, or has said something, of a connection on which nothing is expected.
  bool is_stale() const;
  void secure(const TlsContext& context, bool server, const Limits& limits);
  const TlsSession* tls() const { return tls_ ? &*tls_ : nullptr; }

  // What can be done without waiting, 0: nothing. The end of the stream is an error. Writes: after 0, or less than all, the
  // next one must have the rest at least.
  std::size_t try_read(char* to, std::size_t bytes);
  std::size_t try_write(const char* first, std::size_t bytes, const char* second = nullptr, std::size_t more = 0);
  // For what the last of them lacked.
  void wait(const Limits& limits);
  // The same, but only until then: false if it has not come, or a signal has.
  bool wait_until(Moment until, const Limits& limits);

 private:
  Descriptor socket_;
  std::optional<TlsSession> tls_;
  short lacks_ = 0;
};

// Reads small things many at a time, and large ones straight to where they belong.
class Reader {
 public:
  explicit Reader(Link& link) : link_(link) {}
  std::size_t try_read(char* to, std::size_t bytes);
  void read(void* to, std::size_t bytes, const Limits& limits);
  void wait(const Limits& limits) { link_.wait(limits); }
  bool wait_until(Moment until, const Limits& limits) { return link_.wait_until(until, limits); }
  bool empty() const { return at_ == end_; }

 private:
  Link& link_;
  std::unique_ptr<char[]> buffer_;  // made when it is first needed: strangers get none
  std::size_t at_ = 0, end_ = 0;
};

// The same for writing: what is put is sent together, with what is sent straight from where it lies.
class Writer {
 public:
  explicit Writer(Link& link) : link_(link) {}
  // True if there was room.
  bool put(const void* from, std::size_t bytes);
  void flush(const Limits& limits);
  // First what was put, then these; how many of these were taken.
  std::size_t try_write(const char* from, std::size_t bytes);
  void wait(const Limits& limits) { link_.wait(limits); }

 private:
  Link& link_;
  std::unique_ptr<char[]> buffer_;
  std::size_t at_ = 0, end_ = 0;
};

inline constexpr std::size_t buffered = 64 << 10;     // bytes of a reader's and a writer's buffer
inline constexpr std::size_t straight = 16 << 10;     // from so many bytes on a copy costs more than a system call
inline constexpr std::size_t piece_held = 256 << 10;  // bytes of registered memory that are held at once

}  // namespace monarch
