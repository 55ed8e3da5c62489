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
static_assert(piece_bytes <= gpu::room_bytes);
constexpr std::size_t ahead = 4;  // requests of one connection that wait for their replies
constexpr auto look_at_cancel = std::chrono::milliseconds(20);
constexpr auto helper_patience = std::chrono::seconds(10);  // to connect, which nobody waits for

const char* in_words(Refusal refusal) {
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

// What somebody asks for, and how far it is. Drivers take pieces until none is left or something has gone wrong.
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
  // The first thing that goes wrong is the one that counts.
  void fail(Outcome outcome, Refusal refusal, const std::string& text) {
    const std::scoped_lock lock(mutex_);
    if (result_.outcome == Outcome::done) result_.outcome = outcome, result_.refusal = refusal, result_.text = text;
  }

  bool failed() {
    const std::scoped_lock lock(mutex_);
    return result_.outcome != Outcome::done;
  }

  // A helper may touch the local memory from when join() was true to leave().
  bool join() {
    const std::scoped_lock lock(mutex_);
    if (over_ || next_ == pieces()) return false;
    ++helpers_;
    return true;
  }
  void leave() {
    const std::scoped_lock lock(mutex_);
    if (--helpers_ == 0) left_.notify_all();
  }
  // No helper comes any more, and those that are there end by themselves.
  Result end() {
    std::unique_lock lock(mutex_);
    over_ = true;
    left_.wait(lock, [this] { return helpers_ == 0; });
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
  std::condition_variable left_;
  std::size_t next_ = 0;
  int helpers_ = 0;
  bool over_ = false;
  Result result_;
};

// The answer to the only piece of a transfer, as far as it has come.
struct Answer {
  wire::Reply reply;
  wire::Tail tail;
  std::uint64_t bytes = 0;  // that are here, of all that it has
};

// One connection, if there is one at the moment. Used by one thread at a time.
class Stream {
 public:
  bool connected() const { return connection_.has_value(); }
  bool is_stale() const { return connection_ && connection_->link->is_stale(); }
  void connect(const std::string& address, std::uint16_t port, const Identity& identity, const wire::Token& whom,
               const Limits& limits, Inheritance& inheritance);
  void hang_up(Inheritance& inheritance);

  // Pieces, in the order in which they are answered; `staged` is for memory of a GPU, else nullptr.
  void ask(const Transfer& transfer, std::size_t index, Staged* staged);
  Refusal hear(Transfer& transfer, std::size_t index, Staged* staged);
  // Of the only piece that was asked for: takes what comes until then, to go on with later. Nothing: there is more to come.
  std::optional<Refusal> hear_until(Transfer& transfer, Answer& answer, Moment until);

  // The same, of requests whose bytes NICs carry.
  void ask_staged(const StageRequest& what, const std::vector<Segment>& ranges, const Limits& limits);
  Refusal hear_staged(const Limits& limits);
  bool has_all() const { return asked_ == heard_; }

  bool busy = false;  // the pool's, under its lock

 private:
  struct Connection {
    explicit Connection(std::unique_ptr<Link> from) : link(std::move(from)), reader(*link), writer(*link) {}
    std::unique_ptr<Link> link;
    Reader reader;
    Writer writer;
    std::size_t place = 0;
  };
  void send(const char* from, std::uint64_t bytes, const Limits& limits);
  Refusal hear_bytes(const Transfer::Piece& piece, const Limits& limits, Staged* staged);
  Refusal hear_tail(const Limits& limits);
  // What they say. Throw LinkError if it is no answer to that.
  bool brings_bytes(const wire::Reply& reply, Transfer& transfer, const Transfer::Piece& piece) const;
  Refusal refusal_in(const wire::Tail& tail) const;

  std::optional<Connection> connection_;
  std::uint64_t asked_ = 0, heard_ = 0;
};

void Stream::connect(const std::string& address, std::uint16_t port, const Identity& identity, const wire::Token& whom,
                     const Limits& limits, Inheritance& inheritance) {
  std::unique_ptr<Link> link = Link::connect(address, port, limits);
  connection_.emplace(std::move(link));
  connection_->place = inheritance.add(connection_->link->fd());
  asked_ = heard_ = 0;
  prove_to_owner(*connection_->link, connection_->reader, connection_->writer, identity, whom, limits);
}

void Stream::hang_up(Inheritance& inheritance) {
  if (!connection_) return;
  inheritance.remove(connection_->place);
  connection_.reset();
}

void Stream::send(const char* from, std::uint64_t bytes, const Limits& limits) {
  Writer& writer = connection_->writer;
  while (bytes != 0) {
    std::size_t took = bytes < straight && writer.put(from, bytes) ? bytes : 0;
    if (took == 0) took = writer.try_write(from, bytes);
    if (took == 0) writer.wait(limits);
    from += took, bytes -= took;
  }
}

void Stream::ask(const Transfer& transfer, std::size_t index, Staged* staged) {
  const Transfer::Piece piece = transfer.piece(index);
  const wire::Request request{wire::request_magic,
                              static_cast<std::uint32_t>(transfer.access),
                              transfer.ticket.slot,
                              static_cast<std::uint32_t>(piece.count),
                              transfer.ticket.epoch,
                              transfer.ticket.key,
                              ++asked_,
                              piece.bytes,
                              transfer.operand,
                              transfer.expected};
  Writer& writer = connection_->writer;
  writer.put(&request, sizeof request);
  for (std::size_t i = 0; i < piece.count; ++i) {
    const wire::Range range{piece.first[i].offset, piece.first[i].bytes};
    writer.put(&range, sizeof range);
  }
  if (transfer.access == Access::write && staged != nullptr) {
    staged->send(piece.first, piece.count, [&](const char* from, std::uint64_t bytes) { send(from, bytes, transfer.limits); });
  } else if (transfer.access == Access::write) {
    for (std::size_t i = 0; i < piece.count; ++i) send(piece.first[i].local, piece.first[i].bytes, transfer.limits);
  }
  writer.flush(transfer.limits);
}

[[noreturn]] void wrong(const char* what) {
  throw LinkError(Outcome::lost, std::string("the other side sent ") + what + ": install the same monarch_backend on both");
}

Refusal Stream::hear_bytes(const Transfer::Piece& piece, const Limits& limits, Staged* staged) {
  if (staged == nullptr) {
    for (std::size_t i = 0; i < piece.count; ++i) connection_->reader.read(piece.first[i].local, piece.first[i].bytes, limits);
    return hear_tail(limits);
  }
  Refusal refusal = Refusal::none;
  staged->receive(
      piece.first, piece.count, [&](char* to, std::uint64_t bytes) { connection_->reader.read(to, bytes, limits); },
      [&] { return (refusal = hear_tail(limits)) == Refusal::none; });
  return refusal;
}

Refusal Stream::hear_tail(const Limits& limits) {
  wire::Tail tail;
  connection_->reader.read(&tail, sizeof tail, limits);
  return refusal_in(tail);
}

Refusal Stream::refusal_in(const wire::Tail& tail) const {
  if (tail.magic != wire::tail_magic || tail.number != heard_) wrong("no end of what was read");
  return static_cast<Refusal>(tail.refusal);
}

bool Stream::brings_bytes(const wire::Reply& reply, Transfer& transfer, const Transfer::Piece& piece) const {
  if (reply.magic != wire::reply_magic || reply.number != heard_) wrong("what is no reply");
  const bool bytes_come = transfer.access == Access::read && static_cast<Refusal>(reply.refusal) == Refusal::none;
  if (reply.bytes != (bytes_come ? piece.bytes : 0)) wrong("another number of bytes than was asked for");
  if (transfer.access == Access::fetch_add || transfer.access == Access::compare_and_swap) transfer.value = reply.value;
  return bytes_come;
}

Refusal Stream::hear(Transfer& transfer, std::size_t index, Staged* staged) {
  wire::Reply reply;
  connection_->reader.read(&reply, sizeof reply, transfer.limits);
  ++heard_;
  const Transfer::Piece piece = transfer.piece(index);
  if (brings_bytes(reply, transfer, piece)) return hear_bytes(piece, transfer.limits, staged);
  return static_cast<Refusal>(reply.refusal);
}

std::optional<Refusal> Stream::hear_until(Transfer& transfer, Answer& answer, Moment until) {
  transfer.limits.check();
  std::uint64_t end = 0;  // in the answer, of the part that is looked at
  const auto has = [&](void* to, std::uint64_t bytes) {
    const std::uint64_t begin = std::exchange(end, end + bytes);
    while (answer.bytes < end) {
      // Before anybody waits: OpenSSL may hold what no socket shows.
      const std::size_t n = connection_->reader.try_read(static_cast<char*>(to) + (answer.bytes - begin), end - answer.bytes);
      answer.bytes += n;
      if (n == 0 && !connection_->reader.wait_until(until, transfer.limits)) return false;
    }
    return true;
  };
  if (!has(&answer.reply, sizeof answer.reply)) return {};
  heard_ = asked_;  // nothing else is under way
  const Transfer::Piece piece = transfer.piece(0);
  if (!brings_bytes(answer.reply, transfer, piece)) return static_cast<Refusal>(answer.reply.refusal);
  for (std::size_t i = 0; i < piece.count; ++i) {
    if (!has(piece.first[i].local, piece.first[i].bytes)) return {};
  }
  if (!has(&answer.tail, sizeof answer.tail)) return {};
  return refusal_in(answer.tail);
}

void Stream::ask_staged(const StageRequest& what, const std::vector<Segment>& ranges, const Limits& limits) {
  const std::uint64_t bytes = bytes_of(ranges);
  const wire::Request request{wire::request_magic,
                              what.write ? wire::stage_write : wire::stage_read,
                              what.ticket.slot,
                              static_cast<std::uint32_t>(ranges.size()),
                              what.ticket.epoch,
                              what.ticket.key,
                              ++asked_,
                              bytes,
                              what.buffer,
                              what.turn << wire::slot_bits | what.slot};
  Writer& writer = connection_->writer;
  writer.put(&request, sizeof request);
  for (const Segment& segment : ranges) {
    const wire::Range range{segment.offset, segment.bytes};
    writer.put(&range, sizeof range);
  }
  writer.flush(limits);
}

Refusal Stream::hear_staged(const Limits& limits) {
  wire::Reply reply;
  connection_->reader.read(&reply, sizeof reply, limits);
  ++heard_;
  if (reply.magic != wire::reply_magic || reply.number != heard_ || reply.bytes != 0) wrong("what is no reply");
  return static_cast<Refusal>(reply.refusal);
}

}  // namespace

