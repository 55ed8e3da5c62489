// Advances the Mersenne Twister's state without making the numbers. Nothing here knows torch or Python.
#pragma once

#include <cstdint>

namespace monarch {

constexpr int kMtWords = 624;

// Advance `words`, with `left` - 1 undrawn ones, by `count` draws. Return the new `left`.
int skip_mt19937(std::uint32_t* words, int left, std::uint64_t count);

}  // namespace monarch
