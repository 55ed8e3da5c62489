// What an operation of a group moves from where to where: the choice of an algorithm, and each collective's part in
// it. When this happens, and what if it can't, is in group.cpp.
#include "shm/group.h"

#include <algorithm>
#include <bit>
#include <cstring>

namespace monarch {

namespace {

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
  const std::uint64_t share = whole_lines((bytes + n - 1) / n);
  const std::uint64_t from = std::min(bytes, share * rank);
  return {from, std::min(share, bytes - from)};
}

// Each rank brings something of its own for every other rank.
bool by_pieces(Collective c) {
  return c == Collective::scatter || c == Collective::reduce_scatter || c == Collective::all_to_all;
}

void copy(char* to, const char* from, std::uint64_t bytes) {
  if (to != from && bytes != 0) std::memcpy(to, from, bytes);
}

}  // namespace

// The choice ---------------------------------------------------------------------------------------------------------

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
  if (by_pieces(c)) total = whole_lines(width) * size_;
  op.header.in_slot = total <= slot_bytes;
  if (op.header.in_slot) {
    op.width = by_pieces(c) ? whole_lines(width) : width;
    fill(op, 0, slot(rank_, op.sequence), true);
  }
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
    take(op, 0, true);
    finish(op);
  } else {
    lay_out(op, bytes);
    op.state = Operation::moving;
  }
}

// How a large operation of `bytes` (of one piece, or of the vector) goes through the stage. Four chunks, so that the
// ranks work on different ones at the same time; few large ones where they take turns on the processors anyway.
// Two shots (each rank reduces its slice for all) read less than one (each reduces everything), and wait once more.
void Group::lay_out(Operation& op, std::uint64_t bytes) {
  const bool pieces = by_pieces(op.header.collective);
  const std::uint64_t all = pieces ? whole_lines(bytes) * size_ : bytes;
  const std::uint64_t most = std::min<std::uint64_t>(crowded_ ? stage_ : 256 << 10, stage_ / 2);
  op.stride = std::clamp<std::uint64_t>(std::bit_ceil(crowded_ ? all : all / 4), std::bit_ceil(std::max<std::uint64_t>(32 << 10, 64 * size_)), most);
  op.width = pieces ? op.stride / size_ / 64 * 64 : op.stride;
  op.chunks = (bytes + op.width - 1) / op.width;
  op.base = (position_ + op.stride - 1) / op.stride * op.stride;  // a chunk never crosses the end of the stage
  op.two_shot = op.header.collective == Collective::all_reduce && size_ > 2 && bytes > 32 << 10;
}

// Data ---------------------------------------------------------------------------------------------------------------

// What the others need of mine, in chunk `chunk`, goes to `to`.
void Group::fill(const Operation& op, std::uint64_t chunk, char* to, bool all) const {
  const Header& h = op.header;
  switch (h.collective) {
    case Collective::barrier: break;
    case Collective::all_reduce: {
      const Range range = part(h.bytes, chunk, op.width);
      const Range own = all || !op.two_shot ? Range{range.bytes, 0} : slice(range.bytes, rank_, size_);
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

// What I want of the others', in chunk `chunk`, or in their slots.
void Group::take(const Operation& op, std::uint64_t chunk, bool in_slots) {
  const Header& h = op.header;
  for (int r = 0; r < size_; ++r) from_[r] = in_slots ? slot(r, op.sequence) : stage(r, op.base + chunk * op.stride);
  switch (h.collective) {
    case Collective::barrier: break;
    case Collective::reduce:
      if (rank_ != h.root) break;
      [[fallthrough]];
    case Collective::all_reduce: {
      const Range range = part(h.bytes, chunk, op.width);
      std::copy(from_.begin(), from_.end(), sources_.begin());
      sources_[rank_] = op.in[0].data + range.from;
      reduce_kernel(h.dtype, h.op)(op.out[0].data + range.from, sources_.data(), size_, range.bytes / size_of(h.dtype));
      break;
    }
    case Collective::broadcast: {
      const Range range = part(h.bytes, chunk, op.width);
      if (rank_ != h.root) copy(op.out[0].data + range.from, from_[h.root], range.bytes);
      break;
    }
    case Collective::gather:
      if (rank_ != h.root) break;
      [[fallthrough]];
    case Collective::all_gather: {
      const Range range = part(h.bytes, chunk, op.width);
      for (int r = 0; r < size_; ++r) {
        copy(op.out[r].data + range.from, r == rank_ ? op.in[0].data + range.from : from_[r], range.bytes);
      }
      break;
    }
    case Collective::scatter: {
      const Range range = part(h.bytes, chunk, op.width);
      const char* source = rank_ == h.root ? op.in[rank_].data + range.from : from_[h.root] + rank_ * op.width;
      copy(op.out[0].data + range.from, source, range.bytes);
      break;
    }
    case Collective::reduce_scatter: {
      const Range range = part(h.bytes, chunk, op.width);
      for (int r = 0; r < size_; ++r) sources_[r] = from_[r] + rank_ * op.width;
      sources_[rank_] = op.in[rank_].data + range.from;
      reduce_kernel(h.dtype, h.op)(op.out[0].data + range.from, sources_.data(), size_, range.bytes / size_of(h.dtype));
      break;
    }
    case Collective::all_to_all:
      for (int r = 0; r < size_; ++r) {
        const Range range = part(op.out[r].bytes, chunk, op.width);
        std::uint64_t width = op.width;
        if (in_slots) {  // the sender's pieces lie as wide as its own widest
          const std::uint64_t* sizes = table(r, op.sequence);
          width = whole_lines(*std::max_element(sizes, sizes + size_));
        }
        const char* source = r == rank_ ? op.in[r].data + range.from : from_[r] + rank_ * width;
        copy(op.out[r].data + range.from, source, in_slots ? op.out[r].bytes : range.bytes);
      }
      break;
    case Collective::count: break;
  }
}

void Group::reduce_slice(const Operation& op, std::uint64_t chunk, char* to) {
  constexpr std::uint64_t block = 16 << 10;  // is still in the first-level cache when it is copied to its second place
  const Range range = part(op.header.bytes, chunk, op.width);
  const Range own = slice(range.bytes, rank_, size_);
  const auto kernel = reduce_kernel(op.header.dtype, op.header.op);
  for (std::uint64_t done = 0; done < own.bytes; done += block) {
    const std::uint64_t from = own.from + done, bytes = std::min(block, own.bytes - done);
    for (int r = 0; r < size_; ++r) sources_[r] = stage(r, op.base + chunk * op.stride) + from;
    sources_[rank_] = op.in[0].data + range.from + from;
    kernel(to + from, sources_.data(), size_, bytes / size_of(op.header.dtype));
    copy(op.out[0].data + range.from + from, to + from, bytes);
  }
}

void Group::collect(const Operation& op, std::uint64_t chunk) {
  const Range range = part(op.header.bytes, chunk, op.width);
  for (int r = 0; r < size_; ++r) {
    if (r == rank_) continue;
    const Range theirs = slice(range.bytes, r, size_);
    const char* from = stage(r, op.base + chunk * op.stride) + theirs.from;
    copy(op.out[0].data + range.from + theirs.from, from, theirs.bytes);
  }
}

}  // namespace monarch
