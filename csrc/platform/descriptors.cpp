#include "platform/descriptors.h"

#include <algorithm>

#include <fcntl.h>
#include <unistd.h>

#if !defined(MONARCH_PORTABLE)
#include <sys/epoll.h>
#include <sys/eventfd.h>
#endif

namespace monarch {

void Wakeup::wake() const {
  const std::uint64_t one = 1;
  (void)!write(write_end_, &one, sizeof one);  // a full pipe is a wake-up, too
}

void Wakeup::drain() const {
  char bytes[512];
  while (read(read_end_, bytes, sizeof bytes) == sizeof bytes) {
  }
}

void Wakeup::close() {
  if (read_end_ >= 0) ::close(read_end_);
  if (write_end_ >= 0 && write_end_ != read_end_) ::close(write_end_);
  read_end_ = write_end_ = -1;
}

#if !defined(MONARCH_PORTABLE)

int new_socket(int domain, int type, int protocol) { return socket(domain, type | SOCK_CLOEXEC, protocol); }

int accept_socket(int listener) { return accept4(listener, nullptr, nullptr, SOCK_CLOEXEC); }

Wakeup::Wakeup() : read_end_(eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK)), write_end_(read_end_) {
  if (read_end_ < 0) throw system_failure("eventfd");
}

DescriptorSet::DescriptorSet() : fd_(epoll_create1(EPOLL_CLOEXEC)) {
  if (fd_ < 0) throw system_failure("epoll_create1");
}

bool DescriptorSet::add(int fd, std::uint64_t key) {
  epoll_event event{};
  event.events = EPOLLIN | EPOLLRDHUP;
  event.data.u64 = key;
  return epoll_ctl(fd_, EPOLL_CTL_ADD, fd, &event) == 0;
}

void DescriptorSet::remove(int fd) { epoll_ctl(fd_, EPOLL_CTL_DEL, fd, nullptr); }

std::size_t DescriptorSet::wait(Keys& keys, int timeout_ms) {
  std::array<epoll_event, std::tuple_size_v<Keys>> events;
  const int found = epoll_wait(fd_, events.data(), events.size(), timeout_ms);
  for (int i = 0; i < found; ++i) keys[static_cast<std::size_t>(i)] = events[static_cast<std::size_t>(i)].data.u64;
  return static_cast<std::size_t>(std::max(found, 0));
}

void DescriptorSet::close() {
  if (fd_ >= 0) ::close(fd_);
  fd_ = -1;
}

#else

namespace {

// Between the creation of a descriptor and this call another thread may start a program, which then inherits it.
int closed_by_exec(int fd) {
  if (fd >= 0) fcntl(fd, F_SETFD, FD_CLOEXEC);
  return fd;
}

int prepared_socket(int fd) {
#if defined(SO_NOSIGPIPE)
  const int yes = 1;
  if (fd >= 0) setsockopt(fd, SOL_SOCKET, SO_NOSIGPIPE, &yes, sizeof yes);
#endif
  return closed_by_exec(fd);
}

}  // namespace

int new_socket(int domain, int type, int protocol) { return prepared_socket(socket(domain, type, protocol)); }

int accept_socket(int listener) { return prepared_socket(accept(listener, nullptr, nullptr)); }

Wakeup::Wakeup() {
  std::array<int, 2> ends{};
  if (pipe(ends.data()) != 0) throw system_failure("pipe");
  read_end_ = closed_by_exec(ends[0]), write_end_ = closed_by_exec(ends[1]);
  for (const int end : ends) fcntl(end, F_SETFL, fcntl(end, F_GETFL) | O_NONBLOCK);
}

DescriptorSet::DescriptorSet() = default;

bool DescriptorSet::add(int fd, std::uint64_t key) {
  const std::lock_guard lock(mutex_);
  entries_.push_back({fd, key});
  changed_.wake();
  return true;
}

void DescriptorSet::remove(int fd) {
  const std::lock_guard lock(mutex_);
  std::erase_if(entries_, [fd](const Entry& entry) { return entry.fd == fd; });
}

std::size_t DescriptorSet::wait(Keys& keys, int timeout_ms) {
  {
    const std::lock_guard lock(mutex_);
    waiting_entries_ = entries_;
  }
  polled_.assign(1, {changed_.fd(), POLLIN, 0});
  for (const Entry& entry : waiting_entries_) polled_.push_back({entry.fd, POLLIN, 0});
  const int ready = poll(polled_.data(), static_cast<nfds_t>(polled_.size()), timeout_ms);
  // More than the limit of open files, which was lowered: not at once again.
  if (ready < 0 && errno == EINVAL) usleep(10'000);
  if (ready <= 0) return 0;
  if (polled_[0].revents != 0) changed_.drain();
  std::size_t found = 0;
  for (std::size_t i = 0; i < waiting_entries_.size() && found < keys.size(); ++i) {
    const short events = polled_[i + 1].revents;
    if (events != 0 && (events & POLLNVAL) == 0) keys[found++] = waiting_entries_[i].key;
  }
  return found;
}

void DescriptorSet::close() { changed_.close(); }

#endif

}  // namespace monarch
