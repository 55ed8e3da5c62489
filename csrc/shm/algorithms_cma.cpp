// Operations that read data directly from the callers' tensors: tensors in shared memory through the mapping, others
// with process_vm_readv (cross-memory attach) if the kernel has it and permits it.
//
// A caller may write its tensor again once its operation has ended: so an operation ends only when all ranks have
// taken. A rank that fails does not wait for the others, and publishes the failure in its control block before its caller may
// write. So a reader checks the control blocks afterwards, and does not use its data if a rank has failed (model/group.pml,
// kind 8).
#include <cerrno>
#include <cstddef>
#include <cstring>

#include <sys/uio.h>
#include <unistd.h>

#include "platform/process.h"
#include "shm/group.h"
#include "shm/range.h"

namespace monarch {

namespace {

bool read_memory(int pid, std::uint64_t from, char* to, std::uint64_t bytes) {
  while (bytes != 0) {
    const iovec here{to, bytes}, there{reinterpret_cast<void*>(from), bytes};
    const ssize_t got = read_process(pid, &here, 1, &there, 1);
    if (got <= 0) return false;
    to += got, from += static_cast<std::uint64_t>(got), bytes -= static_cast<std::uint64_t>(got);
  }
  return true;
}

constexpr std::uint64_t time_slice = 16;  // blocks before the other groups of the process have theirs

}  // namespace

// Whether others can read it: not, for example, pinned memory of a device's driver.
bool Group::readable(const Span& span) {
  char byte = 0;
  const auto at = reinterpret_cast<std::uintptr_t>(span.data);
  return span.bytes == 0 || (read_memory(getpid(), at, &byte, 1) && read_memory(getpid(), at + span.bytes - 1, &byte, 1));
}

// Whether the kernel lets us: the same namespaces, the same user, no Yama and no seccomp filter in between.
bool Group::probe_reads() const {
  for (int r = 0; r < size_; ++r) {
    if (r == rank_) continue;
    std::uint64_t seen = 0;
    const std::uint64_t at = control_block(r).self + offsetof(ControlBlock, self);
    if (!read_memory(peers_[r]->pid, at, reinterpret_cast<char*>(&seen), sizeof seen) || seen != control_block(r).self) return false;
  }
  return true;
}

bool Group::move_direct(Operation& op) {
  const std::uint64_t end = op.base + op.stride;
  std::uint64_t left = time_slice;
  bool moved = false;
  // True once this rank has done all chunks of a step, and all ranks have done their part of it.
  const auto step = [&](std::uint64_t& done, bool& published, std::atomic<std::uint64_t> ControlBlock::*counter, auto&& work) {
    for (; done < op.chunks && left != 0; ++done, --left, moved = true) {
      if (!work(op, done)) return false;
    }
    if (done < op.chunks) return false;
    std::atomic_thread_fence(std::memory_order_acquire);  // the look comes after the reads, on any processor
    if (!published && !any_rank_failed()) {
      published = moved = true;
      (control_block(rank_).*counter).store(end, std::memory_order_release);
      ring();
    }
    return published && all_reach(counter, end);
  };
  if (op.header.collective == Collective::all_reduce &&
      !step(op.reduced, op.published_reduced, &ControlBlock::reduced, [this](auto& o, auto chunk) { return reduce_direct(o, chunk); })) {
    return moved;
  }
  if (!step(op.taken, op.published_taken, &ControlBlock::taken, [this](auto& o, auto chunk) { return take_direct(o, chunk); })) return moved;
  position_ = end;
  finish(op);
  return true;
}

// Read `bytes` of the piece that a rank offers, `at` bytes from its beginning. False if that is impossible: the rank
// has died, which will be reported, or the group has failed.
bool Group::fetch(const Operation& op, int from, int piece, std::uint64_t at, char* to, std::uint64_t bytes) {
  const std::uint64_t place = offered(from, op.sequence)[piece] + at;
  if (control_block(from).headers[op.sequence & 1].offer == Offer::shared) {
    if (bytes != 0) std::memcpy(to, arenas_[from] + place, bytes);
    return true;
  }
  if (read_memory(peers_[from]->pid, place, to, bytes)) return true;
  // A failing rank publishes that before its caller frees the tensor: then that is the cause, not this error.
  if (errno != ESRCH && !broken_ && !any_rank_failed()) {
    fail({Failure::unreadable, from, unreadable_text});
  }
  return false;
}

// The same for a kernel to read; reductions are offered in shared memory only (algorithm_selection.cpp).
const void* Group::source_address(const Operation& op, int from, int piece, std::uint64_t at) const {
  return from == rank_ ? op.in[piece].data + at : arenas_[from] + offered(from, op.sequence)[piece] + at;
}

// My slice of an all_reduce, for all.
bool Group::reduce_direct(const Operation& op, std::uint64_t chunk) {
  const Range own = slice(op.header.bytes, rank_, size_), range = part(own.bytes, chunk, op.width);
  for (int r = 0; r < size_; ++r) sources_[r] = source_address(op, r, 0, own.from + range.from);
  char* to = op.out[0].data + own.from + range.from;
  reduce_kernel(op.header.dtype, op.header.op)(to, sources_.data(), size_, range.bytes / size_of(op.header.dtype));
  return true;
}

// The data that this rank needs of the others, in chunk `chunk`.
bool Group::take_direct(const Operation& op, std::uint64_t chunk) {
  const Header& h = op.header;
  const auto get = [&](int from, int piece, const Span& out, const Span& mine) {
    const Range range = part(out.bytes, chunk, op.width);
    char* to = out.data + range.from;
    if (from != rank_) return fetch(op, from, piece, range.from, to, range.bytes);
    if (to != mine.data + range.from && range.bytes != 0) std::memmove(to, mine.data + range.from, range.bytes);
    return true;
  };
  const auto reduce = [&](int piece) {
    const Range range = part(h.bytes, chunk, op.width);
    for (int r = 0; r < size_; ++r) sources_[r] = source_address(op, r, piece, range.from);
    reduce_kernel(h.dtype, h.op)(op.out[0].data + range.from, sources_.data(), size_, range.bytes / size_of(h.dtype));
    return true;
  };
  const auto from_all = [&](auto&& each) {
    for (int k = 0; k < size_; ++k) {
      if (!each((rank_ + k) % size_)) return false;  // not all from the same one at the same time
    }
    return true;
  };
  switch (h.collective) {
    case Collective::all_reduce:
      return from_all([&](int r) {
        const Range theirs = slice(h.bytes, r, size_), range = part(theirs.bytes, chunk, op.width);
        const std::uint64_t at = theirs.from + range.from;
        return r == rank_ || fetch(op, r, size_, at, op.out[0].data + at, range.bytes);
      });
    case Collective::reduce: return rank_ != h.root || reduce(0);
    case Collective::broadcast: return rank_ == h.root || get(h.root, 0, op.out[0], op.in[0]);
    case Collective::gather:
      if (rank_ != h.root) return true;
      [[fallthrough]];
    case Collective::all_gather: return from_all([&](int r) { return get(r, 0, op.out[r], op.in[0]); });
    case Collective::scatter: return get(h.root, rank_, op.out[0], rank_ == h.root ? op.in[rank_] : Span{});
    case Collective::reduce_scatter: return reduce(rank_);
    case Collective::all_to_all: return from_all([&](int r) { return get(r, rank_, op.out[r], op.in[r]); });
    default: return true;
  }
}

}  // namespace monarch
