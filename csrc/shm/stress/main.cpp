// Stress driver of shm/: ranks run random operations on overlapping groups. A round ends in one of several ways:
// cleanly, or with a rank that is late, closes, leaves, is killed, or forks. Without torch and Python, so that the
// sanitizers report only errors of csrc/shm/. tests/shm/test_sanitizers.py builds and runs it.
//
//   stress threads|processes [seed [rounds [steps]]]
//
// At its end a run prints how often each algorithm was used. A run of eight rounds or more fails if one was never used.
//
// Each round prints its seed, which is seed + round number. To repeat a round, pass its seed and 1 round. Only the
// interleaving of threads differs between runs.
#include <array>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <filesystem>
#include <string>
#include <thread>
#include <vector>

#include <signal.h>
#include <sys/wait.h>
#include <unistd.h>

#include "shm/stress/coverage.h"
#include "shm/stress/rank.h"

namespace monarch::stress {

namespace {

constexpr std::size_t arena_bytes = 72 << 20;
constexpr int epochs = 2;
constexpr int seconds_for_a_round = 100;

enum class End { clean, late, closed, left, killed, forked };
constexpr const char* end_names[] = {"cleanly", "a late rank", "a closed group", "a rank that left", "a killed rank", "a fork"};

// What all ranks of a round know.
struct Round {
  Round(std::uint64_t seed, bool threads, int steps_per_caller) : seed(seed), threads(threads), random(seed) {
    ranks = 2 + below(random, max_ranks - 1);
    callers = 1 + below(random, max_callers);
    const End threaded[] = {End::clean, End::late, End::closed, End::left};
    const End forked[] = {End::clean, End::late, End::closed, End::killed, End::forked};
    end = threads ? threaded[seed % 4] : forked[seed % 5];
    culprit = below(random, ranks);
    constexpr std::size_t sizes[] = {0, 320 << 10, 600 << 10};  // the stage as large as may be, 256 KiB, 512 KiB
    // A rank that must not read, none that reads little, all that do, or anything.
    const int reading = static_cast<int>(seed / 3 % 4);
    for (Traits& rank : traits) {
      const std::uint64_t read_from = reading == 1 ? 32'001 : reading == 3 && below(random, 2) != 0 ? 32'001 : 1;
      rank = {arena_bytes, sizes[below(random, 3)], read_from};
    }
    if (reading == 0) traits[static_cast<std::size_t>(below(random, ranks))].read_from = 0;
    for (int epoch = 0; epoch < epochs; ++epoch) {
      specs.emplace_back();
      const int groups = 2 + below(random, max_groups - 2);
      for (int g = 0; g < groups; ++g) specs.back().push_back(spec(g));
      steps.emplace_back(static_cast<std::size_t>(callers));
      for (int caller = 0; caller < callers; ++caller) {
        std::vector<Row> rows;
        for (int i = 0; i < steps_per_caller; ++i) add_step(specs.back(), caller, rows);
        if (caller == 0) {
          for (Step& step : steps_for_every_algorithm(random, 0, ranks)) rows.insert(rows.begin() + below(random, static_cast<int>(rows.size()) + 1), row(std::move(step)));
        }
        for (const Row& row : rows) {
          for (Step step : row) {
            if ((step.number = count++) >= max_steps - 1) die("too many steps");
            if (step.from_any) step.tag = 1000 + step.number;  // of another sender's messages none is like it
            steps.back()[static_cast<std::size_t>(caller)].push_back(std::move(step));
          }
        }
      }
    }
  }

  std::uint64_t seed;
  bool threads;
  Random random;
  int ranks, callers, culprit;
  End end;
  std::array<Traits, max_ranks> traits;
  std::vector<std::vector<GroupSpec>> specs;             // [epoch][group]
  std::vector<std::vector<std::vector<Step>>> steps;    // [epoch][caller]

 private:
  using Row = std::vector<Step>;  // with nothing in between
  int count = 0;

  // A crossed message is followed by the one that the receiver receives before it.
  Row row(Step step) {
    if (!step.crossed) return {std::move(step)};
    Step next = step;
    next.crossed = next.asynchronous = false;
    next.tag = step.tag + 10;
    next.salt = random();
    return {std::move(step), std::move(next)};
  }

  // Groups 0 and 1 have all ranks; the others have any ranks, in any order.
  GroupSpec spec(int index) {
    GroupSpec spec{{}, index % callers};
    for (int r = 0; r < ranks; ++r) {
      if (index < 2 || below(random, 3) != 0) spec.ranks.push_back(r);
    }
    if (spec.ranks.empty()) spec.ranks.push_back(below(random, ranks));
    for (int i = static_cast<int>(spec.ranks.size()) - 1; i > 0; --i) {
      std::swap(spec.ranks[static_cast<std::size_t>(i)], spec.ranks[static_cast<std::size_t>(below(random, i + 1))]);
    }
    return spec;
  }

