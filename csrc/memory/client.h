// The caller's side of one-sided memory between hosts: reads and writes what another process has registered.
//
// A client has a few connections to one process, made when they are first needed. A transfer is cut into pieces; the thread
// that asks for it moves them on one connection and threads of the client's help on the others. Requests run ahead of
// their replies. Nothing here knows Python; local memory belongs to whoever asks, until the call returns, or, of an
// Errand, until it is over.
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
inline constexpr std::uint64_t errand_reads = 64 << 10, errand_writes = 16 << 10;  // bytes: what sockets hold for nobody

// A small transfer that was asked for, and whose answer somebody fetches later: whoever wants it reads it himself.
class Errand {
 public:
  virtual ~Errand() = default;
  // Nothing if the answer is not there by then, or, unless `patiently`, if another thread waits for it. At once when the
  // transfer's own time is over, or it is cancelled. The result is told once.
  virtual std::optional<Result> fetch(Moment until, bool patiently) = 0;
  virtual bool is_over() const = 0;
};

// What a peer's staging memory is asked for: to copy `ranges` of what it has registered there, or from there.
struct StageRequest {
  bool write;
  Ticket ticket;
  std::uint64_t buffer;  // its key
  std::uint32_t slot;
  std::uint64_t turn;
};

// A connection that one thread has for itself, to ask for that. Answers come in the order of the requests.
class Line {
 public:
  virtual ~Line() = default;
  // Sends it off. Of each segment, where it is here does not matter.
  virtual Result ask(const StageRequest& request, const std::vector<Segment>& ranges) = 0;
  virtual Result hear() = 0;
  // Others may have the connection; it is hung up if it has failed, or answers are missing. Twice is as good as once.
  virtual void leave() = 0;
};

class Client {
 public:
  // To the process with the token `whom`. Throws std::invalid_argument.
  Client(std::string address, std::uint16_t port, std::shared_ptr<const Identity> identity, const std::string& whom,
         std::size_t streams = 4);
  ~Client();
  Client(const Client&) = delete;
  Client& operator=(const Client&) = delete;

  // All wait until it is over; from any thread, also several at once. What was read or written of one that is not done is
  // unknown, and the local memory is let go of all the same. A connection that had bytes under way is given up then, and the
  // next transfer makes a new one.
  Result read(const Ticket& ticket, const std::vector<Segment>& segments, Moment deadline = Moment::max(),
              const Cancel* cancel = nullptr);
  Result write(const Ticket& ticket, const std::vector<Segment>& segments, Moment deadline = Moment::max(),
               const Cancel* cancel = nullptr);
  // 8 aligned bytes; `expected` is for compare_and_swap.
  Result atomic(const Ticket& ticket, std::uint64_t offset, Access access, std::uint64_t operand, std::uint64_t expected,
                Moment deadline = Moment::max(), const Cancel* cancel = nullptr);

  // Asks, without waiting, for what one piece of a connection that is there and idle can do; nullptr: nothing was asked for.
  // Its client and `cancel` are to outlive it.
  std::unique_ptr<Errand> begin(Access access, const Ticket& ticket, const std::vector<Segment>& segments, std::uint64_t operand,
                                std::uint64_t expected, Moment deadline = Moment::max(), const Cancel* cancel = nullptr);

  // Waits for a connection that has time; nullptr: `result` says why there is none. As `begin`, for whom its client and
  // `cancel` are to outlive.
  std::unique_ptr<Line> line(Moment deadline, const Cancel* cancel, Result& result);

  // Ends all transfers, connections and threads; a second call does nothing. Waits for errands: cancel them first.
  void close();
  // In a forked child: closes what belongs to the parent, without a word to anybody.
  void abandon();

 private:
  class Pool;
  class Sent;
  class Held;
  Pool* pool_;  // left behind, not freed, in a forked child: it has none of the threads
};

}  // namespace monarch
