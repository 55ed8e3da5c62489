#include "memory/socket_connection.h"

#include <algorithm>
#include <array>
#include <cerrno>
#include <cstring>
#include <utility>

#include <fcntl.h>
#include <netdb.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <poll.h>
#include <pthread.h>
#include <signal.h>
#include <sys/socket.h>
#include <sys/uio.h>
#include <unistd.h>

namespace monarch {

namespace {

constexpr int keep_alive_after = 30, keep_alive_every = 10, keep_alive_times = 3;  // seconds, seconds, times

[[noreturn]] void lost(int error) { throw SocketError(Outcome::lost, std::strerror(error)); }

void set_option(int fd, int level, int option, int value) { setsockopt(fd, level, option, &value, sizeof value); }

int milliseconds_until(TimePoint deadline) {
  if (deadline == TimePoint::max()) return -1;
  const auto left = std::chrono::ceil<std::chrono::milliseconds>(deadline - std::chrono::steady_clock::now()).count();
  return static_cast<int>(std::clamp<std::int64_t>(left, 0, 1'000'000));
}

struct Addresses {
  addrinfo* first = nullptr;
  ~Addresses() {
    if (first != nullptr) freeaddrinfo(first);
  }
};

}  // namespace

Descriptor::~Descriptor() {
  if (fd_ >= 0) close(fd_);
}

InheritedDescriptors::InheritedDescriptors(std::size_t most) : most_(most), open_(new std::atomic<int>[most]) {
  for (std::size_t i = 0; i < most_; ++i) open_[i].store(-1);
}

std::size_t InheritedDescriptors::add(int fd) {
  for (std::size_t i = 0;; i = (i + 1) % most_) {
    int none = -1;
    if (open_[i].compare_exchange_strong(none, fd)) return i;
  }
}

void InheritedDescriptors::close_all() {
  for (std::size_t i = 0; i < most_; ++i) {
    if (const int fd = open_[i].exchange(-1); fd >= 0) close(fd);
  }
}

void Cancel::set() {
  set_.store(true, std::memory_order_release);
  wakeup_.wake();
}

void Limits::check() const {
  if (cancel != nullptr && cancel->is_set()) throw SocketError(Outcome::cancelled, "it was cancelled");
  if (closed != nullptr && closed->is_set()) throw SocketError(Outcome::cancelled, "this side was closed meanwhile");
  if (std::chrono::steady_clock::now() >= deadline) throw SocketError(Outcome::late, "the other side did not answer in time");
}

SocketConnection::SocketConnection(Descriptor socket) : socket_(std::move(socket)) {
  const int fd = socket_.get();
  fcntl(fd, F_SETFL, fcntl(fd, F_GETFL) | O_NONBLOCK);
  set_option(fd, IPPROTO_TCP, TCP_NODELAY, 1);
  // A host that has disappeared frees its thread and its slot within a minute.
  set_option(fd, SOL_SOCKET, SO_KEEPALIVE, 1);
#if defined(__APPLE__)
  set_option(fd, IPPROTO_TCP, TCP_KEEPALIVE, keep_alive_after);
#else
  set_option(fd, IPPROTO_TCP, TCP_KEEPIDLE, keep_alive_after);
#endif
  set_option(fd, IPPROTO_TCP, TCP_KEEPINTVL, keep_alive_every);
  set_option(fd, IPPROTO_TCP, TCP_KEEPCNT, keep_alive_times);
}

std::unique_ptr<SocketConnection> SocketConnection::connect(const std::string& address, std::uint16_t port, const Limits& limits) {
  addrinfo hints{};
  hints.ai_socktype = SOCK_STREAM;
  hints.ai_flags = AI_NUMERICSERV;
  Addresses found;
  if (const int error = getaddrinfo(address.c_str(), std::to_string(port).c_str(), &hints, &found.first); error != 0) {
    throw SocketError(Outcome::unreachable, address + ": " + gai_strerror(error));
  }
  int error = EADDRNOTAVAIL;
  for (const addrinfo* at = found.first; at != nullptr; at = at->ai_next) {
    Descriptor socket(new_socket(at->ai_family, at->ai_socktype, at->ai_protocol));
    if (socket.get() < 0) throw SocketError(Outcome::unreachable, std::strerror(errno));
    auto connection = std::make_unique<SocketConnection>(std::move(socket));
    error = 0;
    if (::connect(connection->fd(), at->ai_addr, at->ai_addrlen) != 0) {
      error = errno;
      if (error == EINPROGRESS || error == EINTR) {
        connection->awaited_events_ = POLLOUT;
        connection->wait(limits);
        socklen_t size = sizeof error;
        getsockopt(connection->fd(), SOL_SOCKET, SO_ERROR, &error, &size);
      }
    }
    if (error == 0) return connection;
  }
  throw SocketError(Outcome::unreachable, std::strerror(error));
}

bool SocketConnection::is_stale() const {
  char byte;
  return recv(fd(), &byte, sizeof byte, MSG_PEEK | MSG_DONTWAIT) >= 0 || (errno != EAGAIN && errno != EINTR);
}

void SocketConnection::secure(const TlsContext& context, bool server, const Limits& limits) {
  tls_.emplace(context, fd(), server);
  for (;;) {
    TlsSession::Wants wants;
    try {
      wants = tls_->handshake();
    } catch (const std::runtime_error& error) {
      throw SocketError(Outcome::lost, error.what());
    }
    if (wants == TlsSession::Wants::nothing) return;
    awaited_events_ = wants == TlsSession::Wants::to_read ? POLLIN : POLLOUT;
    wait(limits);
  }
}

std::size_t SocketConnection::try_read(char* to, std::size_t bytes) {
  awaited_events_ = POLLIN;
  if (bytes == 0) return 0;
  if (tls_) {
    try {
      TlsSession::Wants wants;
      const std::size_t n = tls_->read(to, bytes, wants);
      if (wants == TlsSession::Wants::to_write) awaited_events_ = POLLOUT;
      return n;
    } catch (const std::runtime_error& error) {
      throw SocketError(Outcome::lost, error.what());
    }
  }
  const ssize_t n = recv(fd(), to, bytes, MSG_DONTWAIT);
  if (n > 0) return static_cast<std::size_t>(n);
  if (n == 0) throw SocketError(Outcome::lost, "the other side hung up");
  if (errno != EAGAIN && errno != EINTR) lost(errno);
  return 0;
}

std::size_t SocketConnection::try_write(const char* first, std::size_t bytes, const char* second, std::size_t more) {
  awaited_events_ = POLLOUT;
  if (bytes + more == 0) return 0;
  if (tls_) {
    try {
      TlsSession::Wants wants = TlsSession::Wants::nothing;
      std::size_t n = tls_->write(first, bytes, wants);
      if (n == bytes) n += tls_->write(second, more, wants);
      if (wants == TlsSession::Wants::to_read) awaited_events_ = POLLIN;
      return n;
    } catch (const std::runtime_error& error) {
      throw SocketError(Outcome::lost, error.what());
    }
  }
  std::array<iovec, 2> parts{iovec{const_cast<char*>(first), bytes}, iovec{const_cast<char*>(second), more}};
  msghdr message{};
  message.msg_iov = bytes == 0 ? &parts[1] : parts.data();
  message.msg_iovlen = bytes == 0 || more == 0 ? 1 : 2;
  const ssize_t n = sendmsg(fd(), &message, no_signal | MSG_DONTWAIT);
  if (n >= 0) return static_cast<std::size_t>(n);
  if (errno != EAGAIN && errno != EINTR) lost(errno);
  return 0;
}

namespace {

// The connection's, and those that end waiting for it.
struct PollSet {
  PollSet(int fd, short what, const Limits& limits) {
    entries[count++] = {fd, what, 0};
    for (const Cancel* cancel : {limits.cancel, limits.closed}) {
      if (cancel != nullptr) entries[count++] = {cancel->descriptor(), POLLIN, 0};
    }
  }
  std::array<pollfd, 3> entries{};
  nfds_t count = 0;
};

}  // namespace

void SocketConnection::wait(const Limits& limits) {
  limits.check();  // also of a connection that is always ready
  PollSet poll_set(fd(), awaited_events_, limits);
  for (;;) {
    const int n = poll(poll_set.entries.data(), poll_set.count, milliseconds_until(limits.deadline));
    if (n > 0 && poll_set.entries[0].revents != 0) return;
    if (n < 0 && errno != EINTR) lost(errno);
    limits.check();
  }
}

bool SocketConnection::wait_until(TimePoint until, const Limits& limits) {
  limits.check();
  PollSet poll_set(fd(), awaited_events_, limits);
  const int n = poll(poll_set.entries.data(), poll_set.count, milliseconds_until(std::min(until, limits.deadline)));
  if (n > 0 && poll_set.entries[0].revents != 0) return true;
  if (n < 0 && errno != EINTR) lost(errno);
  limits.check();
  return false;
}

std::size_t Reader::try_read(char* to, std::size_t bytes) {
  if (empty()) {
    if (bytes >= direct_bytes) return connection_.try_read(to, bytes);
    if (!buffer_) buffer_ = std::unique_ptr<char[]>(new char[buffered]);
    at_ = 0;
    end_ = 0;
    end_ = connection_.try_read(buffer_.get(), buffered);
  }
  const std::size_t n = std::min(bytes, end_ - at_);
  std::memcpy(to, buffer_.get() + at_, n);
  at_ += n;
  return n;
}

void Reader::read(void* to, std::size_t bytes, const Limits& limits) {
  auto* at = static_cast<char*>(to);
  while (bytes != 0) {
    const std::size_t n = try_read(at, bytes);
    if (n == 0) connection_.wait(limits);
    at += n, bytes -= n;
  }
}

bool Writer::put(const void* from, std::size_t bytes) {
  if (!buffer_) buffer_ = std::unique_ptr<char[]>(new char[buffered]);
  if (bytes > buffered - end_) return false;
  std::memcpy(buffer_.get() + end_, from, bytes);
  end_ += bytes;
  return true;
}

void Writer::flush(const Limits& limits) {
  while (at_ != end_) {
    try_write(nullptr, 0);
    if (at_ != end_) connection_.wait(limits);
  }
  at_ = end_ = 0;
}

std::size_t Writer::try_write(const char* from, std::size_t bytes) {
  const std::size_t before = end_ - at_;
  const std::size_t n = connection_.try_write(buffer_.get() + at_, before, from, bytes);
  if (n < before) {
    at_ += n;
    return 0;
  }
  at_ = end_ = 0;
  return n - before;
}

}  // namespace monarch
