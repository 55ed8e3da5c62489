#include "platform/local_socket.h"

#include <array>
#include <cstddef>
#include <cstring>

#include <sys/socket.h>
#include <sys/un.h>
#include <unistd.h>

#include "platform/descriptors.h"
#include "platform/system.h"

#if defined(MONARCH_PORTABLE)
#include <cstdlib>

#include <dirent.h>
#include <fcntl.h>
#include <signal.h>
#include <sys/stat.h>
#endif

namespace monarch {

namespace {

constexpr int longest_queue = 4096;  // of connections that are not accepted yet

struct Address {
  sockaddr_un name{};
  socklen_t length = 0;
  const sockaddr* get() const { return reinterpret_cast<const sockaddr*>(&name); }
};

#if !defined(MONARCH_PORTABLE)

// Abstract: visible in this network namespace only.
bool address_of(const std::string& token, Address& address) {
  address.name.sun_family = AF_UNIX;
  const std::string name = "monarch-" + token;
  std::memcpy(address.name.sun_path + 1, name.data(), name.size());
  address.length = static_cast<socklen_t>(offsetof(sockaddr_un, sun_path) + 1 + name.size());
  return true;
}

void prepare_folder() {}
void remove_stale_tokens() {}
bool mark(const std::string&) { return true; }
void remove_mark(const std::string&) {}

#else

constexpr std::size_t token_letters = 32;

// The same for all processes of a user, whatever their environment, and short: a socket's path has 103 letters at most.
const std::string& folder() {
  static const std::string path = [] {
    std::string temporary = "/tmp/";
#if defined(__APPLE__)
    std::array<char, 80> text{};
    const std::size_t bytes = confstr(_CS_DARWIN_USER_TEMP_DIR, text.data(), text.size());
    if (bytes > 1 && bytes <= 56) temporary = text.data();
#endif
    return temporary + "monarch-" + std::to_string(geteuid());
  }();
  return path;
}

std::string path_of(const std::string& name) { return folder() + "/" + name; }

bool address_of(const std::string& token, Address& address) {
  const std::string path = path_of(token);
  if (path.size() >= sizeof address.name.sun_path) {
    errno = ENAMETOOLONG;
    return false;
  }
  address.name.sun_family = AF_UNIX;
  std::memcpy(address.name.sun_path, path.data(), path.size());
  address.length = sizeof address.name;
  return true;
}

void prepare_folder() {
  struct stat found{};
  if (mkdir(folder().c_str(), 0700) != 0 && errno != EEXIST) throw system_failure(("creating " + folder()).c_str());
  if (lstat(folder().c_str(), &found) != 0) throw system_failure(folder().c_str());
  if (!S_ISDIR(found.st_mode) || found.st_uid != geteuid() || (found.st_mode & 077) != 0) {
    errno = EPERM;
    throw system_failure((folder() + " must be a folder of this user that no other user can enter; remove it").c_str());
  }
}

// A file beside the socket says which process listens there: TOKEN-PID. It exists before the socket does.
std::string mark_of(const std::string& token) { return path_of(token + "-" + std::to_string(getpid())); }

bool mark(const std::string& token) {
  const int fd = open(mark_of(token).c_str(), O_WRONLY | O_CREAT | O_EXCL | O_CLOEXEC, 0600);
  if (fd >= 0) close(fd);
  return fd >= 0;
}

void remove_mark(const std::string& token) { unlink(mark_of(token).c_str()); }

// A pid that is in use again keeps the files until the next time.
void remove_stale_tokens() {
  DIR* const files = opendir(folder().c_str());
  if (files == nullptr) return;
  while (const dirent* file = readdir(files)) {
    const std::string name = file->d_name;
    if (name.size() < token_letters + 2 || name[token_letters] != '-') continue;
    const long pid = std::strtol(name.c_str() + token_letters + 1, nullptr, 10);
    if (pid <= 0 || kill(static_cast<pid_t>(pid), 0) == 0 || errno != ESRCH) continue;
    unlink(path_of(name.substr(0, token_letters)).c_str());
    unlink(path_of(name).c_str());
  }
  closedir(files);
}

#endif

// A message with space for one descriptor.
struct Packet {
  Packet(const void* data, std::size_t bytes) : part{const_cast<void*>(data), bytes} {
    message.msg_iov = &part;
    message.msg_iovlen = 1;
    message.msg_control = control.data();
    message.msg_controllen = control.size();
  }
  Packet(const Packet&) = delete;  // the message points into itself
  Packet& operator=(const Packet&) = delete;

