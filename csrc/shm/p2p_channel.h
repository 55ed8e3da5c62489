// Messages from one rank of a group to another, point to point. Driven by Group, under its lock; nothing blocks.
//
// Each ordered pair has a lane: a ring of bytes in the sender's arena, made with its first message. A message is an
// envelope of one cache line and its data, in whole lines. As with a socket, a send is done when its last byte is in
// the ring, and one that is larger than the ring goes through it in parts.
//
// A receiver takes messages in the order in which they were sent. One that nobody has asked for stays in the ring,
// unless a receive of another tag looks behind it: then it moves to memory of this process until it is asked for.
#pragma once

#include <atomic>
#include <cstdint>
#include <deque>
#include <functional>
#include <list>
#include <memory>
#include <optional>
#include <vector>

#include "shm/peer_table.h"
#include "shm/operation.h"

namespace monarch {

inline constexpr std::size_t largest_lane = 2 << 20;  // larger than a core's cache, as the stage is; a power of two
inline constexpr std::size_t smallest_lane = 16 << 10;

// The sender's side, in its board: one line for each receiver. The receiver's side: how much it has read.
struct Lane {
  alignas(64) std::atomic<std::uint64_t> written;  // bytes since the beginning
  std::atomic<std::uint64_t> at;                   // of the ring in the sender's arena, 0: none yet
  std::uint64_t size;                              // before `at`
};
struct Receipt {
  alignas(64) std::atomic<std::uint64_t> read;
};

class Lanes {
 public:
  // What the ranks of a group need of each other; `lanes[r]` and `receipts[r]` are rank r's, one for each rank.
  struct Places {
    std::vector<char*> arenas;
    std::vector<Lane*> lanes;
    std::vector<Receipt*> receipts;
    std::function<void(int)> ring;  // the bell of a rank
  };
  Lanes(Host& host, int rank, Places places);

  void submit(std::shared_ptr<Operation> operation);
  // Moves what can be moved; calls `finish` for operations that are done.
  bool advance(const std::function<void(Operation&)>& finish);
  // Operations under way.
  std::vector<std::shared_ptr<Operation>> pending() const;
  // Forgets an operation that has failed.
  void drop(const Operation& operation);
  // Memory of ours in the arena.
  std::vector<std::uint64_t> rings() const;

 private:
  struct Envelope {
    std::uint64_t bytes;
    std::int32_t tag;
    Dtype dtype;
  };
  struct Letter {  // a message that is on its way in, or waits to be asked for
    Envelope envelope;
    std::uint64_t arrived = 0;
    std::shared_ptr<Operation> to;  // null: `kept`
    std::unique_ptr<char[]> kept;
  };
  using Posts = std::list<std::shared_ptr<Operation>>;

  bool push(int to, const std::function<void(Operation&)>& finish);
  bool pull(int from, const std::function<void(Operation&)>& finish);
  bool open(int to);
  bool serve_early(const std::function<void(Operation&)>& finish);
  bool wanted(int from) const;
  Posts::iterator match(int from, const Envelope& envelope);
  bool begin(int from, const Envelope& envelope);
  void deliver(int from, const std::function<void(Operation&)>& finish);
  static void refuse(Operation& operation, int from, const Envelope& envelope);

  Host& host_;
  int rank_, size_;
  Places places_;
  struct Out {
    std::deque<std::shared_ptr<Operation>> queue;
    std::uint64_t written = 0;
    std::uint64_t sent = 0;  // lines of the first one, with its envelope
  };
  struct In {
    std::uint64_t read = 0;
    std::optional<Letter> letter;
    std::deque<Letter> early;
  };
  std::vector<Out> out_;
  std::vector<In> in_;
  Posts posted_;
  std::size_t sending_ = 0;
  bool look_early_ = false;
};

}  // namespace monarch
