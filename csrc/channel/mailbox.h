// The post office of a process: frames to and from the other processes of its host, and who of its threads reads them.
//
// Sending never waits: what a full ring does not take is kept here and goes out as the receiver reads. How much that may
// be is for the senders' protocol to bound. A payload too large for a ring lies in a block of the sender's arena until
// all its receivers have let go of it; what one of them has not even read may fill a share of the arena, no more, so that
// there is room for the others.
//
// One thread at a time has the turn to read. A thread that waits for something reads for everybody meanwhile, so that an
// answer costs no change of threads; while none does, the standby reads. It takes over a tick after the last reader has
// gone, not at once: readers come and go thousands of times a second.
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
  // True if this process may leave the payload where it is: nobody else reads it, and its owner's arena has room left.
  bool keep();

 private:
  std::shared_ptr<Peer> peer_;
  std::uint64_t at_;
  std::uint32_t reader_;
  std::uint64_t bytes_;
  bool kept_ = false;
  int process_;  // whose hold it is: a fork of it has the object, too, and holds nothing
};

struct Event {
  enum Kind { frame, met, gone, refused } kind = frame;
  std::uint32_t link = 0;             // not of one who refused: there is none
  FrameHeader header;                 // frame
  std::unique_ptr<char[]> inlined;    // frame: its payload, if it came through the ring, or its block's table of lengths
  std::shared_ptr<Block> block;       // frame: its payload otherwise
  std::string text;                   // met, refused: the token; gone: how
  int pid = 0;                        // met
  bool peace = false;                 // gone

  const char* payload() const { return block ? block->data() : inlined.get(); }
  // Of the body (0) or of a buffer, as it was checked: what stands in a block its sender may have changed since.
  std::uint64_t length(std::size_t i) const {
    std::uint64_t bytes;
    std::memcpy(&bytes, inlined.get() + i * sizeof bytes, sizeof bytes);
    return bytes;
  }
};

class Post {
 public:
  // `share`: bytes of the arena that hold what one receiver has not read.
  Post(std::shared_ptr<Host> host, bool crowded, std::uint64_t share = UINT64_MAX);
  ~Post();

  // The link to the process with this token, made if need be; -1 if it cannot be reached. `silent` if it is there and
  // does not answer yet, as one that is stopped: that it was met or has refused comes as an event.
  int connect(const std::string& token);
  static constexpr int silent = -2;
  // False if there is no room for the payload now, or a receiver has not read its share of the arena; then nothing was
  // sent to anybody. A receiver who has read everything gets a payload of any size.
  bool send(FrameHeader header, const Payload& payload, const std::vector<Receiver>& to);
  void drop(std::uint32_t link);  // nothing more to this one

  // The turn to read. `take` returns false if another reader than the standby has it.
  bool take();
  void pass_on();
  // With the turn: what has come; nothing at the deadline, after `wake`, after a signal, or if the standby is to go. Only a
  // sleep is ended by a signal: what has come before it `before_sleep` may see to, and say false for not to sleep.
  std::vector<Event> receive(Clock::time_point deadline, bool standby, bool (*before_sleep)() = nullptr);
  // The standby's: returns when the turn is its own, false once closed.
  bool stand_by();
  void wake();
  void close();
  // A reader waits for the standby to go.
  bool wanted() const { return wanted_.load(std::memory_order_acquire) != 0; }
  // Bytes that the receiver has not read yet.
  std::uint64_t unread(std::uint32_t link);

  // More processes than processors: spinning takes the processor from the one that is waited for.
  void crowd(bool crowded) { crowded_ = crowded; }
  std::uint64_t kept_back() const { return kept_back_.load(std::memory_order_relaxed); }

 private:
  struct Link {
    std::shared_ptr<Peer> peer;
    Ring* out = nullptr;
    Ring* in = nullptr;
    std::uint64_t written = 0, read = 0;
    std::deque<std::vector<char>> waiting;  // whole frames that the ring had no room for
    std::shared_ptr<std::atomic<std::uint64_t>> unread_blocks;  // bytes that it has not looked at
    bool closed = false;                    // for sending
    bool reported = false;                  // that it is gone
  };

  void met(std::shared_ptr<Peer> peer);
  void refused(const std::string& token);
  bool write(Link& link, const char* frame, std::size_t bytes);
  void flush(Link& link);
  void discard(Link& link);  // what waits for room
  bool look(std::vector<Event>& events);
  void read(std::uint32_t number, Link& link, std::vector<Event>& events);
  bool drained(const std::string& token) const;
  void gone(std::uint32_t number, Link& link, std::vector<Event>& events, std::string text, bool peace);
  struct Reader {
    std::shared_ptr<Peer> peer;
    std::shared_ptr<std::atomic<std::uint64_t>> unread_blocks;  // its link's, until this block is taken from it
  };
  std::uint64_t fill_block(const FrameHeader& header, const Payload& payload, std::vector<Reader> readers);
  bool readers_of(const std::vector<Receiver>& to, std::uint64_t bytes, std::vector<Reader>& readers);
  void start_tick(std::int64_t nanoseconds);
  bool sendable(const Link& link) const { return !link.closed && link.peer->state.load(std::memory_order_acquire) == Peer::alive; }

  std::shared_ptr<Host> host_;
  std::atomic<bool> crowded_;
  const std::uint64_t share_;
  std::mutex mutex_;  // links_, what they hold, alive_, met_, parted_ and first_
  std::deque<Link> links_;
  std::vector<std::uint32_t> alive_;  // those that are not reported as gone: they come and go, and each look asks all
  std::vector<Event> met_;  // and who has refused
  std::vector<std::shared_ptr<Peer>> parted_;  // reported as gone, their rings still to be given back
  std::size_t first_ = 0;                      // of alive_, whom to read first: one that always has something is not the only one
  std::atomic<std::uint32_t> wakes_{0};
  std::uint32_t heard_ = 0;  // of wakes_, by whoever has the turn
  std::atomic<std::uint64_t> kept_back_{0};

  std::mutex turn_mutex_;
  std::condition_variable turn_free_;
  int tick_ = -1;  // a timer that the standby sleeps on
  bool taken_ = false, standby_has_ = false, ticking_ = false, closed_ = false;
  std::uint64_t turns_ = 0;
  std::atomic<int> wanted_{0};  // readers who wait for the standby to go
};

}  // namespace monarch