  void add_step(const std::vector<GroupSpec>& groups, int caller, std::vector<Row>& to) {
    const int g = below(random, static_cast<int>(groups.size()));
    const auto& group = groups[static_cast<std::size_t>(g)];
    if (group.caller != caller) return;
    const int size = static_cast<int>(group.ranks.size());
    Step step = random_step(random, g, size);
    if (size > 1 && below(random, 20) == 0) step.mismatched_rank = step.is_message() ? step.to : below(random, size);
    else if (step.is_message()) step.crossed = below(random, 4) == 0;
    to.push_back(row(std::move(step)));
  }
};

// A round's end ----------------------------------------------------------------------------------------------------

using Pendings = std::vector<std::shared_ptr<Pending>>;

Step all_reduce_of(std::uint64_t elements, std::uint64_t salt) {
  Step step;
  step.number = max_steps - 1;  // none of those before
  step.collective = Collective::all_reduce;
  step.dtype = Dtype::f32;
  step.op = ReduceOp::sum;
  step.bytes = 4 * elements;
  step.salt = salt;
  return step;
}

// One of them is large. The seed chooses its algorithm, but threads use the stage: a rank that fails frees its tensors
// while others may still read them, and the readers detect that. Reads of another thread's memory would be a race for
// ThreadSanitizer, and a use after free for AddressSanitizer.
Pendings start_some(RankDriver& driver, const Round& round, int n, double seconds) {
  Pendings pending;
  for (int i = 0; i < n; ++i) {
    const auto salt = round.seed * 100 + static_cast<std::uint64_t>(i);
    Step step = all_reduce_of(i == 2 ? 150'000 : 100, salt);
    const int algorithm = round.threads ? 0 : static_cast<int>(round.seed / 5 % 4);
    if (i == 2 && algorithm == 1) {
      step.bytes = largest_pooled;
      step.in_place = true;
      step.location = Location::arena;
    } else if (i == 2 && algorithm != 0) {
      step.collective = Collective::all_gather;
      step.op = ReduceOp::none;
      step.location = algorithm == 2 ? Location::pages : Location::arena;
    }
    pending.push_back(driver.start(step, seconds, true));
  }
  return pending;
}

void await_all(const Pendings& pending) {
  for (const auto& one : pending) one->completion->await();
}

void end_late(RankDriver& driver, Fixture& fixture, const Round& round, int culprit, int barrier) {
  const bool me = driver.group(0).rank() == culprit;
  const bool asynchronous = (round.seed & 8) != 0;
  const auto start = [&] { return driver.start(all_reduce_of(100, round.seed), 0.3, asynchronous); };
  if (me) fixture.await(barrier, round.ranks - 1);
  const auto pending = start();
  const auto another = start();
  if (asynchronous) await_all({pending, another});
  driver.expect_failed({pending, another}, Failure::late, culprit, true);
  if (!me) fixture.arrive(barrier);
}

// The rank that closes has fewer operations in progress than the others: those that have started may succeed, and the
// others then fail.
void end_closed(RankDriver& driver, const Round& round, int culprit) {
  const bool me = driver.group(0).rank() == culprit;
  const auto pending = start_some(driver, round, me ? 3 : 5, 20);
  if (me) driver.group(0).close();
  await_all(pending);
  driver.expect_failed(pending, me ? Failure::closed : Failure::left, culprit, false);
  if (!me && !pending.back()->operation->failure) driver.fail(*pending.back(), "succeeded without one of the ranks");
}

void end_departed(RankDriver& driver, const Round& round, int culprit, Failure::Kind kind) {
  const bool me = driver.group(0).rank() == culprit;
  auto pending = start_some(driver, round, me ? 3 : 5, 20);
  Step message;
  message.collective = Collective::send;
  message.root = culprit;
  message.to = driver.group(0).rank();
  const auto never_sent = me ? nullptr : driver.start(message, 20, true);
  if (me && kind == Failure::dead) raise(SIGKILL);
  if (me) return driver.close();
  pending.push_back(never_sent);
  await_all(pending);
  pending.pop_back();
  driver.expect_failed({never_sent}, kind, culprit, true);
  driver.expect_failed(pending, kind, culprit, false);
  if (!pending.back()->operation->failure) driver.fail(*pending.back(), "succeeded without one of the ranks");
  pending = {driver.start(all_reduce_of(1, 1), 20, false)};
  driver.expect_failed(pending, kind, culprit, true);
}

// A child that keeps a descriptor of its parent's arena or links would hide the parent's death from the others.
void end_forked(RankDriver& driver, const Round& round) {
  const auto pending = start_some(driver, round, 4, 20);
  const pid_t child = fork();
  if (child == 0) {
    driver.host().abandon();
    int kept = 0;
    for (const auto& entry : std::filesystem::directory_iterator("/proc/self/fd")) {
      std::error_code gone;
      const std::string target = std::filesystem::read_symlink(entry, gone).string();
      for (const char* arena : {"memfd:monarch", "/dev/shm/monarch-"}) kept += target.find(arena) != std::string::npos;
    }
    _exit(kept);
  }
  int status = 0;
  if (waitpid(child, &status, 0) != child || status != 0) die("a forked child keeps its parent's memory, or died");
  await_all(pending);
  for (const auto& one : pending) driver.expect_right(*one);
}

void end_round(RankDriver& driver, Fixture& fixture, const Round& round, int barrier) {
  const auto& all_ranks = round.specs.back()[0];
  const int culprit = all_ranks.rank_of(round.culprit);
  switch (round.end) {
    case End::clean: break;  // every rank leaves as soon as its own steps are done
    case End::late: return end_late(driver, fixture, round, culprit, barrier);
    case End::closed: return end_closed(driver, round, culprit);
    case End::left: return end_departed(driver, round, culprit, Failure::left);
    case End::killed: return end_departed(driver, round, culprit, Failure::dead);
    case End::forked: return end_forked(driver, round);
  }
}

void run_round(Fixture& fixture, const Round& round, int rank) {
  int barrier = 0;
  RankDriver driver(fixture, round.seed, rank, round.ranks, round.traits[static_cast<std::size_t>(rank)]);
  driver.connect(barrier);
  barrier += 2;
  for (int epoch = 0; epoch < epochs; ++epoch) {
    const auto e = static_cast<std::size_t>(epoch);
    driver.open(round.specs[e], barrier);
    barrier += 2;
    std::vector<std::thread> callers;
    for (int caller = 1; caller < round.callers; ++caller) {
      callers.emplace_back([&, caller] { driver.run_steps(caller, round.steps[e][static_cast<std::size_t>(caller)]); });
    }
    driver.run_steps(0, round.steps[e][0]);
    for (auto& caller : callers) caller.join();
    if (epoch + 1 < epochs) driver.close();
  }
  // All operations of a rank are done before a rank leaves or dies: a rank that waits for that one fails the group, and
  // with it messages of other ranks in progress.
  if (round.end == End::left || round.end == End::killed) fixture.arrive_and_wait(barrier++, round.ranks);
  end_round(driver, fixture, round, barrier);
  // Where the failure must name the culprit, the other ranks must not leave in the meantime.
  const bool departs = rank == round.culprit && (round.end == End::left || round.end == End::killed);
  if (round.end != End::clean && !departs) {
    fixture.arrive_and_wait(barrier + 1, round.ranks - (round.end == End::left || round.end == End::killed));
  }
}

}  // namespace

}  // namespace monarch::stress

int main(int argc, char** argv) {
  using namespace monarch::stress;
  const bool threads = argc > 1 && std::strcmp(argv[1], "threads") == 0;
  if (!threads && (argc < 2 || std::strcmp(argv[1], "processes") != 0)) {
    std::fputs("usage: stress threads|processes [seed [rounds [steps]]]\n", stderr);
    return 2;
  }
  const std::uint64_t seed = argc > 2 ? std::strtoull(argv[2], nullptr, 10) : 0;
  const int rounds = argc > 3 ? std::atoi(argv[3]) : 10, steps = argc > 4 ? std::atoi(argv[4]) : 200;
  Coverage& coverage = Coverage::make();
  const bool reads = can_read(threads);
  if (!reads) std::printf("no rank may read another's memory here\n");
  for (int i = 0; i < rounds; ++i) {
    const Round round(seed + static_cast<std::uint64_t>(i), threads, steps);
    std::size_t operations = 0;
    for (const auto& epoch : round.steps) {
      for (const auto& caller : epoch) operations += caller.size();
    }
    std::printf("%s, seed %llu: %d ranks, %d callers, %zu operations, then %s\n", argv[1],
                static_cast<unsigned long long>(round.seed), round.ranks, round.callers, operations,
                end_names[static_cast<int>(round.end)]);
    std::fflush(stdout);
    Fixture& fixture = make_fixture<Fixture>();
    fixture.coverage = &coverage;
    coverage.begin_round();
    const int may_die = round.end == End::killed ? round.culprit : -1;
    run_ranks(fixture, threads, round.ranks, may_die, seconds_for_a_round, [&](int rank) { run_round(fixture, round, rank); });
  }
  coverage.print();
  const std::string missing = coverage.missing(reads);
  if (!missing.empty()) std::printf("never taken: %s\n", missing.c_str());
  return rounds >= 8 && !missing.empty() ? 4 : 0;
}
