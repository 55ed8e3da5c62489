#include "shm/stress/coverage.h"

#include <cstdio>
#include <new>

#include <sys/mman.h>

#include "shm/stress/fixture.h"

namespace monarch::stress {

namespace {

constexpr const char* route_names[] = {"slots", "one shot", "two shots", "shared", "read", "mixed"};
constexpr const char* message_names[] = {"empty", "short", "in parts", "larger than a ring", "looked behind", "from any rank", "refused"};
constexpr std::uint64_t portion = 128 << 10;  // p2p_channel.cpp: more than that goes in parts

}  // namespace

Coverage& Coverage::make() {
  void* memory = mmap(nullptr, sizeof(Coverage), PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
  if (memory == MAP_FAILED) die("no memory");
  return *new (memory) Coverage{};
}

void Coverage::begin_round() {
  for (auto& offers : offers_) offers = 0;
}

void Coverage::count(const Step& step, const Operation& op, int rank, int ranks) {
  if (ranks == 1) return;
  if (step.is_message()) {
    if (rank != step.to) return;
    add(messages_[step.bytes == 0 ? empty : step.bytes <= portion ? short_ : step.bytes <= largest_p2p_ring ? in_parts : beyond_ring]);
    if (step.crossed) add(messages_[looked_behind]);
    if (step.from_any) add(messages_[from_any]);
    return;
  }
  if (step.op != ReduceOp::none) add(reductions_[static_cast<std::size_t>(step.dtype)]);
  auto& counts = collectives_[static_cast<std::size_t>(step.collective)];
  switch (op.algorithm) {
    case Algorithm::slots: return add(counts[slots]);
    case Algorithm::one_shot: return add(counts[one_shot]);
    case Algorithm::two_shot: return add(counts[two_shot]);
    default: break;
  }
  const Offer offer = op.header.offer;
  if (offer != Offer::shared && offer != Offer::memory) return;  // brings nothing
  add(counts[offer == Offer::shared ? shared : read]);
  const std::uint8_t mine = offer == Offer::shared ? 1 : 2;
  const std::uint8_t others = offers_.at(static_cast<std::size_t>(step.number)).fetch_or(mine);
  if (others != 3 && (others | mine) == 3) add(counts[mixed]);
}

bool Coverage::wanted(Collective c, Route route) {
  switch (route) {
    case slots: return true;
    case one_shot:
    case shared: return c != Collective::barrier;
    case two_shot: return c == Collective::all_reduce;
    case mixed:
      if (c == Collective::scatter) return false;  // all is one rank's
      [[fallthrough]];
    default: return c == Collective::all_gather || c == Collective::gather || c == Collective::scatter || c == Collective::all_to_all;
  }
}

void Coverage::print() const {
  for (std::size_t c = 0; c < collectives_.size(); ++c) {
    std::printf("%s:", monarch::name_of(static_cast<Collective>(c)));
    for (int r = 0; r < routes; ++r) {
      const auto n = collectives_[c][static_cast<std::size_t>(r)].load();
      if (wanted(static_cast<Collective>(c), static_cast<Route>(r)) || n != 0) std::printf(" %s %llu", route_names[r], static_cast<unsigned long long>(n));
    }
    std::printf("\n");
  }
  std::printf("messages:");
  for (std::size_t m = 0; m < messages; ++m) std::printf(" %s %llu", message_names[m], static_cast<unsigned long long>(messages_[m].load()));
  std::printf("\nreductions:");
  for (std::size_t d = 0; d < static_cast<std::size_t>(Dtype::bytes); ++d) {
    std::printf(" %s %llu", monarch::name_of(static_cast<Dtype>(d)), static_cast<unsigned long long>(reductions_[d].load()));
  }
  std::printf("\n");
}

std::string Coverage::missing(bool reads) const {
  std::string text;
  const auto miss = [&](const std::string& what) { text += (text.empty() ? "" : ", ") + what; };
  for (std::size_t c = 0; c < collectives_.size(); ++c) {
    for (int r = 0; r < routes; ++r) {
      if ((r == read || r == mixed) && !reads) continue;
      if (!wanted(static_cast<Collective>(c), static_cast<Route>(r)) || collectives_[c][static_cast<std::size_t>(r)] != 0) continue;
      miss(std::string(monarch::name_of(static_cast<Collective>(c))) + " " + route_names[r]);
    }
  }
  for (std::size_t m = 0; m < messages; ++m) {
    if (messages_[m] == 0) miss(std::string("messages ") + message_names[m]);
  }
  for (std::size_t d = 0; d < static_cast<std::size_t>(Dtype::bytes); ++d) {
    if (reductions_[d] == 0) miss(std::string("reductions of ") + monarch::name_of(static_cast<Dtype>(d)));
  }
  return text;
}

}  // namespace monarch::stress
