#include "memory/server.h"

#include <algorithm>
#include <array>
#include <atomic>
#include <cerrno>
#include <cstring>
#include <deque>
#include <list>
#include <mutex>
#include <optional>
#include <stdexcept>
#include <thread>
#include <utility>
#include <vector>

#include <fcntl.h>
#include <netdb.h>
#include <netinet/in.h>
#include <poll.h>
#include <sys/socket.h>
#include <unistd.h>

#include "memory/socket_connection.h"
#include "memory/wire.h"
#include "native_thread.h"

namespace monarch {

namespace {

constexpr std::size_t max_unauthenticated = 256;  // with one more, the oldest is closed
constexpr auto handshake_timeout = std::chrono::seconds(5);
constexpr std::size_t most_listeners = 16;
constexpr int accept_retry_ms = 50;  // after accept() ran out of descriptors

// Sent instead of memory that was dropped during a reply.
const char zeros[held_piece_bytes] = {};

// A piece of registered memory, for as long as this lives.
class Held {
 public:
  Held(Memory& memory, const Ticket& ticket, std::uint64_t offset, std::uint64_t bytes, Access access)
      : refusal(memory.hold(ticket, offset, bytes, access, &data)),
        device(refusal == Refusal::none ? memory.device(ticket) : gpu::none),
        memory_(memory),
        ticket_(ticket) {}
  ~Held() {
    if (refusal == Refusal::none) memory_.release(ticket_);
  }
  Held(const Held&) = delete;
  Held& operator=(const Held&) = delete;

  char* data = nullptr;
  const Refusal refusal;
  const int device;

 private:
  Memory& memory_;
  const Ticket& ticket_;
};

// Registered GPU memory on its way through pinned memory. A piece is held until its copy is done. Copies in progress
// are finished before a wait for the network.
class Staging {
 public:
  Staging(Memory& memory, const Ticket& ticket, int device) : memory_(memory), ticket_(ticket), copies_(device) {}

  char* pinned_buffer(int stream) { return copies_.pinned_buffer(stream); }
  Refusal begin(int stream, std::uint64_t offset, std::uint64_t bytes, Access access) {
    std::optional<Held>& held = held_[stream];
    held.emplace(memory_, ticket_, offset, bytes, access);
    if (held->refusal != Refusal::none) return held->refusal;
    const bool reads = access == Access::read;
    return attempt([&] { copies_.begin(stream, reads ? pinned_buffer(stream) : held->data, reads ? held->data : pinned_buffer(stream), bytes); });
  }
  Refusal finish(int stream) {
    const Refusal refusal = attempt([&] { copies_.finish(stream); });
    held_[stream].reset();
    return refusal;
  }
  Refusal finish() {
    const Refusal first = finish(0), second = finish(1);
    return first != Refusal::none ? first : second;
  }

 private:
  template <class Act>
  static Refusal attempt(Act&& act) {
    try {
      act();
      return Refusal::none;
    } catch (const gpu::Failure&) {
      return Refusal::device;
    }
  }

  Memory& memory_;
  const Ticket& ticket_;
  std::array<std::optional<Held>, gpu::Copies::stream_count> held_;
  gpu::Copies copies_;  // waits at its end, before that of what is held
};

// Serves one connection, one request after the other.
class Service {
 public:
  Service(Memory& memory, StagingBuffers& buffers, Reader& reader, Writer& writer, const Limits& limits)
      : memory_(memory), buffers_(buffers), reader_(reader), writer_(writer), limits_(limits) {}

  // Return when the peer sends an invalid request; throws SocketError when it closes the connection.
  void run() {
    while (next()) serve();
  }

 private:
  bool next();
  Refusal check();
  Refusal stage();
  void serve();
  void serve_read();
  void serve_write();
  void serve_atomic();
  void serve_staged();
  Refusal copy_staged(char* slot);
  Refusal copy_ranges(char* slot, gpu::Copies* copies);
  void send(wire::Range range, Refusal& refusal);
  void receive(wire::Range range, Refusal& refusal);
  std::uint64_t send_staged(const wire::Range& range, Refusal& refusal);
  std::uint64_t receive_staged(const wire::Range& range, Refusal& refusal);
  void reply(Refusal refusal, std::uint64_t bytes = 0, std::uint64_t value = 0);
  void put(const void* from, std::size_t bytes) {
    if (writer_.put(from, bytes)) return;
    writer_.flush(limits_);
    writer_.put(from, bytes);
  }
  bool is_staged() const { return request_.access == wire::stage_read || request_.access == wire::stage_write; }
  Access access() const { return static_cast<Access>(request_.access - (is_staged() ? wire::stage_read : 0)); }

