#include "memory/client.h"

#include <algorithm>
#include <atomic>
#include <condition_variable>
#include <cstring>
#include <deque>
#include <mutex>
#include <optional>
#include <stdexcept>
#include <thread>
#include <utility>

#include <unistd.h>

#include "memory/socket_connection.h"
#include "memory/gpu_pipeline.h"
#include "memory/wire.h"
#include "native_thread.h"

namespace monarch {

namespace {

constexpr std::uint64_t piece_bytes = 1 << 20;
static_assert(piece_bytes <= gpu::pinned_buffer_bytes);
constexpr std::size_t max_pipelined = 4;  // requests of one connection that wait for their replies
constexpr auto cancel_poll_interval = std::chrono::milliseconds(20);
constexpr auto helper_connect_timeout = std::chrono::seconds(10);  // to open a further connection, for which no caller waits

const char* describe_refusal(Refusal refusal) {
  switch (refusal) {
    case Refusal::none:
      return "";
    case Refusal::dropped:
      return "the memory is not registered any more: its owner has dropped it";
    case Refusal::wrong_key:
      return "the key is wrong: use the handle that its owner gave";
    case Refusal::out_of_range:
      return "it reaches beyond the registered memory";
    case Refusal::read_only:
      return "the memory is registered for reading only";
    case Refusal::misaligned:
      return "an atomic operation needs 8 bytes at a multiple of 8";
    case Refusal::device:
      return "the driver of its owner's GPU could not copy it";
    case Refusal::no_atomics:
      return "it is memory of a GPU, which has no atomic operations on this route";
    case Refusal::no_staging:
      return "its owner has lent no such staging memory";
  }
  return "its owner refuses, for a reason that this version does not know";
}

// A transfer and its progress. Threads take pieces until none is left or an error has occurred.
class Transfer {
 public:
  Transfer(Access access, const Ticket& ticket, const std::vector<Segment>& segments, const Limits& limits)
      : access(access), ticket(ticket), limits(limits), device(segments.empty() ? gpu::none : gpu::device_of(segments.front().local)) {
    for (const Segment& segment : segments) cut(segment);
    starts_.push_back(parts_.size());
  }

  struct Piece {
    const Segment* first;
    std::size_t count;
    std::uint64_t bytes;
  };
  std::size_t pieces() const { return starts_.size() - 1; }
  Piece piece(std::size_t index) const {
    Piece piece{&parts_[starts_[index]], starts_[index + 1] - starts_[index], 0};
    for (std::size_t i = 0; i < piece.count; ++i) piece.bytes += piece.first[i].bytes;
    return piece;
  }

  std::optional<std::size_t> take() {
    const std::scoped_lock lock(mutex_);
    if (result_.outcome != Outcome::done || next_ == pieces()) return {};
    return next_++;
  }
  // The first error is the result.
  void fail(Outcome outcome, Refusal refusal, const std::string& text) {
    const std::scoped_lock lock(mutex_);
    if (result_.outcome == Outcome::done) result_.outcome = outcome, result_.refusal = refusal, result_.text = text;
  }

  bool failed() {
    const std::scoped_lock lock(mutex_);
    return result_.outcome != Outcome::done;
  }

  // A helper may access the local memory after join() returned true, until leave().
  bool join() {
    const std::scoped_lock lock(mutex_);
    if (over_ || next_ == pieces()) return false;
    ++helpers_;
    return true;
  }
  void leave() {
    const std::scoped_lock lock(mutex_);
    if (--helpers_ == 0) helpers_left_.notify_all();
  }
  // No helper joins any more; those that have joined end by themselves.
  Result end() {
    std::unique_lock lock(mutex_);
    over_ = true;
    helpers_left_.wait(lock, [this] { return helpers_ == 0; });
    result_.found = value;
    return result_;
  }

