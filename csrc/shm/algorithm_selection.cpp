// Selection of the algorithm of an operation. Each rank publishes with its call how others can access its data. Once
// all have entered, all ranks make the same choice, because it depends only on what all have published.
#include <algorithm>
#include <bit>
#include <cstdio>

#include "shm/group.h"

namespace monarch {

namespace {

constexpr std::uint64_t block = 256 << 10;  // of a direct operation, between two looks at the others

// A direct all_reduce waits twice, and each rank writes to lines that the others have just read. Below this size the
// stage is faster, unless ranks wait for a processor anyway.
constexpr std::uint64_t slices_pay_from = 4 << 20;

// Whether one copy by the kernel is better. It costs as much processor time as two copies through the stage, which stay
// in the caches, and leaves the caches to others; but the reader does all of it. Not for broadcast, where the root
// would otherwise do half of the work for all, and not for reductions, which need a copy first.
bool worth_reading(Collective c) {
  return c == Collective::all_gather || c == Collective::gather || c == Collective::scatter || c == Collective::all_to_all;
}

// Whether another rank takes data from this rank.
bool brings(const Header& header, int rank) {
  switch (header.collective) {
    case Collective::barrier: return false;
    case Collective::broadcast:
    case Collective::scatter: return rank == header.root;
    case Collective::reduce:
    case Collective::gather: return rank != header.root;
    default: return true;
  }
}

}  // namespace

// What a rank offers -------------------------------------------------------------------------------------------------

void Group::offer(Operation& op) {
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
  if (by_pieces(c)) total = whole_lines(width) * size_;
  if (total <= slot_bytes) {
    op.header.offer = Offer::slot;
    op.width = by_pieces(c) ? whole_lines(width) : width;
    fill(op, 0, slot(rank_, op.sequence), true);
  } else {
    op.header.offer = offer_in_place(op);
  }
}

// Where the other ranks can read it without work of this rank. An all_reduce offers its result as well: the slice that
// the rank reduces for all.
Offer Group::offer_in_place(Operation& op) {
  const Collective c = op.header.collective;
  if (!brings(op.header, rank_) || overlaps(op)) return Offer::stage;
  const Mapping& arena = host_->arena().mapping();
  std::uint64_t* places = offered(rank_, op.sequence);
  bool shared = true;
  std::uint64_t bytes = 0;
  const auto publish = [&](int at, const Span& span) {
    places[at] = reinterpret_cast<std::uintptr_t>(span.data);
    shared &= arena.holds(span.data, span.bytes);
    bytes = std::max(bytes, span.bytes);
  };
  for (std::size_t i = 0; i < op.in.size(); ++i) publish(static_cast<int>(i), op.in[i]);
  if (c == Collective::all_reduce) publish(size_, op.out[0]);
  if (shared) {
    for (int i = 0; i <= size_; ++i) places[i] -= reinterpret_cast<std::uintptr_t>(arena.at(0));
    return Offer::shared;
  }
  if (control_block(rank_).reads == 0 || bytes < read_from_ || !worth_reading(c)) return Offer::stage;
  return std::all_of(op.in.begin(), op.in.end(), readable) ? Offer::memory : Offer::stage;
}

// Whether the operation would write to memory that others may still read. A rank may write its result over its own
// part, which no other rank reads. An all_reduce writes only its own slice and slices that are not read.
bool Group::overlaps(const Operation& op) const {
  for (std::size_t i = 0; i < op.in.size(); ++i) {
    for (std::size_t o = 0; o < op.out.size(); ++o) {
      const Span &in = op.in[i], &out = op.out[o];
      if (in.data + in.bytes <= out.data || out.data + out.bytes <= in.data) continue;
      const bool same = in.data == out.data && in.bytes == out.bytes;
      const auto own = static_cast<std::size_t>(rank_);
      if (!same || (op.in.size() > 1 && i != own) || (op.out.size() > 1 && o != own)) return true;
    }
  }
  return false;
}

// The plan -----------------------------------------------------------------------------------------------------------

void Group::plan(Operation& op) {
  bool in_slots = true;
  std::uint64_t bytes = op.header.bytes;
  for (int r = 0; r < size_; ++r) {
    in_slots &= control_block(r).headers[op.sequence & 1].offer == Offer::slot;
    if (op.header.collective == Collective::all_to_all) {
      const std::uint64_t* sizes = table(r, op.sequence);
      bytes = std::max(bytes, *std::max_element(sizes, sizes + size_));
    }
  }
  op.algorithm = Algorithm::slots;
  if (!in_slots) lay_out(op, bytes);
  explain(op);
  if (in_slots) {
    take(op, 0, true);
    finish(op);
  } else {
    op.state = Operation::moving;
  }
}

bool Group::all_offer_in_place(const Operation& op) const {
  bool read = false;
  for (int r = 0; r < size_; ++r) {
    if (!brings(op.header, r)) continue;
    const Offer offer = control_block(r).headers[op.sequence & 1].offer;
    if (offer != Offer::shared && offer != Offer::memory) return false;
    read |= offer == Offer::memory;
  }
  for (int r = 0; read && r < size_; ++r) {
    if (control_block(r).reads == 0) return false;
  }
  return true;
}

// Layout of a large operation of `bytes` (of one piece, or of the vector).
void Group::lay_out(Operation& op, std::uint64_t bytes) {
  const Collective c = op.header.collective;
  const bool too_small = c == Collective::all_reduce && !oversubscribed_ && bytes < slices_pay_from;
  if (!too_small && all_offer_in_place(op)) {
    op.algorithm = Algorithm::direct;
    op.stride = 64;  // uses no stage; only the counters advance
    op.width = block;
    op.chunks = ((c == Collective::all_reduce ? whole_lines((bytes + size_ - 1) / size_) : bytes) + block - 1) / block;
    op.base = position_;
    return;
  }
  // Four chunks, so that the ranks work on different ones at the same time; few large ones if they share processors
  // anyway.
  const bool pieces = by_pieces(c);
  const std::uint64_t all = pieces ? whole_lines(bytes) * size_ : bytes;
  const std::uint64_t most = std::min<std::uint64_t>(oversubscribed_ ? stage_ : 256 << 10, stage_ / 2);
  const std::uint64_t least = std::bit_ceil(std::max<std::uint64_t>(32 << 10, 64 * size_));
  op.stride = std::clamp<std::uint64_t>(std::bit_ceil(oversubscribed_ ? all : all / 4), least, most);
  op.width = pieces ? op.stride / size_ / 64 * 64 : op.stride;
  op.chunks = (bytes + op.width - 1) / op.width;
  op.base = (position_ + op.stride - 1) / op.stride * op.stride;  // a chunk never crosses the end of the stage
  // Two shots (each rank reduces its slice for all) read less than one (each reduces everything), and wait once more.
  op.algorithm = c == Collective::all_reduce && size_ > 2 && bytes > 32 << 10 ? Algorithm::two_shot : Algorithm::one_shot;
}

// Log each algorithm of each collective once, if there is a label.
void Group::explain(const Operation& op) {
  if (label_.empty()) return;
  bool& done = explained_[static_cast<std::size_t>(op.header.collective)][static_cast<std::size_t>(op.algorithm)];
  if (std::exchange(done, true)) return;
  std::string algorithm;
  const std::string chunks = std::to_string(op.chunks) + " chunks of " + std::to_string(op.width) + " bytes";
  switch (op.algorithm) {
    case Algorithm::slots: algorithm = "one shot through slots of " + std::to_string(slot_bytes) + " bytes"; break;
    case Algorithm::one_shot: algorithm = "through the stage, in " + chunks; break;
    case Algorithm::two_shot: algorithm = "two shots through the stage, in " + chunks; break;
    case Algorithm::direct: {
      bool read = false;
      for (int r = 0; r < size_; ++r) read |= brings(op.header, r) && control_block(r).headers[op.sequence & 1].offer == Offer::memory;
      algorithm = read ? "one copy, with process_vm_readv" : "no copy, straight from tensors in shared memory";
      break;
    }
    case Algorithm::count: break;
  }
  // One write: the ranks of a host share a terminal.
  std::fputs((label_ + describe(op) + ": " + algorithm + "\n").c_str(), stderr);
}

}  // namespace monarch
