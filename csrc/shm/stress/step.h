// One random operation: the call of every rank, its data, and its expected result. The expected results are computed
// here from every rank's inputs, which the seed determines, without the code under test. No groups, no waiting.
// memory.h provides the memory.
#pragma once

#include <cstdint>
#include <memory>
#include <random>
#include <string>
#include <vector>

#include "shm/group.h"
#include "shm/stress/memory.h"

namespace monarch::stress {

using Random = std::mt19937_64;

// Uniform in [0, n), and alike with every standard library.
inline int below(Random& random, int n) { return static_cast<int>(random() % static_cast<std::uint64_t>(n)); }

struct Step {
  int number = 0;                     // of the round's steps
  int group = 0;
  Collective collective = Collective::barrier;
  Dtype dtype = Dtype::bytes;
  ReduceOp op = ReduceOp::none;
  int root = -1;                      // of a message the sender
  std::uint64_t bytes = 0;            // of one piece
  std::vector<std::uint64_t> table;   // all_to_all: bytes from rank a to rank b at [a * n + b]
  Location location = Location::heap;          // where the ranks have their data
  bool in_place = false;
  bool asynchronous = false;
  std::uint64_t salt = 0;             // makes the data
  int mismatched_rank = -1;                   // the rank that calls something else (different_step), or -1
  // Of a message, which has Collective::send here:
  int to = -1, tag = 0;
  bool from_any = false;              // the receiver names no sender
  bool crossed = false;               // the receiver posts the receive of the next message first

  bool is_message() const { return collective == Collective::send; }
  bool concerns(int rank) const { return !is_message() || rank == root || rank == to; }
  Header header(int rank) const;
  std::string text() const;
};

// For a group of `ranks`; what only depends on the generator is alike on all of them.
Step random_step(Random& random, int group, int ranks);
// Operations of a group of all ranks that use every algorithm, if they get the memory that they need.
std::vector<Step> steps_for_every_algorithm(Random& random, int group, int ranks);
// Something else than `step` that a rank could call by mistake.
Step different_step(const Step& step, Random& random, int ranks);

// The memory of one rank's part in a step: exactly as much as the operation may access.
class Buffers {
 public:
  Buffers(const Step& step, int rank, int ranks, const std::shared_ptr<ArenaPool>& pool);

  std::vector<Span> in, out;

  // The error in the results of a successful step, or in memory that a failed one must not change; "" if there is none.
  std::string check(const Step& step, int rank, int ranks) const;
  std::string check_untouched(const Step& step, int rank, int ranks) const;
  // The error in the inputs of a step that is in progress or has failed halfway; in-place inputs are not checked.
  std::string check_inputs(const Step& step, int rank, int ranks) const;

 private:
  std::vector<Memory> memory_;
};

}  // namespace monarch::stress
