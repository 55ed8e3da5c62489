#include "memory/same_host.h"

#include <algorithm>
#include <array>
#include <cerrno>
#include <cstring>
#include <exception>
#include <iterator>
#include <thread>

#include <poll.h>
#include <sys/uio.h>
#include <unistd.h>

#include "native_thread.h"
#include "platform/process.h"
#include "shm/copy.h"

namespace monarch {

namespace {

constexpr std::uint64_t piece = 4 << 20;    // bytes between two checks of the transfer's state
constexpr std::uint64_t bounce_bytes = 1 << 20;
constexpr std::size_t most_parts = 256;     // of one system call
constexpr auto tick = std::chrono::milliseconds(20);  // the doorbell does not report the death of a peer, or a cancellation

constexpr std::uint64_t gpu_piece = 64 << 20;  // the same for copies by a GPU

Result ended(Outcome outcome, Refusal refusal = Refusal::none, int error = 0) { return {outcome, refusal, error}; }
Result failed(const std::string& text) { return {Outcome::failed, Refusal::none, 0, 0, text}; }

// Whether the process has ended, or runs another program, according to the kernel. `state` is set later, by the watcher
// thread: until then the pid may belong to another process, for example after this process was stopped for a while. The
// kernel does not reuse a pid before its pidfd is readable. A program's link also closes when exec replaces the
// program; without a pidfd that is the only sign.
bool has_ended(const Peer& peer) {
  // The watcher thread closes these descriptors, and their numbers may be reused; but it sets `state` before that, so
  // `state` is checked last.
  pollfd ends[] = {{__atomic_load_n(&peer.pidfd, __ATOMIC_RELAXED), POLLIN, 0}, {__atomic_load_n(&peer.link, __ATOMIC_RELAXED), hung_up, 0}};
  if (poll(ends, std::size(ends), 0) > 0) return true;
  return peer.state.load(std::memory_order_acquire) != Peer::alive;
}

// In a shorter time no process can end, be reaped by its parent, and have its pid reused by one with memory at the same
// address. So a recent check is not repeated: the system call would be a tenth of a small transfer.
constexpr auto pid_reuse_min = std::chrono::microseconds(50);

// The same, of some moment in the last `pid_reuse_min`.
bool may_have_ended(const Peer& peer) {
  struct Seen {
    const Peer* peer;
    std::uint32_t number;  // a new peer may have the address of an earlier one
    Clock::time_point alive;
  };
  thread_local std::array<Seen, 8> all{};
  Seen& seen = all[peer.number % all.size()];
  const Clock::time_point now = Clock::now();
  if (seen.peer == &peer && seen.number == peer.number && now - seen.alive < pid_reuse_min) return peer.state.load(std::memory_order_acquire) != Peer::alive;
  if (has_ended(peer)) return true;
  seen = {&peer, peer.number, now};
  return false;
}

// `device`: whose memory one of both is, or gpu::none.
void copy(int device, void* to, const void* from, std::uint64_t bytes) {
  if (device == gpu::none) {
    std::memcpy(to, from, bytes);
  } else {
    gpu::copy(device, to, from, bytes);
  }
}

// Split into `count` equal shares, in order; `count` is at most the number of bytes.
std::vector<std::vector<Segment>> shares_of(const std::vector<Segment>& segments, std::uint64_t count) {
  std::vector<std::vector<Segment>> shares(count);
  const std::uint64_t share = (bytes_of(segments) + count - 1) / count;
  std::uint64_t given = 0;
  for (const Segment& segment : segments) {
    for (std::uint64_t at = 0; at < segment.bytes;) {
      const std::uint64_t bytes = std::min(segment.bytes - at, share - given % share);
      shares[given / share].push_back({segment.offset + at, segment.local + at, bytes});
      at += bytes, given += bytes;
    }
  }
  return shares;
}

// Run `copy`(segments, stop) on shares of the segments, in at most `threads` threads, this one included, with at least
// `least` bytes each. Starting a thread costs as much as copying 300 KiB. After `stop` the outcome of a share is
// `done`.
template <class Copy>
Result by_threads(const std::vector<Segment>& segments, std::uint64_t threads, std::uint64_t least, const Copy& copy) {
  std::atomic<bool> stop{false};
  const std::uint64_t count = std::min(threads, bytes_of(segments) / least);
  if (count < 2) return copy(segments, stop);
  const std::vector<std::vector<Segment>> shares = shares_of(segments, count);
  std::vector<Result> results(count);
  const auto copy_share = [&](std::size_t i) {
    results[i] = copy(shares[i], stop);
    if (results[i].outcome != Outcome::done) stop.store(true, std::memory_order_relaxed);
  };
  std::vector<std::thread> others;
  others.reserve(count - 1);
  std::size_t begun = 1;
  try {
    for (; begun < count; ++begun) {
      others.emplace_back([&copy_share, begun] {
        begin_native_thread("monarch_copy");
        copy_share(begun);
      });
    }
  } catch (const std::exception&) {
    // No more threads, or no memory for one: the remaining shares run here.
  }
  copy_share(0);
  for (; begun < count; ++begun) copy_share(begun);
  for (std::thread& other : others) other.join();
  const auto failed = std::find_if(results.begin(), results.end(), [](const Result& result) { return result.outcome != Outcome::done; });
  return failed == results.end() ? Result{} : *failed;
}

}  // namespace

void CancelScope::cancel() {
  const std::lock_guard lock(mutex_);
  cancelled_.store(true);
  if (event_) event_->set();
}

const Cancel* CancelScope::event() const {
  const std::lock_guard lock(mutex_);
  if (!event_) {
    event_.emplace();
    if (cancelled_.load()) event_->set();
  }
  return &*event_;
}

struct SameHost::Transfer {
  std::shared_ptr<Peer> peer;
  TableMemory& table;
  const Ticket& ticket;
  Access access;
  const std::vector<Segment>& segments;
  const CancelScope& scope;
  Claimed claimed;

