#include "shm/arena.h"

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <iterator>
#include <new>

#include <sys/mman.h>
#include <unistd.h>

#include "platform/shared_memory.h"

namespace monarch {

namespace {

constexpr std::uint64_t step = 2 << 20;  // bytes that are committed or given back at once: a huge page

std::size_t whole(std::size_t bytes, std::size_t unit) { return (bytes + unit - 1) / unit * unit; }

}  // namespace

Mapping::Mapping(int fd, std::size_t size) : size_(size) {
  void* base = mmap(nullptr, size, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
  if (base == MAP_FAILED) throw system_failure("mapping shared memory");
  base_ = static_cast<char*>(base);
}

Mapping::~Mapping() { munmap(base_, size_); }

Arena::Arena(std::size_t size) {
  size = whole(size, shared_memory_unit);
  fd_ = new_shared_memory(size);
  mapping_ = new Mapping(fd_, size);
  auto* header = new (mapping_->at(0)) ArenaHeader{};
  header->self.store(reinterpret_cast<std::uintptr_t>(&header->self));
  free_[page] = size - page;
}

Arena::~Arena() {
  delete mapping_;
  close(fd_);
}

std::uint64_t Arena::allocate(std::size_t bytes) {
  bytes = whole(bytes, page);
  std::uint64_t offset = 0;
  {
    const std::lock_guard lock(mutex_);
    for (auto hole = free_.begin(); hole != free_.end(); ++hole) {
      if (hole->second < bytes) continue;
      offset = hole->first;
      const std::size_t rest = hole->second - bytes;
      free_.erase(hole);
      if (rest != 0) free_[offset + bytes] = rest;
      taken_[offset] = bytes;
      used_ = trimmable_ = true;
      peak_ = std::max(peak_, offset + bytes);
      committed_ = std::max(committed_, std::min<std::uint64_t>(peak_, warm));
      break;
    }
  }
  return offset;
}

void Arena::release(std::uint64_t offset) {
  const std::lock_guard lock(mutex_);
  const auto entry = taken_.find(offset);
  if (entry == taken_.end()) return;
  // What lies beyond the warm part was needed once, not always: the system gets its pages back.
  const std::uint64_t end = offset + entry->second, cold = std::max<std::uint64_t>(offset, warm);
  if (end > cold) discard_pages(mapping_->at(cold), end - cold);
  trimmable_ = true;
  auto hole = free_.emplace(offset, entry->second).first;
  taken_.erase(entry);
  if (const auto next = std::next(hole); next != free_.end() && hole->first + hole->second == next->first) {
    hole->second += next->second;
    free_.erase(next);
  }
  if (hole != free_.begin()) {
    if (const auto before = std::prev(hole); before->first + before->second == hole->first) {
      before->second += hole->second;
      free_.erase(hole);
    }
  }
}

void Arena::prefault(std::uint64_t bytes, const std::atomic<bool>& stop) {
  if (is_portable) return;  // pages could not be given back
  bytes = std::min<std::uint64_t>({whole(bytes, page), warm, mapping_->size()});
  prefer_huge_pages(mapping_->at(0), bytes);
  for (std::uint64_t at = 0; at < bytes && !stop;) {
    for (const std::uint64_t end = std::min<std::uint64_t>(at + step, bytes); at < end; at += page) {
      // A write fault, and not MADV_POPULATE_WRITE: that holds the lock of the address space, for which other threads
      // would wait while this one has no processor. The exchange writes what is there, so messages stay intact.
      char zero = 0;
      reinterpret_cast<std::atomic<char>*>(mapping_->at(at))->compare_exchange_strong(zero, 0, std::memory_order_relaxed);
    }
    const std::lock_guard lock(mutex_);
    committed_ = std::max(committed_, at);
    trimmable_ = true;
  }
}

// Pages that a NIC or GPU has pinned stay with its registration when `trim` or `release` discards them. A later
// allocation at this address has other pages. So a registration must not outlive its memory in use. This holds here:
// - Registrations for peers (Engine.expose) own the memory, and end before it is freed. For those of process groups and
//   those for own requests (MemoryCache), a weak reference to the owner ends them after it is freed. They are found by
//   the identity of the living owner, never by address. So a new allocation is registered anew. A transfer in progress
//   keeps its memory.
// - Receivers that keep a message where it lies register it by the same rules, and the sender frees it after them.
// Other libraries may cache registrations by address, and see no discarded pages in a peer's mapping. So memory is not
// trimmed where there are RDMA devices (idle_memory_timeout in links.py).
void Arena::trim() {
  std::unique_lock lock(mutex_);
  const std::uint64_t keep = used_ ? peak_ : 0;
  trimmable_ = used_;
  used_ = false;
  peak_ = taken_.empty() ? 0 : taken_.rbegin()->first + taken_.rbegin()->second;
  // From the end, in steps: allocations wait for one step at most.
  for (std::uint64_t end = committed_;;) {
    auto hole = free_.lower_bound(end);
    if (hole == free_.begin()) break;
    --hole;
    end = std::min(end, hole->first + hole->second);
    if (end <= keep) break;
    const std::uint64_t start = std::max({hole->first, keep, (end - 1) / step * step});
    discard_pages(mapping_->at(start), end - start);
    end = start;
    lock.unlock();
    lock.lock();
  }
  committed_ = std::min(committed_, std::max(keep, peak_));
}

bool Arena::trimmable() const {
  const std::lock_guard lock(mutex_);
  return trimmable_;
}

std::size_t Arena::used() const {
  const std::lock_guard lock(mutex_);
  std::size_t sum = 0;
  for (const auto& entry : taken_) sum += entry.second;
  return sum;
}

}  // namespace monarch
