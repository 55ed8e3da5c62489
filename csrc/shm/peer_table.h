// Table of the other processes of this host: their tokens, their arenas, and their ends.
//
// A process listens on a Unix socket whose name is its token, 128 random bits that other processes get through the
// store. Two processes that pass each other's arena over it certainly share memory; boot ids and namespaces only
// suggest that. The connection stays open, next to a pidfd on Linux. One thread waits on all of them, and so learns of
// the end of a process when the kernel does.
#pragma once

#include <atomic>
#include <condition_variable>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "platform/descriptors.h"
#include "shm/arena.h"

namespace monarch {

struct Peer {
  enum State : int { alive, left, dead };

  std::string token;
  int pid = 0;
  std::uint32_t number = 0;  // of the peers that this process has ever had
  int link = -1;   // the socket
  int pidfd = -1;  // -1 if the kernel has none, or does not permit it for this process
  std::unique_ptr<Mapping> mapping;
  std::atomic<int> state{alive};
  std::atomic<int> readable{0};    // by the kernel: 1, or -1 if not; 0: not tried yet
  std::atomic<bool> ended{false};  // the process itself, not only its connection: it writes to no memory any more
  std::string exit_description;  // "killed by signal 9", written before `state`
  std::uint64_t ring_sent = 0;      // offset of our ring for this peer, see Host::ConnectionHooks
  std::uint64_t ring_received = 0;  // offset of its ring for us

  ~Peer();
};

class Host {
 public:
  // Hooks for new connections. `connected` runs on a thread of this host or on the thread that connects, before other
  // threads can find the peer. `refused` reports that a process did not accept the connection, see connect().
  struct ConnectionHooks {
    std::function<std::uint64_t()> allocate_ring;  // throws std::system_error: then the connection fails
    std::function<void(std::uint64_t)> release_ring;
    std::function<void(std::shared_ptr<Peer>)> connected;
    std::function<void(const std::string& token)> refused;
  };
  // `token`: 32 hexadecimal digits that another process has chosen, or empty. Processes that know such a token may
  // connect at once; they get no answer before `set_hooks`. Throws std::system_error.
  explicit Host(std::size_t arena_bytes, const std::string& token = {});
  ~Host();
  void set_hooks(ConnectionHooks hooks);  // for a random token: before the token is published

  const std::string& token() const { return token_; }
  Arena& arena() { return *arena_; }
  Doorbell& doorbell() { return arena_->mapping().header().doorbell; }
  // For threads that wait for other threads of this process only: peers do not ring it.
  Doorbell& local_doorbell() { return local_doorbell_; }

  // Connect to the process with this token and exchange arenas with it. Return nullptr if it cannot be reached from
  // here, because it is on another host or in another namespace. Connecting twice gives the same peer. A process that
  // does not answer within `seconds` may be stopped. With `waiting` the attempt continues in the background, and
  // `connected` or `refused` follows; without it the attempt is abandoned.
  std::shared_ptr<Peer> connect(const std::string& token, double seconds = 1.0, bool* waiting = nullptr);
  // The connected peer; nullptr if there is none or it has ended.
  std::shared_ptr<Peer> known(const std::string& token);
  // All connected peers that have not ended.
  std::vector<std::shared_ptr<Peer>> peers();
  // The peer that connected to us; waits until it has, or for `seconds`.
  std::shared_ptr<Peer> accepted(const std::string& token, double seconds);

  // Release arena memory once `unused` returns true, because peers do not access it any more. That happens at the next
  // allocation, or a little later on the watcher thread.
  void release_when_unused(std::vector<std::uint64_t> offsets, std::function<bool()> unused);
  void release_unused();  // releases all unused memory now
  // As Arena::allocate, after that.
  std::uint64_t allocate(std::size_t bytes);

  // Commit the first `bytes` of the arena in the background, on a thread that runs only while a processor is idle.
  // Later calls have no effect. Throws std::system_error if there can be no such thread.
  void prefault(std::uint64_t bytes);
  // From now on, give memory of the arena back to the system that was not allocated for `seconds`, at the latest after
  // twice that time. 0: never.
  void return_idle_memory(double seconds);

  // Changes whenever a peer has died or left.
  std::uint32_t departures() const { return departures_.load(std::memory_order_acquire); }

  // Kill this process as soon as the peer with this token ends, whatever the interpreter does then. Return false if the
  // peer has ended already.
  bool die_with_peer(const std::string& token);

  // Tell the peers that this process ends without a failure.
  void leave();
  // In a forked child: drop the parent's descriptors without a message to the peers.
  void abandon();
  // As Arena::release; nothing in a forked child.
  void release(std::uint64_t offset);

 private:
  void begin();
  void watch();
  void trim_when_idle(std::optional<Clock::time_point>& next);
  void accept_one();
  // A connection to a process that has not answered yet. The link is -1 while the answer is checked.
  struct PendingConnect {
    int link;
    std::uint64_t ring_offset;
  };
  std::shared_ptr<Peer> complete_handshake(const std::string& token, PendingConnect pending);
  void watch_connect(const std::string& token, PendingConnect pending);
  bool finish_connect(int link);
  bool is_connecting(const std::string& token);
  // Takes over both descriptors, whether it succeeds or throws.
  std::shared_ptr<Peer> add_peer(int link, std::uint64_t ring_offset, const struct Hello& theirs, int memory, int pid);
  void release_ring(std::uint64_t ring_offset);
  void unwatch(Peer& peer, int Peer::*fd);
  bool sweep();
  void on_peer_exit(Peer& peer);
  struct Hello hello();

  std::string token_, die_with_;
  ConnectionHooks hooks_;
  std::unique_ptr<Arena> arena_;
  int listener_ = -1;
  DescriptorSet watched_fds_;
  Wakeup wakeup_;  // of the watcher: to end, or for deferred_
  std::mutex mutex_;
  std::condition_variable connected_;
  std::map<std::string, std::shared_ptr<Peer>> peers_;
  std::map<std::uint64_t, std::shared_ptr<Peer>> watched_;  // by watch_key
  std::map<std::string, PendingConnect> pending_connects_;                       // by token
  std::uint32_t last_number_ = 0;
  std::vector<std::pair<std::vector<std::uint64_t>, std::function<bool()>>> deferred_;
  bool swept_ = false;  // the watcher looks after deferred_ until nothing is left there
  std::atomic<bool> ending_{false};
  std::atomic<std::int64_t> idle_ms_{0};  // 0: the arena keeps its memory
  std::atomic<std::uint32_t> departures_{0};
  Doorbell local_doorbell_{};
  std::atomic<bool> abandoned_{false};
  bool begun_ = false;
  std::thread watcher_;
  std::thread prefaulter_;
};

// Memory of the arena, released with this object.
class ArenaBuffer {
 public:
  // Without memory (data() is null) if the arena is full.
  ArenaBuffer(std::shared_ptr<Host> host, std::size_t bytes);
  ~ArenaBuffer();
  ArenaBuffer(const ArenaBuffer&) = delete;
  ArenaBuffer& operator=(const ArenaBuffer&) = delete;

  char* data() const { return data_; }
  std::size_t size() const { return bytes_; }

 private:
  std::shared_ptr<Host> host_;
  std::size_t bytes_;
  std::uint64_t offset_;
  char* data_;
};

}  // namespace monarch