  const Access access;
  const Ticket ticket;
  const Limits limits;
  const int device;  // of the local memory
  std::uint64_t operand = 0, expected = 0;
  std::uint64_t value = 0;  // of an atomic, which has one driver

 private:
  void cut(Segment segment) {
    do {
      const bool full = starts_.empty() || bytes_ >= piece_bytes || parts_.size() - starts_.back() == wire::most_ranges;
      if (full) starts_.push_back(parts_.size()), bytes_ = 0;
      const std::uint64_t bytes = std::min(segment.bytes, piece_bytes - bytes_);
      parts_.push_back({segment.offset, segment.local, bytes});
      bytes_ += bytes;
      segment.offset += bytes, segment.local += bytes, segment.bytes -= bytes;
    } while (segment.bytes != 0);
  }

  std::vector<Segment> parts_;
  std::vector<std::size_t> starts_;  // of pieces, in parts_
  std::uint64_t bytes_ = 0;          // of the last piece
  std::mutex mutex_;
  std::condition_variable helpers_left_;
  std::size_t next_ = 0;
  int helpers_ = 0;
  bool over_ = false;
  Result result_;
};

// The part of the reply that has arrived, of a transfer with one piece.
struct PartialReply {
  wire::Reply reply;
  wire::Tail tail;
  std::uint64_t bytes = 0;  // that are here, of all that it has
};

// One connection, if there is one at the moment. Used by one thread at a time.
class Stream {
 public:
  bool connected() const { return connection_.has_value(); }
  bool is_stale() const { return connection_ && connection_->socket->is_stale(); }
  void connect(const std::string& address, std::uint16_t port, const Identity& identity, const wire::Token& owner_token,
               const Limits& limits, InheritedDescriptors& inherited);
  void hang_up(InheritedDescriptors& inherited);

  // Pieces, in the order in which they are answered; `pipeline` is for memory of a GPU, else nullptr.
  void send_request(const Transfer& transfer, std::size_t index, GpuPipeline* pipeline);
  Refusal receive_reply(Transfer& transfer, std::size_t index, GpuPipeline* pipeline);
  // For a transfer of one piece: read what arrives until then. Nothing: more is to come, and a later call continues.
  std::optional<Refusal> receive_reply_until(Transfer& transfer, PartialReply& partial, TimePoint until);

  // The same, of requests whose bytes NICs carry.
  void send_staged_request(const StageRequest& what, const std::vector<Segment>& ranges, const Limits& limits);
  Refusal receive_staged_reply(const Limits& limits);
  bool has_all() const { return sent_count_ == received_count_; }

  bool busy = false;  // the pool's, under its lock

 private:
  struct Connection {
    explicit Connection(std::unique_ptr<SocketConnection> from) : socket(std::move(from)), reader(*socket), writer(*socket) {}
    std::unique_ptr<SocketConnection> socket;
    Reader reader;
    Writer writer;
    std::size_t inherited_index = 0;
  };
  void send(const char* from, std::uint64_t bytes, const Limits& limits);
  Refusal receive_bytes(const Transfer::Piece& piece, const Limits& limits, GpuPipeline* pipeline);
  Refusal receive_tail(const Limits& limits);
  // Check and read a reply and a tail. Throw SocketError if they do not belong to the request.
  bool brings_bytes(const wire::Reply& reply, Transfer& transfer, const Transfer::Piece& piece) const;
  Refusal refusal_in(const wire::Tail& tail) const;

