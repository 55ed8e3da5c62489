// Mailbox of a process: sends frames to other processes of its host, and decides which of its threads reads frames.
//
// Sending never waits. Frames that do not fit into a ring go to a backlog, which is sent as the receiver reads. The
// senders' protocol limits the backlog. A payload that is too large for a ring lies in a block of the sender's arena
// until all receivers have released it. Blocks that one receiver has not read may fill only a share of the arena, so
// that there is space for others.
//
// One thread at a time has the turn to read. A thread that waits for a reply reads for all threads meanwhile, so a
// reply needs no thread switch. While no thread waits, the standby thread reads. It takes over one tick after the last
// reader has left, because readers change thousands of times a second.
#pragma once

#include <unistd.h>

#include <condition_variable>
#include <cstdint>
#include <cstring>
#include <deque>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

#include "channel/frame.h"
#include "channel/ring.h"
#include "platform/timer.h"
#include "shm/peer_table.h"

namespace monarch {

struct Slice {
  const char* data;
  std::uint64_t bytes;
};

struct Receiver {
  std::uint32_t link;
  std::uint64_t seq;
  std::uint32_t rank, epoch;
};

struct Payload {
  Slice prefix;
  std::vector<Slice> body;
  std::vector<Slice> buffers;
};

// A payload in a peer's arena that this process has not let go of.
class Block {
 public:
  Block(std::shared_ptr<Peer> peer, std::uint64_t at, std::uint32_t reader, std::uint64_t bytes)
      : peer_(std::move(peer)), at_(at), reader_(reader), bytes_(bytes), process_(getpid()) {}
  ~Block();
  Block(const Block&) = delete;
  Block& operator=(const Block&) = delete;

  char* data() const;
  std::uint64_t bytes() const { return bytes_; }
  // Return true if this process may keep the payload in place: it is the only reader, and the arena has space left.
  bool retain();

 private:
  std::shared_ptr<Peer> peer_;
  std::uint64_t at_;
  std::uint32_t reader_;
  std::uint64_t bytes_;
  bool retained_ = false;
  int process_;  // the process that holds the block; a forked child has a copy of this object and holds nothing
};

struct Event {
  enum Kind { frame, connected, disconnected, refused } kind = frame;
  std::uint32_t link = 0;             // refused: none
  FrameHeader header;                 // frame
  std::unique_ptr<char[]> inlined;    // frame: its payload, if it came through the ring, or its block's table of lengths
  std::shared_ptr<Block> block;       // frame: its payload otherwise
  std::string text;                   // connected, refused: the token; disconnected: how the process ended
  int pid = 0;                        // connected
  bool clean = false;                 // disconnected: whether the process left without a failure

  const char* payload() const { return block ? block->data() : inlined.get(); }
  // Length of the body (0) or of a buffer, as it was checked. The sender may have changed the block since.
  std::uint64_t length(std::size_t i) const {
    std::uint64_t bytes;
    std::memcpy(&bytes, inlined.get() + i * sizeof bytes, sizeof bytes);
    return bytes;
  }
};

class Mailbox {
 public:
  // `share`: bytes of the arena that hold what one receiver has not read.
  Mailbox(std::shared_ptr<Host> host, bool oversubscribed, std::uint64_t share = UINT64_MAX);
  ~Mailbox();

  // Return the link to the process with this token; -1 if it cannot be reached. `no_answer` if it exists and does not
  // answer yet, for example because it is stopped: then an event `connected` or `refused` follows.
  int connect(const std::string& token);
  static constexpr int no_answer = -2;
  // Return false if there is no space for the payload now, or if a receiver has not read its share of the arena. Then
  // nothing was sent. A receiver that has read everything gets a payload of any size.
  bool send(FrameHeader header, const Payload& payload, const std::vector<Receiver>& to);
  void drop(std::uint32_t link);  // nothing more to this one