  Memory& memory_;
  StagingBuffers& buffers_;
  Reader& reader_;
  Writer& writer_;
  const Limits& limits_;
  wire::Request request_;
  std::vector<wire::Range> ranges_;
  Ticket ticket_;
  int device_ = gpu::none;          // of the current request
  std::optional<Staging> staging_;  // for that
  std::deque<Held> held_;           // of what is staged now
  std::unique_ptr<char[]> scratch_;  // where bytes go that were refused
};

// The head of a request and its ranges, if they are what they have to be.
bool Service::next() {
  if (reader_.empty()) writer_.flush(limits_);  // small replies to requests that came together go together
  reader_.read(&request_, sizeof request_, limits_);
  const bool atomic = request_.access == static_cast<std::uint32_t>(Access::fetch_add) ||
                      request_.access == static_cast<std::uint32_t>(Access::compare_and_swap);
  if (request_.magic != wire::request_magic || request_.access > wire::stage_write ||
      request_.ranges == 0 || request_.ranges > wire::most_ranges || request_.bytes > wire::most_bytes ||
      (atomic && (request_.ranges != 1 || request_.bytes != sizeof(std::uint64_t)))) {
    return false;
  }
  ranges_.resize(request_.ranges);
  reader_.read(ranges_.data(), ranges_.size() * sizeof ranges_[0], limits_);
  std::uint64_t bytes = 0;
  for (const wire::Range& range : ranges_) {
    if (range.bytes > request_.bytes - bytes) return false;
    bytes += range.bytes;
  }
  ticket_ = {request_.slot, request_.epoch, request_.key};
  return bytes == request_.bytes;
}

// Before a byte is moved: a request is refused as a whole, but for what is dropped meanwhile.
Refusal Service::check() {
  for (const wire::Range& range : ranges_) {
    const Held held(memory_, ticket_, range.offset, range.bytes, access());
    if (held.refusal != Refusal::none) return held.refusal;
    device_ = held.device;
  }
  return device_ == gpu::none ? Refusal::none : stage();
}

Refusal Service::stage() {
  try {
    staging_.emplace(memory_, ticket_, device_);
    for (int stream = 0; stream < gpu::Copies::stream_count; ++stream) staging_->pinned_buffer(stream);  // now, since it may fail
    return Refusal::none;
  } catch (const gpu::Failure&) {
    return Refusal::device;
  }
}

void Service::serve() {
  if (is_staged()) return serve_staged();
  switch (access()) {
    case Access::read:
      serve_read();
      break;
    case Access::write:
      serve_write();
      break;
    default:
      serve_atomic();
  }
  device_ = gpu::none;
  staging_.reset();
}

void Service::reply(Refusal refusal, std::uint64_t bytes, std::uint64_t value) {
  const wire::Reply head{wire::reply_magic, static_cast<std::uint32_t>(refusal), request_.number, bytes, value};
  put(&head, sizeof head);
}

void Service::serve_read() {
  Refusal refusal = check();
  reply(refusal, refusal == Refusal::none ? request_.bytes : 0);
  if (refusal != Refusal::none) return;
  for (const wire::Range& range : ranges_) send(range, refusal);
  const wire::Tail tail{wire::tail_magic, static_cast<std::uint32_t>(refusal), request_.number};
  put(&tail, sizeof tail);
}

// The next part is copied while one is sent.
std::uint64_t Service::send_staged(const wire::Range& range, Refusal& refusal) {
  const auto part = [&](std::uint64_t at) { return std::min<std::uint64_t>(held_piece_bytes, range.bytes - at); };
  int stream = 0;
  std::uint64_t sent = 0;
  if (range.bytes != 0) refusal = staging_->begin(stream, range.offset, part(0), Access::read);
  while (sent < range.bytes && refusal == Refusal::none && (refusal = staging_->finish(stream)) == Refusal::none) {
    const std::uint64_t bytes = part(sent), next = sent + bytes;
    if (next < range.bytes) refusal = staging_->begin(1 - stream, range.offset + next, part(next), Access::read);
    for (std::uint64_t at = 0; at < bytes;) {
      const std::size_t took = writer_.try_write(staging_->pinned_buffer(stream) + at, bytes - at);
      at += took;
      if (took != 0) continue;
      if (const Refusal late = staging_->finish(1 - stream); refusal == Refusal::none) refusal = late;
      writer_.wait(limits_);
    }
    sent = next, stream = 1 - stream;
  }
  if (const Refusal late = staging_->finish(); refusal == Refusal::none) refusal = late;
  return sent;
}

void Service::send(wire::Range range, Refusal& refusal) {
  if (staging_ && refusal == Refusal::none) {
    const std::uint64_t sent = send_staged(range, refusal);
    range.offset += sent, range.bytes -= sent;  // zeros follow, if it was refused
  }
  for (std::uint64_t sent = 0; sent < range.bytes;) {
    const std::uint64_t bytes = std::min<std::uint64_t>(held_piece_bytes, range.bytes - sent);
    std::size_t took = 0;
    {
      const char* from = zeros;
      std::optional<Held> held;
      if (refusal == Refusal::none) {
        held.emplace(memory_, ticket_, range.offset + sent, bytes, Access::read);
        refusal = held->refusal;
        if (refusal == Refusal::none) from = held->data;
      }
      // Small ones are copied: many of them go with one system call.
      if (bytes < direct_bytes) took = writer_.put(from, bytes) ? bytes : 0;
      if (took == 0) took = writer_.try_write(from, bytes);
    }
    sent += took;
    if (took == 0) writer_.wait(limits_);
  }
}

void Service::serve_write() {
  Refusal refusal = check();
  for (const wire::Range& range : ranges_) receive(range, refusal);
  reply(refusal);
}

// One part is copied while the next one comes.
std::uint64_t Service::receive_staged(const wire::Range& range, Refusal& refusal) {
  std::uint64_t received = 0;
  for (int stream = 0; received < range.bytes && refusal == Refusal::none; stream = 1 - stream) {
    const std::uint64_t bytes = std::min<std::uint64_t>(held_piece_bytes, range.bytes - received);
    refusal = staging_->finish(stream);
    for (std::uint64_t at = 0; at < bytes;) {
      const std::size_t came = reader_.try_read(staging_->pinned_buffer(stream) + at, bytes - at);
      at += came;
      if (came != 0) continue;
      if (const Refusal late = staging_->finish(); refusal == Refusal::none) refusal = late;
      writer_.flush(limits_);
      reader_.wait(limits_);
    }
    if (refusal == Refusal::none) refusal = staging_->begin(stream, range.offset + received, bytes, Access::write);
    received += bytes;
  }
  if (const Refusal late = staging_->finish(); refusal == Refusal::none) refusal = late;
  return received;
}

void Service::receive(wire::Range range, Refusal& refusal) {
  if (staging_ && refusal == Refusal::none) {
    const std::uint64_t received = receive_staged(range, refusal);
    range.offset += received, range.bytes -= received;  // the rest is discarded, if it was refused
  }
  for (std::uint64_t received = 0; received < range.bytes;) {
    const std::uint64_t bytes = std::min<std::uint64_t>(held_piece_bytes, range.bytes - received);
    std::size_t came = 0;
    if (refusal == Refusal::none) {
      const Held held(memory_, ticket_, range.offset + received, bytes, Access::write);
      refusal = held.refusal;
      if (refusal == Refusal::none) came = reader_.try_read(held.data, bytes);
    }
    if (refusal != Refusal::none) {
      if (!scratch_) scratch_ = std::unique_ptr<char[]>(new char[held_piece_bytes]);
      came = reader_.try_read(scratch_.get(), bytes);
    }
    received += came;
    if (came != 0) continue;
    writer_.flush(limits_);  // the peer may wait for these replies before it sends more
    reader_.wait(limits_);
  }
}

void Service::serve_atomic() {
  std::uint64_t found = 0;
  Refusal refusal;
  {
    const Held held(memory_, ticket_, ranges_[0].offset, sizeof found, access());
    refusal = held.refusal;
    if (refusal == Refusal::none) found = do_atomic(held.data, access(), request_.operand, request_.expected);
  }
  reply(refusal, 0, found);
}

// Later requests wait in the reader, so the reply is sent at once: the peer's NIC waits for it.
void Service::serve_staged() {
  const std::shared_ptr<StagingBuffer> buffer = buffers_.find(request_.operand);
  const auto slot = static_cast<std::uint32_t>(request_.expected & ((1U << wire::slot_bits) - 1));
  const std::uint64_t sequence = request_.expected >> wire::slot_bits;
  reply(buffer == nullptr ? Refusal::no_staging
                          : buffer->use(slot, sequence, request_.bytes, [&](char* data) { return copy_staged(data); }));
  writer_.flush(limits_);
}

// Refused as a whole, but for what is dropped meanwhile.
Refusal Service::copy_staged(char* slot) {
  int device = gpu::none;
  for (const wire::Range& range : ranges_) {
    const Held held(memory_, ticket_, range.offset, range.bytes, access());
    if (held.refusal != Refusal::none) return held.refusal;
    device = held.device;
  }
  Refusal refusal;
  try {
    std::optional<gpu::Copies> copies;
    if (device != gpu::none) copies.emplace(device);
    refusal = copy_ranges(slot, copies ? &*copies : nullptr);
  } catch (const gpu::Failure&) {
    refusal = Refusal::device;
  }
  held_.clear();
  return refusal;
}

// `copies`: of a GPU; all are in progress together. They are finished before the pieces are released.
Refusal Service::copy_ranges(char* slot, gpu::Copies* copies) {
  for (const wire::Range& range : ranges_) {
    const Held& held = held_.emplace_back(memory_, ticket_, range.offset, range.bytes, access());
    if (held.refusal != Refusal::none) return held.refusal;
    const bool reads = access() == Access::read;
    char* const to = reads ? slot : held.data;
    const char* const from = reads ? held.data : slot;
    slot += range.bytes;
    if (copies == nullptr) std::memcpy(to, from, range.bytes), held_.pop_back();
    else if (range.bytes != 0) copies->begin(0, to, from, range.bytes);
  }
  if (copies != nullptr) copies->finish(0);
  return Refusal::none;
}

Descriptor listener_at(const std::string& address, std::uint16_t port) {
  addrinfo hints{}, *found = nullptr;
  hints.ai_socktype = SOCK_STREAM;
  hints.ai_flags = AI_NUMERICHOST | AI_NUMERICSERV | AI_PASSIVE;
  if (getaddrinfo(address.c_str(), std::to_string(port).c_str(), &hints, &found) != 0) {
    throw std::invalid_argument(address + " is no numeric address to listen at, as 127.0.0.1 or ::1 are");
  }
  const std::unique_ptr<addrinfo, void (*)(addrinfo*)> freed(found, freeaddrinfo);
  Descriptor socket(new_socket(found->ai_family, SOCK_STREAM));
  const int yes = 1;
  if (socket.get() < 0) throw system_failure("socket");
  fcntl(socket.get(), F_SETFL, fcntl(socket.get(), F_GETFL) | O_NONBLOCK);
  setsockopt(socket.get(), SOL_SOCKET, SO_REUSEADDR, &yes, sizeof yes);
  if (bind(socket.get(), found->ai_addr, found->ai_addrlen) != 0) throw system_failure(("bind to " + address).c_str());
  if (::listen(socket.get(), SOMAXCONN) != 0) throw system_failure("listen");
  return socket;
}

std::uint16_t port_of(int socket) {
  sockaddr_storage name{};
  socklen_t size = sizeof name;
  if (getsockname(socket, reinterpret_cast<sockaddr*>(&name), &size) != 0) throw system_failure("getsockname");
  return ntohs(name.ss_family == AF_INET6 ? reinterpret_cast<sockaddr_in6&>(name).sin6_port
                                          : reinterpret_cast<sockaddr_in&>(name).sin_port);
}

}  // namespace

// The connections, and the thread that accepts them.
class Server::Acceptor {
 public:
  Acceptor(std::shared_ptr<Memory> memory, std::shared_ptr<const Identity> identity, std::size_t most);
  std::uint16_t listen(const std::string& address, std::uint16_t port);
  void close();
  void abandon() {
    inherited_.close_all();
    wakeup_.close();
  }
  std::size_t authenticated() const { return authenticated_.load(); }
  bool forked() const { return getpid() != pid_; }
  StagingBuffers& staging() { return staging_; }