  // Why it can't go on.
  Result state() const {
    if (scope.is_cancelled()) return ended(Outcome::cancelled);
    if (peer->state.load(std::memory_order_acquire) != Peer::alive) return ended(Outcome::lost);
    if (claimed.entry() == nullptr) return ended(Outcome::refused, claimed.refusal());
    if (!claimed.is_registered()) return ended(Outcome::refused, Refusal::dropped);
    if (Clock::now() >= scope.deadline) return ended(Outcome::late);
    return {};
  }
  Result check() const {
    Result result = state();
    for (auto it = segments.begin(); result.outcome == Outcome::done && it != segments.end(); ++it) {
      const Refusal refusal = claimed.entry()->check(ticket, it->offset, it->bytes, access);
      if (refusal != Refusal::none) result = ended(Outcome::refused, refusal);
    }
    return result;
  }
};

// The same namespaces, the same user, no Yama and no seccomp filter in between: what it has registered shows it best,
// but may not be readable for other reasons; its own table is.
bool SameHost::can_read_memory(Peer& peer) {
  if (!kernel_) return false;
  int known = peer.readable.load(std::memory_order_relaxed);
  if (known == 0) {
    std::uint64_t seen = 0;
    const std::uint64_t at = peer.mapping->header().self.load(std::memory_order_relaxed);
    const iovec here{&seen, sizeof seen}, there{reinterpret_cast<void*>(at), sizeof seen};
    known = read_process(peer.pid, &here, 1, &there, 1) == sizeof seen && seen == at ? 1 : -1;
    peer.readable.store(known, std::memory_order_relaxed);
  }
  return known == 1;
}

std::optional<CopyMethod> SameHost::cpu_copy_method(Peer& peer, const Ticket& ticket) {
  TableMemory* table = table_of(peer);
  if (table == nullptr || ticket.slot >= most_registrations) return can_read_memory(peer) ? CopyMethod::kernel : CopyMethod::thread;
  const Entry& entry = table->entries[ticket.slot];
  if (entry.device() != gpu::none) return {};
  const bool mapped = entry.shared_at.load() != 0;
  return mapped ? CopyMethod::mapped : can_read_memory(peer) ? CopyMethod::kernel : CopyMethod::thread;
}

CopyMethod SameHost::copy_method(Peer& peer, const Ticket& ticket) {
  if (const std::optional<CopyMethod> copy_method = cpu_copy_method(peer, ticket)) return *copy_method;
  if (mappings_->external(peer, ticket) != nullptr) return CopyMethod::external;
  const TableMemory* table = table_of(peer);
  if (!ipc_ || table == nullptr || table->entries[ticket.slot].is_exported.load() == 0) return CopyMethod::thread;
  switch (mappings_->known(peer, *table, ticket)) {
    case IpcMappingCache::Known::nothing:
      return CopyMethod::unseen;
    case IpcMappingCache::Known::mapped:
      return CopyMethod::gpu;
    case IpcMappingCache::Known::refused:
      break;
  }
  return CopyMethod::thread;
}

std::string SameHost::why_not(Peer& peer, const Ticket& ticket) {
  const TableMemory* table = table_of(peer);
  if (!ipc_) return "MONARCH_GPU_IPC=0";
  if (table == nullptr || ticket.slot >= most_registrations) return {};
  if (table->entries[ticket.slot].is_exported.load() == 0) return "its driver does not export such memory";
  std::string said;
  mappings_->known(peer, *table, ticket, &said);
  return said;
}

Result SameHost::move(const std::shared_ptr<Peer>& peer, const Ticket& ticket, Access access, const std::vector<Segment>& segments, const CancelScope& scope) {
  TableMemory* table = table_of(*peer);
  if (table == nullptr) {
    return peer->state.load() == Peer::alive ? ended(Outcome::refused, Refusal::dropped) : ended(Outcome::lost);
  }
  Transfer transfer{peer, *table, ticket, access, segments, scope, Claimed(*table, ticket)};
  if (const Result result = transfer.check(); result.outcome != Outcome::done) return result;
  const Entry& entry = *transfer.claimed.entry();
  if (entry.device() != gpu::none) return by_gpu(transfer);
  const std::uint64_t shared_at = entry.shared_at.load(std::memory_order_relaxed), bytes = entry.bytes.load(std::memory_order_relaxed);
  if (shared_at != 0 && bytes <= peer->mapping->size() && shared_at <= peer->mapping->size() - bytes) {
    return by_mapping(transfer, peer->mapping->at(shared_at));
  }
  return can_read_memory(*peer) ? by_kernel(transfer, entry.address.load(std::memory_order_relaxed)) : by_thread(transfer);
}

// A copy past the cache: 64 MiB took 4.4 ms with one thread and 3.1 with two, 16 MiB no less with two.
Result SameHost::by_mapping(Transfer& transfer, const char* base) {
  return by_threads(transfer.segments, threads_, 4 * piece, [&](const std::vector<Segment>& segments, const std::atomic<bool>& stop) {
    return by_mapping(transfer, base, segments, stop);
  });
}

Result SameHost::by_mapping(const Transfer& transfer, const char* base, const std::vector<Segment>& segments, const std::atomic<bool>& stop) {
  std::uint64_t copied = 0;
  for (const Segment& segment : segments) {
    char* there = const_cast<char*>(base) + segment.offset;
    for (std::uint64_t at = 0; at < segment.bytes; at += piece) {
      const std::uint64_t bytes = std::min(piece, segment.bytes - at);
      const bool reads = transfer.access == Access::read;
      put(reads ? segment.local + at : there + at, reads ? there + at : segment.local + at, bytes, segment.bytes);
      if ((copied += bytes) < piece) continue;
      copied = 0;
      if (stop.load(std::memory_order_relaxed)) return {};
      if (const Result result = transfer.state(); result.outcome != Outcome::done) return result;
    }
  }
  return {};
}

Result SameHost::by_gpu(Transfer& transfer) {
  if (transfer.segments.empty()) return {};
  const int device = gpu::device_of(transfer.segments.front().local);
  if (device == gpu::none) return failed("it is memory of a GPU, and the memory here is not");
  try {
    const Entry& entry = *transfer.claimed.entry();
    if (const auto external = mappings_->external(*transfer.peer, transfer.ticket)) return by_import(transfer, external->base, device);
    if (ipc_ && entry.is_exported.load(std::memory_order_relaxed) != 0) {
      const std::shared_ptr<const IpcMappingCache::IpcMapping> import = mappings_->get(transfer.peer, transfer.table, transfer.ticket, device);
      if (import->base != nullptr) return by_import(transfer, import->base + transfer.table.exports[transfer.ticket.slot].offset, device);
    }
    return by_thread(transfer, device);
  } catch (const gpu::Failure& failure) {
    return failed(failure.what());
  }
}

// Two pieces are in progress at a time; none when this returns.
Result SameHost::by_import(Transfer& transfer, const char* base, int device) {
  const bool reads = transfer.access == Access::read;
  gpu::Copies copies(device);
  std::uint64_t begun = 0;  // of this piece
  int stream = 0;
  for (const Segment& segment : transfer.segments) {
    for (std::uint64_t at = 0; at < segment.bytes;) {
      const std::uint64_t bytes = std::min(gpu_piece - begun, segment.bytes - at);
      char* there = const_cast<char*>(base) + segment.offset + at;
      copies.begin(stream, reads ? segment.local + at : there, reads ? there : segment.local + at, bytes);
      at += bytes;
      if ((begun += bytes) < gpu_piece) continue;
      begun = 0, stream = 1 - stream;
      copies.finish(stream);
      if (const Result result = transfer.state(); result.outcome != Outcome::done) return result;
    }
  }
  for (int each = 0; each < gpu::Copies::stream_count; ++each) copies.finish(each);
  // If the peer has died meanwhile, the memory may belong to another process: the copied bytes are unknown.
  return has_ended(*transfer.peer) ? ended(Outcome::lost) : Result{};
}

// Memory limits the copy, and one core uses less than half of its bandwidth: 16 MiB took 2.9 ms with one
// thread and 1.3 with two, 64 MiB 14.5 and 9.4.
Result SameHost::by_kernel(Transfer& transfer, std::uint64_t base) {
  return by_threads(transfer.segments, threads_, piece, [&](const std::vector<Segment>& segments, const std::atomic<bool>& stop) {
    return by_kernel(transfer, base, segments, stop);
  });
}

// The kernel takes a pid, which may be reused after its owner has ended. If the owner is alive after a read, the pid
// was its own all the time: so each piece is checked afterwards, and bytes of another process are no success. A write
// can't be undone, so it is checked before. One gap remains: the writing thread stops between the check and the call,
// the owner ends, and another process gets its pid and has writable memory at that address. No call takes a pidfd
// instead, and only the parent can keep a pid from being reused.
Result SameHost::by_kernel(const Transfer& transfer, std::uint64_t base, const std::vector<Segment>& segments, const std::atomic<bool>& stop) {
  const bool reads = transfer.access == Access::read;
  std::array<iovec, most_parts> here, there;
  std::size_t segment = 0;
  std::uint64_t at = 0;  // in it
  while (segment < segments.size()) {
    std::size_t count = 0;
    std::uint64_t bytes = 0, from = at;
    for (std::size_t i = segment; i < segments.size() && count < most_parts && bytes < piece; ++i, from = 0) {
      const Segment& part = segments[i];
      const std::uint64_t length = std::min(part.bytes - from, piece - bytes);
      if (length == 0) continue;
      here[count] = {part.local + from, length};
      there[count++] = {reinterpret_cast<void*>(base + part.offset + from), length};
      bytes += length;
    }
    if (count == 0) break;
    if (!reads && may_have_ended(*transfer.peer)) return ended(Outcome::lost);
    const auto call = reads ? read_process : write_process;
    const ssize_t moved = call(transfer.peer->pid, here.data(), count, there.data(), count);
    const int error = moved < 0 ? errno : EFAULT;
    // Also where it failed: another process may have nothing at this address, or not permit access.
    if (moved <= 0 ? has_ended(*transfer.peer) : reads && may_have_ended(*transfer.peer)) return ended(Outcome::lost);
    if (moved <= 0) return error == ESRCH ? ended(Outcome::lost) : ended(Outcome::failed, Refusal::none, error);
    for (auto left = static_cast<std::uint64_t>(moved); segment < segments.size();) {
      const std::uint64_t rest = segments[segment].bytes - at;
      if (left < rest) {
        at += left;
        break;
      }
      left -= rest, at = 0, ++segment;
    }
    if (segment == segments.size() || stop.load(std::memory_order_relaxed)) break;
    if (const Result result = transfer.state(); result.outcome != Outcome::done) return result;
  }
  return {};
}

// A request to the peer's service thread, with a bounce buffer for its bytes. If the caller gives up while the thread
// serves it, both are released later.
class SameHost::ServiceRequest {
 public:
  ServiceRequest(std::shared_ptr<Host> host, std::uint64_t bounce_offset) : host_(std::move(host)), bounce_offset_(bounce_offset) {}
  ~ServiceRequest() {
    std::uint32_t state = Request::asked;
    if (request_ == nullptr || request_->state.compare_exchange_strong(state, Request::idle) || state != Request::serving) {
      if (request_ != nullptr) release_request(*request_);
      if (bounce_offset_ != 0) host_->release(bounce_offset_);
      return;
    }
    const auto served = [request = request_, peer = peer_] {
      if (peer->ended.load(std::memory_order_acquire)) return true;  // the process itself has ended: it writes to no memory any more
      if (request->state.load(std::memory_order_acquire) == Request::serving) return false;
      release_request(*request);
      return true;
    };
    host_->release_when_unused(bounce_offset_ == 0 ? std::vector<std::uint64_t>{} : std::vector{bounce_offset_}, served);
  }
  ServiceRequest(const ServiceRequest&) = delete;
  ServiceRequest& operator=(const ServiceRequest&) = delete;

