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

enum class Location : std::uint8_t { heap, pages, arena, mixed };  // mixed: some ranks in the arena, some on the heap
const char* name_of(Location location);

inline constexpr char poison = static_cast<char>(0xa5);  // of memory that was not written yet
inline constexpr std::uint64_t largest_pooled = 4 << 20;

// Buffers in a rank's arena for some tensors, allocated before groups and messages fill the arena. Thread-safe.
class ArenaPool : public std::enable_shared_from_this<ArenaPool> {
 public:
  explicit ArenaPool(std::shared_ptr<Host> host);
  // Null where there is none; it comes back by itself.
  std::shared_ptr<ArenaBuffer> take(std::uint64_t bytes);

 private:
  std::shared_ptr<Host> host_;
  std::mutex mutex_;
  std::multimap<std::uint64_t, std::unique_ptr<ArenaBuffer>> free_;
};

// The memory of one tensor, poisoned; on the heap if the arena is full.
class Memory {
 public:
  Memory(Location location, std::uint64_t bytes, std::uint64_t skew, const std::shared_ptr<ArenaPool>& pool);
  Span span() const { return {begin_ + skew_, bytes_}; }
  // Whether the bytes around the tensor are unchanged, where AddressSanitizer does not check.
  bool edges_untouched() const;

 private:
  std::shared_ptr<void> owner_;
  char* begin_;
  std::uint64_t bytes_, skew_, edge_;
};

}  // namespace monarch::stress