// The connections, and who helps.
class Client::Pool {
 public:
  Pool(std::string address, std::uint16_t port, std::shared_ptr<const Identity> identity, const std::string& whom,
       std::size_t streams);
  Result run(const std::shared_ptr<Transfer>& transfer);
  Stream& enter_patiently(const Limits& limits);  // the same, that waits for one, and connects it. Throws LinkError
  Stream* enter();                          // an idle connection, for an errand; nullptr: there is none
  void leave(Stream& stream, bool broken);  // after that
  Limits limits(Moment deadline, const Cancel* cancel) const { return {deadline, cancel, &closed_}; }
  void close();
  void abandon() { inheritance_.close_all(); }
  bool forked() const { return getpid() != pid_; }

 private:
  Stream& claim(const Limits& limits);
  Stream* claim_idle();
  void release(Stream& stream);
  void invite(const std::shared_ptr<Transfer>& transfer);
  void help();
  void help_with(Transfer& transfer, Stream& stream);
  void drive(Transfer& transfer, Stream& stream, bool helps);
  void connect(Stream& stream, const Limits& limits);

 public:
  std::string told(const std::exception& error) const { return address_ + " port " + std::to_string(port_) + ": " + error.what(); }

 private:
  const std::string address_;
  const std::uint16_t port_;
  const std::shared_ptr<const Identity> identity_;
  const wire::Token whom_;
  const int pid_;
  Cancel closed_;
  Inheritance inheritance_;
  std::mutex mutex_;
  std::condition_variable idle_, invited_;
  std::vector<Stream> streams_;
  std::atomic<int> waiting_{0};  // who has no connection at all: helpers make room
  int callers_ = 0;
  std::deque<std::shared_ptr<Transfer>> invitations_;
  std::vector<std::thread> helpers_;
};

