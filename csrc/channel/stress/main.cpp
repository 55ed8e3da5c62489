// Stress driver of channel/: ranks send each other random frames through rings and blocks. A round ends in one of
// several ways: cleanly, or with a rank that is killed, leaves, drops its links, or attacks. Without torch and Python,
// so that the sanitizers report only errors of csrc/. tests/transport/test_channel_sanitizers.py builds and runs it.
//
//   stress threads|processes [seed [rounds [messages]]]
//
// At its end a run prints what its frames have exercised. A run of fifteen rounds or more fails if a case never
// occurred.
//
// Each round prints its seed, which is seed + round number. To repeat a round, pass its seed and 1 round. Only the
// interleaving of threads differs between runs.
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

void choose_tokens(Fixture& fixture) {
  std::random_device device;
  for (auto& token : fixture.malicious_tokens) {
    for (char& digit : token) digit = "0123456789abcdef"[device() % 16];
  }
}

void run_round(Fixture& fixture, const Round& round, int rank) {
  if (rank == round.malicious_rank()) return run_malicious_peer(fixture, round);
  Endpoint(fixture, round, rank).run();
}

}  // namespace

}  // namespace monarch::stress

int main(int argc, char** argv) {
  using namespace monarch::stress;
  const bool threads = argc > 1 && std::strcmp(argv[1], "threads") == 0;
  if (!threads && (argc < 2 || std::strcmp(argv[1], "processes") != 0)) {
    std::fputs("usage: stress threads|processes [seed [rounds [messages]]]\n", stderr);
    return 2;
  }
  const std::uint64_t seed = argc > 2 ? std::strtoull(argv[2], nullptr, 10) : 0;
  const int rounds = argc > 3 ? std::atoi(argv[3]) : 15, messages = argc > 4 ? std::atoi(argv[4]) : 200;
  fill_pool();
  Coverage& coverage = Coverage::make();
  for (int i = 0; i < rounds; ++i) {
    const Round round(seed + static_cast<std::uint64_t>(i), threads, messages);
    std::printf("%s, seed %llu: %d ranks, %d callers of %d %s messages, connected %s, arenas of %zu MiB, end: %s\n", argv[1],
                static_cast<unsigned long long>(round.seed), round.ranks, round.callers, round.messages,
                weight_names[static_cast<int>(round.weight)], connect_order_names[static_cast<int>(round.connect_order)], round.arena_bytes >> 20, end_names[static_cast<int>(round.end)]);
    std::fflush(stdout);
    Fixture& fixture = make_fixture<Fixture>();
    fixture.coverage = &coverage;
    choose_tokens(fixture);
    const int may_die = round.end == End::killed ? round.culprit : -1;
    run_ranks(fixture, threads, round.ranks + (round.incarnations != 0), may_die, seconds_for_a_round, [&](int rank) { run_round(fixture, round, rank); });
  }
  coverage.print();
  const std::string missing = coverage.missing(threads);
  if (!missing.empty()) std::printf("never seen: %s\n", missing.c_str());
  return rounds >= 15 && !missing.empty() ? 4 : 0;
}