  std::optional<Connection> connection_;
  std::uint64_t sent_count_ = 0, received_count_ = 0;
};

void Stream::connect(const std::string& address, std::uint16_t port, const Identity& identity, const wire::Token& owner_token,
                     const Limits& limits, InheritedDescriptors& inherited) {
  std::unique_ptr<SocketConnection> socket = SocketConnection::connect(address, port, limits);
  connection_.emplace(std::move(socket));
  connection_->inherited_index = inherited.add(connection_->socket->fd());
  sent_count_ = received_count_ = 0;
  authenticate_to_owner(*connection_->socket, connection_->reader, connection_->writer, identity, owner_token, limits);
}

void Stream::hang_up(InheritedDescriptors& inherited) {
  if (!connection_) return;
  inherited.remove(connection_->inherited_index);
  connection_.reset();
}

void Stream::send(const char* from, std::uint64_t bytes, const Limits& limits) {
  Writer& writer = connection_->writer;
  while (bytes != 0) {
    std::size_t took = bytes < direct_bytes && writer.put(from, bytes) ? bytes : 0;
    if (took == 0) took = writer.try_write(from, bytes);
    if (took == 0) writer.wait(limits);
    from += took, bytes -= took;
  }
}

void Stream::send_request(const Transfer& transfer, std::size_t index, GpuPipeline* pipeline) {
  const Transfer::Piece piece = transfer.piece(index);
  const wire::Request request{wire::request_magic,
                              static_cast<std::uint32_t>(transfer.access),
                              transfer.ticket.slot,
                              static_cast<std::uint32_t>(piece.count),
                              transfer.ticket.epoch,
                              transfer.ticket.key,
                              ++sent_count_,
                              piece.bytes,
                              transfer.operand,
                              transfer.expected};
  Writer& writer = connection_->writer;
  writer.put(&request, sizeof request);
  for (std::size_t i = 0; i < piece.count; ++i) {
    const wire::Range range{piece.first[i].offset, piece.first[i].bytes};
    writer.put(&range, sizeof range);
  }
  if (transfer.access == Access::write && pipeline != nullptr) {
    pipeline->send(piece.first, piece.count, [&](const char* from, std::uint64_t bytes) { send(from, bytes, transfer.limits); });
  } else if (transfer.access == Access::write) {
    for (std::size_t i = 0; i < piece.count; ++i) send(piece.first[i].local, piece.first[i].bytes, transfer.limits);
  }
  writer.flush(transfer.limits);
}

[[noreturn]] void wrong(const char* what) {
  throw SocketError(Outcome::lost, std::string("the other side sent ") + what + ": install the same monarch_backend on both");
}

Refusal Stream::receive_bytes(const Transfer::Piece& piece, const Limits& limits, GpuPipeline* pipeline) {
  if (pipeline == nullptr) {
    for (std::size_t i = 0; i < piece.count; ++i) connection_->reader.read(piece.first[i].local, piece.first[i].bytes, limits);
    return receive_tail(limits);
  }
  Refusal refusal = Refusal::none;
  pipeline->receive(
      piece.first, piece.count, [&](char* to, std::uint64_t bytes) { connection_->reader.read(to, bytes, limits); },
      [&] { return (refusal = receive_tail(limits)) == Refusal::none; });
  return refusal;
}

Refusal Stream::receive_tail(const Limits& limits) {
  wire::Tail tail;
  connection_->reader.read(&tail, sizeof tail, limits);
  return refusal_in(tail);
}

Refusal Stream::refusal_in(const wire::Tail& tail) const {
  if (tail.magic != wire::tail_magic || tail.number != received_count_) wrong("no end of what was read");
  return static_cast<Refusal>(tail.refusal);
}

bool Stream::brings_bytes(const wire::Reply& reply, Transfer& transfer, const Transfer::Piece& piece) const {
  if (reply.magic != wire::reply_magic || reply.number != received_count_) wrong("what is no reply");
  const bool bytes_come = transfer.access == Access::read && static_cast<Refusal>(reply.refusal) == Refusal::none;
  if (reply.bytes != (bytes_come ? piece.bytes : 0)) wrong("another number of bytes than was asked for");
  if (transfer.access == Access::fetch_add || transfer.access == Access::compare_and_swap) transfer.value = reply.value;
  return bytes_come;
}

Refusal Stream::receive_reply(Transfer& transfer, std::size_t index, GpuPipeline* pipeline) {
  wire::Reply reply;
  connection_->reader.read(&reply, sizeof reply, transfer.limits);
  ++received_count_;
  const Transfer::Piece piece = transfer.piece(index);
  if (brings_bytes(reply, transfer, piece)) return receive_bytes(piece, transfer.limits, pipeline);
  return static_cast<Refusal>(reply.refusal);
}

std::optional<Refusal> Stream::receive_reply_until(Transfer& transfer, PartialReply& partial, TimePoint until) {
  transfer.limits.check();
  std::uint64_t end = 0;  // in the answer, of the part that is looked at
  const auto has = [&](void* to, std::uint64_t bytes) {
    const std::uint64_t begin = std::exchange(end, end + bytes);
    while (partial.bytes < end) {
      // Before the wait: OpenSSL may hold bytes that the socket does not show.
      const std::size_t n = connection_->reader.try_read(static_cast<char*>(to) + (partial.bytes - begin), end - partial.bytes);
      partial.bytes += n;
      if (n == 0 && !connection_->reader.wait_until(until, transfer.limits)) return false;
    }
    return true;
  };
  if (!has(&partial.reply, sizeof partial.reply)) return {};
  received_count_ = sent_count_;  // no other request is in flight
  const Transfer::Piece piece = transfer.piece(0);
  if (!brings_bytes(partial.reply, transfer, piece)) return static_cast<Refusal>(partial.reply.refusal);
  for (std::size_t i = 0; i < piece.count; ++i) {
    if (!has(piece.first[i].local, piece.first[i].bytes)) return {};
  }
  if (!has(&partial.tail, sizeof partial.tail)) return {};
  return refusal_in(partial.tail);
}

void Stream::send_staged_request(const StageRequest& what, const std::vector<Segment>& ranges, const Limits& limits) {
  const std::uint64_t bytes = bytes_of(ranges);
  const wire::Request request{wire::request_magic,
                              what.write ? wire::stage_write : wire::stage_read,
                              what.ticket.slot,
                              static_cast<std::uint32_t>(ranges.size()),
                              what.ticket.epoch,
                              what.ticket.key,
                              ++sent_count_,
                              bytes,
                              what.buffer,
                              what.sequence << wire::slot_bits | what.slot};
  Writer& writer = connection_->writer;
  writer.put(&request, sizeof request);
  for (const Segment& segment : ranges) {
    const wire::Range range{segment.offset, segment.bytes};
    writer.put(&range, sizeof range);
  }
  writer.flush(limits);
}

Refusal Stream::receive_staged_reply(const Limits& limits) {
  wire::Reply reply;
  connection_->reader.read(&reply, sizeof reply, limits);
  ++received_count_;
  if (reply.magic != wire::reply_magic || reply.number != received_count_ || reply.bytes != 0) wrong("what is no reply");
  return static_cast<Refusal>(reply.refusal);
}

}  // namespace

// The connections and the helper threads.
class Client::Pool {
 public:
  Pool(std::string address, std::uint16_t port, std::shared_ptr<const Identity> identity, const std::string& owner_token,
       std::size_t streams);
  Result run(const std::shared_ptr<Transfer>& transfer);
  Stream& acquire(const Limits& limits);  // the same, that waits for one, and connects it. Throws SocketError
  Stream* try_acquire();                          // an idle connection, for a small request; nullptr: there is none
  void give_back(Stream& stream, bool broken);  // after that
  Limits limits(TimePoint deadline, const Cancel* cancel) const { return {deadline, cancel, &closed_}; }
  void close();
  void abandon() { inherited_.close_all(); }
  bool forked() const { return getpid() != pid_; }