Client::Pool::Pool(std::string address, std::uint16_t port, std::shared_ptr<const Identity> identity, const std::string& whom,
                   std::size_t streams)
    : address_(std::move(address)),
      port_(port),
      identity_(std::move(identity)),
      whom_(parse_token(whom)),
      pid_(getpid()),
      inheritance_(most_streams + 1),
      streams_(streams) {
  inheritance_.add(closed_.descriptor());
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
    // A cancel rings no bell here, so it is looked for.
    idle_.wait_until(lock, std::min(limits.deadline, std::chrono::steady_clock::now() + look_at_cancel));
    --waiting_;
  }
}

void Client::Pool::release(Stream& stream) {
  const std::scoped_lock lock(mutex_);
  stream.busy = false;
  idle_.notify_one();
}

void Client::Pool::connect(Stream& stream, const Limits& limits) {
  if (stream.is_stale()) stream.hang_up(inheritance_);  // nothing has been asked for yet: a new one will do
  if (!stream.connected()) stream.connect(address_, port_, *identity_, whom_, limits, inheritance_);
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
    invite(transfer);  // not before: a helper might take the last place that the owner has
    drive(*transfer, *stream, false);
  } catch (const LinkError& error) {
    transfer->fail(error.outcome, Refusal::none, told(error));
    if (stream != nullptr) stream->hang_up(inheritance_);
  } catch (const gpu::Failure& failure) {
    transfer->fail(Outcome::failed, Refusal::none, failure.what());
    if (stream != nullptr) stream->hang_up(inheritance_);
  } catch (const std::exception& error) {  // no memory, no more threads
    transfer->fail(Outcome::lost, Refusal::none, told(error));
    if (stream != nullptr) stream->hang_up(inheritance_);
  }
  if (stream != nullptr) release(*stream);
  Result result = transfer->end();
  const std::scoped_lock lock(mutex_);
  if (--callers_ == 0) idle_.notify_all();
  return result;
}