  // The turn to read. `acquire_turn` returns false if a reader other than the standby thread has it.
  bool acquire_turn();
  void release_turn();
  // Requires the turn. Return the events that have arrived. Empty at the deadline, after `wake`, after a signal, or if
  // the standby thread must release the turn. A signal only ends a sleep. `before_sleep` handles signals that came
  // earlier, and returns false to prevent the sleep.
  std::vector<Event> receive(Clock::time_point deadline, bool standby, bool (*before_sleep)() = nullptr);
  // For the standby thread: return when it has the turn; false once closed.
  bool acquire_turn_as_standby();
  void wake();
  void close();
  // A reader waits for the standby to go.
  bool is_turn_wanted() const { return turn_waiters_.load(std::memory_order_acquire) != 0; }
  // Bytes that the receiver has not read yet.
  std::uint64_t unread(std::uint32_t link);

  // More processes than processors: spinning takes the processor from the one that is waited for.
  void set_oversubscribed(bool oversubscribed) { oversubscribed_ = oversubscribed; }
  std::uint64_t backlog_bytes() const { return backlog_bytes_.load(std::memory_order_relaxed); }

 private:
  struct Link {
    std::shared_ptr<Peer> peer;
    Ring* out = nullptr;
    Ring* in = nullptr;
    std::uint64_t written = 0, read = 0;
    std::deque<std::vector<char>> backlog;  // whole frames that did not fit into the ring
    std::shared_ptr<std::atomic<std::uint64_t>> unread_blocks;  // bytes that it has not looked at
    bool closed = false;                    // for sending
    bool reported = false;                  // that it is gone
  };

  void connected(std::shared_ptr<Peer> peer);
  void refused(const std::string& token);
  bool write(Link& link, const char* frame, std::size_t bytes);
  void flush(Link& link);
  void discard(Link& link);  // drops the backlog
  bool poll_links(std::vector<Event>& events);
  void read(std::uint32_t number, Link& link, std::vector<Event>& events);
  bool is_drained(const std::string& token) const;
  void disconnected(std::uint32_t number, Link& link, std::vector<Event>& events, std::string text, bool clean);
  struct Reader {
    std::shared_ptr<Peer> peer;
    std::shared_ptr<std::atomic<std::uint64_t>> unread_blocks;  // its link's, until this block is taken from it
  };
  std::uint64_t fill_block(const FrameHeader& header, const Payload& payload, std::vector<Reader> readers);
  bool readers_of(const std::vector<Receiver>& to, std::uint64_t bytes, std::vector<Reader>& readers);
  void start_tick(std::int64_t nanoseconds);
  bool sendable(const Link& link) const { return !link.closed && link.peer->state.load(std::memory_order_acquire) == Peer::alive; }

  std::shared_ptr<Host> host_;
  std::atomic<bool> oversubscribed_;
  const std::uint64_t share_;
  std::mutex mutex_;  // links_, what they hold, alive_, new_events_, closed_peers_ and first_
  std::deque<Link> links_;
  std::vector<std::uint32_t> alive_;  // links that are not reported as disconnected
  std::vector<Event> new_events_;  // connected and refused
  std::vector<std::shared_ptr<Peer>> closed_peers_;  // reported as disconnected; their rings are released later
  std::size_t first_ = 0;                      // index in alive_ to read first: no busy link starves the others
  std::atomic<std::uint32_t> wakes_{0};
  std::uint32_t seen_wakes_ = 0;  // value of wakes_ that the reader has seen
  std::atomic<std::uint64_t> backlog_bytes_{0};

  std::mutex turn_mutex_;
  std::condition_variable turn_free_;
  Timer tick_;  // the standby thread sleeps on it
  bool turn_taken_ = false, standby_has_turn_ = false, ticking_ = false, closed_ = false;
  std::uint64_t turns_ = 0;
  std::atomic<int> turn_waiters_{0};  // readers that wait for the standby thread
};

}  // namespace monarch
