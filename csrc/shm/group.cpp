#include "shm/group.h"

#include <algorithm>
#include <cstring>
#include <new>
#include <utility>

#include <sched.h>

namespace monarch {

namespace {

constexpr std::array<const char*, static_cast<std::size_t>(Collective::count)> collectives{
    "barrier", "all_reduce", "reduce", "broadcast", "all_gather", "gather", "scatter", "reduce_scatter", "all_to_all"};

// Pieces begin on cache lines, which is a multiple of every element size.
std::uint64_t lines(std::uint64_t bytes) { return (bytes + 63) / 64 * 64; }

std::size_t board_bytes(std::size_t n) {
  const std::size_t head = sizeof(Board) + lines(n * sizeof(std::uint32_t)) + lines(4 * n * sizeof(std::uint64_t));
  return head + 2 * slot_bytes;
}

int processors() {
  cpu_set_t set;
  return sched_getaffinity(0, sizeof set, &set) == 0 ? CPU_COUNT(&set) : 1;
}

struct Range {
  std::uint64_t from, bytes;
};

// The part of piece or vector of `bytes` that chunk `chunk` of `width` covers.
Range part(std::uint64_t bytes, std::uint64_t chunk, std::uint64_t width) {
  const std::uint64_t from = std::min(bytes, chunk * width);
  return {from, std::min(width, bytes - from)};
}

// Rank `rank`'s share of `bytes`, in whole cache lines.
Range slice(std::uint64_t bytes, int rank, int n) {
  const std::uint64_t share = lines((bytes + n - 1) / n);
  const std::uint64_t from = std::min(bytes, share * rank);
  return {from, std::min(share, bytes - from)};
}

bool rooted(Collective c) {
  return c == Collective::broadcast || c == Collective::reduce || c == Collective::gather || c == Collective::scatter;
}

// Each rank brings something of its own for every other rank.
bool by_pieces(Collective c) {
  return c == Collective::scatter || c == Collective::reduce_scatter || c == Collective::all_to_all;
}

void copy(char* to, const char* from, std::uint64_t bytes) {
  if (to != from && bytes != 0) std::memcpy(to, from, bytes);
}

}  // namespace

const char* name_of(Collective collective) { return collectives.at(static_cast<std::size_t>(collective)); }

// Boards -----------------------------------------------------------------------------------------------------------

std::uint64_t Group::make_board(Host& host, int size) {
  const std::size_t bytes = board_bytes(size);
  const std::uint64_t offset = host.allocate(bytes);
  if (offset != 0) {
    char* memory = host.arena().mapping().at(offset);
    std::memset(memory, 0, bytes - 2 * slot_bytes);
    new (memory) Board{};
  }
  return offset;
}

Mapping& Group::arena(int rank) const { return rank == rank_ ? host_->arena().mapping() : *peers_[rank]->mapping; }

std::atomic<std::uint32_t>* Group::gone(int rank) const {
  return reinterpret_cast<std::atomic<std::uint32_t>*>(reinterpret_cast<char*>(&board(rank)) + sizeof(Board));
}

std::uint64_t* Group::table(int rank, std::uint64_t sequence) const {
  char* tables = reinterpret_cast<char*>(&board(rank)) + sizeof(Board) + lines(size_ * sizeof(std::uint32_t));
  return reinterpret_cast<std::uint64_t*>(tables) + (sequence & 1) * 2 * size_;
}

char* Group::slot(int rank, std::uint64_t sequence) const {
  return reinterpret_cast<char*>(&board(rank)) + board_bytes(size_) - 2 * slot_bytes + (sequence & 1) * slot_bytes;
}

char* Group::stage(int rank, std::uint64_t chunk) const {
  const std::uint64_t at = std::uint64_t{board(rank).stage.load(std::memory_order_relaxed)} * page;
  return arena(rank).at(at) + (chunk & 1) * chunk_bytes;
}

// Kept once it is there: memory that has been touched is what makes the next large operation fast.
bool Group::ensure_stage() {
  auto& mine = board(rank_).stage;
  if (mine.load(std::memory_order_relaxed) != 0) return true;
  const std::uint64_t offset = host_->allocate(2 * chunk_bytes);
  mine.store(static_cast<std::uint32_t>(offset / page), std::memory_order_relaxed);
  return offset != 0;
}

Group::Group(std::shared_ptr<Host> host, int rank, std::vector<std::shared_ptr<Peer>> peers,
             std::vector<std::uint64_t> boards)
    : host_(std::move(host)),
      rank_(rank),
      size_(static_cast<int>(boards.size())),
      peers_(std::move(peers)),
      boards_(std::move(boards)),
      crowded_(size_ > processors()) {}

Group::~Group() { close(); }

// Memory order: who reads a counter that says "ready" sees what was written before it.
bool Group::all_reach(std::atomic<std::uint64_t> Board::*counter, std::uint64_t value) const {
  for (int r = 0; r < size_; ++r) {
    if ((board(r).*counter).load(std::memory_order_acquire) < value) return false;
  }
  return true;
}

void Group::ring() const {
  std::atomic_thread_fence(std::memory_order_seq_cst);
  for (int r = 0; r < size_; ++r) {
    if (r == rank_) continue;
    Bell& bell = peers_[r]->mapping->header().bell;
    if (bell.sleepers.load(std::memory_order_relaxed) != 0) bell.wake();
  }
}

// The queue --------------------------------------------------------------------------------------------------------

void Group::submit(const std::shared_ptr<Operation>& operation) {
  const std::lock_guard lock(mutex_);
  queue_.push_back(operation);
}

bool Group::advance() {
  const std::unique_lock lock(mutex_, std::try_to_lock);
  if (!lock) return false;
  bool moved = false;
  while (!queue_.empty()) {
    const auto op = queue_.front();  // keeps it alive when its owner lets go as soon as it is done
    if (broken_) {
      op->failure = broken_;
      finish(*op);
    } else {
      moved |= step(*op);
    }
    if (!op->done.load(std::memory_order_relaxed)) break;
    queue_.pop_front();
    moved = true;
  }
  return moved;
}

void Group::wait(Operation& operation) { wait(operation, Clock::time_point::max()); }

void Group::wait(Operation& operation, Clock::time_point limit) {
  Patience patience(host_->bell(), crowded_);
  const auto look = [&] { return operation.done.load(std::memory_order_acquire) || advance(); };
  while (!operation.done.load(std::memory_order_acquire)) {
    if (advance()) {
      patience.reset();
    } else if (!patience.again(look, std::min(limit, operation.deadline))) {
      if (Clock::now() >= operation.deadline) expire(operation);
      if (Clock::now() >= limit) return;
    }
  }
}

void Group::finish(Operation& op) {
  op.done.store(true, std::memory_order_release);
  // Whoever waits for it may be another thread of this process.
  host_->bell().ring();
}

// Steps ------------------------------------------------------------------------------------------------------------

bool Group::step(Operation& op) {
  bool moved = false;
  // Whoever gave up on this group does not come back: an operation that has not begun need not begin.
  if (op.state == Operation::queued && !somebody_gave_up()) moved = enter(op);
  if (op.state == Operation::entering && all_reach(&Board::entered, op.sequence)) {
    moved = true;
    if (!compare(op)) {
      finish(op);
      return true;
    }
    plan(op);
  }
  if (op.state == Operation::moving && !op.done.load(std::memory_order_relaxed)) moved |= move(op);
  if (!moved && (host_->departures() != departures_ || somebody_gave_up())) {
    if (auto fault = find_fault(op)) {
      fail(*fault);
      op.failure = broken_;
      finish(op);
      return true;
    }
  }
  return moved;
}

bool Group::enter(Operation& op) {
  op.sequence = ++sequence_;
  put_in_slot(op);
  board(rank_).headers[op.sequence & 1] = op.header;
  board(rank_).entered.store(op.sequence, std::memory_order_release);
  ring();
  op.state = Operation::entering;
  return true;
}

void Group::put_in_slot(Operation& op) {
  const Collective c = op.header.collective;
  std::uint64_t width = op.header.bytes, total = width;
  if (c == Collective::all_to_all) {
    std::uint64_t* sizes = table(rank_, op.sequence);
    width = 0;
    for (int r = 0; r < size_; ++r) {
      sizes[r] = op.in[r].bytes;
      sizes[size_ + r] = op.out[r].bytes;
      width = std::max(width, op.in[r].bytes);
    }
  }
  if (by_pieces(c)) total = lines(width) * size_;
  op.header.in_slot = total <= slot_bytes;
  if (op.header.in_slot) {
    op.width = by_pieces(c) ? lines(width) : width;
    op.chunks = 1;
    fill(op, 0, slot(rank_, op.sequence), true);
  } else {
    ensure_stage();
  }
}

bool Group::compare(Operation& op) {
  const auto at = op.sequence & 1;
  const auto called = [&](int r) {
    Header header = board(r).headers[at];
    header.in_slot = 0;
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

// Every rank comes to the same plan: it is made of what all have published.
void Group::plan(Operation& op) {
  bool in_slots = true;
  std::uint64_t bytes = op.header.bytes;
  for (int r = 0; r < size_; ++r) {
    in_slots &= board(r).headers[op.sequence & 1].in_slot != 0;
    if (op.header.collective == Collective::all_to_all) {
      const std::uint64_t* sizes = table(r, op.sequence);
      bytes = std::max(bytes, *std::max_element(sizes, sizes + size_));
    }
  }
  if (in_slots) {
    take_from_slots(op);
    finish(op);
    return;
  }
  ensure_stage();  // all_to_all: my own data may have been small
  op.width = by_pieces(op.header.collective) ? chunk_bytes / size_ / 64 * 64 : chunk_bytes;
  op.chunks = (bytes + op.width - 1) / op.width;
  op.state = Operation::moving;
}

void Group::take_from_slots(Operation& op) {
  std::vector<const char*> from(size_);
  for (int r = 0; r < size_; ++r) from[r] = slot(r, op.sequence);
  take(op, 0, from, true);
}

// A large operation: fill my buffer, take from everybody's; all_reduce has a step in between, in which each rank
// reduces its slice of the chunk for all. Chunk numbers go on from one operation to the next.
bool Group::move(Operation& op) {
  Board& mine = board(rank_);
  const bool two_shot = op.header.collective == Collective::all_reduce;
  bool moved = false;
  std::vector<const char*> from(size_);
  const auto buffers = [&](std::uint64_t chunk) -> const std::vector<const char*>& {
    for (int r = 0; r < size_; ++r) from[r] = stage(r, chunk);
    return from;
  };
  const auto publish = [&](std::atomic<std::uint64_t>& counter, std::uint64_t& count) {
    counter.store(chunk_ + ++count, std::memory_order_release);
    ring();
    moved = true;
  };
  for (bool again = true; again;) {
    again = false;
    // The buffer holds the chunk before the last until everybody has taken from it.
    const std::uint64_t next = chunk_ + op.filled;
    if (op.filled < op.chunks && (next < 2 || all_reach(&Board::taken, next - 1))) {
      fill(op, op.filled, stage(rank_, next), false);
      publish(mine.filled, op.filled);
      again = true;
    }
    if (two_shot && op.reduced < op.filled && all_reach(&Board::filled, chunk_ + op.reduced + 1)) {
      const std::uint64_t chunk = chunk_ + op.reduced;
      reduce_slice(op, op.reduced, buffers(chunk), stage(rank_, chunk));
      publish(mine.reduced, op.reduced);
      again = true;
    }
    const std::uint64_t ready = two_shot ? op.reduced : op.filled;
    if (op.taken < ready && all_reach(two_shot ? &Board::reduced : &Board::filled, chunk_ + op.taken + 1)) {
      if (two_shot) {
        collect(op, op.taken, buffers(chunk_ + op.taken));
      } else {
        take(op, op.taken, buffers(chunk_ + op.taken), false);
      }
      publish(mine.taken, op.taken);
      again = true;
    }
  }
  if (op.taken == op.chunks) {
    chunk_ += op.chunks;
    finish(op);
  }
  return moved;
}

// Data -------------------------------------------------------------------------------------------------------------

// What the others need of mine, in chunk `chunk`, goes to `to`.
void Group::fill(const Operation& op, std::uint64_t chunk, char* to, bool all) const {
  const Header& h = op.header;
  switch (h.collective) {
    case Collective::barrier: break;
    case Collective::all_reduce: {
      const Range range = part(h.bytes, chunk, op.width);
      const Range own = all ? Range{range.bytes, 0} : slice(range.bytes, rank_, size_);
      const char* data = op.in[0].data + range.from;
      copy(to, data, own.from);
      copy(to + own.from + own.bytes, data + own.from + own.bytes, range.bytes - own.from - own.bytes);
      break;
    }
    case Collective::reduce:
      if (rank_ == h.root) break;
      [[fallthrough]];
    case Collective::all_gather:
    case Collective::gather: {
      const Range range = part(h.bytes, chunk, op.width);
      if (h.collective != Collective::gather || rank_ != h.root) copy(to, op.in[0].data + range.from, range.bytes);
      break;
    }
    case Collective::broadcast: {
      const Range range = part(h.bytes, chunk, op.width);
      if (rank_ == h.root) copy(to, op.in[0].data + range.from, range.bytes);
      break;
    }
    case Collective::scatter:
      if (rank_ != h.root) break;
      [[fallthrough]];
    case Collective::reduce_scatter:
    case Collective::all_to_all:
      for (int r = 0; r < size_; ++r) {
        if (r == rank_) continue;
        const Range range = part(op.in[r].bytes, chunk, op.width);
        copy(to + r * op.width, op.in[r].data + range.from, range.bytes);
      }
      break;
    case Collective::count: break;
  }
}

// What I want of the others', in chunk `chunk`; `from[r]` is rank r's buffer.
void Group::take(const Operation& op, std::uint64_t chunk, const std::vector<const char*>& from, bool one_shot) {
  const Header& h = op.header;
  switch (h.collective) {
    case Collective::barrier: break;
    case Collective::reduce:
      if (rank_ != h.root) break;
      [[fallthrough]];
    case Collective::all_reduce: {
      const Range range = part(h.bytes, chunk, op.width);
      std::vector<const void*> sources(from.begin(), from.end());
      sources[rank_] = op.in[0].data + range.from;
      reduce_kernel(h.dtype, h.op)(op.out[0].data + range.from, sources.data(), size_, range.bytes / size_of(h.dtype));
      break;
    }
    case Collective::broadcast: {
      const Range range = part(h.bytes, chunk, op.width);
      if (rank_ != h.root) copy(op.out[0].data + range.from, from[h.root], range.bytes);
      break;
    }
    case Collective::gather:
      if (rank_ != h.root) break;
      [[fallthrough]];
    case Collective::all_gather: {
      const Range range = part(h.bytes, chunk, op.width);
      for (int r = 0; r < size_; ++r) {
        copy(op.out[r].data + range.from, r == rank_ ? op.in[0].data + range.from : from[r], range.bytes);
      }
      break;
    }
    case Collective::scatter: {
      const Range range = part(h.bytes, chunk, op.width);
      const char* source = rank_ == h.root ? op.in[rank_].data + range.from : from[h.root] + rank_ * op.width;
      copy(op.out[0].data + range.from, source, range.bytes);
      break;
    }
    case Collective::reduce_scatter: {
      const Range range = part(h.bytes, chunk, op.width);
      std::vector<const void*> sources(size_);
      for (int r = 0; r < size_; ++r) sources[r] = from[r] + rank_ * op.width;
      sources[rank_] = op.in[rank_].data + range.from;
      reduce_kernel(h.dtype, h.op)(op.out[0].data + range.from, sources.data(), size_, range.bytes / size_of(h.dtype));
      break;
    }
    case Collective::all_to_all:
      for (int r = 0; r < size_; ++r) {
        const Range range = part(op.out[r].bytes, chunk, op.width);
        std::uint64_t width = op.width;
        if (one_shot) {  // the sender's pieces lie as wide as its own widest
          const std::uint64_t* sizes = table(r, op.sequence);
          width = lines(*std::max_element(sizes, sizes + size_));
        }
        const char* source = r == rank_ ? op.in[r].data + range.from : from[r] + rank_ * width;
        copy(op.out[r].data + range.from, source, one_shot ? op.out[r].bytes : range.bytes);
      }
      break;
    case Collective::count: break;
  }
}

void Group::reduce_slice(const Operation& op, std::uint64_t chunk, const std::vector<const char*>& from, char* to) {
  const Range range = part(op.header.bytes, chunk, op.width);
  const Range own = slice(range.bytes, rank_, size_);
  std::vector<const void*> sources(size_);
  for (int r = 0; r < size_; ++r) sources[r] = from[r] + own.from;
  sources[rank_] = op.in[0].data + range.from + own.from;
  const auto kernel = reduce_kernel(op.header.dtype, op.header.op);
  kernel(to + own.from, sources.data(), size_, own.bytes / size_of(op.header.dtype));
  copy(op.out[0].data + range.from + own.from, to + own.from, own.bytes);
}

void Group::collect(const Operation& op, std::uint64_t chunk, const std::vector<const char*>& from) {
  const Range range = part(op.header.bytes, chunk, op.width);
  for (int r = 0; r < size_; ++r) {
    if (r == rank_) continue;
    const Range theirs = slice(range.bytes, r, size_);
    copy(op.out[0].data + range.from + theirs.from, from[r] + theirs.from, theirs.bytes);
  }
}

// Faults -----------------------------------------------------------------------------------------------------------

void Group::fail(Failure failure) {
  broken_ = std::move(failure);
  const auto kind = static_cast<std::uint32_t>(broken_->kind);
  board(rank_).culprit.store(kind << 24 | static_cast<std::uint32_t>(broken_->rank + 1), std::memory_order_release);
  ring();
}

bool Group::somebody_gave_up() const {
  for (int r = 0; r < size_; ++r) {
    if (r != rank_ && board(r).culprit.load(std::memory_order_acquire) != 0) return true;
  }
  return false;
}

// Who is to blame if `op` cannot go on. A rank that gave up, or ended after it had, says on its board whose fault it
// was, and the board outlives it: all blame the first cause, not the last.
std::optional<Failure> Group::find_fault(const Operation& op) {
  departures_ = host_->departures();
  for (int r = 0; r < size_; ++r) {
    if (r == rank_) continue;
    const std::uint32_t said = board(r).culprit.load(std::memory_order_acquire);
    const int blamed = static_cast<int>(said & 0xffffffu) - 1;
    const int culprit = blamed >= 0 ? blamed : r;
    if (culprit != rank_) {
      const Peer& peer = *peers_[culprit];
      const int state = peer.state.load(std::memory_order_acquire);
      if (state == Peer::dead) return Failure{Failure::dead, culprit, peer.epitaph};
      if (state == Peer::left) return Failure{Failure::left, culprit, "ended without " + describe(op.header)};
      if (said >> 24 == Failure::dead || said >> 24 == Failure::left) continue;  // we shall hear of it in a moment
    }
    if (said != 0) {
      return Failure{Failure::late, culprit, "kept rank " + std::to_string(r) + " waiting until it gave up"};
    }
  }
  return std::nullopt;
}

void Group::expire(const Operation& op) {
  const std::lock_guard lock(mutex_);
  if (op.done.load(std::memory_order_relaxed) || broken_) return;
  Failure failure{Failure::late, -1, "did not enter " + describe(op.header)};
  for (int r = 0; r < size_ && failure.rank < 0; ++r) {
    if (r != rank_ && board(r).entered.load(std::memory_order_acquire) < op.sequence) failure.rank = r;
  }
  if (failure.rank < 0) failure.text = describe(op.header) + " did not end, though all ranks have entered it";
  fail(failure);
}

void Group::expire_if_due(Operation& operation) {
  bool next = false;
  {
    const std::lock_guard lock(mutex_);
    next = !queue_.empty() && queue_.front().get() == &operation;
  }
  if (next && Clock::now() >= operation.deadline) expire(operation);
}

void Group::close() {
  {
    const std::lock_guard lock(mutex_);
    if (closed_) return;
    closed_ = true;
    if (!broken_) broken_ = Failure{Failure::closed, rank_, "closed the group"};
  }
  advance();  // ends what is queued
  // The others may still read my board and stage; when the last has closed, the memory is free again.
  for (int r = 0; r < size_; ++r) {
    if (r != rank_) gone(r)[rank_].store(1, std::memory_order_release);
  }
  const auto unused = [flags = gone(rank_), peers = peers_] {
    for (std::size_t r = 0; r < peers.size(); ++r) {
      if (peers[r] && flags[r].load(std::memory_order_acquire) == 0 && peers[r]->state.load() == Peer::alive) return false;
    }
    return true;
  };
  std::vector<std::uint64_t> mine{boards_[rank_]};
  if (const auto pages = board(rank_).stage.load(std::memory_order_relaxed)) mine.push_back(std::uint64_t{pages} * page);
  host_->bury(std::move(mine), unused);
}

std::string Group::describe(const Header& header) const {
  std::string text = name_of(header.collective);
  if (header.collective == Collective::barrier) return text;
  text += std::string("(") + name_of(header.dtype);
  if (header.collective != Collective::all_to_all) text += ", " + std::to_string(header.bytes / size_of(header.dtype)) + " elements";
  if (header.op != ReduceOp::none) text += std::string(", ") + name_of(header.op);
  if (rooted(header.collective)) text += ", root " + std::to_string(header.root);
  return text + ")";
}

}  // namespace monarch
