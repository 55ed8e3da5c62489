// The channels' stress driver: ranks that send each other random frames over rings and blocks, and a round's end of one
// of several kinds: in peace, a rank that is killed, leaves, drops its links, or forges frames. Torch-free, no Python:
// what the sanitizers report is about csrc/ and nothing else. Built and run by
// tests/transport/test_channel_sanitizers.py.
//
//   stress threads|processes [seed [rounds [letters]]]
//
// At its end a run says what its frames have met with; one of fifteen rounds or more fails if something was never seen.
//
// Every round has a seed of its own, seed + its number, which it prints: to run it again, give that and 1 round. What
// differs from run to run is only how the threads interleave.
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <random>
#include <string>

#include "channel/stress/coverage.h"
#include "channel/stress/malicious_peer.h"
#include "channel/stress/endpoint.h"

namespace monarch::stress {

namespace {

constexpr int seconds_for_a_round = 100;

void choose_tokens(World& world) {
  std::random_device device;
  for (auto& token : world.forgers) {
    for (char& digit : token) digit = "0123456789abcdef"[device() % 16];
  }
}

void play_round(World& world, const Round& round, int rank) {
  if (rank == round.forger()) return play_forger(world, round);
  Station(world, round, rank).play();
}

}  // namespace

}  // namespace monarch::stress

int main(int argc, char** argv) {
  using namespace monarch::stress;
  const bool threads = argc > 1 && std::strcmp(argv[1], "threads") == 0;
  if (!threads && (argc < 2 || std::strcmp(argv[1], "processes") != 0)) {
    std::fputs("usage: stress threads|processes [seed [rounds [letters]]]\n", stderr);
    return 2;
  }
  const std::uint64_t seed = argc > 2 ? std::strtoull(argv[2], nullptr, 10) : 0;
  const int rounds = argc > 3 ? std::atoi(argv[3]) : 15, letters = argc > 4 ? std::atoi(argv[4]) : 200;
  fill_pool();
  Coverage& coverage = Coverage::make();
  for (int i = 0; i < rounds; ++i) {
    const Round round(seed + static_cast<std::uint64_t>(i), threads, letters);
    std::printf("%s, seed %llu: %d ranks, %d lanes of %d %s letters, met %s, arenas of %zu MiB, end: %s\n", argv[1],
                static_cast<unsigned long long>(round.seed), round.ranks, round.lanes, round.letters,
                weight_names[static_cast<int>(round.weight)], meeting_names[static_cast<int>(round.meeting)], round.arena_bytes >> 20, end_names[static_cast<int>(round.end)]);
    std::fflush(stdout);
    World& world = make_world<World>();
    world.coverage = &coverage;
    choose_tokens(world);
    const int may_die = round.end == End::killed ? round.culprit : -1;
    run_ranks(world, threads, round.ranks + (round.lives != 0), may_die, seconds_for_a_round, [&](int rank) { play_round(world, round, rank); });
  }
  coverage.print();
  const std::string missing = coverage.missing(threads);
  if (!missing.empty()) std::printf("never seen: %s\n", missing.c_str());
  return rounds >= 15 && !missing.empty() ? 4 : 0;
}
