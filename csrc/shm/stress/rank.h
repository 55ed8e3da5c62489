// One rank of the stress driver: a Host, an Engine, and groups with the other ranks. It runs the steps that a seed
// generates, the same on every rank, but in its own way: sync or async, on several threads, and waiting in any order
// and by any method of the core. step.h has the steps, fixture.h the shared state.
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

// The ranks of a group in their order, and the caller that runs its steps.
struct GroupSpec {
  std::vector<int> ranks;
  int caller;
  int rank_of(int rank) const;  // -1: not in it
};

// What the engine calls at an operation's end. Apart from the buffers, which belong to a Host: the thread that calls
// may drop it after the rank has ended.
class Completion {
 public:
  explicit Completion(std::shared_ptr<Operation> operation) : operation_(std::move(operation)) {}
  void call();
  void await();

 private:
  std::shared_ptr<Operation> operation_;
  std::mutex mutex_;
  std::condition_variable changed_;
  int calls_ = 0;
};

// An operation in progress with its buffers.
struct Pending {
  Pending(const Step& step, int rank, int ranks, double seconds, const std::shared_ptr<ArenaPool>& pool);

  Step step;
  int rank, ranks;
  Buffers buffers;
  std::shared_ptr<Operation> operation;
  std::shared_ptr<Completion> completion;
  bool has_engine = false;  // which calls `completion`
};

// How a rank is set up.
struct Traits {
  std::size_t arena_bytes;
  std::size_t hole;         // if not 0, the free blocks have this size, so that groups get no larger stage
  std::uint64_t read_from;  // as a Group has it
};

class RankDriver {
 public:
  RankDriver(Fixture& fixture, std::uint64_t seed, int rank, int ranks, const Traits& traits);
  ~RankDriver();

  // Finds the others; all ranks call both, and `barrier` and the one after it are free.
  void connect(int barrier);
  void open(const std::vector<GroupSpec>& specs, int barrier);
  void close();

  // Run `steps` of the groups of one caller. Thread-safe between callers.
  void run_steps(int caller, const std::vector<Step>& steps);

  std::shared_ptr<Pending> start(const Step& step, double seconds, bool asynchronous, bool may_defer = false);
  void wait(Pending& pending, Random& random);
  // Dies unless the operation succeeded, or failed as it should.
  void expect_right(const Pending& pending) const;
  // Of operations of one group in the order of their start: those that failed are the last, and failed like this.
  void expect_failed(const std::vector<std::shared_ptr<Pending>>& pending, Failure::Kind kind, int culprit, bool all) const;

  Group& group(int index) { return *groups_.at(static_cast<std::size_t>(index)); }
  bool in(int index) const { return groups_.at(static_cast<std::size_t>(index)) != nullptr; }
  Host& host() { return *host_; }
  [[noreturn]] void fail(const Pending& pending, const std::string& what) const;

 private:
  Fixture& fixture_;
  std::uint64_t seed_;
  int rank_, ranks_;
  std::uint64_t read_from_;
  std::shared_ptr<Host> host_;
  std::shared_ptr<ArenaPool> pool_;
  void hand_over(Pending& pending);

  std::unique_ptr<Engine> engine_;
  // By group: a small asynchronous operation that no thread moves until the next one of the group is called, or it is
  // waited for. The Python code does the same.
  std::vector<std::shared_ptr<Pending>> deferred_;
  std::vector<std::shared_ptr<Group>> groups_;
};

}  // namespace monarch::stress
