// The other processes of this host: who they are, their arenas, and when they die.
//
// A process listens on an abstract Unix socket whose name is its token, 128 random bits that it tells the others
// through the store. Passing each other's memfd over it proves that two processes share memory; boot ids and
// namespaces only suggest it. The connection stays open, with a pidfd beside it: one thread sleeps on all of them
// and hears of a death when the kernel does.
#pragma once

#include <atomic>
#include <condition_variable>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "shm/arena.h"

namespace monarch {

struct Peer {
  enum State : int { alive, left, dead };

  std::string token;
  int pid = 0;
  std::uint32_t number = 0;  // of the peers that this process has ever had
  int link = -1;   // the socket
  int pidfd = -1;  // -1 where the kernel has none, or the process is not ours to see
  std::unique_ptr<Mapping> mapping;
  std::atomic<int> state{alive};
  std::atomic<int> readable{0};    // by process_vm_readv: 1, or -1 if not; 0: nobody has tried
  std::atomic<bool> ended{false};  // not only lost to us: it runs no more, and writes to nothing
  std::string epitaph;  // "killed by signal 9", written before `state`
  std::uint64_t gift_sent = 0;      // what we told it when we met, see Host::Manners
  std::uint64_t gift_received = 0;  // what it told us

  ~Peer();
};

class Host {
 public:
  // What whoever uses this host wants to say to each peer when they meet, and to hear of it. `arrived` runs on a thread
  // of this host or on the one that connects, before the peer can be found by others; `refused` tells that one who was
  // called has not taken the call, see connect().
  struct Manners {
    std::function<std::uint64_t()> gift;  // throws std::system_error: then they do not meet
    std::function<void(std::uint64_t)> take_back;
    std::function<void(std::shared_ptr<Peer>)> arrived;
    std::function<void(const std::string& token)> refused;
  };
  // `token`: 32 hexadecimal digits that somebody else has chosen, or empty. Others may know such a one already and call:
  // they are not answered before `behave`. Throws std::system_error.
  explicit Host(std::size_t arena_bytes, const std::string& token = {});
  ~Host();
  void behave(Manners manners);  // before anybody can know the token, if it is our own

  const std::string& token() const { return token_; }
  Arena& arena() { return *arena_; }
  Bell& bell() { return arena_->mapping().header().bell; }
  // For threads that wait for other threads of this process only: peers do not ring it.
  Bell& inside() { return inside_; }

  // Connects to the process with this token and exchanges arenas with it; nullptr if it cannot be reached from
  // here, which is an answer: it is on another host or in another namespace. Connecting twice gives the same peer.
  // One that is there and does not answer for so many seconds stands still, for now. With `waiting` given the call goes
  // on without us, and `arrived` or `refused` follow; else it is given up.
  std::shared_ptr<Peer> connect(const std::string& token, double seconds = 1.0, bool* waiting = nullptr);
  // The peer that we have met; nullptr if we have not, or it is gone.
  std::shared_ptr<Peer> known(const std::string& token);
  // All whom we have met and who are not gone.
  std::vector<std::shared_ptr<Peer>> peers();
  // The peer that connected to us; waits until it has, or for `seconds`.
  std::shared_ptr<Peer> accepted(const std::string& token, double seconds);

  // Room in the arena that peers may still look at: `unused` says when they no longer do. It is given back with the
  // next allocation, or, since there may be none, by the watcher a little later.
  void bury(std::vector<std::uint64_t> offsets, std::function<bool()> unused);
  void tidy();  // gives back what is no longer looked at, now
  // As Arena::allocate, after that.
  std::uint64_t allocate(std::size_t bytes);

  // Changes whenever a peer has died or left.
  std::uint32_t departures() const { return departures_.load(std::memory_order_acquire); }

  // From now on this process lives no longer than the peer with this token: it dies with it at once, whatever its
  // interpreter does. False if that peer is not there any more.
  bool tether(const std::string& token);

  // Tells the peers that this process ends in peace.
  void leave();
  // In a forked child: gives up what belongs to the parent, without a word to the peers.
  void abandon();
  // As Arena::release; nothing in a forked child.
  void release(std::uint64_t offset);

 private:
  void begin();
  void watch();
  void accept_one();
  // To a process that has not answered yet. Without a link: the answer is being looked at.
  struct Call {
    int link;
    std::uint64_t gift;
  };
  std::shared_ptr<Peer> answer(const std::string& token, Call call);
  void wait_for(const std::string& token, Call call);
  bool conclude(int link);
  bool calls(const std::string& token);
  // Takes over both descriptors, whether it succeeds or throws.
  std::shared_ptr<Peer> adopt(int link, std::uint64_t gift, const struct Hello& theirs, int memfd, int pid);
  void take_back(std::uint64_t gift);
  void forget(Peer& peer, int Peer::*fd);
  bool sweep();
  void lost(Peer& peer);
  struct Hello hello();

  std::string token_, tether_;
  Manners manners_;
  std::unique_ptr<Arena> arena_;
  int listener_ = -1, epoll_ = -1;
  int nudge_ = -1;  // an eventfd: the watcher is to end, or to look after what is buried
  std::mutex mutex_;
  std::condition_variable arrived_;
  std::map<std::string, std::shared_ptr<Peer>> peers_;
  std::map<std::uint64_t, std::shared_ptr<Peer>> watched_;  // by what their descriptors' events say
  std::map<std::string, Call> calls_;                       // by token
  std::uint32_t last_number_ = 0;
  std::vector<std::pair<std::vector<std::uint64_t>, std::function<bool()>>> buried_;
  bool swept_ = false;  // the watcher looks after buried_ until nothing is left there
  std::atomic<bool> ending_{false};
  std::atomic<std::uint32_t> departures_{0};
  Bell inside_{};
  std::atomic<bool> abandoned_{false};
  bool begun_ = false;
  std::thread watcher_;
};

// Memory of the arena for as long as somebody holds it.
class Room {
 public:
  // Without memory (data() is null) where there is no room.
  Room(std::shared_ptr<Host> host, std::size_t bytes);
  ~Room();
  Room(const Room&) = delete;
  Room& operator=(const Room&) = delete;

  char* data() const { return data_; }
  std::size_t size() const { return bytes_; }

 private:
  std::shared_ptr<Host> host_;
  std::size_t bytes_;
  std::uint64_t offset_;
  char* data_;
};

}  // namespace monarch
