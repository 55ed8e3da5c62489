// One random operation: what every rank calls, the data that it brings, and what it must get. The expected results
// come from every rank's inputs, which anybody can make again from the seed, and from arithmetic of its own: nothing
// of the code under test takes part. No groups, no waiting.
#pragma once

#include <cstdint>
#include <memory>
#include <random>
#include <string>
#include <vector>

#include "shm/group.h"

namespace monarch::stress {

using Random = std::mt19937_64;

// Uniform in [0, n), and alike with every standard library.
inline int below(Random& random, int n) { return static_cast<int>(random() % static_cast<std::uint64_t>(n)); }

struct Turn {
  int group = 0;
  Collective collective = Collective::barrier;
  Dtype dtype = Dtype::bytes;
  ReduceOp op = ReduceOp::none;
  int root = -1;
  std::uint64_t bytes = 0;            // of one piece
  std::vector<std::uint64_t> table;   // all_to_all: bytes from rank a to rank b at [a * n + b]
  bool in_place = false;
  bool asynchronous = false;
  std::uint64_t salt = 0;             // makes the data
  int odd_one = -1;                   // the rank that calls something else (`odd`), or nobody

  Header header() const { return {collective == Collective::all_to_all ? 0 : bytes, root, collective, dtype, op, 0}; }
  std::string text() const;
};

// For a group of `ranks`; what only depends on the generator is alike on all of them.
Turn random_turn(Random& random, int group, int ranks);
// Something else than `turn` that a rank could call by mistake.
Turn another_turn(const Turn& turn, Random& random, int ranks);

// The memory of one rank's part in a turn: exactly as much as the operation may touch, so that AddressSanitizer hears
// of every byte beyond it.
class Buffers {
 public:
  Buffers(const Turn& turn, int rank, int ranks);

  std::vector<Span> in, out;

  // What is wrong with the results of a turn that succeeded, or with memory that one that failed should not have
  // touched; "" if all is well.
  std::string check(const Turn& turn, int rank, int ranks) const;
  std::string check_untouched(const Turn& turn, int rank, int ranks) const;
  // The inputs of a turn that is under way or failed half-way; in place they are what they are.
  std::string check_inputs(const Turn& turn, int rank, int ranks) const;

 private:
  Span make(std::uint64_t bytes, std::uint64_t skew);

  std::vector<std::unique_ptr<char[]>> memory_;
};

}  // namespace monarch::stress
