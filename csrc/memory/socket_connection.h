// A connection to another host, with or without TLS: non-blocking reads and writes, and waits that can be cancelled.
//
// Nothing here holds registered memory during a wait, so that its owner does not wait for a network. The server and the
// client define the meaning of the bytes.
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
#include "platform/descriptors.h"

namespace monarch {

// Why a connection can't be used any more.
class SocketError : public std::runtime_error {
 public:
  SocketError(Outcome outcome, const std::string& text) : std::runtime_error(text), outcome(outcome) {}
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

// The descriptors of connections, for a forked child to close: other state of their owner may be inconsistent there.
class InheritedDescriptors {
 public:
  explicit InheritedDescriptors(std::size_t most);
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
  void set();
  bool is_set() const { return set_.load(std::memory_order_acquire); }
  int descriptor() const { return wakeup_.fd(); }  // readable once it is set
 private:
  Wakeup wakeup_;
  std::atomic<bool> set_{false};
};

using TimePoint = std::chrono::steady_clock::time_point;

// Limits of a wait: its deadline, and what ends it early.
struct Limits {
  TimePoint deadline = TimePoint::max();
  const Cancel* cancel = nullptr;
  const Cancel* closed = nullptr;  // set when this side closes
  // Throws SocketError if the wait is over.
  void check() const;
};

class SocketConnection {
 public:
  explicit SocketConnection(Descriptor socket);  // makes it non-blocking, and sets TCP options
  int fd() const { return socket_.get(); }

  // To an address and port, names too. Throws SocketError, as all below.
  static std::unique_ptr<SocketConnection> connect(const std::string& address, std::uint16_t port, const Limits& limits);
  // Whether the peer has closed the connection or sent unexpected bytes.
  bool is_stale() const;
  void secure(const TlsContext& context, bool server, const Limits& limits);
  const TlsSession* tls() const { return tls_ ? &*tls_ : nullptr; }

  // What can be done without waiting, 0: nothing. The end of the stream is an error. Writes: after 0, or less than all, the
  // next one must have the rest at least.
  std::size_t try_read(char* to, std::size_t bytes);
  std::size_t try_write(const char* first, std::size_t bytes, const char* second = nullptr, std::size_t more = 0);
  // Wait until the last read or write can continue.
  void wait(const Limits& limits);
  // The same until a time: false if it is over, or after a signal.
  bool wait_until(TimePoint until, const Limits& limits);

 private:
  Descriptor socket_;
  std::optional<TlsSession> tls_;
  short awaited_events_ = 0;
};

// Reads small things many at a time, and large ones straight to where they belong.
class Reader {
 public:
  explicit Reader(SocketConnection& connection) : connection_(connection) {}
  std::size_t try_read(char* to, std::size_t bytes);
  void read(void* to, std::size_t bytes, const Limits& limits);
  void wait(const Limits& limits) { connection_.wait(limits); }
  bool wait_until(TimePoint until, const Limits& limits) { return connection_.wait_until(until, limits); }
  bool empty() const { return at_ == end_; }

 private:
  SocketConnection& connection_;
  std::unique_ptr<char[]> buffer_;  // made at the first read, so unauthenticated peers get none
  std::size_t at_ = 0, end_ = 0;
};

// The same for writing: what is put is sent together, with what is sent straight from where it lies.
class Writer {
 public:
  explicit Writer(SocketConnection& connection) : connection_(connection) {}
  // Return true if it fitted.
  bool put(const void* from, std::size_t bytes);
  void flush(const Limits& limits);
  // First what was put, then these; how many of these were taken.
  std::size_t try_write(const char* from, std::size_t bytes);
  void wait(const Limits& limits) { connection_.wait(limits); }

 private:
  SocketConnection& connection_;
  std::unique_ptr<char[]> buffer_;
  std::size_t at_ = 0, end_ = 0;
};

inline constexpr std::size_t buffered = 64 << 10;     // bytes of a reader's and a writer's buffer
inline constexpr std::size_t direct_bytes = 16 << 10;     // from this size on a copy costs more than a system call
inline constexpr std::size_t held_piece_bytes = 256 << 10;  // bytes of registered memory that are held at once

}  // namespace monarch