Stream* Client::Pool::enter() {
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
  leave(*stream, true);
  return nullptr;
}

Stream& Client::Pool::enter_patiently(const Limits& limits) {
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
      leave(*stream, true);
      throw;
    }
    const std::scoped_lock lock(mutex_);
    if (--callers_ == 0) idle_.notify_all();
    throw;
  }
}

void Client::Pool::leave(Stream& stream, bool broken) {
  if (broken) stream.hang_up(inheritance_);
  release(stream);
  const std::scoped_lock lock(mutex_);
  if (--callers_ == 0) idle_.notify_all();
}

void Client::Pool::drive(Transfer& transfer, Stream& stream, bool helps) {
  std::optional<Staged> staged;
  if (transfer.device != gpu::none) staged.emplace(transfer.device);
  Staged* const through = staged ? &*staged : nullptr;
  std::deque<std::size_t> under_way;
  for (;;) {
    while (under_way.size() < ahead && !(helps && waiting_ > 0)) {
      const std::optional<std::size_t> index = transfer.take();
      if (!index) break;
      transfer.limits.check();
      stream.ask(transfer, *index, through);
      under_way.push_back(*index);
    }
    if (under_way.empty()) break;
    const Refusal refusal = stream.hear(transfer, under_way.front(), through);
    under_way.pop_front();
    if (refusal != Refusal::none) transfer.fail(Outcome::refused, refusal, in_words(refusal));
  }
  if (staged) staged->finish();
}

// One helper for each further connection, as long as there is something to do for it.
void Client::Pool::invite(const std::shared_ptr<Transfer>& transfer) {
  const std::size_t wanted = std::min(streams_.size(), transfer->pieces()) - 1;
  if (wanted == 0) return;
  const std::scoped_lock lock(mutex_);
  if (closed_.is_set()) return;
  while (helpers_.size() < streams_.size() - 1) helpers_.emplace_back([this] { help(); });
  for (std::size_t i = 0; i < wanted; ++i) invitations_.push_back(transfer);
  invited_.notify_all();
}

