// The core's stress driver: ranks that play random operations on overlapping groups, and a round's end of one of
// several kinds: in peace, a rank that is late, closes, leaves, is killed, forks. Torch-free, no Python: what the
// sanitizers report is about csrc/shm/ and nothing else. Built and run by tests/shm/test_sanitizers.py.
//
//   stress threads|processes [seed [rounds [turns]]]
//
// At its end a run says how often each way was taken; one of eight rounds or more fails if one never was.
//
// Every round has a seed of its own, seed + its number, which it prints: to run it again, give that and 1 round. What
// differs from run to run is only how the threads interleave.
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

enum class End { in_peace, late, closed, left, killed, forked };
constexpr const char* end_names[] = {"in peace", "a late rank", "a closed group", "a rank that left", "a killed rank", "a fork"};

// What all ranks of a round know.
struct Round {
  Round(std::uint64_t seed, bool threads, int turns_of_a_lane) : seed(seed), threads(threads), random(seed) {
    ranks = 2 + below(random, max_ranks - 1);
    lanes = 1 + below(random, max_lanes);
    const End threaded[] = {End::in_peace, End::late, End::closed, End::left};
    const End forked[] = {End::in_peace, End::late, End::closed, End::killed, End::forked};
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
      circles.emplace_back();
      const int groups = 2 + below(random, max_groups - 2);
      for (int g = 0; g < groups; ++g) circles.back().push_back(circle(g));
      turns.emplace_back(static_cast<std::size_t>(lanes));
      for (int lane = 0; lane < lanes; ++lane) {
        std::vector<Row> rows;
        for (int i = 0; i < turns_of_a_lane; ++i) add_turn(circles.back(), lane, rows);
        if (lane == 0) {
          for (Turn& turn : every_way(random, 0, ranks)) rows.insert(rows.begin() + below(random, static_cast<int>(rows.size()) + 1), row(std::move(turn)));
        }
        for (const Row& row : rows) {
          for (Turn turn : row) {
            if ((turn.number = count++) >= max_turns - 1) die("too many turns");
            if (turn.from_any) turn.tag = 1000 + turn.number;  // of another sender's messages none is like it
            turns.back()[static_cast<std::size_t>(lane)].push_back(std::move(turn));
          }
        }
      }
    }
  }

  std::uint64_t seed;
  bool threads;
  Random random;
  int ranks, lanes, culprit;
  End end;
  std::array<Traits, max_ranks> traits;
  std::vector<std::vector<Circle>> circles;             // [epoch][group]
  std::vector<std::vector<std::vector<Turn>>> turns;    // [epoch][lane]

 private:
  using Row = std::vector<Turn>;  // with nothing in between
  int count = 0;

  // With a message that is crossed goes the one that the receiver asks for before it.
  Row row(Turn turn) {
    if (!turn.crossed) return {std::move(turn)};
    Turn next = turn;
    next.crossed = next.asynchronous = false;
    next.tag = turn.tag + 10;
    next.salt = random();
    return {std::move(turn), std::move(next)};
  }

  // Groups 0 and 1 have everybody; the others have anybody, in any order.
  Circle circle(int index) {
    Circle circle{{}, index % lanes};
    for (int r = 0; r < ranks; ++r) {
      if (index < 2 || below(random, 3) != 0) circle.ranks.push_back(r);
    }
    if (circle.ranks.empty()) circle.ranks.push_back(below(random, ranks));
    for (int i = static_cast<int>(circle.ranks.size()) - 1; i > 0; --i) {
      std::swap(circle.ranks[static_cast<std::size_t>(i)], circle.ranks[static_cast<std::size_t>(below(random, i + 1))]);
    }
    return circle;
  }

  void add_turn(const std::vector<Circle>& groups, int lane, std::vector<Row>& to) {
    const int g = below(random, static_cast<int>(groups.size()));
    const auto& group = groups[static_cast<std::size_t>(g)];
    if (group.lane != lane) return;
    const int size = static_cast<int>(group.ranks.size());
    Turn turn = random_turn(random, g, size);
    if (size > 1 && below(random, 20) == 0) turn.odd_one = turn.is_message() ? turn.to : below(random, size);
    else if (turn.is_message()) turn.crossed = below(random, 4) == 0;
    to.push_back(row(std::move(turn)));
  }
};

