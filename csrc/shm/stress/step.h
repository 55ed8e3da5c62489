// One random operation: what every rank calls, the data that it brings, and what it must get. The expected results
// come from every rank's inputs, which anybody can make again from the seed, and from arithmetic of its own: nothing
// of the code under test takes part. No groups, no waiting. Where the data lie is memory.h's.
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

struct Turn {
  int number = 0;                     // of the round's turns
  int group = 0;
  Collective collective = Collective::barrier;
  Dtype dtype = Dtype::bytes;
  ReduceOp op = ReduceOp::none;
  int root = -1;                      // of a message the sender
  std::uint64_t bytes = 0;            // of one piece
  std::vector<std::uint64_t> table;   // all_to_all: bytes from rank a to rank b at [a * n + b]
  Place place = Place::heap;          // where the ranks have their data
  bool in_place = false;
  bool asynchronous = false;
  std::uint64_t salt = 0;             // makes the data
  int odd_one = -1;                   // the rank that calls something else (another_turn), or nobody
  // Of a message, which has Collective::send here:
  int to = -1, tag = 0;
  bool from_any = false;              // the receiver does not say from whom
  bool crossed = false;               // the receiver asks for the message after this one first

  bool is_message() const { return collective == Collective::send; }
  bool concerns(int rank) const { return !is_message() || rank == root || rank == to; }
  Header header(int rank) const;
  std::string text() const;
};

// For a group of `ranks`; what only depends on the generator is alike on all of them.
Turn random_turn(Random& random, int group, int ranks);
// Operations of a group of all that take every way there is, if they find the memory that they ask for.
std::vector<Turn> every_way(Random& random, int group, int ranks);
// Something else than `turn` that a rank could call by mistake.
Turn another_turn(const Turn& turn, Random& random, int ranks);

// The memory of one rank's part in a turn: exactly as much as the operation may touch.
class Buffers {
 public:
  Buffers(const Turn& turn, int rank, int ranks, const std::shared_ptr<Shelf>& shelf);

  std::vector<Span> in, out;

  // What is wrong with the results of a turn that succeeded, or with memory that one that failed should not have
  // touched; "" if all is well.
  std::string check(const Turn& turn, int rank, int ranks) const;
  std::string check_untouched(const Turn& turn, int rank, int ranks) const;
  // The inputs of a turn that is under way or failed half-way; in place they are what they are.
  std::string check_inputs(const Turn& turn, int rank, int ranks) const;

 private:
  std::vector<Memory> memory_;
};

}  // namespace monarch::stress
