// What the ranks of this driver share: how they tell each other tokens, and what each of them knows of its frames.
// Where ranks live and how they wait for each other stands in stress/ranks.h. Nothing here knows frames.
#pragma once

#include <array>
#include <atomic>
#include <cstdint>

#include "stress/ranks.h"

namespace monarch::stress {

// Ranks, and one that forges. Lanes, and one for answers.
inline constexpr int max_ranks = 5, max_lanes = 4, max_lives = 13;

class Coverage;

// In memory that all ranks share; zero where nothing has been said yet.
struct World : Assembly {
  using Count = std::atomic<std::uint64_t>;

  std::array<std::array<char, 32>, max_ranks> tokens;
  // Frames [of a rank][of its lane][to a rank] that their sender knows to be in the ring, whatever becomes of it.
  std::array<std::array<std::array<Count, max_ranks>, max_lanes>, max_ranks> written;
  std::array<std::atomic<bool>, max_ranks> departed;  // it has died or left, or is about to
  std::array<std::atomic<int>, max_ranks> counting;   // threads of a rank that are about to count what they keep
  std::array<std::array<char, 32>, max_lives> forgers;
  std::array<std::atomic<int>, max_lives> exposed;  // how many ranks were told that this one is gone
  Coverage* coverage;
};

}  // namespace monarch::stress