  char* bounce_buffer() const { return host_->arena().mapping().at(bounce_offset_); }
  // Fill in the request, submit it and wait for the reply.
  Result submit_and_wait(Transfer& transfer, std::uint64_t offset, std::uint64_t bytes, std::uint64_t operand = 0, std::uint64_t expected = 0);
  std::uint64_t found() const { return request_->found; }

 private:
  std::shared_ptr<Host> host_;
  std::uint64_t bounce_offset_;  // in our arena; 0: none
  Request* request_ = nullptr;
  std::shared_ptr<Peer> peer_;
};

Result SameHost::ServiceRequest::submit_and_wait(Transfer& transfer, std::uint64_t offset, std::uint64_t bytes, std::uint64_t operand, std::uint64_t expected) {
  peer_ = transfer.peer;
  while (request_ == nullptr && (request_ = take_request(transfer.table)) == nullptr) {
    if (const Result result = transfer.state(); result.outcome != Outcome::done) return result;
    usleep(100);  // all requests are in use; one will end soon
  }
  Request& request = *request_;
  std::memcpy(request.token, host_->token().data(), sizeof request.token);
  request.ticket = transfer.ticket, request.access = transfer.access, request.refusal = Refusal::none;
  request.offset = offset, request.bytes = bytes, request.bounce_offset = bounce_offset_;
  request.operand = operand, request.expected = expected;
  request.state.store(Request::asked, std::memory_order_release);
  transfer.table.doorbell.ring();
  FutexWaiter waiter(request.doorbell, true);
  const auto done = [&] { return request.state.load(std::memory_order_acquire) == Request::served; };
  while (!done()) {
    if (const Result result = transfer.state(); result.outcome != Outcome::done) return result;
    waiter.wait(done, std::min(transfer.scope.deadline, Clock::now() + tick));
  }
  request.state.store(Request::idle, std::memory_order_relaxed);
  return request.refusal == Refusal::none ? Result{} : ended(Outcome::refused, request.refusal);
}

Result SameHost::by_thread(Transfer& transfer, int device) {
  transfer.claimed.release();  // the thread holds each piece while it copies it
  const std::uint64_t at_most = std::max_element(transfer.segments.begin(), transfer.segments.end(), [](auto& a, auto& b) {
                                  return a.bytes < b.bytes;
                                })->bytes;
  const std::uint64_t size = std::min(at_most, bounce_bytes), bounce_offset = host_->allocate(size);
  if (bounce_offset == 0) return ended(Outcome::failed, Refusal::none, ENOMEM);
  ServiceRequest request_to_owner(host_, bounce_offset);
  const bool reads = transfer.access == Access::read;
  for (const Segment& segment : transfer.segments) {
    for (std::uint64_t at = 0; at < segment.bytes; at += size) {
      const std::uint64_t bytes = std::min(size, segment.bytes - at);
      if (!reads) copy(device, request_to_owner.bounce_buffer(), segment.local + at, bytes);
      if (const Result result = request_to_owner.submit_and_wait(transfer, segment.offset + at, bytes); result.outcome != Outcome::done) return result;
      if (reads) copy(device, segment.local + at, request_to_owner.bounce_buffer(), bytes);
    }
  }
  return {};
}

Result SameHost::change(const std::shared_ptr<Peer>& peer, const Ticket& ticket, Access access, std::uint64_t offset,
                    std::uint64_t operand, std::uint64_t expected, const CancelScope& scope) {
  TableMemory* table = table_of(*peer);
  if (table == nullptr) return peer->state.load() == Peer::alive ? ended(Outcome::refused, Refusal::dropped) : ended(Outcome::lost);
  const std::vector<Segment> segments{{offset, nullptr, 8}};
  Transfer transfer{peer, *table, ticket, access, segments, scope, Claimed(*table, ticket)};
  if (const Result result = transfer.check(); result.outcome != Outcome::done) return result;
  const std::uint64_t shared_at = transfer.claimed.entry()->shared_at.load(std::memory_order_relaxed);
  if (shared_at != 0 && shared_at + offset <= peer->mapping->size() - 8) {
    return {Outcome::done, Refusal::none, 0, do_atomic(peer->mapping->at(shared_at + offset), access, operand, expected)};
  }
  ServiceRequest request_to_owner(host_, 0);
  Result result = request_to_owner.submit_and_wait(transfer, offset, 8, operand, expected);
  if (result.outcome == Outcome::done) result.found = request_to_owner.found();
  return result;
}

Service::Service(std::shared_ptr<Table> table, std::shared_ptr<IpcMappingCache> mappings)
    : table_(std::move(table)), mappings_(std::move(mappings)), thread_([this] { run(); }) {}

Service::~Service() {
  ending_.store(true);
  table_->memory().doorbell.wake();
  thread_.join();
}

void Service::run() {
  FutexWaiter waiter(table_->memory().doorbell, true);
  while (!ending_.load(std::memory_order_acquire)) {
    const bool unmap = table_->memory().unmap_requested.exchange(0, std::memory_order_acquire) != 0;
    if (unmap) mappings_->sweep();
    if (serve_all() || unmap) {
      waiter.reset();
      continue;
    }
    const auto asked = [&] {
      if (ending_.load(std::memory_order_acquire) || table_->memory().unmap_requested.load(std::memory_order_acquire) != 0) return true;
      const auto& requests = table_->memory().requests;
      return std::any_of(std::begin(requests), std::end(requests), [](const Request& r) { return r.state.load() == Request::asked; });
    };
    waiter.wait(asked, Clock::time_point::max());
  }
}

bool Service::serve_all() {
  bool served = false;
  for (Request& request : table_->memory().requests) {
    std::uint32_t state = Request::asked;
    if (request.state.load(std::memory_order_relaxed) != state || !request.state.compare_exchange_strong(state, Request::serving)) continue;
    serve(request);
    request.state.store(Request::served, std::memory_order_seq_cst);
    request.doorbell.ring();
    served = true;
  }
  return served;
}

void Service::serve(Request& request) {
  const Ticket ticket = request.ticket;  // copied once, because the requesting process may change it
  const Access access = request.access;
  const std::uint64_t offset = request.offset, bytes = request.bytes, bounce_offset = request.bounce_offset;
  const bool atomic = access == Access::fetch_add || access == Access::compare_and_swap;
  std::shared_ptr<Peer> peer;
  if (!atomic) peer = table_->host().accepted(std::string(request.token, sizeof request.token), 1.0);
  if (!atomic && (peer == nullptr || bytes > bounce_bytes || bounce_offset > peer->mapping->size() - bounce_bytes)) {
    request.refusal = Refusal::out_of_range;
    return;
  }
  char* data = nullptr;
  request.refusal = table_->hold(ticket, offset, bytes, access, &data);
  if (request.refusal != Refusal::none) return;
  if (atomic) {
    request.found = do_atomic(data, access, request.operand, request.expected);
  } else {
    char* theirs = peer->mapping->at(bounce_offset);
    const bool reads = access == Access::read;
    try {
      copy(table_->device(ticket), reads ? theirs : data, reads ? data : theirs, bytes);
    } catch (const gpu::Failure&) {
      request.refusal = Refusal::device;
    }
  }
  table_->release(ticket);
}

}  // namespace monarch
