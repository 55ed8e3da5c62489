// State that the ranks of this driver share: their tokens, and what each has sent. stress/ranks.h runs the ranks and
// lets them wait for each other. Nothing here depends on frames.
#pragma once

#include <array>
#include <atomic>
#include <cstdint>

#include "stress/ranks.h"

namespace monarch::stress {

// One more rank for the malicious peer, and one more caller for replies.
inline constexpr int max_ranks = 5, max_callers = 4, max_incarnations = 13;

class Coverage;

// In memory that all ranks share; zero at first.
struct Fixture : RankSync {
  using Count = std::atomic<std::uint64_t>;

  std::array<std::array<char, 32>, max_ranks> tokens;
  // Number of frames [of a rank][of its caller][to a rank] that are certainly in the ring.
  std::array<std::array<std::array<Count, max_ranks>, max_callers>, max_ranks> written;
  std::array<std::atomic<bool>, max_ranks> departed;  // it has died or left, or is about to
  std::array<std::atomic<int>, max_ranks> counting;   // threads of a rank that are about to count what they keep
  std::array<std::array<char, 32>, max_incarnations> malicious_tokens;
  std::array<std::atomic<int>, max_incarnations> detected;  // ranks that have reported the end of this peer
  Coverage* coverage;
};

}  // namespace monarch::stress