 private:
  Stream& claim(const Limits& limits);
  Stream* claim_idle();
  void release(Stream& stream);
  void request_helpers(const std::shared_ptr<Transfer>& transfer);
  void run_helper();
  void help_transfer(Transfer& transfer, Stream& stream);
  void drive(Transfer& transfer, Stream& stream, bool helps);
  void connect(Stream& stream, const Limits& limits);

 public:
  std::string describe(const std::exception& error) const { return address_ + " port " + std::to_string(port_) + ": " + error.what(); }

 private:
  const std::string address_;
  const std::uint16_t port_;
  const std::shared_ptr<const Identity> identity_;
  const wire::Token owner_token_;
  const int pid_;
  Cancel closed_;
  InheritedDescriptors inherited_;
  std::mutex mutex_;
  std::condition_variable idle_, help_requested_;
  std::vector<Stream> streams_;
  std::atomic<int> waiting_{0};  // callers without a connection: helpers give theirs back
  int callers_ = 0;
  std::deque<std::shared_ptr<Transfer>> help_queue_;
  std::vector<std::thread> helpers_;
};

Client::Pool::Pool(std::string address, std::uint16_t port, std::shared_ptr<const Identity> identity, const std::string& owner_token,
                   std::size_t streams)
    : address_(std::move(address)),
      port_(port),
      identity_(std::move(identity)),
      owner_token_(parse_token(owner_token)),
      pid_(getpid()),
      inherited_(most_streams + 1),
      streams_(streams) {
  inherited_.add(closed_.descriptor());
}

Stream* Client::Pool::claim_idle() {
  Stream* found = nullptr;
  for (Stream& stream : streams_) {
    if (!stream.busy && (found == nullptr || (stream.connected() && !found->connected()))) found = &stream;
  }
  if (found != nullptr) found->busy = true;
  return found;
}

Stream& Client::Pool::claim(const Limits& limits) {
  std::unique_lock lock(mutex_);
  for (;;) {
    limits.check();
    if (Stream* stream = claim_idle()) return *stream;
    ++waiting_;
    // A cancellation does not wake this thread, so it is polled.
    idle_.wait_until(lock, std::min(limits.deadline, std::chrono::steady_clock::now() + cancel_poll_interval));
    --waiting_;
  }
}

void Client::Pool::release(Stream& stream) {
  const std::scoped_lock lock(mutex_);
  stream.busy = false;
  idle_.notify_one();
}

void Client::Pool::connect(Stream& stream, const Limits& limits) {
  if (stream.is_stale()) stream.hang_up(inherited_);  // no request was sent on it, so a new one is as good
  if (!stream.connected()) stream.connect(address_, port_, *identity_, owner_token_, limits, inherited_);
}

Result Client::Pool::run(const std::shared_ptr<Transfer>& transfer) {
  if (transfer->pieces() == 0) return {};
  {
    const std::scoped_lock lock(mutex_);
    ++callers_;
  }
  Stream* stream = nullptr;
  try {
    stream = &claim(transfer->limits);
    connect(*stream, transfer->limits);
    request_helpers(transfer);  // not before: a helper might take the last connection that the owner accepts
    drive(*transfer, *stream, false);
  } catch (const SocketError& error) {
    transfer->fail(error.outcome, Refusal::none, describe(error));
    if (stream != nullptr) stream->hang_up(inherited_);
  } catch (const gpu::Failure& failure) {
    transfer->fail(Outcome::failed, Refusal::none, failure.what());
    if (stream != nullptr) stream->hang_up(inherited_);
  } catch (const std::exception& error) {  // no memory, no more threads
    transfer->fail(Outcome::lost, Refusal::none, describe(error));
    if (stream != nullptr) stream->hang_up(inherited_);
  }
  if (stream != nullptr) release(*stream);
  Result result = transfer->end();
  const std::scoped_lock lock(mutex_);
  if (--callers_ == 0) idle_.notify_all();
  return result;
}

Stream* Client::Pool::try_acquire() {
  Stream* stream = nullptr;
  {
    const std::scoped_lock lock(mutex_);
    if (closed_.is_set() || waiting_ > 0) return nullptr;
    for (Stream& each : streams_) {
      if (!each.busy && each.connected()) stream = &each;
    }
    if (stream == nullptr) return nullptr;
    stream->busy = true;
    ++callers_;
  }
  if (!stream->is_stale()) return stream;
  give_back(*stream, true);
  return nullptr;
}

Stream& Client::Pool::acquire(const Limits& limits) {
  {
    const std::scoped_lock lock(mutex_);
    ++callers_;
  }
  Stream* stream = nullptr;
  try {
    stream = &claim(limits);
    connect(*stream, limits);
    return *stream;
  } catch (...) {
    if (stream != nullptr) {
      give_back(*stream, true);
      throw;
    }
    const std::scoped_lock lock(mutex_);
    if (--callers_ == 0) idle_.notify_all();
    throw;
  }
}

void Client::Pool::give_back(Stream& stream, bool broken) {
  if (broken) stream.hang_up(inherited_);
  release(stream);
  const std::scoped_lock lock(mutex_);
  if (--callers_ == 0) idle_.notify_all();
}

void Client::Pool::drive(Transfer& transfer, Stream& stream, bool helps) {
  std::optional<GpuPipeline> pipeline;
  if (transfer.device != gpu::none) pipeline.emplace(transfer.device);
  GpuPipeline* const active_pipeline = pipeline ? &*pipeline : nullptr;
  std::deque<std::size_t> in_flight;
  for (;;) {
    while (in_flight.size() < max_pipelined && !(helps && waiting_ > 0)) {
      const std::optional<std::size_t> index = transfer.take();
      if (!index) break;
      transfer.limits.check();
      stream.send_request(transfer, *index, active_pipeline);
      in_flight.push_back(*index);
    }
    if (in_flight.empty()) break;
    const Refusal refusal = stream.receive_reply(transfer, in_flight.front(), active_pipeline);
    in_flight.pop_front();
    if (refusal != Refusal::none) transfer.fail(Outcome::refused, refusal, describe_refusal(refusal));
  }
  if (pipeline) pipeline->finish();
}

// One helper for each further connection, as long as there is something to do for it.
void Client::Pool::request_helpers(const std::shared_ptr<Transfer>& transfer) {
  const std::size_t helpers = std::min(streams_.size(), transfer->pieces()) - 1;
  if (helpers == 0) return;
  const std::scoped_lock lock(mutex_);
  if (closed_.is_set()) return;
  while (helpers_.size() < streams_.size() - 1) helpers_.emplace_back([this] { run_helper(); });
  for (std::size_t i = 0; i < helpers; ++i) help_queue_.push_back(transfer);
  help_requested_.notify_all();
}

void Client::Pool::run_helper() {
  begin_native_thread("monarch_stream");
  std::unique_lock lock(mutex_);
  for (;;) {
    help_requested_.wait(lock, [this] { return closed_.is_set() || !help_queue_.empty(); });
    if (closed_.is_set()) return;
    const std::shared_ptr<Transfer> transfer = std::move(help_queue_.front());
    help_queue_.pop_front();
    Stream* stream = waiting_ == 0 ? claim_idle() : nullptr;
    if (stream == nullptr) continue;
    lock.unlock();
    help_transfer(*transfer, *stream);
    release(*stream);
    lock.lock();
  }
}

void Client::Pool::help_transfer(Transfer& transfer, Stream& stream) {
  // A failure to open a further connection is not reported: the transfer continues without it.
  try {
    connect(stream, limits(std::chrono::steady_clock::now() + helper_connect_timeout, nullptr));
  } catch (const std::exception&) {
    return stream.hang_up(inherited_);
  }
  if (!transfer.join()) return;
  try {
    drive(transfer, stream, true);
  } catch (const std::exception& error) {
    const auto* socket_error = dynamic_cast<const SocketError*>(&error);
    const bool is_local = dynamic_cast<const gpu::Failure*>(&error) != nullptr;
    transfer.fail(socket_error != nullptr ? socket_error->outcome : is_local ? Outcome::failed : Outcome::lost, Refusal::none, is_local ? error.what() : describe(error));
    stream.hang_up(inherited_);
  }
  transfer.leave();
}

void Client::Pool::close() {
  std::vector<std::thread> helpers;
  {
    const std::scoped_lock lock(mutex_);
    closed_.set();
    helpers.swap(helpers_);
    help_queue_.clear();
    help_requested_.notify_all();
    idle_.notify_all();
  }
  for (std::thread& helper : helpers) helper.join();
  std::unique_lock lock(mutex_);
  idle_.wait(lock, [this] { return callers_ == 0; });
  for (Stream& stream : streams_) stream.hang_up(inherited_);
}

namespace {

std::size_t checked(std::size_t streams) {
  if (streams == 0 || streams > most_streams) throw std::invalid_argument("a client has 1 to 64 streams");
  return streams;
}

}  // namespace

// A small request in flight. One thread at a time waits for the reply.
class Client::SentRequest : public SmallRequest {
 public:
  SentRequest(Pool& pool, std::shared_ptr<Transfer> transfer) : pool_(pool), transfer_(std::move(transfer)) {}
  ~SentRequest() override {
    if (stream_ != nullptr && !pool_.forked()) pool_.give_back(*stream_, true);
  }

