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

const char* name_of(Place place) {
  constexpr const char* names[] = {"heap", "pages", "arena", "arena or heap"};
  return names[static_cast<std::size_t>(place)];
}

Shelf::Shelf(std::shared_ptr<Host> host) : host_(std::move(host)) {
  const auto put = [this](std::uint64_t bytes) {
    auto room = std::make_unique<Room>(host_, bytes);
    if (room->data() == nullptr) die("an arena is too small for its tensors");
    free_.emplace(bytes, std::move(room));
  };
  put(largest_shelved + page);
  for (int i = 0; i < small_ones; ++i) put(small);
}

std::shared_ptr<Room> Shelf::take(std::uint64_t bytes) {
  const std::lock_guard lock(mutex_);
  // The largest one is for those that no other would do for.
  const auto found = free_.lower_bound(bytes);
  if (found == free_.end() || (found->first > largest_shelved && bytes < largest_shelved)) {
    auto room = std::make_shared<Room>(host_, bytes);
    return room->data() != nullptr ? room : nullptr;
  }
  Room* room = found->second.release();
  free_.erase(found);
  return {room, [shelf = shared_from_this()](Room* room) {
            const std::lock_guard lock(shelf->mutex_);
            shelf->free_.emplace(room->size(), room);
          }};
}

Memory::Memory(Place place, std::uint64_t bytes, std::uint64_t skew, const std::shared_ptr<Shelf>& shelf)
    : bytes_(bytes), skew_(skew), edge_(edge) {
  const std::uint64_t all = skew + bytes + edge;
  if (place == Place::arena) {
    if (const auto room = shelf->take(all)) {
      begin_ = room->data();
      owner_ = room;
    }
  } else if (place == Place::pages) {
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
