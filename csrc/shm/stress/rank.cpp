#include "shm/stress/rank.h"

#include <algorithm>
#include <chrono>
#include <utility>

#include <unistd.h>

#include "shm/stress/coverage.h"

namespace monarch::stress {

namespace {

// Long enough for a machine that is busy with other things; whoever waits so long has missed a bell.
constexpr double patience = 20;

Clock::time_point in_seconds(double seconds) {
  return Clock::now() + std::chrono::duration_cast<Clock::duration>(std::chrono::duration<double>(seconds));
}

}  // namespace

int Circle::rank_of(int rank) const {
  const auto found = std::find(ranks.begin(), ranks.end(), rank);
  return found == ranks.end() ? -1 : static_cast<int>(found - ranks.begin());
}

void Ending::call() {
  const std::lock_guard lock(mutex_);
  if (!operation_->done.load(std::memory_order_acquire)) die("an operation's callback ran before its end");
  if (++calls_ != 1) die("an operation's callback ran twice");
  changed_.notify_all();
}

void Ending::await() {
  std::unique_lock lock(mutex_);
  changed_.wait(lock, [this] { return calls_ != 0; });
}

Pending::Pending(const Turn& turn, int rank, int ranks, double seconds, const std::shared_ptr<Shelf>& shelf)
    : turn(turn), rank(rank), ranks(ranks), buffers(turn, rank, ranks, shelf), operation(std::make_shared<Operation>()),
      ending(std::make_shared<Ending>(operation)) {
  operation->header = turn.header(rank);
  operation->in = buffers.in;
  operation->out = buffers.out;
  operation->tag = turn.tag;
  operation->deadline = in_seconds(seconds);
}

Member::Member(World& world, std::uint64_t seed, int rank, int ranks, const Traits& traits)
    : world_(world), seed_(seed), rank_(rank), ranks_(ranks), read_from_(traits.read_from),
      host_(std::make_shared<Host>(traits.arena_bytes)), shelf_(std::make_shared<Shelf>(host_)),
      engine_(std::make_unique<Engine>(host_)) {
  std::vector<std::uint64_t> pieces;
  while (const std::uint64_t piece = traits.hole != 0 ? host_->allocate(traits.hole) : 0) pieces.push_back(piece);
  for (std::size_t i = 0; i < pieces.size(); i += 2) host_->arena().release(pieces[i]);
}

Member::~Member() {
  close();
  engine_->stop();
}

// The smaller token connects to the larger, as process_group/_bootstrap.py has it.
void Member::connect(int meeting) {
  const auto token_of = [&](int rank) { return std::string(world_.tokens[rank].begin(), world_.tokens[rank].end()); };
  std::copy(host_->token().begin(), host_->token().end(), world_.tokens[rank_].begin());
  world_.meet(meeting, ranks_);
  for (int r = 0; r < ranks_; ++r) {
    if (token_of(r) > host_->token() && !host_->connect(token_of(r))) die("rank " + std::to_string(r) + " can't be reached");
  }
  world_.meet(meeting + 1, ranks_);
  for (int r = 0; r < ranks_; ++r) {
    if (r != rank_ && !host_->accepted(token_of(r), patience)) die("rank " + std::to_string(r) + " did not connect");
  }
}

void Member::open(const std::vector<Circle>& circles, int meeting) {
  for (std::size_t g = 0; g < circles.size(); ++g) {
    const int rank = circles[g].rank_of(rank_);
    if (rank < 0) continue;
    // Full until the others have closed the groups before these as well.
    while ((world_.boards[g][rank] = Group::make_board(*host_, static_cast<int>(circles[g].ranks.size()))) == 0) usleep(100);
  }
  world_.meet(meeting, ranks_);
  for (std::size_t g = 0; g < circles.size(); ++g) {
    const int rank = circles[g].rank_of(rank_), size = static_cast<int>(circles[g].ranks.size());
    groups_.push_back(nullptr);
    if (rank < 0) continue;
    std::vector<std::shared_ptr<Peer>> peers;
    for (const int r : circles[g].ranks) {
      const std::string token(world_.tokens[r].begin(), world_.tokens[r].end());
      peers.push_back(r == rank_ ? nullptr : host_->accepted(token, 0));
      if (r != rank_ && !peers.back()) die("rank " + std::to_string(r) + " is gone");
    }
    std::vector<std::uint64_t> boards(world_.boards[g].begin(), world_.boards[g].begin() + size);
    groups_.back() = std::make_shared<Group>(host_, rank, std::move(peers), std::move(boards), read_from_, "");
  }
  world_.meet(meeting + 1, ranks_);  // the boards in `world` may be written again
}

void Member::close() {
  for (const auto& group : groups_) {
    if (group) group->close();
  }
  groups_.clear();
}

std::shared_ptr<Pending> Member::start(const Turn& turn, double seconds, bool asynchronous) {
  Group& group = *groups_[static_cast<std::size_t>(turn.group)];
  Turn called = turn;
  if (turn.odd_one == group.rank()) {
    Random random(turn.salt);
    called = another_turn(turn, random, group.size());
  }
  called.odd_one = turn.odd_one;
  auto pending = std::make_shared<Pending>(called, group.rank(), group.size(), seconds, shelf_);
  if (asynchronous) {
    const auto then = [ending = pending->ending] { ending->call(); };
    engine_->start(groups_[static_cast<std::size_t>(turn.group)], pending->operation, then);
  } else {
    group.submit(pending->operation);
    group.wait(*pending->operation);
  }
  return pending;
}

// By any of the means that Python has: wait(), wait() for a time, or the callback alone.
void Member::wait(Pending& pending, Random& random) {
  Group& group = *groups_[static_cast<std::size_t>(pending.turn.group)];
  Operation& op = *pending.operation;
  const int means = below(random, 4);
  if (means == 0) {
    pending.ending->await();
  } else if (means == 1) {
    while (!op.done.load(std::memory_order_acquire)) group.wait(op, in_seconds(0.0005));
  } else {
    group.wait(op);
  }
}

void Member::blame(const Pending& pending, const std::string& what) const {
  die("seed " + std::to_string(seed_) + ", rank " + std::to_string(rank_) + ", " + pending.turn.text() + ": " + what);
}

void Member::expect_right(const Pending& pending) const {
  const Operation& op = *pending.operation;
  if (!op.done.load(std::memory_order_acquire)) blame(pending, "is not done");
  std::string wrong;
  if (pending.turn.odd_one >= 0 && (!pending.turn.is_message() || pending.turn.odd_one == pending.rank)) {
    if (!op.failure || op.failure->kind != Failure::mismatch) blame(pending, "the mismatch was not noticed");
    wrong = pending.buffers.check_untouched(pending.turn, pending.rank, pending.ranks);
  } else {
    if (op.failure) blame(pending, "failed: kind " + std::to_string(op.failure->kind) + ", rank " + std::to_string(op.failure->rank) + ", " + op.failure->text);
    wrong = pending.buffers.check(pending.turn, pending.rank, pending.ranks);
    if (pending.turn.to == pending.rank && op.source != pending.turn.root) wrong = "names another sender";
  }
  if (!wrong.empty()) blame(pending, wrong);
  if (!op.failure) world_.coverage->count(pending.turn, op, pending.rank, pending.ranks);
  else if (pending.turn.is_message()) world_.coverage->count_refused();
}

void Member::expect_failed(const std::vector<std::shared_ptr<Pending>>& pending, Failure::Kind kind, int culprit, bool all) const {
  bool failed = all;
  for (const auto& one : pending) {
    const Operation& op = *one->operation;
    if (!op.done.load(std::memory_order_acquire)) blame(*one, "is not done");
    if (!op.failure) {
      if (failed) blame(*one, "succeeded in a group that had ended");
      expect_right(*one);
      continue;
    }
    failed = true;
    if (op.failure->kind != kind || (culprit >= 0 && op.failure->rank != culprit)) {
      blame(*one, "should fail with kind " + std::to_string(kind) + " by rank " + std::to_string(culprit) + ", and failed with kind " +
                      std::to_string(op.failure->kind) + " by rank " + std::to_string(op.failure->rank) + ", " + op.failure->text);
    }
    const auto wrong = one->buffers.check_inputs(one->turn, one->rank, one->ranks);
    if (!wrong.empty()) blame(*one, wrong);
  }
}

void Member::play(int lane, const std::vector<Turn>& turns) {
  Random random(seed_ * 64 + static_cast<std::uint64_t>(rank_ * max_lanes + lane));  // a rank's own way of waiting
  std::deque<std::shared_ptr<Pending>> under_way;
  const auto finish_one = [&](std::size_t which) {
    const auto pending = under_way[which];
    world_.note(rank_, lane, "seed " + std::to_string(seed_) + ": waits for " + pending->turn.text());
    wait(*pending, random);
    expect_right(*pending);
    under_way.erase(under_way.begin() + static_cast<std::ptrdiff_t>(which));
  };
  std::vector<const Turn*> mine;
  for (const Turn& turn : turns) {
    if (in(turn.group) && turn.concerns(group(turn.group).rank())) mine.push_back(&turn);
  }
  // A receiver that asks for a message after the next one looks behind it, and has to keep what it finds before.
  for (std::size_t i = 0; i + 1 < mine.size(); ++i) {
    if (mine[i]->crossed && group(mine[i]->group).rank() == mine[i]->to) std::swap(mine[i], mine[i + 1]), ++i;
  }
  for (const Turn* next : mine) {
    const Turn& turn = *next;
    world_.note(rank_, lane, "seed " + std::to_string(seed_) + ": " + turn.text());
    auto pending = start(turn, patience, turn.asynchronous);
    if (turn.asynchronous) under_way.push_back(std::move(pending));
    else expect_right(*pending);
    while (under_way.size() > 8 || (!under_way.empty() && below(random, 4) == 0)) {
      finish_one(static_cast<std::size_t>(below(random, static_cast<int>(under_way.size()))));
    }
  }
  while (!under_way.empty()) finish_one(static_cast<std::size_t>(below(random, static_cast<int>(under_way.size()))));
  world_.note(rank_, lane, "seed " + std::to_string(seed_) + ": its turns are over");
}

}  // namespace monarch::stress