  // Return false if there is no connection for it. Called after construction, so that the destructor returns the
  // connection if this throws.
  bool send_request() {
    stream_ = pool_.try_acquire();
    if (stream_ == nullptr) return false;
    attempt([&] { stream_->send_request(*transfer_, 0, nullptr); });
    if (transfer_->failed()) end(true);
    return true;
  }

  std::optional<Result> fetch(TimePoint until, bool wait_for_others) override {
    std::unique_lock lock(mutex_, std::defer_lock);
    if (wait_for_others) {
      lock.lock();
    } else if (!lock.try_lock()) {
      return {};
    }
    if (!over_ && !receive_reply(until)) return {};
    return std::exchange(result_, {});
  }
  bool is_over() const override { return over_; }

 private:
  bool receive_reply(TimePoint until) {
    std::optional<Refusal> refusal;
    attempt([&] { refusal = stream_->receive_reply_until(*transfer_, partial_, until); });
    if (!refusal && !transfer_->failed()) return false;
    if (refusal && *refusal != Refusal::none) transfer_->fail(Outcome::refused, *refusal, describe_refusal(*refusal));
    end(!refusal);
    return true;
  }
  template <class Work>
  void attempt(Work&& work) {
    try {
      work();
    } catch (const SocketError& error) {
      transfer_->fail(error.outcome, Refusal::none, pool_.describe(error));
    } catch (const std::exception& error) {  // no memory
      transfer_->fail(Outcome::lost, Refusal::none, pool_.describe(error));
    }
  }
  void end(bool broken) {
    pool_.give_back(*std::exchange(stream_, nullptr), broken);
    result_ = transfer_->end();
    over_ = true;
  }

