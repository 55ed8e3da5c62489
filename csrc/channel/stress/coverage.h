// What the frames of a run met with, counted by all of its ranks: what happens no more is not tested any more, and the
// run says so.
#pragma once

#include <array>
#include <atomic>
#include <cstdint>
#include <string>

namespace monarch::stress {

enum class Seen {
  inlined, nearly_inlined, block, streamed, many_buffers, cast_inlined, cast_block, kept, not_kept, kept_beyond_death,
  full_ring, no_room, answered, followed, standby, called_off, woken, full_batch, two_links, met_late, unreachable,
  dead, left, dropped, frames_of_a_forger, count
};
inline constexpr int seen = static_cast<int>(Seen::count), max_forgeries = 32;

// In memory that all ranks share.
class Coverage {
 public:
  static Coverage& make();

  void count(Seen what) { counts_[static_cast<std::size_t>(what)].fetch_add(1, std::memory_order_relaxed); }
  void count_forgery(int forgery) { forgeries_.at(static_cast<std::size_t>(forgery)).fetch_add(1, std::memory_order_relaxed); }

  void print() const;
  // What never happened; "" if all is well. Between threads there are no deaths, and forgers are less wild.
  std::string missing(bool threads) const;

 private:
  std::array<std::atomic<std::uint64_t>, seen> counts_;
  std::array<std::atomic<std::uint64_t>, max_forgeries> forgeries_;
};

}  // namespace monarch::stress