void Client::Pool::help() {
  begin_native_thread("monarch_stream");
  std::unique_lock lock(mutex_);
  for (;;) {
    invited_.wait(lock, [this] { return closed_.is_set() || !invitations_.empty(); });
    if (closed_.is_set()) return;
    const std::shared_ptr<Transfer> transfer = std::move(invitations_.front());
    invitations_.pop_front();
    Stream* stream = waiting_ == 0 ? claim_idle() : nullptr;
    if (stream == nullptr) continue;
    lock.unlock();
    help_with(*transfer, *stream);
    release(*stream);
    lock.lock();
  }
}

void Client::Pool::help_with(Transfer& transfer, Stream& stream) {
  // Whether there is one more connection is nobody's concern but ours: the transfer goes on without.
  try {
    connect(stream, limits(std::chrono::steady_clock::now() + helper_patience, nullptr));
  } catch (const std::exception&) {
    return stream.hang_up(inheritance_);
  }
  if (!transfer.join()) return;
  try {
    drive(transfer, stream, true);
  } catch (const std::exception& error) {
    const auto* link = dynamic_cast<const LinkError*>(&error);
    const bool here = dynamic_cast<const gpu::Failure*>(&error) != nullptr;
    transfer.fail(link != nullptr ? link->outcome : here ? Outcome::failed : Outcome::lost, Refusal::none, here ? error.what() : told(error));
    stream.hang_up(inheritance_);
  }
  transfer.leave();
}

void Client::Pool::close() {
  std::vector<std::thread> helpers;
  {
    const std::scoped_lock lock(mutex_);
    closed_.set();
    helpers.swap(helpers_);
    invitations_.clear();
    invited_.notify_all();
    idle_.notify_all();
  }
  for (std::thread& helper : helpers) helper.join();
  std::unique_lock lock(mutex_);
  idle_.wait(lock, [this] { return callers_ == 0; });
  for (Stream& stream : streams_) stream.hang_up(inheritance_);
}

namespace {

std::size_t checked(std::size_t streams) {
  if (streams == 0 || streams > most_streams) throw std::invalid_argument("a client has 1 to 64 streams");
  return streams;
}

}  // namespace

// An errand on its way. One thread at a time looks for the answer.
class Client::Sent : public Errand {
 public:
  Sent(Pool& pool, std::shared_ptr<Transfer> transfer) : pool_(pool), transfer_(std::move(transfer)) {}
  ~Sent() override {
    if (stream_ != nullptr && !pool_.forked()) pool_.leave(*stream_, true);
  }

  // False if there is no connection for it. Here, not before: whatever is thrown, the connection is left again.
  bool ask() {
    stream_ = pool_.enter();
    if (stream_ == nullptr) return false;
    attempt([&] { stream_->ask(*transfer_, 0, nullptr); });
    if (transfer_->failed()) end(true);
    return true;
  }

  std::optional<Result> fetch(Moment until, bool patiently) override {
    std::unique_lock lock(mutex_, std::defer_lock);
    if (patiently) {
      lock.lock();
    } else if (!lock.try_lock()) {
      return {};
    }
    if (!over_ && !hear(until)) return {};
    return std::exchange(result_, {});
  }
  bool is_over() const override { return over_; }

 private:
  bool hear(Moment until) {
    std::optional<Refusal> refusal;
    attempt([&] { refusal = stream_->hear_until(*transfer_, answer_, until); });
    if (!refusal && !transfer_->failed()) return false;
    if (refusal && *refusal != Refusal::none) transfer_->fail(Outcome::refused, *refusal, in_words(*refusal));
    end(!refusal);
    return true;
  }
  template <class Work>
  void attempt(Work&& work) {
    try {
      work();
    } catch (const LinkError& error) {
      transfer_->fail(error.outcome, Refusal::none, pool_.told(error));
    } catch (const std::exception& error) {  // no memory
      transfer_->fail(Outcome::lost, Refusal::none, pool_.told(error));
    }
  }
  void end(bool broken) {
    pool_.leave(*std::exchange(stream_, nullptr), broken);
    result_ = transfer_->end();
    over_ = true;
  }