  Pool& pool_;
  const std::shared_ptr<Transfer> transfer_;
  Stream* stream_ = nullptr;  // as long as the connection is ours
  PartialReply partial_;
  std::mutex mutex_;
  std::optional<Result> result_;
  std::atomic<bool> over_{false};
};

// A connection that was taken out of the pool.
class Client::LeasedConnection : public StagingConnection {
 public:
  LeasedConnection(Pool& pool, const Limits& limits) : pool_(pool), limits_(limits), stream_(pool.acquire(limits)) {}
  ~LeasedConnection() override { release(); }

  void release() override {
    if (pool_.forked() || released_.exchange(true)) return;
    pool_.give_back(stream_, failed_ || !stream_.has_all());
  }

  Result send_request(const StageRequest& request, const std::vector<Segment>& ranges) override {
    return attempt([&] {
      limits_.check();
      stream_.send_staged_request(request, ranges, limits_);
      return Refusal::none;
    });
  }
  Result receive_reply() override {
    return attempt([&] { return stream_.receive_staged_reply(limits_); });
  }

 private:
  template <class Work>
  Result attempt(Work&& work) {
    try {
      const Refusal refusal = work();
      if (refusal == Refusal::none) return {};
      return {Outcome::refused, refusal, 0, 0, describe_refusal(refusal)};
    } catch (const SocketError& error) {
      failed_ = true;
      return {error.outcome, Refusal::none, 0, 0, pool_.describe(error)};
    } catch (const std::exception& error) {  // no memory
      failed_ = true;
      return {Outcome::lost, Refusal::none, 0, 0, pool_.describe(error)};
    }
  }

