// Counts of what the frames of a run have exercised, over all ranks. The run reports cases that never occurred, because
// they are not tested any more.
#pragma once

#include <array>
#include <atomic>
#include <cstdint>
#include <string>

namespace monarch::stress {

enum class Seen {
  inlined, nearly_inlined, block, streamed, many_buffers, multicast_inlined, multicast_block, retained, not_retained, retained_beyond_exit,
  full_ring, no_room, answered, followed, standby, standby_preempted, woken, full_batch, two_links, connected_late, unreachable,
  dead, left, dropped, malicious_frames, count
};
inline constexpr int seen_kinds = static_cast<int>(Seen::count), max_attacks = 32;

// In memory that all ranks share.
class Coverage {
 public:
  static Coverage& make();

  void count(Seen what) { counts_[static_cast<std::size_t>(what)].fetch_add(1, std::memory_order_relaxed); }
  void count_attack(int attack) { attacks_.at(static_cast<std::size_t>(attack)).fetch_add(1, std::memory_order_relaxed); }

  void print() const;
  // The cases that never occurred; "" if there are none. Threads cannot die, and random attacks run between processes
  // only.
  std::string missing(bool threads) const;

 private:
  std::array<std::atomic<std::uint64_t>, seen_kinds> counts_;
  std::array<std::atomic<std::uint64_t>, max_attacks> attacks_;
};

}  // namespace monarch::stress
