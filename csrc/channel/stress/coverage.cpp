#include "channel/stress/coverage.h"

#include <cstdio>
#include <new>

#include <sys/mman.h>

#include "channel/stress/malicious_peer.h"
#include "channel/stress/fixture.h"

namespace monarch::stress {

namespace {

constexpr const char* names[seen] = {
    "inline",       "nearly inline", "in blocks",      "past the cache", "many buffers", "cast inline", "cast in blocks",
    "kept",         "not kept",      "kept beyond a death", "full rings", "no room",     "answers",     "waited behind a reader",
    "standby read", "standby called off", "woken",     "full batches",   "two links",    "met late",    "unreachable",
    "dead",         "left",          "dropped",        "frames of a forger"};

}  // namespace

Coverage& Coverage::make() {
  void* memory = mmap(nullptr, sizeof(Coverage), PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
  if (memory == MAP_FAILED) die("no memory");
  return *new (memory) Coverage{};
}

void Coverage::print() const {
  std::printf("seen:");
  const auto print = [](const char* name, std::uint64_t n) {
    if (n != 0) std::printf(" %s %llu,", name, static_cast<unsigned long long>(n));
  };
  for (std::size_t i = 0; i < seen; ++i) print(names[i], counts_[i]);
  std::printf("\nforged:");
  for (int f = 0; f < forgeries; ++f) print(name_of(static_cast<Forgery>(f)), forgeries_[static_cast<std::size_t>(f)]);
  std::printf("\n");
}

std::string Coverage::missing(bool threads) const {
  std::string text;
  const auto miss = [&](const char* what) { text += (text.empty() ? "" : ", ") + std::string(what); };
  for (std::size_t i = 0; i < seen; ++i) {
    const auto what = static_cast<Seen>(i);
    // Nobody dies between threads. Who leaves or dies before all have met is the scheduler's to say.
    if (what == Seen::unreachable || (threads && (what == Seen::dead || what == Seen::kept_beyond_death))) continue;
    if (counts_[i] == 0) miss(names[i]);
  }
  for (int f = 0; f < forgeries; ++f) {
    if (threads && is_wild(static_cast<Forgery>(f))) continue;
    if (forgeries_[static_cast<std::size_t>(f)] == 0) miss(name_of(static_cast<Forgery>(f)));
  }
  return text;
}

}  // namespace monarch::stress