  Pool& pool_;
  const Limits limits_;
  Stream& stream_;
  bool failed_ = false;
  std::atomic<bool> released_{false};
};

Client::Client(std::string address, std::uint16_t port, std::shared_ptr<const Identity> identity, const std::string& owner_token,
               std::size_t streams)
    : pool_(new Pool(std::move(address), port, std::move(identity), owner_token, checked(streams))) {}

Client::~Client() {
  if (pool_->forked()) {
    abandon();
    return;
  }
  pool_->close();
  delete pool_;
}

Result Client::read(const Ticket& ticket, const std::vector<Segment>& segments, TimePoint deadline, const Cancel* cancel) {
  return pool_->run(std::make_shared<Transfer>(Access::read, ticket, segments, pool_->limits(deadline, cancel)));
}

Result Client::write(const Ticket& ticket, const std::vector<Segment>& segments, TimePoint deadline, const Cancel* cancel) {
  return pool_->run(std::make_shared<Transfer>(Access::write, ticket, segments, pool_->limits(deadline, cancel)));
}

Result Client::atomic(const Ticket& ticket, std::uint64_t offset, Access access, std::uint64_t operand, std::uint64_t expected,
                      TimePoint deadline, const Cancel* cancel) {
  const std::vector<Segment> segments{{offset, nullptr, sizeof(std::uint64_t)}};
  const auto transfer = std::make_shared<Transfer>(access, ticket, segments, pool_->limits(deadline, cancel));
  transfer->operand = operand, transfer->expected = expected;
  return pool_->run(transfer);
}

std::unique_ptr<SmallRequest> Client::begin(Access access, const Ticket& ticket, const std::vector<Segment>& segments, std::uint64_t operand,
                                      std::uint64_t expected, TimePoint deadline, const Cancel* cancel) {
  if (bytes_of(segments) > (access == Access::write ? max_small_write : max_small_read)) return nullptr;
  auto transfer = std::make_shared<Transfer>(access, ticket, segments, pool_->limits(deadline, cancel));
  if (transfer->pieces() != 1 || transfer->device != gpu::none) return nullptr;
  transfer->operand = operand, transfer->expected = expected;
  auto sent = std::make_unique<SentRequest>(*pool_, std::move(transfer));
  if (!sent->send_request()) return nullptr;
  return sent;
}

std::unique_ptr<StagingConnection> Client::open_staging_connection(TimePoint deadline, const Cancel* cancel, Result& result) {
  try {
    return std::make_unique<LeasedConnection>(*pool_, pool_->limits(deadline, cancel));
  } catch (const SocketError& error) {
    result = {error.outcome, Refusal::none, 0, 0, pool_->describe(error)};
  } catch (const std::exception& error) {  // no memory, no descriptors
    result = {Outcome::lost, Refusal::none, 0, 0, pool_->describe(error)};
  }
  return nullptr;
}

void Client::close() {
  if (!pool_->forked()) pool_->close();
}

void Client::abandon() {
  if (pool_->forked()) pool_->abandon();
}

}  // namespace monarch
