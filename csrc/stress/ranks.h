// Where the ranks of a stress driver live: forked processes, as in production, or threads of one process, each with a
// Host of its own, so that ThreadSanitizer sees what they do to each other's memory. What they do is the drivers' part
// (shm/stress, channel/stress); nothing here knows collectives or frames.
//
// A driver is linked with --wrap=mmap, --wrap=munmap (tests/support/sanitizers.py), for two reasons. Threads of one
// process must share one mapping of an arena: through two mappings the same byte has two addresses, and ThreadSanitizer
// can't relate them. And every arena gets forbidden pages around it, so that who follows a wrong offset out of it ends
// at once. The core knows nothing of it.
#pragma once

#include <array>
#include <atomic>
#include <cstddef>
#include <functional>
#include <new>
#include <string>

namespace monarch::stress {

// Ends the process with the text on stderr, and so the run.
[[noreturn]] void die(const std::string& text);

// Of zeros; forked ranks see the same.
void* shared_memory(std::size_t bytes);

// The only way of ranks to wait for each other that does not go through the code under test, and what they are at. Lives
// in shared memory.
struct Assembly {
  std::array<std::atomic<int>, 512> meetings;
  // Of each lane of each rank, for the one who finds them hung.
  std::array<std::array<std::array<char, 160>, 4>, 8> notes;

  void arrive(int meeting) { meetings.at(static_cast<std::size_t>(meeting)).fetch_add(1, std::memory_order_acq_rel); }
  void await(int meeting, int ranks) const;
  void meet(int meeting, int ranks) {
    arrive(meeting);
    await(meeting, ranks);
  }
  void note(int rank, int lane, const std::string& text);
};

// A World is an Assembly and what its driver's ranks share besides.
template <class World>
World& make_world() {
  return *new (shared_memory(sizeof(World))) World{};
}

// Runs body(rank) on `ranks` ranks and waits for all of them. `may_die` is the rank whose death by SIGKILL is part of
// the plan, or -1. When a rank fails, or `seconds` have passed, the run ends with the notes on stderr.
void run_ranks(Assembly& assembly, bool threads, int ranks, int may_die, int seconds, const std::function<void(int)>& body);

}  // namespace monarch::stress
