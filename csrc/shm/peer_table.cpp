#include "shm/peer_table.h"

#include <algorithm>
#include <array>
#include <cerrno>
#include <cstdio>
#include <cstring>
#include <fstream>
#include <sstream>
#include <system_error>
#include <vector>

#include <poll.h>
#include <pthread.h>
#include <signal.h>
#include <sys/epoll.h>
#include <sys/eventfd.h>
#include <sys/ioctl.h>
#include <sys/random.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <sys/un.h>
#include <sys/wait.h>
#include <unistd.h>

#include "native_thread.h"

namespace monarch {

// The message that both sides send once, with their memfd attached.
struct Hello {
  std::uint64_t magic = 0x324f4c4c45484d00;
  std::uint64_t arena_bytes = 0;
  std::uint64_t ring_offset = 0;
  std::array<char, 32> token{};
};

namespace {

std::string random_token() {
  std::array<unsigned char, 16> bytes{};
  if (getrandom(bytes.data(), bytes.size(), 0) != static_cast<ssize_t>(bytes.size())) throw system_failure("getrandom");
  std::string text;
  std::array<char, 3> hex{};
  for (const unsigned char byte : bytes) {
    std::snprintf(hex.data(), hex.size(), "%02x", byte);
    text += hex.data();
  }
  return text;
}

// Abstract: no file, gone with the process, visible in this network namespace only.
socklen_t address_of(const std::string& token, sockaddr_un& address) {
  address = {};
  address.sun_family = AF_UNIX;
  const std::string name = "monarch-" + token;
  std::memcpy(address.sun_path + 1, name.data(), name.size());
  return static_cast<socklen_t>(offsetof(sockaddr_un, sun_path) + 1 + name.size());
}

bool same_user(int link, int& pid) {
  ucred peer{};
  socklen_t size = sizeof peer;
  if (getsockopt(link, SOL_SOCKET, SO_PEERCRED, &peer, &size) != 0 || peer.uid != geteuid()) return false;
  pid = peer.pid;
  return true;
}

// A Hello as a socket message, with space for one descriptor.
struct HelloPacket {
  explicit HelloPacket(Hello& hello) : part{&hello, sizeof hello} {
    message.msg_iov = &part;
    message.msg_iovlen = 1;
    message.msg_control = control.data();
    message.msg_controllen = control.size();
  }
  HelloPacket(const HelloPacket&) = delete;  // the message points into itself
  HelloPacket& operator=(const HelloPacket&) = delete;

