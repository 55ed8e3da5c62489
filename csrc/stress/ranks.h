// Runs the ranks of a stress driver: as forked processes, as in production, or as threads of one process, each with its
// own Host, so that ThreadSanitizer sees their accesses to each other's memory. Nothing here depends on collectives or
// frames.
//
// A driver is linked with --wrap=mmap and --wrap=munmap (tests/support/sanitizers.py), for two reasons. Threads of one
// process must share one mapping of an arena: with two mappings a byte has two addresses, which ThreadSanitizer cannot
// relate. And every arena gets guard pages, so that an access with a wrong offset crashes at once. The core itself is
// unchanged.
#pragma once

#include <array>
#include <atomic>
#include <cstddef>
#include <functional>
#include <new>
#include <string>

namespace monarch::stress {

// Print the text to stderr and end the process, and with it the run.
[[noreturn]] void die(const std::string& text);

// Zeroed memory, shared with forked ranks.
void* shared_memory(std::size_t bytes);

// Barriers and status notes in shared memory, independent of the code under test.
struct RankSync {
  std::array<std::atomic<int>, 512> barriers;
  // Of each caller of each rank, printed when a round hangs.
  std::array<std::array<std::array<char, 160>, 4>, 8> notes;

  void arrive(int barrier) { barriers.at(static_cast<std::size_t>(barrier)).fetch_add(1, std::memory_order_acq_rel); }
  void await(int barrier, int ranks) const;
  void arrive_and_wait(int barrier, int ranks) {
    arrive(barrier);
    await(barrier, ranks);
  }
  void note(int rank, int caller, const std::string& text);
};

// A Fixture is a RankSync with the other state that its driver's ranks share.
template <class Fixture>
Fixture& make_fixture() {
  return *new (shared_memory(sizeof(Fixture))) Fixture{};
}

// Runs body(rank) on `ranks` ranks and waits for all of them. `may_die` is the rank whose death by SIGKILL is
// planned, or -1. When a rank fails, or `seconds` have passed, the run ends with the notes on stderr.
void run_ranks(RankSync& rank_sync, bool threads, int ranks, int may_die, int seconds, const std::function<void(int)>& body);

}  // namespace monarch::stress
