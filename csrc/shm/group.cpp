#include "shm/group.h"

#include <pthread.h>

#include <algorithm>
#include <cstring>
#include <new>
#include <utility>

#include "platform/process.h"

namespace monarch {

namespace {

// Where things lie behind a ControlBlock of n ranks.
struct Layout {
  explicit Layout(std::size_t n)
      : closed_flags(sizeof(ControlBlock)),
        tables(closed_flags + whole_lines(n * sizeof(std::uint32_t))),
        offers(tables + whole_lines(4 * n * sizeof(std::uint64_t))),
        send_rings(offers + whole_lines(2 * (n + 1) * sizeof(std::uint64_t))),
        read_counts(send_rings + n * sizeof(SendRing)),
        slots(read_counts + n * sizeof(ReadCount)),
        stage(slots + 2 * slot_bytes) {}
  std::size_t closed_flags, tables, offers, send_rings, read_counts, slots, stage;
};

}  // namespace

// Control blocks ---------------------------------------------------------------------------------------------------

std::uint64_t Group::allocate_control_block(Host& host, int size) {
  const Layout layout(size);
  std::uint64_t offset = 0;
  std::size_t stage = 2 * largest_stage;
  while (offset == 0 && stage > smallest_stage) {
    stage /= 2;
    offset = host.allocate(layout.stage + stage);
  }
  if (offset == 0) return 0;
  char* memory = host.arena().mapping().at(offset);
  std::memset(memory, 0, layout.slots);
  ControlBlock* control_block = new (memory) ControlBlock{};
  control_block->stage = static_cast<std::uint32_t>(stage);
  control_block->processors = processors();
  control_block->self = reinterpret_cast<std::uintptr_t>(memory);
  return offset;
}

std::atomic<std::uint32_t>* Group::closed_flags(int rank) const {
  return reinterpret_cast<std::atomic<std::uint32_t>*>(at(rank) + Layout(size_).closed_flags);
}

std::uint64_t* Group::table(int rank, std::uint64_t sequence) const {
  return reinterpret_cast<std::uint64_t*>(at(rank) + Layout(size_).tables) + (sequence & 1) * 2 * size_;
}

std::uint64_t* Group::offered(int rank, std::uint64_t sequence) const {
  return reinterpret_cast<std::uint64_t*>(at(rank) + Layout(size_).offers) + (sequence & 1) * (size_ + 1);
}

char* Group::slot(int rank, std::uint64_t sequence) const {
  return at(rank) + Layout(size_).slots + (sequence & 1) * slot_bytes;
}

char* Group::stage(int rank, std::uint64_t position) const {
  return at(rank) + Layout(size_).stage + (position & (stage_ - 1));
}

Group::Group(std::shared_ptr<Host> host, int rank, std::vector<std::shared_ptr<Peer>> peers,
             std::vector<std::uint64_t> control_blocks, std::uint64_t read_from, std::string label)
    : host_(std::move(host)),
      rank_(rank),
      size_(static_cast<int>(control_blocks.size())),
      peers_(std::move(peers)),
      control_blocks_(std::move(control_blocks)),
      stage_(largest_stage),
      oversubscribed_(false),
      from_(size_),
      sources_(size_),
      read_from_(read_from),
      label_(std::move(label)) {
  for (int r = 0; r < size_; ++r) {
    const Mapping& arena = r == rank_ ? host_->arena().mapping() : *peers_[r]->mapping;
    arenas_.push_back(arena.at(0));
    bases_.push_back(arena.at(control_blocks_[r]));
    // Where the stages or the processors differ, all ranks still come to the same plans.
    stage_ = std::min<std::uint64_t>(stage_, control_block(r).stage);
    oversubscribed_ |= size_ > static_cast<int>(control_block(r).processors);
  }
  control_block(rank_).reads = read_from_ != 0 && probe_reads();
  p2p_.emplace(*host_, rank_, p2p_layout());
}

P2pChannels::Layout Group::p2p_layout() const {
  P2pChannels::Layout layout{arenas_, {}, {}, [this](int r) { ring(r); }};
  for (int r = 0; r < size_; ++r) {
    layout.send_rings.push_back(reinterpret_cast<SendRing*>(at(r) + Layout(size_).send_rings));
    layout.read_counts.push_back(reinterpret_cast<ReadCount*>(at(r) + Layout(size_).read_counts));
  }
  return layout;
}

Group::~Group() {
  close();
  recording_.stop();
}

// Memory order: a thread that reads a counter also sees what was written before it.
bool Group::all_reach(std::atomic<std::uint64_t> ControlBlock::*counter, std::uint64_t value) const {
  for (int r = 0; r < size_; ++r) {
    if ((control_block(r).*counter).load(std::memory_order_acquire) < value) return false;
  }
  return true;
}

void Group::ring() const {
  std::atomic_thread_fence(std::memory_order_seq_cst);
  for (int r = 0; r < size_; ++r) {
    if (r == rank_) continue;
    Doorbell& doorbell = peers_[r]->mapping->header().doorbell;
    if (doorbell.sleepers.load(std::memory_order_relaxed) != 0) doorbell.wake();
  }
}

void Group::ring(int rank) const { (rank == rank_ ? host_->doorbell() : peers_[rank]->mapping->header().doorbell).ring(); }

// The queue --------------------------------------------------------------------------------------------------------

void Group::submit(const std::shared_ptr<Operation>& operation) {
  const std::lock_guard lock(mutex_);
  departures_ = 0;  // check all again: earlier checks did not cover this operation
  const Collective c = operation->header.collective;
  if (is_point_to_point(c)) {
    p2p_->submit(operation);
  } else {
    queue_.push_back(operation);
    submitted_.fetch_add(1, std::memory_order_relaxed);
  }
  if (recording_.is_on()) record_begin(*operation);
}

void Group::record_as(const std::string& name, int rank, std::uint64_t identity) {
  const std::lock_guard lock(mutex_);
  recording_.start(name, static_cast<std::uint32_t>(rank), identity);
}

telemetry::OperationRecording::What Group::what_of(const Operation& op) {
  const Header& header = op.header;
  const bool has_data = header.collective != Collective::barrier;
  const auto dtype = static_cast<std::uint16_t>(has_data ? static_cast<int>(header.dtype) + 1 : 0);
  return {static_cast<std::size_t>(header.collective), is_point_to_point(header.collective), header.bytes,
          telemetry::payload(dtype, telemetry::Route::shm)};
}

void Group::record_begin(Operation& op) {
  const auto what = what_of(op);
  const std::uint64_t reference = what.is_message ? static_cast<std::uint64_t>(op.header.root) : submitted_.load(std::memory_order_relaxed);
  const bool alone = what.is_message ? messages_++ == 0 : queue_.size() == 1;
  op.recorded = recording_.begin(what, name_of(op.header.collective), reference, alone);
}

// Before the operation is done: its owner may free it then.
void Group::record_end(const Operation& op) {
  const auto what = what_of(op);
  const bool last = what.is_message ? --messages_ == 0 : queue_.size() <= 1;
  recording_.end(what, op.recorded, op.failure.has_value(), last);
  if (last || what.is_message) return;
  const Operation& next = *queue_[1];
  recording_.show(what_of(next), next.recorded);
}

bool Group::advance(bool before_sleep) {
  std::unique_lock lock(mutex_, std::defer_lock);
  if (before_sleep) {
    lock.lock();
  } else if (!lock.try_lock()) {
    return false;
  }
  bool moved = look();
  if (!moved && !broken_ && (host_->departures() != departures_ || any_rank_failed())) moved = detect_failures();
  if (!broken_) return moved;
  const auto end = [&](const std::shared_ptr<Operation>& op) {
    op->failure = broken_;
    finish(*op);
    moved = true;
  };
  for (; !queue_.empty(); queue_.pop_front()) end(queue_.front());
  for (const auto& op : p2p_->pending()) {
    p2p_->drop(*op);
    end(op);
  }
  return moved;
}

bool Group::look() {
  if (broken_) return false;
  bool moved = p2p_->advance([this](Operation& op) { finish(op); });
  while (!queue_.empty()) {
    const auto op = queue_.front();  // keeps it alive when its owner lets go as soon as it is done
    moved |= step(*op);
    if (!op->done.load(std::memory_order_relaxed)) break;
    queue_.pop_front();
    moved = true;
  }
  return moved;
}

void Group::wait(Operation& operation, Clock::time_point limit) {
  wait(operation, limit, FutexWaiter(host_->doorbell(), oversubscribed_), false);
}

void Group::wait_asleep(Operation& operation, Clock::time_point limit) {
  FutexWaiter waiter(host_->doorbell(), oversubscribed_);
  waiter.sleep_next();
  wait(operation, limit, waiter, true);
}

void Group::wait(Operation& operation, Clock::time_point limit, FutexWaiter waiter, bool until_signal) {
  const auto look = [&] { return operation.done.load(std::memory_order_acquire) || advance(true); };
  operation.waiters.fetch_add(1, std::memory_order_relaxed);
  while (!operation.done.load(std::memory_order_acquire)) {
    if (advance()) {
      waiter.reset();
      continue;
    }
    if (!is_point_to_point(operation.header.collective)) waiting_thread_.store((std::uint64_t)pthread_self(), std::memory_order_relaxed);
    if (!waiter.wait(look, std::min(limit, operation.deadline))) {
      if (Clock::now() >= operation.deadline) expire(operation);
      if (Clock::now() >= limit) break;
    } else if (until_signal && waiter.interrupted()) {
      break;
    }
  }
  operation.waiters.fetch_sub(1, std::memory_order_relaxed);
  waiting_thread_.store(0, std::memory_order_relaxed);
  if (!operation.done.load(std::memory_order_acquire)) host_->local_doorbell().ring();  // the engine drives it again
}

void Group::wait_briefly(Operation& operation, Clock::duration limit) {
  if (!spin(operation)) wait(operation, Clock::now() + limit);
}

bool Group::spin(const Operation& operation) {
  for (int looks = oversubscribed_ ? 1 : 100; looks > 0; --looks) {
    advance();
    if (operation.done.load(std::memory_order_acquire)) return true;
  }
  return false;
}

// By what all ranks agree on. An all_to_all has other sizes on each rank.
bool Group::is_small(const Operation& operation) const {
  const Header& header = operation.header;
  return header.collective != Collective::all_to_all && whole_lines(header.bytes) * static_cast<std::uint64_t>(size_) <= slot_bytes;
}

void Group::finish_by(Operation& operation, Clock::time_point deadline) {
  operation.deadline = deadline;
  wait(operation);
}

void Group::finish(Operation& op) {
  if (op.recorded.ticks != 0) record_end(op);
  op.done.store(true, std::memory_order_release);
  // The waiting thread may be another thread of this process.
  host_->doorbell().ring();
  host_->local_doorbell().ring();
}

// Steps ------------------------------------------------------------------------------------------------------------

bool Group::step(Operation& op) {
  bool moved = false;
  // A rank that failed the group does not return: an operation that has not started need not start.
  if (op.state == Operation::queued && !any_rank_failed()) moved = enter(op);
  if (op.state == Operation::entering && all_reach(&ControlBlock::entered, op.sequence)) {
    moved = true;
    if (!compare(op)) {
      finish(op);
      return true;
    }
    plan(op);
  }
  if (op.state == Operation::moving && !op.done.load(std::memory_order_relaxed)) moved |= move(op);
  return moved;
}

bool Group::enter(Operation& op) {
  op.sequence = ++sequence_;
  offer(op);
  control_block(rank_).headers[op.sequence & 1] = op.header;
  control_block(rank_).entered.store(op.sequence, std::memory_order_release);
  ring();
  op.state = Operation::entering;
  return true;
}

bool Group::compare(Operation& op) {
#ifdef MONARCH_UNCHECKED  // benchmarks/call_comparison.py measures the cost of the comparison
  (void)op;
  return true;
#endif
  const auto at = op.sequence & 1;
  const auto called = [&](int r) {
    Header header = control_block(r).headers[at];
    header.offer = Offer::stage;
    return header;
  };
  int odd = -1;
  for (int r = 1; r < size_ && odd < 0; ++r) {
    if (!(called(r) == called(0))) odd = r;
  }
  if (odd >= 0) {
    std::string text = "the ranks disagree about operation " + std::to_string(op.sequence) + " of the group:";
    for (int r = 0; r < size_; ++r) text += (r ? "; rank " : " rank ") + std::to_string(r) + " called " + describe(called(r));
    op.failure = Failure{Failure::mismatch, -1, text};
    return false;
  }
  if (op.header.collective == Collective::all_to_all) {
    for (int a = 0; a < size_; ++a) {
      for (int b = 0; b < size_; ++b) {
        const auto sent = table(a, op.sequence)[b], awaited = table(b, op.sequence)[size_ + a];
        if (sent == awaited) continue;
        op.failure = Failure{Failure::mismatch, -1,
                             "all_to_all: rank " + std::to_string(a) + " sends " + std::to_string(sent) + " bytes to rank " +
                                 std::to_string(b) + ", which expects " + std::to_string(awaited)};
        return false;
      }
    }
  }
  return true;
}

// A large operation: fill the own buffer, take from all ranks' buffers. all_reduce has a step in between, in which each
// rank reduces its slice of the chunk for all. Chunk numbers continue from one operation to the next.
bool Group::move(Operation& op) {
  if (op.algorithm == Algorithm::direct) return move_direct(op);
  const bool two_shot = op.algorithm == Algorithm::two_shot;
  ControlBlock& mine = control_block(rank_);
  bool moved = false;
  const auto end_of = [&op](std::uint64_t chunk) { return op.base + (chunk + 1) * op.stride; };
  const auto publish = [&](std::atomic<std::uint64_t>& counter, std::uint64_t& count) {
    counter.store(end_of(count++), std::memory_order_release);
    ring();
    moved = true;
  };
  for (bool again = true; again;) {
    again = false;
    // The buffer holds an older chunk until all ranks have taken from it.
    const std::uint64_t end = end_of(op.filled);
    if (op.filled < op.chunks && (end <= stage_ || all_reach(&ControlBlock::taken, end - stage_))) {
      fill(op, op.filled, stage(rank_, end - op.stride), false);
      publish(mine.filled, op.filled);
      again = true;
    }
    if (two_shot && op.reduced < op.filled && all_reach(&ControlBlock::filled, end_of(op.reduced))) {
      reduce_slice(op, op.reduced, stage(rank_, end_of(op.reduced) - op.stride));
      publish(mine.reduced, op.reduced);
      again = true;
    }
    const std::uint64_t ready = two_shot ? op.reduced : op.filled;
    if (op.taken < ready && all_reach(two_shot ? &ControlBlock::reduced : &ControlBlock::filled, end_of(op.taken))) {
      if (two_shot) {
        collect(op, op.taken);
      } else {
        take(op, op.taken, false);
      }
      publish(mine.taken, op.taken);
      again = true;
    }
  }
  if (op.taken == op.chunks) {
    position_ = op.base + op.chunks * op.stride;
    finish(op);
  }
  return moved;
}

// Faults -----------------------------------------------------------------------------------------------------------

void Group::fail(Failure failure) {
  broken_ = std::move(failure);
  const auto kind = static_cast<std::uint32_t>(broken_->kind);
  control_block(rank_).culprit.store(kind << 24 | static_cast<std::uint32_t>(broken_->rank + 1), std::memory_order_release);
  ring();
}

bool Group::any_rank_failed() const {
  for (int r = 0; r < size_; ++r) {
    if (r != rank_ && control_block(r).culprit.load(std::memory_order_acquire) != 0) return true;
  }
  return false;
}

bool Group::all_left() const {
  return std::all_of(peers_.begin(), peers_.end(), [](const auto& peer) { return !peer || peer->state.load() != Peer::alive; });
}

// Nothing moves, and a rank has ended or failed: find the operations that this affects. A rank may have done its part
// just before it ended, after our last check; so we check once more between finding a failure and acting.
bool Group::detect_failures() {
  const std::uint32_t departures = host_->departures();
  std::vector<std::shared_ptr<Operation>> all = p2p_->pending();
  if (!queue_.empty()) all.push_back(queue_.front());
  for (const auto& op : all) {
    const auto failure = find_failure(*op);
    if (!failure) continue;
    if (look() || broken_) return true;
    const Collective c = op->header.collective;
    if (failure->kind == Failure::left && (c == Collective::send || c == Collective::recv)) {
      op->failure = failure;  // the others may well go on without it
      p2p_->drop(*op);
      finish(*op);
    } else {
      fail(*failure);
    }
    return true;
  }
  departures_ = departures;
  return false;
}

// The rank that caused `op` to stop. A rank that failed the group, or ended after that, names the first cause in its
// control block, and the control block outlives it: all ranks report the first cause, not the last.
std::optional<Failure> Group::find_failure(const Operation& op) {
  const Collective c = op.header.collective;
  const bool alone = c == Collective::send || c == Collective::recv;  // needs one other rank, or any
  for (int r = 0; r < size_; ++r) {
    if (r == rank_) continue;
    const auto& word = control_block(r).culprit;
    std::uint32_t said = word.load(std::memory_order_acquire);
    // It may have named the cause and ended since: the cause is in its control block when its end is known here.
    if (said == 0 && peers_[r]->state.load(std::memory_order_acquire) != Peer::alive) said = word.load(std::memory_order_acquire);
    const int blamed = static_cast<int>(said & 0xffffffu) - 1;
    const int culprit = blamed >= 0 ? blamed : r;
    const bool closed = said >> 24 == Failure::closed;
    if (closed && alone && op.header.root != r) continue;  // it may have done its part already
    if (culprit != rank_) {
      const Peer& peer = *peers_[culprit];
      const int state = peer.state.load(std::memory_order_acquire);
      if (state == Peer::dead) return Failure{Failure::dead, culprit, reason(culprit) + peer.exit_description};
      const bool needed = !alone || op.header.root == culprit || (op.header.root < 0 && all_left());
      if (state == Peer::left && needed) return Failure{Failure::left, culprit, reason(culprit) + "ended without " + describe(op)};
      if (state == Peer::left && said != 0 && !closed) {
        return Failure{Failure::left, culprit, reason(culprit) + "ended, and rank " + std::to_string(r) + " gave up on the group for it, before the end of " + describe(op)};
      }
      if (closed) return Failure{Failure::left, r, reason(r) + "closed the group without " + describe(op)};
      if (said >> 24 == Failure::dead || said >> 24 == Failure::left) continue;  // its end will be reported in a moment
    }
    if (said >> 24 == Failure::unreadable) return Failure{Failure::unreadable, culprit, unreadable_text};
    if (said != 0) {
      if (culprit == r) return Failure{Failure::late, r, "gave up on " + describe(op)};
      return Failure{Failure::late, culprit, "kept rank " + std::to_string(r) + " waiting until it gave up"};
    }
  }
  return std::nullopt;
}

void Group::expire(const Operation& op) {
  const std::lock_guard lock(mutex_);
  if (op.done.load(std::memory_order_relaxed) || broken_) return;
  Failure failure{Failure::late, -1, "did not enter " + describe(op)};
  const auto beyond = std::chrono::duration_cast<std::chrono::milliseconds>(Clock::now() - op.deadline);
  if (beyond > std::chrono::milliseconds(200)) {
    // The others have waited for this rank all the time; a rank that is late now may be late because of this one.
    failure = {Failure::late, rank_, "was stopped itself, or had no processor, until " + std::to_string(beyond.count()) +
                                         " ms after the end of the time for " + describe(op)};
  } else if (op.header.collective == Collective::recv) {
    failure = {Failure::late, op.header.root, "did not send what " + describe(op) + " waits for"};
  } else if (op.header.collective == Collective::send) {
    failure = {Failure::late, op.header.root, "did not take what " + describe(op) + " has for it"};
  } else {
    // A queued operation is late because the first one is.
    const Operation& first = queue_.empty() ? op : *queue_.front();
    failure.text = "did not enter " + describe(first);
    for (int r = 0; r < size_ && failure.rank < 0; ++r) {
      if (r != rank_ && control_block(r).entered.load(std::memory_order_acquire) < first.sequence) failure.rank = r;
    }
    if (failure.rank < 0) {
      failure.rank = straggler(first);
      failure.text = (failure.rank < 0 ? "" : "does not go on with ") + describe(first) +
                     (failure.rank < 0 ? " did not end, though all ranks have entered it" : ", which it has entered");
    }
  }
  fail(failure);
}

// The rank that delays an operation which all ranks have entered, or -1. It does not wait for another rank, because
// this rank has already passed the same point.
int Group::straggler(const Operation& op) const {
  if (op.state != Operation::moving) return -1;
  const auto behind = [this](std::atomic<std::uint64_t> ControlBlock::*counter, std::uint64_t position) {
    for (int r = 0; r < size_; ++r) {
      if (r != rank_ && (control_block(r).*counter).load(std::memory_order_acquire) < position) return r;
    }
    return -1;
  };
  const std::uint64_t end = op.base + (op.algorithm == Algorithm::direct ? 1 : op.taken + 1) * op.stride;
  int late = -1;
  if (op.algorithm == Algorithm::direct) {
    if (op.header.collective == Collective::all_reduce) late = behind(&ControlBlock::reduced, end);
    return late < 0 ? behind(&ControlBlock::taken, end) : late;
  }
  if (end > stage_) late = behind(&ControlBlock::taken, end - stage_);  // no rank can fill the chunk yet
  if (late < 0) late = behind(&ControlBlock::filled, end);
  return late < 0 && op.algorithm == Algorithm::two_shot ? behind(&ControlBlock::reduced, end) : late;
}

void Group::expire_if_due(Operation& operation) {
  if (Clock::now() >= operation.deadline) expire(operation);
}

void Group::set_reason(const std::string& text) {
  const std::lock_guard lock(mutex_);
  auto& reason = control_block(rank_).reason;
  if (closed_ || text.empty() || reason[0] != '\0') return;  // the control block may be another group's; the first cause stays
  const std::size_t length = std::min(text.size(), reason.size() - 1);
  std::memcpy(reason.data() + 1, text.data() + 1, length - 1);
  reason[length] = '\0';
  // The first byte comes last: if this process is killed in between, its peers see no text and not a part of one.
  __atomic_store_n(&reason[0], text[0], __ATOMIC_RELEASE);  // not std::atomic_ref, which older releases of libc++ lack
}

// Text of the failure on a rank; the text of how the rank ended follows it.
std::string Group::reason(int rank) const {
  auto& text = control_block(rank).reason;
  if (__atomic_load_n(&text[0], __ATOMIC_ACQUIRE) == '\0') return "";
  return std::string(text.data(), strnlen(text.data(), text.size())) + ", and ";
}

void Group::set_place(std::uint64_t sequence, const std::string& text) {
  const std::lock_guard lock(mutex_);
  if (closed_) return;
  auto& block = control_block(rank_);
  const std::size_t length = std::min(text.size(), block.place.size() - 1);
  block.placed.store(0, std::memory_order_relaxed);
  std::atomic_thread_fence(std::memory_order_release);
  std::memcpy(block.place.data(), text.data(), length);
  block.place[length] = '\0';
  block.placed.store(sequence, std::memory_order_release);
}

std::vector<std::string> Group::places(std::uint64_t sequence) {
  const std::lock_guard lock(mutex_);
  std::vector<std::string> found(static_cast<std::size_t>(size_));
  if (closed_) return found;
  for (int r = 0; r < size_; ++r) {
    const auto& block = control_block(r);
    if (block.placed.load(std::memory_order_acquire) != sequence) continue;
    std::string text(block.place.data(), strnlen(block.place.data(), block.place.size()));
    std::atomic_thread_fence(std::memory_order_acquire);
    if (block.placed.load(std::memory_order_relaxed) == sequence) found[static_cast<std::size_t>(r)] = std::move(text);
  }
  return found;
}

void Group::close() {
  {
    const std::lock_guard lock(mutex_);
    if (closed_) return;
    closed_ = true;
    if (!broken_) fail(Failure{Failure::closed, rank_, "closed the group"});
  }
  advance();  // ends what is queued
  // The others may still read the control block and the stage of this rank; when the last has closed, the memory is free again.
  for (int r = 0; r < size_; ++r) {
    if (r != rank_) closed_flags(r)[rank_].store(1, std::memory_order_release);
  }
  const auto unused = [flags = closed_flags(rank_), peers = peers_] {
    for (std::size_t r = 0; r < peers.size(); ++r) {
      if (peers[r] && flags[r].load(std::memory_order_acquire) == 0 && peers[r]->state.load() == Peer::alive) return false;
    }
    return true;
  };
  std::vector<std::uint64_t> mine = p2p_->rings();
  mine.push_back(control_blocks_[rank_]);
  host_->release_when_unused(std::move(mine), unused);
}

std::string Group::describe(const Operation& op) {
  const Collective c = op.header.collective;
  if (c != Collective::send && c != Collective::recv) return describe(op.header);
  const int other = op.header.root;
  std::string text = std::string(name_of(c)) + (c == Collective::send ? " to " : " from ");
  text += (other < 0 ? "any rank" : "rank " + std::to_string(other)) + " (" + name_of(op.header.dtype) + ", ";
  return text + std::to_string(op.header.bytes / size_of(op.header.dtype)) + " elements, tag " + std::to_string(op.tag) + ")";
}

std::string Group::describe(const Header& header) {
  std::string text = name_of(header.collective);
  if (header.collective == Collective::barrier) return text;
  text += std::string("(") + name_of(header.dtype);
  if (header.collective != Collective::all_to_all) text += ", " + std::to_string(header.bytes / size_of(header.dtype)) + " elements";
  if (header.op != ReduceOp::none) text += std::string(", ") + name_of(header.op);
  if (has_root(header.collective)) text += ", root " + std::to_string(header.root);
  return text + ")";
}

}  // namespace monarch