  iovec part;
  alignas(cmsghdr) std::array<char, CMSG_SPACE(sizeof(int))> control{};
  msghdr message{};
};

bool send_hello(int link, Hello hello, int memfd) {
  HelloPacket packet(hello);
  cmsghdr* attached = CMSG_FIRSTHDR(&packet.message);
  attached->cmsg_level = SOL_SOCKET;
  attached->cmsg_type = SCM_RIGHTS;
  attached->cmsg_len = CMSG_LEN(sizeof(int));
  std::memcpy(CMSG_DATA(attached), &memfd, sizeof memfd);
  return sendmsg(link, &packet.message, MSG_NOSIGNAL) == static_cast<ssize_t>(sizeof hello);
}

// Return the attached memfd, or -1 for bytes of other programs: wrong size, wrong magic, no descriptor.
int receive_hello(int link, Hello& hello) {
  HelloPacket packet(hello);
  const ssize_t got = recvmsg(link, &packet.message, MSG_CMSG_CLOEXEC | MSG_WAITALL);
  int memfd = -1;
  if (const cmsghdr* attached = got > 0 ? CMSG_FIRSTHDR(&packet.message) : nullptr;
      attached != nullptr && attached->cmsg_level == SOL_SOCKET && attached->cmsg_type == SCM_RIGHTS) {
    std::memcpy(&memfd, CMSG_DATA(attached), sizeof memfd);
  }
  struct stat file{};
  const bool good = got == static_cast<ssize_t>(sizeof hello) && hello.magic == Hello{}.magic && memfd >= 0 &&
                    fstat(memfd, &file) == 0 && static_cast<std::uint64_t>(file.st_size) == hello.arena_bytes;
  if (!good && memfd >= 0) close(memfd);
  return good ? memfd : -1;
}

constexpr int sweep_interval_ms = 200;  // ms

void wake_watcher(int eventfd) {
  const std::uint64_t one = 1;
  (void)!write(eventfd, &one, sizeof one);
}

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

// Key of an epoll event. The number of a descriptor alone may be in use for another peer by now.
std::uint64_t watch_key(std::uint32_t number, int fd) { return std::uint64_t{number} << 32 | static_cast<std::uint32_t>(fd); }

std::string describe_status(int status) {
  if (WIFSIGNALED(status)) return "killed by signal " + std::to_string(WTERMSIG(status));
  return "exited with status " + std::to_string(WEXITSTATUS(status));
}

// The wait status of a process that is not our child. A zombie shows it in /proc; once it is reaped, the pidfd
// remembers it (Linux 6.15).
bool status_of(int pid, int pidfd, int& status) {
  std::ifstream file("/proc/" + std::to_string(pid) + "/stat");
  std::string line;
  if (std::getline(file, line)) {
    std::istringstream fields(line.substr(line.rfind(')') + 1));
    std::string state, field, last;
    fields >> state;
    while (fields >> field) last = field;
    if (state == "Z" && !last.empty()) {
      status = std::stoi(last);
      return true;
    }
  }
  struct {  // struct pidfd_info, whose header is newer than most
    std::uint64_t mask, cgroup;
    std::uint32_t pid, tgid, ppid, ids[8];
    std::int32_t exit_code;
    std::uint32_t more[8];
  } info{};
  info.mask = 1u << 3;  // PIDFD_INFO_EXIT
  if (pidfd >= 0 && ioctl(pidfd, _IOC(_IOC_READ | _IOC_WRITE, 0xFF, 11, 64), &info) == 0 && (info.mask & (1u << 3))) {
    status = info.exit_code;
    return true;
  }
  return false;
}

std::string describe_exit(const Peer& peer) {
  // The socket closes a moment before the process is a zombie.
  if (peer.pidfd >= 0) {
    pollfd end{peer.pidfd, POLLIN, 0};
    if (poll(&end, 1, 50) == 0) return "closed its link to this process";
  }
  int status = 0;
  return status_of(peer.pid, peer.pidfd, status) ? describe_status(status) : "gone (how it ended is not known here)";
}

}  // namespace

Peer::~Peer() {
  if (link >= 0) close(link);
  if (pidfd >= 0) close(pidfd);
}

Host::Host(std::size_t arena_bytes, const std::string& token)
    : token_(token.empty() ? random_token() : token), arena_(std::make_unique<Arena>(arena_bytes)) {
  listener_ = socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0);
  sockaddr_un address;
  const socklen_t length = address_of(token_, address);
  if (listener_ < 0 || bind(listener_, reinterpret_cast<sockaddr*>(&address), length) != 0 || listen(listener_, 4096) != 0) {
    throw system_failure("listening on a Unix socket");
  }
  epoll_ = epoll_create1(EPOLL_CLOEXEC);
  wakeup_fd_ = eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK);
  for (const int fd : {listener_, wakeup_fd_}) {
    epoll_event event{};
    event.events = EPOLLIN;
    event.data.u64 = watch_key(0, fd);
    if (epoll_ctl(epoll_, EPOLL_CTL_ADD, fd, &event) != 0) throw system_failure("epoll_ctl");
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
  if (watcher_.joinable()) {
    ending_ = true;
    wake_watcher(wakeup_fd_);
    watcher_.join();
  }
  for (const auto& [token, pending] : pending_connects_) close(pending.link);
  for (const int fd : {listener_, epoll_, wakeup_fd_}) {
    if (fd >= 0) close(fd);
  }
}

