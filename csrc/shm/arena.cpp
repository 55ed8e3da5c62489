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

std::size_t Arena::used() const {
  const std::lock_guard lock(mutex_);
  std::size_t sum = 0;
  for (const auto& entry : taken_) sum += entry.second;
  return sum;
}

}  // namespace monarch
