// Counts of the algorithms that the operations of a run used, over all ranks. The run reports algorithms that were
// never used, because they are not tested any more. Only successful operations count.
#pragma once

#include <array>
#include <atomic>
#include <cstdint>
#include <string>

#include "shm/stress/step.h"

namespace monarch::stress {

inline constexpr int max_steps = 4096;  // of a round

// In memory that all ranks share.
class Coverage {
 public:
  static Coverage& make();

  void begin_round();
  void count(const Step& step, const Operation& op, int rank, int ranks);
  void count_refused() { add(messages_[refused]); }

  void print() const;
  // What nothing took; "" if all is well. `reads`: this system lets processes read each other's memory.
  std::string missing(bool reads) const;

 private:
  enum Route { slots, one_shot, two_shot, shared, read, mixed, routes };
  enum Message { empty, short_, in_parts, beyond_ring, looked_behind, from_any, refused, messages };
  using Count = std::atomic<std::uint64_t>;
  static void add(Count& count) { count.fetch_add(1, std::memory_order_relaxed); }
  static bool wanted(Collective collective, Route route);

  std::array<std::array<Count, routes>, static_cast<std::size_t>(Collective::send)> collectives_;
  std::array<Count, static_cast<std::size_t>(Dtype::count)> reductions_;
  std::array<Count, messages> messages_;
  std::array<std::atomic<std::uint8_t>, max_steps> offers_;  // of the ranks in a round's direct operations
};

}  // namespace monarch::stress