void Host::release_when_unused(std::vector<std::uint64_t> offsets, std::function<bool()> unused) {
  const std::lock_guard lock(mutex_);
  deferred_.emplace_back(std::move(offsets), std::move(unused));
  if (!swept_) {
    swept_ = true;
    wake_watcher(wakeup_fd_);
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
  for (int* fd : {&listener_, &epoll_, &wakeup_fd_}) {
    if (*fd >= 0) close(*fd);
    *fd = -1;
  }
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

std::shared_ptr<Peer> Host::add_peer(int link, std::uint64_t ring_offset, const Hello& hello, int memfd, int pid) {
  auto peer = std::make_shared<Peer>();
  peer->token.assign(hello.token.begin(), hello.token.end());
  peer->pid = pid;
  peer->link = link;
  peer->pidfd = static_cast<int>(syscall(434 /* pidfd_open */, pid, 0));
  try {
    peer->mapping = std::make_unique<Mapping>(memfd, hello.arena_bytes);
  } catch (...) {
    close(memfd);
    release_ring(ring_offset);
    throw;
  }
  close(memfd);
  peer->ring_sent = ring_offset;
  peer->ring_received = hello.ring_offset;
  const std::lock_guard lock(mutex_);
  if (hooks_.connected) hooks_.connected(peer);
  peers_.emplace(peer->token, peer);  // both sides may have connected at the same time: connect() returns the first
  peer->number = ++last_number_;
  for (const int fd : {peer->link, peer->pidfd}) {
    if (fd < 0) continue;
    watched_[watch_key(peer->number, fd)] = peer;
    epoll_event event{};
    event.events = EPOLLIN | EPOLLRDHUP;
    event.data.u64 = watch_key(peer->number, fd);
    epoll_ctl(epoll_, EPOLL_CTL_ADD, fd, &event);
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
    const int link = socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0);
    if (link < 0) {
      const auto error = system_failure("socket");
      release_ring(ours.ring_offset);
      throw error;
    }
    sockaddr_un address;
    const socklen_t length = address_of(token, address);
    set_one_second_timeouts(link);
    const bool there = ::connect(link, reinterpret_cast<sockaddr*>(&address), length) == 0;
    const bool said = there && send_hello(link, ours, arena_->fd());
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
  int pid = 0, memfd = -1;
  const bool met = same_user(pending.link, pid) && (memfd = receive_hello(pending.link, theirs)) >= 0;
  if (met && std::string(theirs.token.begin(), theirs.token.end()) == token) {
    return add_peer(pending.link, pending.ring_offset, theirs, memfd, pid);
  }
  if (memfd >= 0) close(memfd);
  close(pending.link);
  release_ring(pending.ring_offset);
  return nullptr;
}

void Host::watch_connect(const std::string& token, PendingConnect pending) {
  {
    const std::lock_guard lock(mutex_);
    if (pending_connects_.emplace(token, pending).second) {
      epoll_event event{};
      event.events = EPOLLIN | EPOLLRDHUP;
      event.data.u64 = watch_key(0, pending.link);
      epoll_ctl(epoll_, EPOLL_CTL_ADD, pending.link, &event);
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
    epoll_ctl(epoll_, EPOLL_CTL_DEL, link, nullptr);
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
  const int link = accept4(listener_, nullptr, nullptr, SOCK_CLOEXEC);
  if (link < 0) {
    // Out of descriptors: the connecting process waits until there are some, and this thread does not retry at once.
    if (errno == EMFILE || errno == ENFILE || errno == ENOMEM || errno == ENOBUFS) usleep(10'000);
    return;
  }
  set_one_second_timeouts(link);
  Hello ours, theirs;
  int pid = 0, memfd = -1;
  const auto reject = [&] {
    if (memfd >= 0) close(memfd);
    close(link);
  };
  if (!same_user(link, pid) || (memfd = receive_hello(link, theirs)) < 0) return reject();
  try {
    ours = hello();
  } catch (const std::system_error&) {
    return reject();  // no space for our ring
  }
  if (!send_hello(link, ours, arena_->fd())) {
    release_ring(ours.ring_offset);
    return reject();
  }
  try {
    add_peer(link, ours.ring_offset, theirs, memfd, pid);
  } catch (const std::system_error&) {
    // No space to map it: the peer sees its link close.
  }
}

void Host::unwatch(Peer& peer, int Peer::*fd) {
  if (peer.*fd < 0) return;
  epoll_ctl(epoll_, EPOLL_CTL_DEL, peer.*fd, nullptr);
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
  if (!left_cleanly) peer.exit_description = describe_exit(peer);
  peer.state.store(left_cleanly ? Peer::left : Peer::dead, std::memory_order_release);
  departures_.fetch_add(1, std::memory_order_release);
  doorbell().wake();
}

void Host::watch() {
  std::array<epoll_event, 64> events;
  bool sweeping = false;
  for (Clock::time_point swept{};;) {
    const int n = epoll_wait(epoll_, events.data(), events.size(), sweeping ? sweep_interval_ms : -1);
    if (sweeping && Clock::now() - swept >= std::chrono::milliseconds(sweep_interval_ms)) {
      const std::lock_guard lock(mutex_);
      sweeping = swept_ = sweep();
      swept = Clock::now();
    }
    for (int i = 0; i < n; ++i) {
      const std::uint64_t key = events[i].data.u64;
      if (key == watch_key(0, wakeup_fd_)) {
        if (ending_) return;
        std::uint64_t wakeups = 0;
        (void)!read(wakeup_fd_, &wakeups, sizeof wakeups);
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
        const auto found = watched_.find(key);
        if (found == watched_.end()) continue;
        peer = found->second;
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
