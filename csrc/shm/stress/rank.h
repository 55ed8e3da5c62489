// One rank of the stress driver: a Host, an Engine, and groups with the other ranks. It plays the turns that a seed
// makes, the same on every rank, in its own way: sync or async, waiting in any order and by any of the means that the
// core offers, on several threads. Which turns there are is step.h's, what the ranks live in fixture.h's.
#pragma once

#include <condition_variable>
#include <deque>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

#include "shm/engine.h"
#include "shm/stress/step.h"
#include "shm/stress/fixture.h"

namespace monarch::stress {

// The ranks of a group in their order, and the lane that plays its turns.
struct Circle {
  std::vector<int> ranks;
  int lane;
  int rank_of(int rank) const;  // -1: not in it
};

// What the engine calls at an operation's end. Apart from the buffers, which belong to a Host: the thread that calls
// may drop it after the rank has ended.
class Ending {
 public:
  explicit Ending(std::shared_ptr<Operation> operation) : operation_(std::move(operation)) {}
  void call();
  void await();

 private:
  std::shared_ptr<Operation> operation_;
  std::mutex mutex_;
  std::condition_variable changed_;
  int calls_ = 0;
};

// An operation under way with all that belongs to it.
struct Pending {
  Pending(const Turn& turn, int rank, int ranks, double seconds, const std::shared_ptr<Shelf>& shelf);

  Turn turn;
  int rank, ranks;
  Buffers buffers;
  std::shared_ptr<Operation> operation;
  std::shared_ptr<Ending> ending;
};

// How a rank is set up.
struct Traits {
  std::size_t arena_bytes;
  std::size_t hole;         // if not 0, there is room in pieces of this size only, so that groups get a stage no larger
  std::uint64_t read_from;  // as a Group has it
};

class Member {
 public:
  Member(World& world, std::uint64_t seed, int rank, int ranks, const Traits& traits);
  ~Member();

  // Finds the others; all ranks call both, and `meeting` and the one after it are free.
  void connect(int meeting);
  void open(const std::vector<Circle>& circles, int meeting);
  void close();

  // Plays `turns` of the groups of one lane. Thread-safe between lanes.
  void play(int lane, const std::vector<Turn>& turns);

  std::shared_ptr<Pending> start(const Turn& turn, double seconds, bool asynchronous);
  void wait(Pending& pending, Random& random);
  // Dies unless the operation succeeded, or failed as it should.
  void expect_right(const Pending& pending) const;
  // Of operations of one group in the order of their start: those that failed are the last, and failed like this.
  void expect_failed(const std::vector<std::shared_ptr<Pending>>& pending, Failure::Kind kind, int culprit, bool all) const;

  Group& group(int index) { return *groups_.at(static_cast<std::size_t>(index)); }
  bool in(int index) const { return groups_.at(static_cast<std::size_t>(index)) != nullptr; }
  Host& host() { return *host_; }
  [[noreturn]] void blame(const Pending& pending, const std::string& what) const;

 private:
  World& world_;
  std::uint64_t seed_;
  int rank_, ranks_;
  std::uint64_t read_from_;
  std::shared_ptr<Host> host_;
  std::shared_ptr<Shelf> shelf_;
  std::unique_ptr<Engine> engine_;
  std::vector<std::shared_ptr<Group>> groups_;
};

}  // namespace monarch::stress
