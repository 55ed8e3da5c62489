// One rank of the stress driver: a Host, an Engine, and groups with the other ranks. It plays the turns that a seed
// makes, the same on every rank, in its own way: sync or async, waiting in any order and by any of the means that the
// core offers, on several threads. Which turns there are is turn.h's, what the ranks live in world.h's.
#pragma once

#include <condition_variable>
#include <deque>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

#include "shm/engine.h"
#include "shm/stress/turn.h"
#include "shm/stress/world.h"

namespace monarch::stress {

// The ranks of a group in their order, and the lane that plays its turns.
struct Circle {
  std::vector<int> ranks;
  int lane;
  int rank_of(int rank) const;  // -1: not in it
};

// An operation under way with all that belongs to it.
struct Pending {
  Pending(const Turn& turn, const Turn& called, int rank, int ranks, double seconds);

  Turn turn;
  int rank, ranks;
  Buffers buffers;
  std::shared_ptr<Operation> operation;

  void ended();        // what the engine calls
  void await_ended();
  bool has_ended();

 private:
  std::mutex mutex_;
  std::condition_variable changed_;
  int ends_ = 0;
};

class Member {
 public:
  // With hole != 0 the arena has room in pieces of this size only, so that groups get a stage no larger than that.
  Member(World& world, std::uint64_t seed, int rank, int ranks, std::size_t arena_bytes, std::size_t hole);
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
  std::shared_ptr<Host> host_;
  std::unique_ptr<Engine> engine_;
  std::vector<std::shared_ptr<Group>> groups_;
};

}  // namespace monarch::stress