// A round's end ----------------------------------------------------------------------------------------------------

using Pendings = std::vector<std::shared_ptr<Pending>>;

Turn all_reduce_of(std::uint64_t elements, std::uint64_t salt) {
  Turn turn;
  turn.number = max_turns - 1;  // none of those before
  turn.collective = Collective::all_reduce;
  turn.dtype = Dtype::f32;
  turn.op = ReduceOp::sum;
  turn.bytes = 4 * elements;
  turn.salt = salt;
  return turn;
}

// One of them is large. Which way it takes is the seed's, but between threads it goes through the stage: a rank that
// fails gives its tensors back while others may still read them, and lets them see that it did; those who read threads
// of their own process would be in a race for ThreadSanitizer, and read freed memory for AddressSanitizer.
Pendings start_some(Member& member, const Round& round, int n, double seconds) {
  Pendings pending;
  for (int i = 0; i < n; ++i) {
    const auto salt = round.seed * 100 + static_cast<std::uint64_t>(i);
    Turn turn = all_reduce_of(i == 2 ? 150'000 : 100, salt);
    const int way = round.threads ? 0 : static_cast<int>(round.seed / 5 % 4);
    if (i == 2 && way == 1) {
      turn.bytes = largest_shelved;
      turn.in_place = true;
      turn.place = Place::arena;
    } else if (i == 2 && way != 0) {
      turn.collective = Collective::all_gather;
      turn.op = ReduceOp::none;
      turn.place = way == 2 ? Place::pages : Place::arena;
    }
    pending.push_back(member.start(turn, seconds, true));
  }
  return pending;
}

void await_all(const Pendings& pending) {
  for (const auto& one : pending) one->ending->await();
}

void end_late(Member& member, World& world, const Round& round, int culprit, int meeting) {
  const bool me = member.group(0).rank() == culprit;
  const bool asynchronous = (round.seed & 8) != 0;
  const auto start = [&] { return member.start(all_reduce_of(100, round.seed), 0.3, asynchronous); };
  if (me) world.await(meeting, round.ranks - 1);
  const auto pending = start();
  const auto another = start();
  if (asynchronous) await_all({pending, another});
  member.expect_failed({pending, another}, Failure::late, culprit, true);
  if (!me) world.arrive(meeting);
}

// The one that closes has fewer under way than the others: what has begun may succeed, the others then wait in vain.
void end_closed(Member& member, const Round& round, int culprit) {
  const bool me = member.group(0).rank() == culprit;
  const auto pending = start_some(member, round, me ? 3 : 5, 20);
  if (me) member.group(0).close();
  await_all(pending);
  member.expect_failed(pending, me ? Failure::closed : Failure::left, culprit, false);
  if (!me && !pending.back()->operation->failure) member.blame(*pending.back(), "succeeded without one of the ranks");
}

void end_gone(Member& member, const Round& round, int culprit, Failure::Kind kind) {
  const bool me = member.group(0).rank() == culprit;
  auto pending = start_some(member, round, me ? 3 : 5, 20);
  Turn message;
  message.collective = Collective::send;
  message.root = culprit;
  message.to = member.group(0).rank();
  const auto never_sent = me ? nullptr : member.start(message, 20, true);
  if (me && kind == Failure::dead) raise(SIGKILL);
  if (me) return member.close();
  pending.push_back(never_sent);
  await_all(pending);
  pending.pop_back();
  member.expect_failed({never_sent}, kind, culprit, true);
  member.expect_failed(pending, kind, culprit, false);
  if (!pending.back()->operation->failure) member.blame(*pending.back(), "succeeded without one of the ranks");
  pending = {member.start(all_reduce_of(1, 1), 20, false)};
  member.expect_failed(pending, kind, culprit, true);
}

// A child that keeps a descriptor of its parent's arena or links would hide the parent's death from the others.
void end_forked(Member& member, const Round& round) {
  const auto pending = start_some(member, round, 4, 20);
  const pid_t child = fork();
  if (child == 0) {
    member.host().abandon();
    int kept = 0;
    for (const auto& entry : std::filesystem::directory_iterator("/proc/self/fd")) {
      std::error_code gone;
      kept += std::filesystem::read_symlink(entry, gone).string().find("memfd:monarch") != std::string::npos;
    }
    _exit(kept);
  }
  int status = 0;
  if (waitpid(child, &status, 0) != child || status != 0) die("a forked child keeps its parent's memory, or died");
  await_all(pending);
  for (const auto& one : pending) member.expect_right(*one);
}

void end_round(Member& member, World& world, const Round& round, int meeting) {
  const auto& everybody = round.circles.back()[0];
  const int culprit = everybody.rank_of(round.culprit);
  switch (round.end) {
    case End::in_peace: break;  // every rank goes as soon as its own turns are over
    case End::late: return end_late(member, world, round, culprit, meeting);
    case End::closed: return end_closed(member, round, culprit);
    case End::left: return end_gone(member, round, culprit, Failure::left);
    case End::killed: return end_gone(member, round, culprit, Failure::dead);
    case End::forked: return end_forked(member, round);
  }
}

void play_round(World& world, const Round& round, int rank) {
  int meeting = 0;
  Member member(world, round.seed, rank, round.ranks, round.traits[static_cast<std::size_t>(rank)]);
  member.connect(meeting);
  meeting += 2;
  for (int epoch = 0; epoch < epochs; ++epoch) {
    const auto e = static_cast<std::size_t>(epoch);
    member.open(round.circles[e], meeting);
    meeting += 2;
    std::vector<std::thread> lanes;
    for (int lane = 1; lane < round.lanes; ++lane) {
      lanes.emplace_back([&, lane] { member.play(lane, round.turns[e][static_cast<std::size_t>(lane)]); });
    }
    member.play(0, round.turns[e][0]);
    for (auto& lane : lanes) lane.join();
    if (epoch + 1 < epochs) member.close();
  }
  // All that a rank has to do with the others is over before one goes for good: whoever is waiting for that one gives up
  // on the group, and with it on messages of others that are still under way.
  if (round.end == End::left || round.end == End::killed) world.meet(meeting++, round.ranks);
  end_round(member, world, round, meeting);
  // Where a failure is blamed on somebody, the others must not add their own departures to it.
  const bool goes = rank == round.culprit && (round.end == End::left || round.end == End::killed);
  if (round.end != End::in_peace && !goes) {
    world.meet(meeting + 1, round.ranks - (round.end == End::left || round.end == End::killed));
  }
}

}  // namespace

}  // namespace monarch::stress

