// Where the ranks of the stress driver live: forked processes, as in production, or threads of one process, each with
// a Host of its own, so that ThreadSanitizer sees what they do to each other's memory.
//
// Threads of one process must share one mapping of an arena: through two mappings the same byte has two addresses, and
// ThreadSanitizer can't relate them. So the driver is linked with --wrap=mmap, --wrap=munmap (see
// tests/shm/test_sanitizers.py), and a memfd that this process has mapped already is not mapped a second time. In the
// same way --wrap=process_vm_readv: what a rank reads of a thread beside it, it copies itself, because no sanitizer sees
// the kernel read. The core knows nothing of it, and between processes nothing changes.
//
// A World is also what the store is in production: how ranks tell each other tokens and boards, and the only way to
// wait for each other that does not go through the code under test. Nothing here knows collectives.
#pragma once

#include <array>
#include <atomic>
#include <cstdint>
#include <functional>
#include <string>

namespace monarch::stress {

inline constexpr int max_ranks = 4, max_groups = 8, max_meetings = 512, max_lanes = 2;

// Ends the process with the text on stderr, and so the run.
[[noreturn]] void die(const std::string& text);

class Coverage;

// In memory that all ranks share; zero where nothing has been said yet.
struct World {
  std::array<std::array<char, 32>, max_ranks> tokens;
  std::array<std::array<std::uint64_t, max_ranks>, max_groups> boards;
  std::array<std::atomic<int>, max_meetings> meetings;
  // What each lane of each rank is at, for the one who finds them hung.
  std::array<std::array<std::array<char, 160>, max_lanes>, max_ranks> notes;

  void arrive(int meeting) { meetings[meeting].fetch_add(1, std::memory_order_acq_rel); }
  void await(int meeting, int ranks) const;
  void meet(int meeting, int ranks) {
    arrive(meeting);
    await(meeting, ranks);
  }
  void note(int rank, int lane, const std::string& text);
  Coverage* coverage;

  static World& make(Coverage& coverage);
};

// Whether this system lets a process read the memory of another one that is not its child.
bool can_read_others();

// Runs body(rank) on `ranks` ranks and waits for all of them. `may_die` is the rank whose death by SIGKILL is part of
// the plan, or -1. When a rank fails, or `seconds` have passed, the run ends with the notes on stderr.
void run_ranks(World& world, bool threads, int ranks, int may_die, int seconds, const std::function<void(int)>& body);

}  // namespace monarch::stress
