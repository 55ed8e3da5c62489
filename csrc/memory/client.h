// Client of registered memory on another host: reads and writes memory that another process has registered.
//
// A client has a few connections to one process, made when they are first needed. A transfer is cut into pieces. The
// calling thread moves them on one connection, and helper threads of the client use the other connections. Requests are
// pipelined: several are sent before their replies arrive. Nothing here depends on Python. The caller keeps the local
// memory until the call returns, or until a SmallRequest is over.
#pragma once

#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "memory/handshake.h"
#include "memory/status.h"

namespace monarch {

inline constexpr std::size_t most_streams = 64;
inline constexpr std::uint64_t max_small_read = 64 << 10, max_small_write = 16 << 10;  // bytes that socket buffers hold while no thread reads

// A small transfer in flight. The waiting thread reads the reply itself.
class SmallRequest {
 public:
  virtual ~SmallRequest() = default;
  // Return nothing if the reply has not arrived by then, or if another thread waits for it and `wait_for_others` is
  // false. Return at once when the transfer's deadline has passed, or when it is cancelled. The result is returned
  // once.
  virtual std::optional<Result> fetch(TimePoint until, bool wait_for_others) = 0;
  virtual bool is_over() const = 0;
};

// A request to copy `ranges` of registered memory into a peer's staging memory, or from it.
struct StageRequest {
  bool write;
  Ticket ticket;
  std::uint64_t buffer;  // its key
  std::uint32_t slot;
  std::uint64_t sequence;
};

// A connection for one thread's requests of that kind. Replies arrive in the order of the requests.
class StagingConnection {
 public:
  virtual ~StagingConnection() = default;
  // Send the request. The local addresses of the segments are not used.
  virtual Result send_request(const StageRequest& request, const std::vector<Segment>& ranges) = 0;
  virtual Result receive_reply() = 0;
  // Return the connection to the pool, or close it if it has failed or replies are missing. A second call does nothing.
  virtual void release() = 0;
};

class Client {
 public:
  // To the process with the token `owner_token`. Throws std::invalid_argument.
  Client(std::string address, std::uint16_t port, std::shared_ptr<const Identity> identity, const std::string& owner_token,
         std::size_t streams = 4);
  ~Client();
  Client(const Client&) = delete;
  Client& operator=(const Client&) = delete;

  // All wait until the transfer is over. They may be called from any thread, also several at once. After a failed
  // transfer the contents are unknown, and the local memory is not accessed any more. A connection with bytes in flight
  // is closed then, and the next transfer opens a new one.
  Result read(const Ticket& ticket, const std::vector<Segment>& segments, TimePoint deadline = TimePoint::max(),
              const Cancel* cancel = nullptr);
  Result write(const Ticket& ticket, const std::vector<Segment>& segments, TimePoint deadline = TimePoint::max(),
               const Cancel* cancel = nullptr);
  // 8 aligned bytes; `expected` is for compare_and_swap.
  Result atomic(const Ticket& ticket, std::uint64_t offset, Access access, std::uint64_t operand, std::uint64_t expected,
                TimePoint deadline = TimePoint::max(), const Cancel* cancel = nullptr);

  // Send the request of a transfer of one piece, without waiting. Return nullptr, and send nothing, if no connection is
  // idle. The client and `cancel` must outlive the result.
  std::unique_ptr<SmallRequest> begin(Access access, const Ticket& ticket, const std::vector<Segment>& segments, std::uint64_t operand,
                                std::uint64_t expected, TimePoint deadline = TimePoint::max(), const Cancel* cancel = nullptr);

  // Wait for a connection. Return nullptr on failure; `result` says why. The client and `cancel` must outlive the
  // result of this function.
  std::unique_ptr<StagingConnection> open_staging_connection(TimePoint deadline, const Cancel* cancel, Result& result);

  // End all transfers, connections and threads; a second call does nothing. Waits for small requests: cancel them
  // first.
  void close();
  // In a forked child: close inherited descriptors without a message to the peers.
  void abandon();

 private:
  class Pool;
  class SentRequest;
  class LeasedConnection;
  Pool* pool_;  // left behind, not freed, in a forked child: it has none of the threads
};

}  // namespace monarch
