// State that the ranks of this driver share, in place of a store: tokens and control blocks. stress/ranks.h runs the ranks and
// lets them wait for each other. Nothing here depends on collectives.
//
// The driver is also linked with --wrap=process_vm_readv: reads of another thread's memory are copied by the driver,
// because sanitizers do not see reads by the kernel. Between processes nothing changes.
#pragma once

#include <array>
#include <cstdint>

#include "stress/ranks.h"

namespace monarch::stress {

inline constexpr int max_ranks = 4, max_groups = 8, max_barriers = 512, max_callers = 2;

class Coverage;

// In memory that all ranks share; zero at first.
struct Fixture : RankSync {
  std::array<std::array<char, 32>, max_ranks> tokens;
  std::array<std::array<std::uint64_t, max_ranks>, max_groups> control_blocks;
  Coverage* coverage;
};

// Whether ranks can read each other's private memory. Threads copy it. A process reads the memory of another one that
// is not its child, where the system permits that.
bool can_read(bool threads);

}  // namespace monarch::stress