 private:
  // A socket that a forked child has to close.
  struct InheritedEntry {
    InheritedEntry(InheritedDescriptors& inherited, int fd) : inherited(inherited), index(inherited.add(fd)) {}
    ~InheritedEntry() { inherited.remove(index); }
    InheritedEntry(const InheritedEntry&) = delete;
    InheritedEntry& operator=(const InheritedEntry&) = delete;
    InheritedDescriptors& inherited;
    std::size_t index;
  };
  struct Listener {
    Listener(Descriptor&& from, InheritedDescriptors& inherited) : socket(std::move(from)), inherited_entry(inherited, socket.get()) {}
    Descriptor socket;
    InheritedEntry inherited_entry;
  };
  struct Connection {
    Connection(Descriptor socket, InheritedDescriptors& inherited) : conn(std::move(socket)), inherited_entry(inherited, conn.fd()) {}
    void hang_up() const { shutdown(conn.fd(), SHUT_RDWR); }  // its thread finds the end of the stream

    SocketConnection conn;
    InheritedEntry inherited_entry;
    enum State : int { unauthenticated, authenticated, evicted, finished };
    std::atomic<int> state{unauthenticated};
    std::thread thread;
  };

  void run();
  std::vector<pollfd> sources();
  void accept_one(int listener);
  void evict_unauthenticated();
  void reap();
  void serve(Connection& connection);
  bool reserve_slot();

