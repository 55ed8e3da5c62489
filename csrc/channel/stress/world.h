// Where the ranks of the stress driver live: forked processes, as in production, or threads of one process, each with
// a Host and a Post of its own, so that ThreadSanitizer sees what they do to each other's memory.
//
// The driver is linked with --wrap=mmap, --wrap=munmap (tests/transport/test_channel_sanitizers.py), for two reasons.
// Threads of one process must share one mapping of an arena: through two mappings the same byte has two addresses, and
// ThreadSanitizer can't relate them. And every arena gets forbidden pages around it, so that a reader who follows a
// forged offset out of it ends at once. The core knows nothing of it.
//
// A World is also how ranks tell each other tokens, and the only way to wait for each other that does not go through
// the code under test. Nothing here knows frames.
#pragma once

#include <array>
#include <atomic>
#include <cstdint>
#include <functional>
#include <string>

namespace monarch::stress {

// Ranks, and one that forges. Lanes, and one for answers.
inline constexpr int max_ranks = 5, max_lanes = 4, max_meetings = 8, max_lives = 13;

// Ends the process with the text on stderr, and so the run.
[[noreturn]] void die(const std::string& text);

class Coverage;

// In memory that all ranks share; zero where nothing has been said yet.
struct World {
  using Count = std::atomic<std::uint64_t>;

  std::array<std::array<char, 32>, max_ranks> tokens;
  std::array<std::atomic<int>, max_meetings> meetings;
  // Frames [of a rank][of its lane][to a rank] that their sender knows to be in the ring, whatever becomes of it.
  std::array<std::array<std::array<Count, max_ranks>, max_lanes>, max_ranks> written;
  std::array<std::atomic<bool>, max_ranks> departed;  // it has died or left, or is about to
  std::array<std::atomic<int>, max_ranks> counting;   // threads of a rank that are about to count what they keep
  std::array<std::array<char, 32>, max_lives> forgers;
  std::array<std::atomic<int>, max_lives> exposed;  // how many ranks were told that this one is gone
  // What each lane of each rank is at, for the one who finds them hung.
  std::array<std::array<std::array<char, 160>, max_lanes>, max_ranks> notes;
  Coverage* coverage;

  void arrive(int meeting) { meetings.at(static_cast<std::size_t>(meeting)).fetch_add(1, std::memory_order_acq_rel); }
  void await(int meeting, int ranks) const;
  void meet(int meeting, int ranks) {
    arrive(meeting);
    await(meeting, ranks);
  }
  void note(int rank, int lane, const std::string& text);

  static World& make(Coverage& coverage);
};

// Runs body(rank) on `ranks` ranks and waits for all of them. `may_die` is the rank whose death by SIGKILL is part of
// the plan, or -1. When a rank fails, or `seconds` have passed, the run ends with the notes on stderr.
void run_ranks(World& world, bool threads, int ranks, int may_die, int seconds, const std::function<void(int)>& body);

}  // namespace monarch::stress
