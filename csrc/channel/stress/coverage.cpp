#include "channel/stress/coverage.h"

#include <cstdio>
#include <new>

#include <sys/mman.h>

#include "channel/stress/malicious_peer.h"
#include "channel/stress/fixture.h"

namespace monarch::stress {

namespace {

constexpr const char* names[seen_kinds] = {
    "inline",       "nearly inline", "in blocks",      "past the cache", "many buffers", "multicast inline", "multicast in blocks",
    "retained",     "not retained",      "retained beyond an exit", "full rings", "no space",     "replies",     "waited behind a reader",
    "standby read", "standby preempted", "woken",     "full batches",   "two links",    "connected late",    "unreachable",
    "dead",         "left",          "dropped",        "frames of a malicious peer"};

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
  for (std::size_t i = 0; i < seen_kinds; ++i) print(names[i], counts_[i]);
  std::printf("\nattacks:");
  for (int f = 0; f < attacks; ++f) print(name_of(static_cast<Attack>(f)), attacks_[static_cast<std::size_t>(f)]);
  std::printf("\n");
}

std::string Coverage::missing(bool threads) const {
  std::string text;
  const auto miss = [&](const char* what) { text += (text.empty() ? "" : ", ") + std::string(what); };
  for (std::size_t i = 0; i < seen_kinds; ++i) {
    const auto what = static_cast<Seen>(i);
    // Threads do not die. Whether a rank ends before all have connected depends on the scheduler.
    if (what == Seen::unreachable || (threads && (what == Seen::dead || what == Seen::retained_beyond_exit))) continue;
    if (counts_[i] == 0) miss(names[i]);
  }
  for (int f = 0; f < attacks; ++f) {
    if (threads && is_random(static_cast<Attack>(f))) continue;
    if (attacks_[static_cast<std::size_t>(f)] == 0) miss(name_of(static_cast<Attack>(f)));
  }
  return text;
}

}  // namespace monarch::stress
