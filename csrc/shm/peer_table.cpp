#include "shm/peer_table.h"

#include <algorithm>
#include <array>
#include <cerrno>
#include <cstdio>
#include <cstring>
#include <limits>
#include <system_error>
#include <vector>

#include <poll.h>
#include <signal.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <unistd.h>

#include "native_thread.h"
#include "platform/local_socket.h"
#include "platform/process.h"
#include "platform/random.h"

namespace monarch {

// The message that both sides send once, with the descriptor of their arena attached.
struct Hello {
  std::uint64_t magic = 0x324f4c4c45484d00;
  std::uint64_t arena_bytes = 0;
  std::uint64_t ring_offset = 0;
  std::array<char, 32> token{};
};

namespace {

std::string random_token() {
  std::array<unsigned char, 16> bytes{};
  if (!fill_random(bytes.data(), bytes.size())) throw system_failure("random numbers");
  std::string text;
  std::array<char, 3> hex{};
  for (const unsigned char byte : bytes) {
    std::snprintf(hex.data(), hex.size(), "%02x", byte);
    text += hex.data();
  }
  return text;
}

// Return the attached descriptor, or -1 for bytes of other programs: wrong size, wrong magic, no descriptor.
int receive_hello(int link, Hello& hello) {
  int memory = -1;
  const ssize_t got = receive_with_descriptor(link, &hello, sizeof hello, memory);
  struct stat file{};
  const bool good = got == static_cast<ssize_t>(sizeof hello) && hello.magic == Hello{}.magic && memory >= 0 &&
                    fstat(memory, &file) == 0 && static_cast<std::uint64_t>(file.st_size) == hello.arena_bytes;
  if (!good && memory >= 0) close(memory);
  return good ? memory : -1;
}

constexpr int sweep_interval_ms = 200;  // ms

// Whether the link becomes readable within `seconds`, despite signals.
bool readable(int link, double seconds) {
  const auto deadline = Clock::now() + std::chrono::duration_cast<Clock::duration>(std::chrono::duration<double>(seconds));
  for (;;) {
    const auto left = std::chrono::duration_cast<std::chrono::milliseconds>(deadline - Clock::now()).count();
    pollfd come{link, POLLIN, 0};
    const int n = poll(&come, 1, static_cast<int>(std::clamp<std::int64_t>(left, 0, 1'000'000)));
    if (n > 0) return true;
    if (n == 0 ? left <= 0 : errno != EINTR) return false;
  }
}

void set_one_second_timeouts(int link) {
  const timeval second{1, 0};
  setsockopt(link, SOL_SOCKET, SO_RCVTIMEO, &second, sizeof second);
  setsockopt(link, SOL_SOCKET, SO_SNDTIMEO, &second, sizeof second);
}

// Key of a watched descriptor. The number of a descriptor alone may be in use for another peer by now.
std::uint64_t watch_key(std::uint32_t number, int fd) { return std::uint64_t{number} << 32 | static_cast<std::uint32_t>(fd); }

}  // namespace

Peer::~Peer() {
  if (link >= 0) close(link);
  if (pidfd >= 0) close(pidfd);
}

Host::Host(std::size_t arena_bytes, const std::string& token)
    : token_(token.empty() ? random_token() : token), arena_(std::make_unique<Arena>(arena_bytes)) {
  listener_ = listen_at_token(token_);
  for (const int fd : {listener_, wakeup_.fd()}) {
    if (!watched_fds_.add(fd, watch_key(0, fd))) throw system_failure("epoll_ctl");
  }
  if (token.empty()) begin();
}

void Host::begin() {
  watcher_ = std::thread([this] {
    begin_native_thread("monarch_watch");
    watch();
  });
  begun_ = true;
}

void Host::set_hooks(ConnectionHooks hooks) {
  const std::lock_guard lock(mutex_);
  if (!begun_) begin();
  hooks_ = std::move(hooks);
}

bool Host::die_with_peer(const std::string& token) {
  const std::lock_guard lock(mutex_);
  die_with_ = token;
  return peers_.count(token) != 0;
}

Hello Host::hello() {
  Hello ours;
  ours.arena_bytes = arena_->mapping().size();
  std::memcpy(ours.token.data(), token_.data(), ours.token.size());
  std::function<std::uint64_t()> allocate_ring;
  {
    const std::lock_guard lock(mutex_);
    allocate_ring = hooks_.allocate_ring;
  }
  if (allocate_ring) ours.ring_offset = allocate_ring();
  return ours;
}

Host::~Host() {
  leave();
  ending_ = true;
  if (prefaulter_.joinable()) prefaulter_.join();
  if (watcher_.joinable()) {
    wakeup_.wake();
    watcher_.join();
  }
  for (const auto& [token, pending] : pending_connects_) close(pending.link);
  if (listener_ >= 0) {
    remove_token(token_);
    close(listener_);
  }
}

void Host::release_when_unused(std::vector<std::uint64_t> offsets, std::function<bool()> unused) {
  const std::lock_guard lock(mutex_);
  deferred_.emplace_back(std::move(offsets), std::move(unused));
  if (!swept_) {
    swept_ = true;
    wakeup_.wake();
  }
}

// Release memory that no peer uses any more. Return true if some is left. Under the lock.
bool Host::sweep() {
  std::erase_if(deferred_, [this](const auto& entry) {
    const bool free = entry.second();
    for (const std::uint64_t offset : entry.first) {
      if (free) arena_->release(offset);
    }
    return free;
  });
  return !deferred_.empty();
}

void Host::release_unused() {
  const std::lock_guard lock(mutex_);
  sweep();
}

std::uint64_t Host::allocate(std::size_t bytes) {
  release_unused();
  return arena_->allocate(bytes);
}

void Host::leave() { arena_->mapping().header().left.store(1, std::memory_order_seq_cst); }

void Host::release(std::uint64_t offset) {
  if (!abandoned_) arena_->release(offset);
}

void Host::abandon() {
  abandoned_ = true;
  // The watcher does not exist in the child, and its locks may be held for ever: touch neither. Only descriptors
  // matter: a child that kept them would keep a dead parent's links open.
  if (watcher_.joinable()) watcher_.detach();
  if (prefaulter_.joinable()) prefaulter_.detach();
  if (listener_ >= 0) close(listener_);
  listener_ = -1;
  watched_fds_.close();
  wakeup_.close();
  for (auto& [key, peer] : watched_) {
    if (peer->link >= 0) close(peer->link);
    if (peer->pidfd >= 0) close(peer->pidfd);
    peer->link = peer->pidfd = -1;
  }
  for (const auto& [token, pending] : pending_connects_) {
    if (pending.link >= 0) close(pending.link);
  }
  pending_connects_.clear();
  close(arena_->fd());
}

ArenaBuffer::ArenaBuffer(std::shared_ptr<Host> host, std::size_t bytes)
    : host_(std::move(host)), bytes_(bytes), offset_(host_->allocate(bytes)), data_(offset_ == 0 ? nullptr : host_->arena().mapping().at(offset_)) {}

ArenaBuffer::~ArenaBuffer() {
  if (offset_ != 0) host_->release(offset_);
}

std::shared_ptr<Peer> Host::known(const std::string& token) {
  const std::lock_guard lock(mutex_);
  const auto found = peers_.find(token);
  return found == peers_.end() ? nullptr : found->second;
}

std::vector<std::shared_ptr<Peer>> Host::peers() {
  const std::lock_guard lock(mutex_);
  std::vector<std::shared_ptr<Peer>> all;
  all.reserve(peers_.size());
  for (const auto& [token, peer] : peers_) all.push_back(peer);
  return all;
}

std::shared_ptr<Peer> Host::add_peer(int link, std::uint64_t ring_offset, const Hello& hello, int memory, int pid) {
  auto peer = std::make_shared<Peer>();
  peer->token.assign(hello.token.begin(), hello.token.end());
  peer->pid = pid;
  peer->link = link;
  peer->pidfd = open_process(pid);
  try {
    peer->mapping = std::make_unique<Mapping>(memory, hello.arena_bytes);
  } catch (...) {
    close(memory);
    release_ring(ring_offset);
    throw;
  }
  close(memory);
  peer->ring_sent = ring_offset;
  peer->ring_received = hello.ring_offset;
  const std::lock_guard lock(mutex_);
  if (hooks_.connected) hooks_.connected(peer);
  peers_.emplace(peer->token, peer);  // both sides may have connected at the same time: connect() returns the first
  peer->number = ++last_number_;
  for (const int fd : {peer->link, peer->pidfd}) {
    if (fd < 0) continue;
    watched_[watch_key(peer->number, fd)] = peer;
    watched_fds_.add(fd, watch_key(peer->number, fd));
  }
  connected_.notify_all();
  return peer;
}

std::shared_ptr<Peer> Host::connect(const std::string& token, double seconds, bool* waiting) {
  // If a process was stopped during a connect, one of the two sides may have closed the link: connect again.
  for (int attempt = 0; attempt < 3; ++attempt) {
    if (auto known = this->known(token)) return known;
    if (token.size() != Hello{}.token.size()) return nullptr;
    if (waiting != nullptr && (*waiting = is_connecting(token))) return nullptr;
    const Hello ours = hello();
    const int link = new_socket(AF_UNIX, SOCK_STREAM);
    if (link < 0) {
      const auto error = system_failure("socket");
      release_ring(ours.ring_offset);
      throw error;
    }
    set_one_second_timeouts(link);
    const bool there = connect_to_token(link, token);
    const bool said = there && send_with_descriptor(link, &ours, sizeof ours, arena_->fd());
    const bool answered = said && readable(link, seconds);
    if (said && !answered && waiting != nullptr) {
      *waiting = true;
      watch_connect(token, {link, ours.ring_offset});
      return nullptr;
    }
    if (answered) {
      if (auto peer = complete_handshake(token, {link, ours.ring_offset})) return peer;
      continue;
    }
    close(link);
    release_ring(ours.ring_offset);
    if (!there || said) return nullptr;
  }
  return nullptr;
}

// Finish with the received answer. Return nullptr if the link is closed or belongs to another process. Takes over the
// link.
std::shared_ptr<Peer> Host::complete_handshake(const std::string& token, PendingConnect pending) {
  Hello theirs;
  int pid = 0, memory = -1;
  const bool met = is_same_user(pending.link, pid) && (memory = receive_hello(pending.link, theirs)) >= 0;
  if (met && std::string(theirs.token.begin(), theirs.token.end()) == token) {
    return add_peer(pending.link, pending.ring_offset, theirs, memory, pid);
  }
  if (memory >= 0) close(memory);
  close(pending.link);
  release_ring(pending.ring_offset);
  return nullptr;
}

void Host::watch_connect(const std::string& token, PendingConnect pending) {
  {
    const std::lock_guard lock(mutex_);
    if (pending_connects_.emplace(token, pending).second) {
      watched_fds_.add(pending.link, watch_key(0, pending.link));
      return;
    }
  }
  close(pending.link);  // another thread has connected to it, too
  release_ring(pending.ring_offset);
}

bool Host::is_connecting(const std::string& token) {
  const std::lock_guard lock(mutex_);
  return pending_connects_.count(token) != 0;
}

// On the watcher thread: a process has answered a pending connect, or closed it. False if the link is another one.
bool Host::finish_connect(int link) {
  std::string token;
  PendingConnect pending;
  {
    const std::lock_guard lock(mutex_);
    const auto found = std::find_if(pending_connects_.begin(), pending_connects_.end(), [link](const auto& entry) { return entry.second.link == link; });
    if (found == pending_connects_.end()) return false;
    watched_fds_.remove(link);
    token = found->first, pending = found->second;
    found->second.link = -1;
  }
  std::shared_ptr<Peer> peer;
  try {
    peer = complete_handshake(token, pending);
  } catch (const std::system_error&) {
    // No space to map it.
  }
  const std::lock_guard lock(mutex_);
  pending_connects_.erase(token);  // after the peer can be found: otherwise another thread would connect again
  if (!peer && hooks_.refused) hooks_.refused(token);
  return true;
}

std::shared_ptr<Peer> Host::accepted(const std::string& token, double seconds) {
  std::unique_lock lock(mutex_);
  const auto there = [&] { return peers_.count(token) != 0; };
  if (!connected_.wait_for(lock, std::chrono::duration<double>(seconds), there)) return nullptr;
  return peers_[token];
}

void Host::accept_one() {
  const int link = accept_socket(listener_);
  if (link < 0) {
    // Out of descriptors: the connecting process waits until there are some, and this thread does not retry at once.
    if (errno == EMFILE || errno == ENFILE || errno == ENOMEM || errno == ENOBUFS) usleep(10'000);
    return;
  }
  set_one_second_timeouts(link);
  Hello ours, theirs;
  int pid = 0, memory = -1;
  const auto reject = [&] {
    if (memory >= 0) close(memory);
    close(link);
  };
  if (!is_same_user(link, pid) || (memory = receive_hello(link, theirs)) < 0) return reject();
  try {
    ours = hello();
  } catch (const std::system_error&) {
    return reject();  // no space for our ring
  }
  if (!send_with_descriptor(link, &ours, sizeof ours, arena_->fd())) {
    release_ring(ours.ring_offset);
    return reject();
  }
  try {
    add_peer(link, ours.ring_offset, theirs, memory, pid);
  } catch (const std::system_error&) {
    // No space to map it: the peer sees its link close.
  }
}

void Host::unwatch(Peer& peer, int Peer::*fd) {
  if (peer.*fd < 0) return;
  watched_fds_.remove(peer.*fd);
  watched_.erase(watch_key(peer.number, peer.*fd));
  close(peer.*fd);
  peer.*fd = -1;
}

void Host::release_ring(std::uint64_t ring_offset) {
  std::function<void(std::uint64_t)> release_ring;
  {
    const std::lock_guard lock(mutex_);
    release_ring = hooks_.release_ring;
  }
  if (ring_offset != 0 && release_ring) release_ring(ring_offset);
}

void Host::on_peer_exit(Peer& peer) {
  {
    const std::lock_guard lock(mutex_);
    // Not exit(): no code of this process, such as a busy interpreter, may delay the end.
    if (!die_with_.empty() && peer.token == die_with_) kill(getpid(), SIGKILL);
  }
  const bool left_cleanly = peer.mapping->header().left.load(std::memory_order_acquire) != 0;
  if (!left_cleanly) peer.exit_description = describe_end(peer.pid, peer.pidfd);
  peer.state.store(left_cleanly ? Peer::left : Peer::dead, std::memory_order_release);
  departures_.fetch_add(1, std::memory_order_release);
  doorbell().wake();
}

void Host::prefault(std::uint64_t bytes) {
  const std::lock_guard lock(mutex_);
  if (bytes == 0 || prefaulter_.joinable()) return;
  prefaulter_ = std::thread([this, bytes] {
    begin_native_thread("monarch_memory");
    run_when_idle();
    arena_->prefault(bytes, ending_);
    wakeup_.wake();  // the watcher has memory to give back
  });
}

void Host::return_idle_memory(double seconds) {
  idle_ms_ = static_cast<std::int64_t>(std::clamp(seconds, 0.0, 1e6) * 1e3);
  wakeup_.wake();
}

// On the watcher thread. `next` is the time of the next trim; none while the arena has nothing to give back.
void Host::trim_when_idle(std::optional<Clock::time_point>& next) {
  const std::chrono::milliseconds idle(idle_ms_);
  if (idle.count() == 0 || !arena_->trimmable()) return next.reset();
  const auto now = Clock::now();
  if (next && now < *next) return;
  if (next) arena_->trim();
  next = now + idle;
}

void Host::watch() {
  DescriptorSet::Keys keys;
  bool sweeping = false;
  std::optional<Clock::time_point> trim;
  for (Clock::time_point swept{};;) {
    trim_when_idle(trim);
    std::int64_t wait = sweeping ? sweep_interval_ms : -1;
    if (trim) {
      const auto left = std::chrono::ceil<std::chrono::milliseconds>(*trim - Clock::now()).count();
      wait = std::clamp<std::int64_t>(left, 0, sweeping ? sweep_interval_ms : std::numeric_limits<int>::max());
    }
    const std::size_t found = watched_fds_.wait(keys, static_cast<int>(wait));
    if (sweeping && Clock::now() - swept >= std::chrono::milliseconds(sweep_interval_ms)) {
      const std::lock_guard lock(mutex_);
      sweeping = swept_ = sweep();
      swept = Clock::now();
    }
    for (std::size_t i = 0; i < found; ++i) {
      const std::uint64_t key = keys[i];
      if (key == watch_key(0, wakeup_.fd())) {
        if (ending_) return;
        wakeup_.drain();
        sweeping = true;
        swept = Clock::now();
        continue;
      }
      if (key == watch_key(0, listener_)) {
        accept_one();
        continue;
      }
      if (key >> 32 == 0 && finish_connect(static_cast<int>(key))) continue;
      std::shared_ptr<Peer> peer;
      {
        const std::lock_guard lock(mutex_);
        const auto entry = watched_.find(key);
        if (entry == watched_.end()) continue;
        peer = entry->second;
        if (const auto by_token = peers_.find(peer->token); by_token != peers_.end() && by_token->second == peer) peers_.erase(by_token);
      }
      if (peer->state.load(std::memory_order_relaxed) == Peer::alive) on_peer_exit(*peer);
      // The link closes first; the process may run on for a while, and its end is still waited for.
      const std::lock_guard lock(mutex_);
      const bool over = peer->pidfd < 0 || key == watch_key(peer->number, peer->pidfd);
      unwatch(*peer, &Peer::link);
      if (!over) continue;
      unwatch(*peer, &Peer::pidfd);
      peer->ended.store(true, std::memory_order_release);
    }
  }
}

}  // namespace monarch
