// What an operation of a group moves from where to where, through the slots and the stage. When, is in group.cpp.
#include "shm/copy.h"
#include "shm/group.h"
#include "shm/range.h"

#include <algorithm>
#include <bit>
#include <cstring>

namespace monarch {

namespace {

void copy(char* to, const char* from, std::uint64_t bytes) {
  if (to != from && bytes != 0) std::memcpy(to, from, bytes);
}

}  // namespace

// Data ---------------------------------------------------------------------------------------------------------------

// Copy the data that others need of this rank, in chunk `chunk`, to `to`.
void Group::fill(const Operation& op, std::uint64_t chunk, char* to, bool all) const {
  const Header& h = op.header;
  switch (h.collective) {
    case Collective::barrier: break;
    case Collective::all_reduce: {
      const Range range = part(h.bytes, chunk, op.width);
      const Range own = all || op.algorithm != Algorithm::two_shot ? Range{range.bytes, 0} : slice(range.bytes, rank_, size_);
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
    case Collective::send:
    case Collective::recv:
    case Collective::count: break;  // never here
  }
}

// Take the data that this rank needs of the others, in chunk `chunk`, or from their slots.
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
      if (rank_ != h.root) put(op.out[0].data + range.from, from_[h.root], range.bytes, h.bytes);
      break;
    }
    case Collective::gather:
      if (rank_ != h.root) break;
      [[fallthrough]];
    case Collective::all_gather: {
      const Range range = part(h.bytes, chunk, op.width);
      for (int r = 0; r < size_; ++r) {
        put(op.out[r].data + range.from, r == rank_ ? op.in[0].data + range.from : from_[r], range.bytes, h.bytes * size_);
      }
      break;
    }
    case Collective::scatter: {
      const Range range = part(h.bytes, chunk, op.width);
      const char* source = rank_ == h.root ? op.in[rank_].data + range.from : from_[h.root] + rank_ * op.width;
      put(op.out[0].data + range.from, source, range.bytes, h.bytes);
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
        put(op.out[r].data + range.from, source, in_slots ? op.out[r].bytes : range.bytes, op.out[r].bytes);
      }
      break;
    case Collective::send:
    case Collective::recv:
    case Collective::count: break;  // never here
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
    put(op.out[0].data + range.from + from, to + from, bytes, op.header.bytes);
  }
}

void Group::collect(const Operation& op, std::uint64_t chunk) {
  const Range range = part(op.header.bytes, chunk, op.width);
  for (int r = 0; r < size_; ++r) {
    if (r == rank_) continue;
    const Range theirs = slice(range.bytes, r, size_);
    const char* from = stage(r, op.base + chunk * op.stride) + theirs.from;
    put(op.out[0].data + range.from + theirs.from, from, theirs.bytes, op.header.bytes);
  }
}

}  // namespace monarch
