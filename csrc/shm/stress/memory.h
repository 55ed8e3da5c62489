// Where the ranks of the stress driver have their tensors: on the heap, with AddressSanitizer's fences around them; in
// pages of their own, which are gone when the tensor is; or in the arena, where the peers have them mapped. No groups.
#pragma once

#include <cstdint>
#include <map>
#include <memory>
#include <mutex>

#include "shm/peer_table.h"
#include "shm/operation.h"

namespace monarch::stress {

enum class Place : std::uint8_t { heap, pages, arena, mixed };  // mixed: some ranks in the arena, some on the heap
const char* name_of(Place place);

inline constexpr char poison = static_cast<char>(0xa5);  // where nobody has written yet
inline constexpr std::uint64_t largest_shelved = 4 << 20;

// Room in a rank's arena, for some tensors set aside before groups and messages take all there is. Thread-safe.
class Shelf : public std::enable_shared_from_this<Shelf> {
 public:
  explicit Shelf(std::shared_ptr<Host> host);
  // Null where there is none; it comes back by itself.
  std::shared_ptr<Room> take(std::uint64_t bytes);

 private:
  std::shared_ptr<Host> host_;
  std::mutex mutex_;
  std::multimap<std::uint64_t, std::unique_ptr<Room>> free_;
};

// The memory of one tensor, poisoned; on the heap where the arena has no room.
class Memory {
 public:
  Memory(Place place, std::uint64_t bytes, std::uint64_t skew, const std::shared_ptr<Shelf>& shelf);
  Span span() const { return {begin_ + skew_, bytes_}; }
  // Whether nobody has written beside the tensor, where AddressSanitizer does not look.
  bool edges_untouched() const;

 private:
  std::shared_ptr<void> owner_;
  char* begin_;
  std::uint64_t bytes_, skew_, edge_;
};

}  // namespace monarch::stress
