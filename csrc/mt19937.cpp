#include "mt19937.h"

namespace monarch {
namespace {

constexpr int kShift = 397;
constexpr std::uint32_t kMatrix = 0x9908b0dfU;

inline std::uint32_t twisted(std::uint32_t high, std::uint32_t low) {
  const std::uint32_t mixed = (high & 0x80000000U) | (low & 0x7fffffffU);
  return (mixed >> 1) ^ ((0U - (low & 1U)) & kMatrix);  // no branch: the loops below become vector instructions
}

// Generate all words again. Each loop reads only words that are further from those it writes than a vector is long.
void twist(std::uint32_t* words) {
  constexpr int kFirst = kMtWords - kShift;
  for (int i = 0; i < kFirst; ++i) words[i] = words[i + kShift] ^ twisted(words[i], words[i + 1]);
  for (int i = kFirst; i < kMtWords - 1; ++i) words[i] = words[i - kFirst] ^ twisted(words[i], words[i + 1]);
  words[kMtWords - 1] = words[kShift - 1] ^ twisted(words[kMtWords - 1], words[0]);
}

}  // namespace

int skip_mt19937(std::uint32_t* words, int left, std::uint64_t count) {
  const auto ready = static_cast<std::uint64_t>(left - 1);
  if (count <= ready) return left - static_cast<int>(count);
  count -= ready;  // of new words; the first is drawn at once
  const std::uint64_t rounds = (count + kMtWords - 1) / kMtWords;
  for (std::uint64_t i = 0; i < rounds; ++i) twist(words);
  return kMtWords + 1 - static_cast<int>(count - (rounds - 1) * kMtWords);
}

}  // namespace monarch