  const std::shared_ptr<Memory> memory_;
  const std::shared_ptr<const Identity> identity_;
  StagingBuffers staging_;
  const std::size_t most_, most_sockets_;
  const int pid_;
  Wakeup wakeup_;  // for a new listener, an ended connection, or close
  InheritedDescriptors inherited_;
  std::mutex lifecycle_;  // serialises listen and close
  std::mutex mutex_;      // listeners_
  std::list<Listener> listeners_;
  std::list<Connection> connections_;  // oldest first; thread_'s own
  std::atomic<bool> ending_{false};
  std::atomic<std::size_t> authenticated_{0};
  std::thread thread_;
};

Server::Acceptor::Acceptor(std::shared_ptr<Memory> memory, std::shared_ptr<const Identity> identity, std::size_t most)
    : memory_(std::move(memory)),
      identity_(std::move(identity)),
      most_(most),
      most_sockets_(2 * max_unauthenticated + most),
      pid_(getpid()),
      inherited_(most_sockets_ + most_listeners) {}

std::uint16_t Server::Acceptor::listen(const std::string& address, std::uint16_t port) {
  const std::scoped_lock lifecycle(lifecycle_);
  if (ending_) throw std::invalid_argument("this server was closed: make a new one");
  Descriptor socket = listener_at(address, port);
  const std::uint16_t got = port_of(socket.get());
  {
    const std::scoped_lock lock(mutex_);
    if (listeners_.size() == most_listeners) throw std::invalid_argument("a server listens at 16 addresses at most");
    listeners_.emplace_back(std::move(socket), inherited_);
  }
  if (!thread_.joinable()) thread_ = std::thread([this] { run(); });
  wakeup_.wake();
  return got;
}

void Server::Acceptor::close() {
  const std::scoped_lock lifecycle(lifecycle_);
  ending_ = true;
  wakeup_.wake();
  if (thread_.joinable()) thread_.join();
  const std::scoped_lock lock(mutex_);
  listeners_.clear();
}

std::vector<pollfd> Server::Acceptor::sources() {
  std::vector<pollfd> sources{{wakeup_.fd(), POLLIN, 0}};
  const std::scoped_lock lock(mutex_);
  for (const Listener& listener : listeners_) sources.push_back({listener.socket.get(), POLLIN, 0});
  return sources;
}

void Server::Acceptor::run() {
  begin_native_thread("monarch_door");
  while (!ending_) {
    std::vector<pollfd> ready = sources();
    poll(ready.data(), ready.size(), -1);
    wakeup_.drain();
    reap();
    for (std::size_t i = 1; i < ready.size() && !ending_; ++i) {
      if (ready[i].revents != 0) accept_one(ready[i].fd);
    }
  }
  for (const Connection& connection : connections_) connection.hang_up();
  for (Connection& connection : connections_) connection.thread.join();
  connections_.clear();
}

void Server::Acceptor::accept_one(int listener) {
  Descriptor socket(accept_socket(listener));
  if (socket.get() < 0) {
    if (errno == EMFILE || errno == ENFILE || errno == ENOBUFS || errno == ENOMEM) {
      std::this_thread::sleep_for(std::chrono::milliseconds(accept_retry_ms));
    }
    return;
  }
  evict_unauthenticated();
  if (connections_.size() >= most_sockets_) return;
  Connection& connection = connections_.emplace_back(std::move(socket), inherited_);
  try {
    connection.thread = std::thread([this, &connection] { serve(connection); });
  } catch (const std::system_error&) {  // no more threads: the connection is closed
    connections_.pop_back();
  }
}

// Close the oldest unauthenticated connections, to make space for one more.
void Server::Acceptor::evict_unauthenticated() {
  auto unauthenticated_count = std::count_if(connections_.begin(), connections_.end(),
                                 [](const Connection& one) { return one.state == Connection::unauthenticated; });
  for (Connection& connection : connections_) {
    if (unauthenticated_count < static_cast<std::ptrdiff_t>(max_unauthenticated)) return;
    int unauthenticated = Connection::unauthenticated;
    if (!connection.state.compare_exchange_strong(unauthenticated, Connection::evicted)) continue;
    connection.hang_up();
    --unauthenticated_count;
  }
}

void Server::Acceptor::reap() {
  connections_.remove_if([](Connection& connection) {
    if (connection.state != Connection::finished) return false;
    connection.thread.join();
    return true;
  });
}

bool Server::Acceptor::reserve_slot() {
  std::size_t taken = authenticated_.load();
  while (taken < most_) {
    if (authenticated_.compare_exchange_weak(taken, taken + 1)) return true;
  }
  return false;
}

// Run a connection. On any error the connection is closed without a message.
void Server::Acceptor::serve(Connection& connection) {
  begin_native_thread("monarch_serve");
  bool has_slot = false;
  try {
    Reader reader(connection.conn);
    Writer writer(connection.conn);
    const Limits handshake_limits{std::chrono::steady_clock::now() + handshake_timeout, nullptr, nullptr};
    int unauthenticated = Connection::unauthenticated;
    if (authenticate_caller(connection.conn, reader, writer, *identity_, handshake_limits) &&
        connection.state.compare_exchange_strong(unauthenticated, Connection::authenticated)) {
      has_slot = reserve_slot();
      const wire::Welcome welcome{wire::welcome_magic, has_slot ? 0U : 1U};
      writer.put(&welcome, sizeof welcome);
      writer.flush(handshake_limits);
      const Limits none;
      if (has_slot) Service(*memory_, staging_, reader, writer, none).run();
    }
  } catch (const std::exception&) {
    // Invalid bytes, a peer that has ended, no memory: only this connection ends.
  }
  if (has_slot) --authenticated_;
  connection.hang_up();
  connection.state = Connection::finished;
  wakeup_.wake();
}

Server::Server(std::shared_ptr<Memory> memory, std::shared_ptr<const Identity> identity, std::size_t most)
    : acceptor_(new Acceptor(std::move(memory), std::move(identity), most)) {}

Server::~Server() {
  if (acceptor_->forked()) {
    abandon();
    return;
  }
  acceptor_->close();
  delete acceptor_;
}

std::uint16_t Server::listen(const std::string& address, std::uint16_t port) { return acceptor_->listen(address, port); }

std::size_t Server::connections() const { return acceptor_->authenticated(); }

StagingBuffers& Server::staging() { return acceptor_->staging(); }

void Server::close() {
  if (!acceptor_->forked()) acceptor_->close();
}

void Server::abandon() {
  if (acceptor_->forked()) acceptor_->abandon();
}

}  // namespace monarch
