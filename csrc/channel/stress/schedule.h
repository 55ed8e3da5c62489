// What all ranks of a round derive from its seed: the ranks, how they connect, how the round ends.
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

enum class End { clean, killed, malicious, left, dropped };
inline constexpr const char* end_names[] = {"cleanly", "a killed rank", "a malicious peer", "a rank that left", "a rank that drops its links"};

// Mostly small frames, without waiting for answers; anything; mostly blocks, which are kept for long.
enum class Weight { light, mixed, heavy };
inline constexpr const char* weight_names[] = {"light", "mixed", "heavy"};

enum class ConnectOrder { one_side, both_sides, late };
inline constexpr const char* connect_order_names[] = {"from one side", "from both sides at once", "when first sent to"};

struct Round {
  Round(std::uint64_t seed, bool threads, int messages) : seed(seed), threads(threads) {
    Random random(seed);
    constexpr End threaded[] = {End::clean, End::malicious, End::left, End::dropped};
    end = threads ? threaded[seed % 4] : static_cast<End>(seed % 5);
    connect_order = end == End::dropped ? static_cast<ConnectOrder>(seed / 5 % 2) : static_cast<ConnectOrder>(seed / 5 % 3);
    ranks = 2 + below(random, max_ranks - 2);
    callers = 1 + below(random, max_callers - 1);
    culprit = end == End::clean || end == End::malicious ? -1 : below(random, ranks);
    weight = static_cast<Weight>(below(random, 3));
    this->messages = weight == Weight::light ? 4 * messages : messages;
    for (int& stop : stops) stop = below(random, this->messages);
    fatal_caller = below(random, callers);
    // A payload must fit between the rings when the other frames are released. Malicious peers leave many blocks
    // behind.
    tiny = weight == Weight::heavy && end != End::malicious && below(random, 2) == 0;
    large = !tiny && connect_order != ConnectOrder::late;
    arena_bytes = static_cast<std::size_t>(tiny ? 4 : 24) << 20;
    incarnations = end == End::malicious ? max_incarnations : 0;
  }

  bool is_over(int rank, int caller, int number) const {
    return rank == culprit && number >= stops[static_cast<std::size_t>(caller)];
  }
  // Ranks that stay until the end.
  int survivors() const { return ranks - (end == End::killed || end == End::left); }
  int malicious_rank() const { return ranks; }

  std::uint64_t seed;
  bool threads;
  int messages;  // of a caller
  End end;
  ConnectOrder connect_order;
  int ranks, callers, culprit, fatal_caller, incarnations;
  std::array<int, max_callers> stops;  // the message at which each caller of the culprit ends
  std::size_t arena_bytes;
  Weight weight;
  bool large;  // there are payloads that are copied past the cache
  bool tiny;   // nor any of more than some 250 KiB
};

}  // namespace monarch::stress
