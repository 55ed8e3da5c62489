#include "shm/stress/memory.h"

#include <algorithm>
#include <cstring>
#include <utility>

#include <sys/mman.h>

#include "shm/stress/fixture.h"

namespace monarch::stress {

namespace {

constexpr std::uint64_t edge = 64;
constexpr std::uint64_t small = 256 << 10;
constexpr int small_ones = 24;

}  // namespace

const char* name_of(Location location) {
  constexpr const char* names[] = {"heap", "pages", "arena", "arena or heap"};
  return names[static_cast<std::size_t>(location)];
}

ArenaPool::ArenaPool(std::shared_ptr<Host> host) : host_(std::move(host)) {
  const auto put = [this](std::uint64_t bytes) {
    auto buffer = std::make_unique<ArenaBuffer>(host_, bytes);
    if (buffer->data() == nullptr) die("an arena is too small for its tensors");
    free_.emplace(bytes, std::move(buffer));
  };
  put(largest_pooled + page);
  for (int i = 0; i < small_ones; ++i) put(small);
}

std::shared_ptr<ArenaBuffer> ArenaPool::take(std::uint64_t bytes) {
  const std::lock_guard lock(mutex_);
  // The largest one is for those that no other would do for.
  const auto found = free_.lower_bound(bytes);
  if (found == free_.end() || (found->first > largest_pooled && bytes < largest_pooled)) {
    auto buffer = std::make_shared<ArenaBuffer>(host_, bytes);
    return buffer->data() != nullptr ? buffer : nullptr;
  }
  ArenaBuffer* buffer = found->second.release();
  free_.erase(found);
  return {buffer, [pool = shared_from_this()](ArenaBuffer* buffer) {
            const std::lock_guard lock(pool->mutex_);
            pool->free_.emplace(buffer->size(), buffer);
          }};
}

Memory::Memory(Location location, std::uint64_t bytes, std::uint64_t skew, const std::shared_ptr<ArenaPool>& pool)
    : bytes_(bytes), skew_(skew), edge_(edge) {
  const std::uint64_t all = skew + bytes + edge;
  if (location == Location::arena) {
    if (const auto buffer = pool->take(all)) {
      begin_ = buffer->data();
      owner_ = buffer;
    }
  } else if (location == Location::pages) {
    void* pages = mmap(nullptr, all, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (pages == MAP_FAILED) die("no memory");
    begin_ = static_cast<char*>(pages);
    owner_ = {pages, [all](void* pages) { munmap(pages, all); }};
  }
  if (!owner_) {
    edge_ = 0;
    const std::shared_ptr<char[]> heap(new char[skew + bytes]);
    begin_ = heap.get();
    owner_ = heap;
  }
  std::memset(begin_, poison, skew + bytes + edge_);
}

bool Memory::edges_untouched() const {
  const auto untouched = [](const char* from, std::uint64_t bytes) { return std::all_of(from, from + bytes, [](char c) { return c == poison; }); };
  return untouched(begin_, skew_) && untouched(begin_ + skew_ + bytes_, edge_);
}

}  // namespace monarch::stress
