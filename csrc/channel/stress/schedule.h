// What all ranks of a round know from its seed: who there is, how they meet, how the round ends.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <random>

#include "channel/stress/fixture.h"

namespace monarch::stress {

using Random = std::mt19937_64;

// Uniform in [0, n), and alike with every standard library.
inline int below(Random& random, int n) { return static_cast<int>(random() % static_cast<std::uint64_t>(n)); }

enum class End { in_peace, killed, forged, left, dropped };
inline constexpr const char* end_names[] = {"in peace", "a killed rank", "a forger", "a rank that left", "a rank that drops its links"};

// Mostly small frames, without waiting for answers; anything; mostly blocks, which are kept for long.
enum class Weight { light, mixed, heavy };
inline constexpr const char* weight_names[] = {"light", "mixed", "heavy"};

enum class Meeting { one_side, both_sides, late };
inline constexpr const char* meeting_names[] = {"from one side", "from both sides at once", "when first sent to"};

struct Round {
  Round(std::uint64_t seed, bool threads, int letters) : seed(seed), threads(threads) {
    Random random(seed);
    constexpr End threaded[] = {End::in_peace, End::forged, End::left, End::dropped};
    end = threads ? threaded[seed % 4] : static_cast<End>(seed % 5);
    meeting = end == End::dropped ? static_cast<Meeting>(seed / 5 % 2) : static_cast<Meeting>(seed / 5 % 3);
    ranks = 2 + below(random, max_ranks - 2);
    lanes = 1 + below(random, max_lanes - 1);
    culprit = end == End::in_peace || end == End::forged ? -1 : below(random, ranks);
    weight = static_cast<Weight>(below(random, 3));
    this->letters = weight == Weight::light ? 4 * letters : letters;
    for (int& stop : stops) stop = below(random, this->letters);
    fatal_lane = below(random, lanes);
    // A payload must find room between the rings when the other frames have gone. Forgers leave much behind.
    tiny = weight == Weight::heavy && end != End::forged && below(random, 2) == 0;
    large = !tiny && meeting != Meeting::late;
    arena_bytes = static_cast<std::size_t>(tiny ? 4 : 24) << 20;
    lives = end == End::forged ? max_lives : 0;
  }

  bool is_over(int rank, int lane, int number) const {
    return rank == culprit && number >= stops[static_cast<std::size_t>(lane)];
  }
  // Ranks that are there till the end, and the one that forges.
  int survivors() const { return ranks - (end == End::killed || end == End::left); }
  int forger() const { return ranks; }

  std::uint64_t seed;
  bool threads;
  int letters;  // of a lane
  End end;
  Meeting meeting;
  int ranks, lanes, culprit, fatal_lane, lives;
  std::array<int, max_lanes> stops;  // where the lanes of the culprit end
  std::size_t arena_bytes;
  Weight weight;
  bool large;  // there are payloads that are copied past the cache
  bool tiny;   // nor any of more than some 250 KiB
};

}  // namespace monarch::stress
