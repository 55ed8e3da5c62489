#include "shm/stress/rank.h"

#include <algorithm>
#include <chrono>
#include <utility>

#include <unistd.h>

#include "shm/stress/coverage.h"

namespace monarch::stress {

namespace {

// Long enough for a busy machine; a rank that waits longer has missed a doorbell.
constexpr double operation_timeout_s = 20;

Clock::time_point in_seconds(double seconds) {
  return Clock::now() + std::chrono::duration_cast<Clock::duration>(std::chrono::duration<double>(seconds));
}

}  // namespace

int GroupSpec::rank_of(int rank) const {
  const auto found = std::find(ranks.begin(), ranks.end(), rank);
  return found == ranks.end() ? -1 : static_cast<int>(found - ranks.begin());
}

void Completion::call() {
  const std::lock_guard lock(mutex_);
  if (!operation_->done.load(std::memory_order_acquire)) die("an operation's callback ran before its end");
  if (++calls_ != 1) die("an operation's callback ran twice");
  changed_.notify_all();
}

void Completion::await() {
  std::unique_lock lock(mutex_);
  changed_.wait(lock, [this] { return calls_ != 0; });
}

Pending::Pending(const Step& step, int rank, int ranks, double seconds, const std::shared_ptr<ArenaPool>& pool)
    : step(step), rank(rank), ranks(ranks), buffers(step, rank, ranks, pool), operation(std::make_shared<Operation>()),
      completion(std::make_shared<Completion>(operation)) {
  operation->header = step.header(rank);
  operation->in = buffers.in;
  operation->out = buffers.out;
  operation->tag = step.tag;
  operation->deadline = in_seconds(seconds);
}

RankDriver::RankDriver(Fixture& fixture, std::uint64_t seed, int rank, int ranks, const Traits& traits)
    : fixture_(fixture), seed_(seed), rank_(rank), ranks_(ranks), read_from_(traits.read_from),
      host_(std::make_shared<Host>(traits.arena_bytes)), pool_(std::make_shared<ArenaPool>(host_)),
      engine_(std::make_unique<Engine>(host_)) {
  std::vector<std::uint64_t> pieces;
  while (const std::uint64_t piece = traits.hole != 0 ? host_->allocate(traits.hole) : 0) pieces.push_back(piece);
  for (std::size_t i = 0; i < pieces.size(); i += 2) host_->arena().release(pieces[i]);
}

RankDriver::~RankDriver() {
  close();
  engine_->stop();
}

// The smaller token connects to the larger, as process_group/_bootstrap.py has it.
void RankDriver::connect(int barrier) {
  const auto token_of = [&](int rank) { return std::string(fixture_.tokens[rank].begin(), fixture_.tokens[rank].end()); };
  std::copy(host_->token().begin(), host_->token().end(), fixture_.tokens[rank_].begin());
  fixture_.arrive_and_wait(barrier, ranks_);
  for (int r = 0; r < ranks_; ++r) {
    if (token_of(r) > host_->token() && !host_->connect(token_of(r))) die("rank " + std::to_string(r) + " can't be reached");
  }
  fixture_.arrive_and_wait(barrier + 1, ranks_);
  for (int r = 0; r < ranks_; ++r) {
    if (r != rank_ && !host_->accepted(token_of(r), operation_timeout_s)) die("rank " + std::to_string(r) + " did not connect");
  }
}

void RankDriver::open(const std::vector<GroupSpec>& specs, int barrier) {
  for (std::size_t g = 0; g < specs.size(); ++g) {
    const int rank = specs[g].rank_of(rank_);
    if (rank < 0) continue;
    // Full until the others have closed the groups before these as well.
    while ((fixture_.control_blocks[g][rank] = Group::allocate_control_block(*host_, static_cast<int>(specs[g].ranks.size()))) == 0) usleep(100);
  }
  fixture_.arrive_and_wait(barrier, ranks_);
  for (std::size_t g = 0; g < specs.size(); ++g) {
    const int rank = specs[g].rank_of(rank_), size = static_cast<int>(specs[g].ranks.size());
    groups_.push_back(nullptr);
    deferred_.push_back(nullptr);
    if (rank < 0) continue;
    std::vector<std::shared_ptr<Peer>> peers;
    for (const int r : specs[g].ranks) {
      const std::string token(fixture_.tokens[r].begin(), fixture_.tokens[r].end());
      peers.push_back(r == rank_ ? nullptr : host_->accepted(token, 0));
      if (r != rank_ && !peers.back()) die("rank " + std::to_string(r) + " is gone");
    }
    std::vector<std::uint64_t> control_blocks(fixture_.control_blocks[g].begin(), fixture_.control_blocks[g].begin() + size);
    groups_.back() = std::make_shared<Group>(host_, rank, std::move(peers), std::move(control_blocks), read_from_, "");
  }
  fixture_.arrive_and_wait(barrier + 1, ranks_);  // the control blocks in `fixture` may be written again
}

void RankDriver::close() {
  for (const auto& group : groups_) {
    if (group) group->close();
  }
  groups_.clear();
  deferred_.clear();
}

std::shared_ptr<Pending> RankDriver::start(const Step& step, double seconds, bool asynchronous, bool may_defer) {
  Group& group = *groups_[static_cast<std::size_t>(step.group)];
  Step called = step;
  if (step.mismatched_rank == group.rank()) {
    Random random(step.salt);
    called = different_step(step, random, group.size());
  }
  called.mismatched_rank = step.mismatched_rank;
  auto pending = std::make_shared<Pending>(called, group.rank(), group.size(), seconds, pool_);
  auto& deferred = deferred_[static_cast<std::size_t>(step.group)];
  if (asynchronous) {
    group.submit(pending->operation);
    may_defer = may_defer && !step.is_message() && group.is_small(*pending->operation);
    if (may_defer) {
      group.spin(*pending->operation);
    } else if (step.is_message()) {
      group.advance();
    }
    if (deferred && !deferred->operation->done.load(std::memory_order_acquire)) {
      if (!deferred->has_engine) hand_over(*deferred);
      may_defer = false;
    }
    deferred = may_defer ? pending : nullptr;
    if (!may_defer) hand_over(*pending);
  } else {
    group.submit(pending->operation);
    group.wait(*pending->operation);
  }
  return pending;
}

void RankDriver::hand_over(Pending& pending) {
  pending.has_engine = true;
  const auto then = [completion = pending.completion] { completion->call(); };
  engine_->submit_async(groups_[static_cast<std::size_t>(pending.step.group)], pending.operation, then);
}

// By any of the means that Python has: wait(), wait() for a time, or the callback alone.
void RankDriver::wait(Pending& pending, Random& random) {
  Group& group = *groups_[static_cast<std::size_t>(pending.step.group)];
  Operation& op = *pending.operation;
  const int means = below(random, 4);
  if (means == 0) {
    if (!pending.has_engine) hand_over(pending);
    pending.completion->await();
  } else if (means == 1) {
    while (!op.done.load(std::memory_order_acquire)) {
      if (pending.step.is_message()) {
        group.wait_asleep(op, in_seconds(0.0005));
      } else {
        group.wait(op, in_seconds(0.0005));
      }
    }
  } else {
    group.wait(op);
    if (means == 2 && engine_->take_back(op)) pending.completion->call();  // which counts the calls
  }
}

void RankDriver::fail(const Pending& pending, const std::string& what) const {
  die("seed " + std::to_string(seed_) + ", rank " + std::to_string(rank_) + ", " + pending.step.text() + ": " + what);
}

void RankDriver::expect_right(const Pending& pending) const {
  const Operation& op = *pending.operation;
  if (!op.done.load(std::memory_order_acquire)) fail(pending, "is not done");
  std::string wrong;
  if (pending.step.mismatched_rank >= 0 && (!pending.step.is_message() || pending.step.mismatched_rank == pending.rank)) {
    if (!op.failure || op.failure->kind != Failure::mismatch) fail(pending, "the mismatch was not noticed");
    wrong = pending.buffers.check_untouched(pending.step, pending.rank, pending.ranks);
  } else {
    if (op.failure) fail(pending, "failed: kind " + std::to_string(op.failure->kind) + ", rank " + std::to_string(op.failure->rank) + ", " + op.failure->text);
    wrong = pending.buffers.check(pending.step, pending.rank, pending.ranks);
    if (pending.step.to == pending.rank && op.source != pending.step.root) wrong = "names another sender";
  }
  if (!wrong.empty()) fail(pending, wrong);
  if (!op.failure) fixture_.coverage->count(pending.step, op, pending.rank, pending.ranks);
  else if (pending.step.is_message()) fixture_.coverage->count_refused();
}

void RankDriver::expect_failed(const std::vector<std::shared_ptr<Pending>>& pending, Failure::Kind kind, int culprit, bool all) const {
  bool failed = all;
  for (const auto& one : pending) {
    const Operation& op = *one->operation;
    if (!op.done.load(std::memory_order_acquire)) fail(*one, "is not done");
    if (!op.failure) {
      if (failed) fail(*one, "succeeded in a group that had ended");
      expect_right(*one);
      continue;
    }
    failed = true;
    if (op.failure->kind != kind || (culprit >= 0 && op.failure->rank != culprit)) {
      fail(*one, "should fail with kind " + std::to_string(kind) + " by rank " + std::to_string(culprit) + ", and failed with kind " +
                      std::to_string(op.failure->kind) + " by rank " + std::to_string(op.failure->rank) + ", " + op.failure->text);
    }
    const auto wrong = one->buffers.check_inputs(one->step, one->rank, one->ranks);
    if (!wrong.empty()) fail(*one, wrong);
  }
}

void RankDriver::run_steps(int caller, const std::vector<Step>& steps) {
  Random random(seed_ * 64 + static_cast<std::uint64_t>(rank_ * max_callers + caller));  // each rank waits in its own way
  std::deque<std::shared_ptr<Pending>> under_way;
  const auto finish_one = [&](std::size_t which) {
    const auto pending = under_way[which];
    fixture_.note(rank_, caller, "seed " + std::to_string(seed_) + ": waits for " + pending->step.text());
    wait(*pending, random);
    expect_right(*pending);
    under_way.erase(under_way.begin() + static_cast<std::ptrdiff_t>(which));
  };
  std::vector<const Step*> mine;
  for (const Step& step : steps) {
    if (in(step.group) && step.concerns(group(step.group).rank())) mine.push_back(&step);
  }
  // A receiver that posts a receive for a later message first must buffer the earlier one.
  for (std::size_t i = 0; i + 1 < mine.size(); ++i) {
    if (mine[i]->crossed && group(mine[i]->group).rank() == mine[i]->to) std::swap(mine[i], mine[i + 1]), ++i;
  }
  for (const Step* next : mine) {
    const Step& step = *next;
    fixture_.note(rank_, caller, "seed " + std::to_string(seed_) + ": " + step.text());
    auto pending = start(step, operation_timeout_s, step.asynchronous, below(random, 2) == 0);
    if (step.asynchronous) under_way.push_back(std::move(pending));
    else expect_right(*pending);
    while (under_way.size() > 8 || (!under_way.empty() && below(random, 4) == 0)) {
      finish_one(static_cast<std::size_t>(below(random, static_cast<int>(under_way.size()))));
    }
  }
  while (!under_way.empty()) finish_one(static_cast<std::size_t>(below(random, static_cast<int>(under_way.size()))));
  fixture_.note(rank_, caller, "seed " + std::to_string(seed_) + ": its steps are done");
}

}  // namespace monarch::stress