  Pool& pool_;
  const std::shared_ptr<Transfer> transfer_;
  Stream* stream_ = nullptr;  // as long as the connection is ours
  Answer answer_;
  std::mutex mutex_;
  std::optional<Result> result_;
  std::atomic<bool> over_{false};
};

// A connection that was taken out of the pool.
class Client::Held : public Line {
 public:
  Held(Pool& pool, const Limits& limits) : pool_(pool), limits_(limits), stream_(pool.enter_patiently(limits)) {}
  ~Held() override { leave(); }

  void leave() override {
    if (left_ || pool_.forked()) return;
    left_ = true;
    pool_.leave(stream_, failed_ || !stream_.has_all());
  }

  Result ask(const StageRequest& request, const std::vector<Segment>& ranges) override {
    return attempt([&] {
      limits_.check();
      stream_.ask_staged(request, ranges, limits_);
      return Refusal::none;
    });
  }
  Result hear() override {
    return attempt([&] { return stream_.hear_staged(limits_); });
  }

 private:
  template <class Work>
  Result attempt(Work&& work) {
    try {
      const Refusal refusal = work();
      if (refusal == Refusal::none) return {};
      return {Outcome::refused, refusal, 0, 0, in_words(refusal)};
    } catch (const LinkError& error) {
      failed_ = true;
      return {error.outcome, Refusal::none, 0, 0, pool_.told(error)};
    } catch (const std::exception& error) {  // no memory
      failed_ = true;
      return {Outcome::lost, Refusal::none, 0, 0, pool_.told(error)};
    }
  }

  Pool& pool_;
  const Limits limits_;
  Stream& stream_;
  bool failed_ = false, left_ = false;
};

Client::Client(std::string address, std::uint16_t port, std::shared_ptr<const Identity> identity, const std::string& whom,
               std::size_t streams)
    : pool_(new Pool(std::move(address), port, std::move(identity), whom, checked(streams))) {}

Client::~Client() {
  if (pool_->forked()) {
    abandon();
    return;
  }
  pool_->close();
  delete pool_;
}

Result Client::read(const Ticket& ticket, const std::vector<Segment>& segments, Moment deadline, const Cancel* cancel) {
  return pool_->run(std::make_shared<Transfer>(Access::read, ticket, segments, pool_->limits(deadline, cancel)));
}

Result Client::write(const Ticket& ticket, const std::vector<Segment>& segments, Moment deadline, const Cancel* cancel) {
  return pool_->run(std::make_shared<Transfer>(Access::write, ticket, segments, pool_->limits(deadline, cancel)));
}

Result Client::atomic(const Ticket& ticket, std::uint64_t offset, Access access, std::uint64_t operand, std::uint64_t expected,
                      Moment deadline, const Cancel* cancel) {
  const std::vector<Segment> segments{{offset, nullptr, sizeof(std::uint64_t)}};
  const auto transfer = std::make_shared<Transfer>(access, ticket, segments, pool_->limits(deadline, cancel));
  transfer->operand = operand, transfer->expected = expected;
  return pool_->run(transfer);
}

std::unique_ptr<Errand> Client::begin(Access access, const Ticket& ticket, const std::vector<Segment>& segments, std::uint64_t operand,
                                      std::uint64_t expected, Moment deadline, const Cancel* cancel) {
  if (bytes_of(segments) > (access == Access::write ? errand_writes : errand_reads)) return nullptr;
  auto transfer = std::make_shared<Transfer>(access, ticket, segments, pool_->limits(deadline, cancel));
  if (transfer->pieces() != 1 || transfer->device != gpu::none) return nullptr;
  transfer->operand = operand, transfer->expected = expected;
  auto sent = std::make_unique<Sent>(*pool_, std::move(transfer));
  if (!sent->ask()) return nullptr;
  return sent;
}

std::unique_ptr<Line> Client::line(Moment deadline, const Cancel* cancel, Result& result) {
  try {
    return std::make_unique<Held>(*pool_, pool_->limits(deadline, cancel));
  } catch (const LinkError& error) {
    result = {error.outcome, Refusal::none, 0, 0, pool_->told(error)};
  } catch (const std::exception& error) {  // no memory, no descriptors
    result = {Outcome::lost, Refusal::none, 0, 0, pool_->told(error)};
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
