// What the ranks of this driver share: what the store is in production, how they tell each other tokens and boards.
// Where ranks live and how they wait for each other stands in stress/ranks.h. Nothing here knows collectives.
//
// The driver is linked with --wrap=process_vm_readv, too: what a rank reads of a thread beside it, it copies itself,
// because no sanitizer sees the kernel read. Between processes nothing changes.
#pragma once

#include <array>
#include <cstdint>

#include "stress/ranks.h"

namespace monarch::stress {

inline constexpr int max_ranks = 4, max_groups = 8, max_meetings = 512, max_lanes = 2;

class Coverage;

// In memory that all ranks share; zero where nothing has been said yet.
struct World : Assembly {
  std::array<std::array<char, 32>, max_ranks> tokens;
  std::array<std::array<std::uint64_t, max_ranks>, max_groups> boards;
  Coverage* coverage;
};

// Whether this system lets a process read the memory of another one that is not its child.
bool can_read_others();

}  // namespace monarch::stress