int main(int argc, char** argv) {
  using namespace monarch::stress;
  const bool threads = argc > 1 && std::strcmp(argv[1], "threads") == 0;
  if (!threads && (argc < 2 || std::strcmp(argv[1], "processes") != 0)) {
    std::fputs("usage: stress threads|processes [seed [rounds [turns]]]\n", stderr);
    return 2;
  }
  const std::uint64_t seed = argc > 2 ? std::strtoull(argv[2], nullptr, 10) : 0;
  const int rounds = argc > 3 ? std::atoi(argv[3]) : 10, turns = argc > 4 ? std::atoi(argv[4]) : 200;
  Coverage& coverage = Coverage::make();
  // Threads copy themselves: shm/stress/fixture.h.
  const bool reads = threads || can_read_others();
  if (!reads) std::printf("no process may read another's memory here\n");
  for (int i = 0; i < rounds; ++i) {
    const Round round(seed + static_cast<std::uint64_t>(i), threads, turns);
    std::size_t operations = 0;
    for (const auto& epoch : round.turns) {
      for (const auto& lane : epoch) operations += lane.size();
    }
    std::printf("%s, seed %llu: %d ranks, %d lanes, %zu operations, then %s\n", argv[1],
                static_cast<unsigned long long>(round.seed), round.ranks, round.lanes, operations,
                end_names[static_cast<int>(round.end)]);
    std::fflush(stdout);
    World& world = make_world<World>();
    world.coverage = &coverage;
    coverage.begin_round();
    const int may_die = round.end == End::killed ? round.culprit : -1;
    run_ranks(world, threads, round.ranks, may_die, seconds_for_a_round, [&](int rank) { play_round(world, round, rank); });
  }
  coverage.print();
  const std::string missing = coverage.missing(reads);
  if (!missing.empty()) std::printf("never taken: %s\n", missing.c_str());
  return rounds >= 8 && !missing.empty() ? 4 : 0;
}
