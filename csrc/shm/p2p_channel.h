// Point-to-point messages between ranks of a group. Group drives them under its lock; nothing blocks.
//
// Each ordered pair of ranks has a channel: a ring of bytes in the sender's arena, allocated with its first message. A
// message is an envelope of one cache line and its data, in whole lines. As with a socket, a send is done when its last
// byte is in the ring. A message that is larger than the ring passes through it in parts.
//
// A receiver takes messages in the order in which they were sent. A message without a matching receive stays in the
// ring. If a receive with another tag needs a later message, the earlier one moves to memory of this process
// ("unexpected" message).
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

inline constexpr std::size_t largest_p2p_ring = 2 << 20;  // larger than a core's cache, as the stage is; a power of two
inline constexpr std::size_t smallest_p2p_ring = 16 << 10;

// The sender's side, in its control block: one line for each receiver. The receiver's side: how much it has read.
struct SendRing {
  alignas(64) std::atomic<std::uint64_t> written;  // bytes since the beginning
  std::atomic<std::uint64_t> offset;                   // of the ring in the sender's arena, 0: none yet
  std::uint64_t size;                              // before `offset`
};
struct ReadCount {
  alignas(64) std::atomic<std::uint64_t> read;
};

class P2pChannels {
 public:
  // What the ranks of a group need of each other; `send_rings[r]` and `read_counts[r]` are rank r's, one for each rank.
  struct Layout {
    std::vector<char*> arenas;
    std::vector<SendRing*> send_rings;
    std::vector<ReadCount*> read_counts;
    std::function<void(int)> ring;  // rings the doorbell of a rank
  };
  P2pChannels(Host& host, int rank, Layout layout);

  void submit(std::shared_ptr<Operation> operation);
  // Moves what can be moved; calls `finish` for operations that are done.
  bool advance(const std::function<void(Operation&)>& finish);
  // Operations in progress.
  std::vector<std::shared_ptr<Operation>> pending() const;
  // Remove an operation that has failed.
  void drop(const Operation& operation);
  // Memory of ours in the arena.
  std::vector<std::uint64_t> rings() const;

 private:
  struct Envelope {
    std::uint64_t bytes;
    std::int32_t tag;
    Dtype dtype;
  };
  struct Message {  // a message that is being received, or waits for its receive
    Envelope envelope;
    std::uint64_t received = 0;
    std::shared_ptr<Operation> to;  // null: `buffered`
    std::unique_ptr<char[]> buffered;
  };
  using PostedReceives = std::list<std::shared_ptr<Operation>>;

  bool push(int to, const std::function<void(Operation&)>& finish);
  bool pull(int from, const std::function<void(Operation&)>& finish);
  bool open(int to);
  bool match_unexpected(const std::function<void(Operation&)>& finish);
  bool is_expected(int from) const;
  PostedReceives::iterator match(int from, const Envelope& envelope);
  bool begin(int from, const Envelope& envelope);
  void deliver(int from, const std::function<void(Operation&)>& finish);
  static void fail_mismatch(Operation& operation, int from, const Envelope& envelope);

  Host& host_;
  int rank_, size_;
  Layout layout_;
  struct Out {
    std::deque<std::shared_ptr<Operation>> queue;
    std::uint64_t written = 0;
    std::uint64_t sent = 0;  // lines of the first one, with its envelope
  };
  struct In {
    std::uint64_t read = 0;
    std::optional<Message> message;
    std::deque<Message> unexpected;
  };
  std::vector<Out> out_;
  std::vector<In> in_;
  PostedReceives posted_;
  std::size_t sending_ = 0;
  bool check_unexpected_ = false;
};

}  // namespace monarch
