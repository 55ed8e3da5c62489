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

// What both sides say once, with their memfd attached.
struct Hello {
  std::uint64_t magic = 0x324f4c4c45484d00;
  std::uint64_t arena_bytes = 0;
  std::uint64_t gift = 0;
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

// A Hello on its way, with room for one descriptor beside it.
struct Letter {
  explicit Letter(Hello& hello) : part{&hello, sizeof hello} {
    message.msg_iov = &part;
    message.msg_iovlen = 1;
    message.msg_control = room.data();
    message.msg_controllen = room.size();
  }
  Letter(const Letter&) = delete;  // the message points into itself
  Letter& operator=(const Letter&) = delete;

  iovec part;
  alignas(cmsghdr) std::array<char, CMSG_SPACE(sizeof(int))> room{};
  msghdr message{};
};

bool say(int link, Hello hello, int memfd) {
  Letter letter(hello);
  cmsghdr* attached = CMSG_FIRSTHDR(&letter.message);
  attached->cmsg_level = SOL_SOCKET;
  attached->cmsg_type = SCM_RIGHTS;
  attached->cmsg_len = CMSG_LEN(sizeof(int));
  std::memcpy(CMSG_DATA(attached), &memfd, sizeof memfd);
  return sendmsg(link, &letter.message, MSG_NOSIGNAL) == static_cast<ssize_t>(sizeof hello);
}

// The memfd that came along, or -1. A stranger's bytes end here: wrong size, wrong magic, no descriptor.
int hear(int link, Hello& hello) {
  Letter letter(hello);
  const ssize_t got = recvmsg(link, &letter.message, MSG_CMSG_CLOEXEC | MSG_WAITALL);
  int memfd = -1;
  if (const cmsghdr* attached = got > 0 ? CMSG_FIRSTHDR(&letter.message) : nullptr;
      attached != nullptr && attached->cmsg_level == SOL_SOCKET && attached->cmsg_type == SCM_RIGHTS) {
    std::memcpy(&memfd, CMSG_DATA(attached), sizeof memfd);
  }
  struct stat file{};
  const bool good = got == static_cast<ssize_t>(sizeof hello) && hello.magic == Hello{}.magic && memfd >= 0 &&
                    fstat(memfd, &file) == 0 && static_cast<std::uint64_t>(file.st_size) == hello.arena_bytes;
  if (!good && memfd >= 0) close(memfd);
  return good ? memfd : -1;
}

constexpr int pause_between_sweeps = 200;  // ms

void nudge(int eventfd) {
  const std::uint64_t one = 1;
  (void)!write(eventfd, &one, sizeof one);
}

// Within so many seconds, whatever signals come meanwhile.
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

void patience_of_a_second(int link) {
  const timeval second{1, 0};
  setsockopt(link, SOL_SOCKET, SO_RCVTIMEO, &second, sizeof second);
  setsockopt(link, SOL_SOCKET, SO_SNDTIMEO, &second, sizeof second);
}

// What an event says of its descriptor: the number of a descriptor alone may be another peer's by now.
std::uint64_t watch_key(std::uint32_t number, int fd) { return std::uint64_t{number} << 32 | static_cast<std::uint32_t>(fd); }

std::string in_words(int status) {
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

std::string epitaph_of(const Peer& peer) {
  // The socket closes a moment before the process is a zombie.
  if (peer.pidfd >= 0) {
    pollfd end{peer.pidfd, POLLIN, 0};
    if (poll(&end, 1, 50) == 0) return "closed its link to this process";
  }
  int status = 0;
  return status_of(peer.pid, peer.pidfd, status) ? in_words(status) : "gone (how it ended is not known here)";
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
  nudge_ = eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK);
  for (const int fd : {listener_, nudge_}) {
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

void Host::behave(Manners manners) {
  const std::lock_guard lock(mutex_);
  if (!begun_) begin();
  manners_ = std::move(manners);
}

bool Host::tether(const std::string& token) {
  const std::lock_guard lock(mutex_);
  tether_ = token;
  return peers_.count(token) != 0;
}

Hello Host::hello() {
  Hello ours;
  ours.arena_bytes = arena_->mapping().size();
  std::memcpy(ours.token.data(), token_.data(), ours.token.size());
  std::function<std::uint64_t()> gift;
  {
    const std::lock_guard lock(mutex_);
    gift = manners_.gift;
  }
  if (gift) ours.gift = gift();
  return ours;
}

Host::~Host() {
  leave();
  if (watcher_.joinable()) {
    ending_ = true;
    nudge(nudge_);
    watcher_.join();
  }
  for (const auto& [token, call] : calls_) close(call.link);
  for (const int fd : {listener_, epoll_, nudge_}) {
    if (fd >= 0) close(fd);
  }
}

void Host::bury(std::vector<std::uint64_t> offsets, std::function<bool()> unused) {
  const std::lock_guard lock(mutex_);
  buried_.emplace_back(std::move(offsets), std::move(unused));
  if (!swept_) {
    swept_ = true;
    nudge(nudge_);
  }
}

// Gives back what nobody looks at any more. True if something is left; under the lock.
bool Host::sweep() {
  std::erase_if(buried_, [this](const auto& entry) {
    const bool free = entry.second();
    for (const std::uint64_t offset : entry.first) {
      if (free) arena_->release(offset);
    }
    return free;
  });
  return !buried_.empty();
}

void Host::tidy() {
  const std::lock_guard lock(mutex_);
  sweep();
}

std::uint64_t Host::allocate(std::size_t bytes) {
  tidy();
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
  for (int* fd : {&listener_, &epoll_, &nudge_}) {
    if (*fd >= 0) close(*fd);
    *fd = -1;
  }
  for (auto& [key, peer] : watched_) {
    if (peer->link >= 0) close(peer->link);
    if (peer->pidfd >= 0) close(peer->pidfd);
    peer->link = peer->pidfd = -1;
  }
  for (const auto& [token, call] : calls_) {
    if (call.link >= 0) close(call.link);
  }
  calls_.clear();
  close(arena_->fd());
}

Room::Room(std::shared_ptr<Host> host, std::size_t bytes)
    : host_(std::move(host)), bytes_(bytes), offset_(host_->allocate(bytes)), data_(offset_ == 0 ? nullptr : host_->arena().mapping().at(offset_)) {}

Room::~Room() {
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

std::shared_ptr<Peer> Host::adopt(int link, std::uint64_t gift, const Hello& hello, int memfd, int pid) {
  auto peer = std::make_shared<Peer>();
  peer->token.assign(hello.token.begin(), hello.token.end());
  peer->pid = pid;
  peer->link = link;
  peer->pidfd = static_cast<int>(syscall(434 /* pidfd_open */, pid, 0));
  try {
    peer->mapping = std::make_unique<Mapping>(memfd, hello.arena_bytes);
  } catch (...) {
    close(memfd);
    take_back(gift);
    throw;
  }
  close(memfd);
  peer->gift_sent = gift;
  peer->gift_received = hello.gift;
  const std::lock_guard lock(mutex_);
  if (manners_.arrived) manners_.arrived(peer);
  peers_.emplace(peer->token, peer);  // both may have called at the same time: the first one is how we call it
  peer->number = ++last_number_;
  for (const int fd : {peer->link, peer->pidfd}) {
    if (fd < 0) continue;
    watched_[watch_key(peer->number, fd)] = peer;
    epoll_event event{};
    event.events = EPOLLIN | EPOLLRDHUP;
    event.data.u64 = watch_key(peer->number, fd);
    epoll_ctl(epoll_, EPOLL_CTL_ADD, fd, &event);
  }
  arrived_.notify_all();
  return peer;
}

std::shared_ptr<Peer> Host::connect(const std::string& token, double seconds, bool* waiting) {
  // One that stood still between being called and answering has hung up on us, or we on it: it is called again.
  for (int attempt = 0; attempt < 3; ++attempt) {
    if (auto known = this->known(token)) return known;
    if (token.size() != Hello{}.token.size()) return nullptr;
    if (waiting != nullptr && (*waiting = calls(token))) return nullptr;
    const Hello ours = hello();
    const int link = socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0);
    if (link < 0) {
      const auto error = system_failure("socket");
      take_back(ours.gift);
      throw error;
    }
    sockaddr_un address;
    const socklen_t length = address_of(token, address);
    patience_of_a_second(link);
    const bool there = ::connect(link, reinterpret_cast<sockaddr*>(&address), length) == 0;
    const bool said = there && say(link, ours, arena_->fd());
    const bool answered = said && readable(link, seconds);
    if (said && !answered && waiting != nullptr) {
      *waiting = true;
      wait_for(token, {link, ours.gift});
      return nullptr;
    }
    if (answered) {
      if (auto peer = answer(token, {link, ours.gift})) return peer;
      continue;
    }
    close(link);
    take_back(ours.gift);
    if (!there || said) return nullptr;
  }
  return nullptr;
}

// With what it has answered; nullptr if it has hung up or is somebody else. Takes over the link.
std::shared_ptr<Peer> Host::answer(const std::string& token, Call call) {
  Hello theirs;
  int pid = 0, memfd = -1;
  const bool met = same_user(call.link, pid) && (memfd = hear(call.link, theirs)) >= 0;
  if (met && std::string(theirs.token.begin(), theirs.token.end()) == token) {
    return adopt(call.link, call.gift, theirs, memfd, pid);
  }
  if (memfd >= 0) close(memfd);
  close(call.link);
  take_back(call.gift);
  return nullptr;
}

void Host::wait_for(const std::string& token, Call call) {
  {
    const std::lock_guard lock(mutex_);
    if (calls_.emplace(token, call).second) {
      epoll_event event{};
      event.events = EPOLLIN | EPOLLRDHUP;
      event.data.u64 = watch_key(0, call.link);
      epoll_ctl(epoll_, EPOLL_CTL_ADD, call.link, &event);
      return;
    }
  }
  close(call.link);  // another thread has called it, too
  take_back(call.gift);
}

bool Host::calls(const std::string& token) {
  const std::lock_guard lock(mutex_);
  return calls_.count(token) != 0;
}

// On the watcher: one that was silent has answered, or hung up. False if the link is not a call's.
bool Host::conclude(int link) {
  std::string token;
  Call call;
  {
    const std::lock_guard lock(mutex_);
    const auto found = std::find_if(calls_.begin(), calls_.end(), [link](const auto& entry) { return entry.second.link == link; });
    if (found == calls_.end()) return false;
    epoll_ctl(epoll_, EPOLL_CTL_DEL, link, nullptr);
    token = found->first, call = found->second;
    found->second.link = -1;
  }
  std::shared_ptr<Peer> peer;
  try {
    peer = answer(token, call);
  } catch (const std::system_error&) {
    // No room to map it.
  }
  const std::lock_guard lock(mutex_);
  calls_.erase(token);  // not before it can be found: whoever looked in between would call it again
  if (!peer && manners_.refused) manners_.refused(token);
  return true;
}

std::shared_ptr<Peer> Host::accepted(const std::string& token, double seconds) {
  std::unique_lock lock(mutex_);
  const auto there = [&] { return peers_.count(token) != 0; };
  if (!arrived_.wait_for(lock, std::chrono::duration<double>(seconds), there)) return nullptr;
  return peers_[token];
}

void Host::accept_one() {
  const int link = accept4(listener_, nullptr, nullptr, SOCK_CLOEXEC);
  if (link < 0) {
    // Out of descriptors: whoever called waits until there are some, and we do not ask again at once.
    if (errno == EMFILE || errno == ENFILE || errno == ENOMEM || errno == ENOBUFS) usleep(10'000);
    return;
  }
  patience_of_a_second(link);
  Hello ours, theirs;
  int pid = 0, memfd = -1;
  const auto hang_up = [&] {
    if (memfd >= 0) close(memfd);
    close(link);
  };
  if (!same_user(link, pid) || (memfd = hear(link, theirs)) < 0) return hang_up();
  try {
    ours = hello();
  } catch (const std::system_error&) {
    return hang_up();  // no room for what we would give
  }
  if (!say(link, ours, arena_->fd())) {
    take_back(ours.gift);
    return hang_up();
  }
  try {
    adopt(link, ours.gift, theirs, memfd, pid);
  } catch (const std::system_error&) {
    // No room to map it: the peer sees its link close.
  }
}

void Host::forget(Peer& peer, int Peer::*fd) {
  if (peer.*fd < 0) return;
  epoll_ctl(epoll_, EPOLL_CTL_DEL, peer.*fd, nullptr);
  watched_.erase(watch_key(peer.number, peer.*fd));
  close(peer.*fd);
  peer.*fd = -1;
}

void Host::take_back(std::uint64_t gift) {
  std::function<void(std::uint64_t)> take_back;
  {
    const std::lock_guard lock(mutex_);
    take_back = manners_.take_back;
  }
  if (gift != 0 && take_back) take_back(gift);
}

void Host::lost(Peer& peer) {
  {
    const std::lock_guard lock(mutex_);
    // Not exit: nothing of this process may hold up its end, least of all an interpreter that is busy.
    if (!tether_.empty() && peer.token == tether_) kill(getpid(), SIGKILL);
  }
  const bool in_peace = peer.mapping->header().left.load(std::memory_order_acquire) != 0;
  if (!in_peace) peer.epitaph = epitaph_of(peer);
  peer.state.store(in_peace ? Peer::left : Peer::dead, std::memory_order_release);
  departures_.fetch_add(1, std::memory_order_release);
  bell().wake();
}

void Host::watch() {
  std::array<epoll_event, 64> events;
  bool sweeping = false;
  for (Clock::time_point swept{};;) {
    const int n = epoll_wait(epoll_, events.data(), events.size(), sweeping ? pause_between_sweeps : -1);
    if (sweeping && Clock::now() - swept >= std::chrono::milliseconds(pause_between_sweeps)) {
      const std::lock_guard lock(mutex_);
      sweeping = swept_ = sweep();
      swept = Clock::now();
    }
    for (int i = 0; i < n; ++i) {
      const std::uint64_t key = events[i].data.u64;
      if (key == watch_key(0, nudge_)) {
        if (ending_) return;
        std::uint64_t nudges = 0;
        (void)!read(nudge_, &nudges, sizeof nudges);
        sweeping = true;
        swept = Clock::now();
        continue;
      }
      if (key == watch_key(0, listener_)) {
        accept_one();
        continue;
      }
      if (key >> 32 == 0 && conclude(static_cast<int>(key))) continue;
      std::shared_ptr<Peer> peer;
      {
        const std::lock_guard lock(mutex_);
        const auto found = watched_.find(key);
        if (found == watched_.end()) continue;
        peer = found->second;
        if (const auto named = peers_.find(peer->token); named != peers_.end() && named->second == peer) peers_.erase(named);
      }
      if (peer->state.load(std::memory_order_relaxed) == Peer::alive) lost(*peer);
      // The link closes first; the process may run on for a while, and its end is still waited for.
      const std::lock_guard lock(mutex_);
      const bool over = peer->pidfd < 0 || key == watch_key(peer->number, peer->pidfd);
      forget(*peer, &Peer::link);
      if (!over) continue;
      forget(*peer, &Peer::pidfd);
      peer->ended.store(true, std::memory_order_release);
    }
  }
}

}  // namespace monarch