  iovec part;
  alignas(cmsghdr) std::array<char, CMSG_SPACE(sizeof(int))> control{};
  msghdr message{};
};

}  // namespace

int listen_at_token(const std::string& token) {
  prepare_folder();
  remove_stale_tokens();
  const int listener = new_socket(AF_UNIX, SOCK_STREAM);
  Address address;
  if (listener < 0 || !address_of(token, address) || !mark(token)) {
    const auto error = system_failure("listening on a Unix socket");
    if (listener >= 0) close(listener);
    throw error;
  }
  if (bind(listener, address.get(), address.length) != 0 || listen(listener, longest_queue) != 0) {
    const auto error = system_failure("listening on a Unix socket");
    remove_mark(token);
    close(listener);
    throw error;
  }
  return listener;
}

#if !defined(MONARCH_PORTABLE)

void remove_token(const std::string&) {}

#else

void remove_token(const std::string& token) {
  unlink(path_of(token).c_str());
  remove_mark(token);
}

#endif

bool connect_to_token(int socket, const std::string& token) {
  Address address;
  return address_of(token, address) && connect(socket, address.get(), address.length) == 0;
}

bool is_same_user(int socket, int& pid) {
#if defined(__APPLE__)
  uid_t user = 0;
  gid_t group = 0;
  pid_t peer = 0;
  socklen_t size = sizeof peer;
  if (getpeereid(socket, &user, &group) != 0 || user != geteuid()) return false;
  if (getsockopt(socket, SOL_LOCAL, LOCAL_PEERPID, &peer, &size) != 0) return false;
  pid = peer;
#else
  ucred peer{};
  socklen_t size = sizeof peer;
  if (getsockopt(socket, SOL_SOCKET, SO_PEERCRED, &peer, &size) != 0 || peer.uid != geteuid()) return false;
  pid = peer.pid;
#endif
  return true;
}

bool send_with_descriptor(int socket, const void* data, std::size_t bytes, int descriptor) {
  Packet packet(data, bytes);
  cmsghdr* attached = CMSG_FIRSTHDR(&packet.message);
  attached->cmsg_level = SOL_SOCKET;
  attached->cmsg_type = SCM_RIGHTS;
  attached->cmsg_len = CMSG_LEN(sizeof(int));
  std::memcpy(CMSG_DATA(attached), &descriptor, sizeof descriptor);
  return sendmsg(socket, &packet.message, no_signal) == static_cast<ssize_t>(bytes);
}

ssize_t receive_with_descriptor(int socket, void* data, std::size_t bytes, int& descriptor) {
  Packet packet(data, bytes);
#if defined(MONARCH_PORTABLE)
  constexpr int flags = MSG_WAITALL;
#else
  constexpr int flags = MSG_CMSG_CLOEXEC | MSG_WAITALL;
#endif
  const ssize_t got = recvmsg(socket, &packet.message, flags);
  descriptor = -1;
  if (const cmsghdr* attached = got > 0 ? CMSG_FIRSTHDR(&packet.message) : nullptr;
      attached != nullptr && attached->cmsg_level == SOL_SOCKET && attached->cmsg_type == SCM_RIGHTS) {
    std::memcpy(&descriptor, CMSG_DATA(attached), sizeof descriptor);
  }
#if defined(MONARCH_PORTABLE)
  if (descriptor >= 0) fcntl(descriptor, F_SETFD, FD_CLOEXEC);
#endif
  return got;
}

}  // namespace monarch
