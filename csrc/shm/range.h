// Parts of a vector of bytes. Knows numbers only.
#pragma once

#include <algorithm>
#include <cstdint>

#include "shm/operation.h"

namespace monarch {

struct Range {
  std::uint64_t from, bytes;
};

// The part of a piece or vector of `bytes` that chunk `chunk` of `width` covers.
inline Range part(std::uint64_t bytes, std::uint64_t chunk, std::uint64_t width) {
  const std::uint64_t from = std::min(bytes, chunk * width);
  return {from, std::min(width, bytes - from)};
}

// Rank `rank`'s share of `bytes`, in whole cache lines.
inline Range slice(std::uint64_t bytes, int rank, int n) {
  const std::uint64_t share = whole_lines((bytes + n - 1) / n);
  const std::uint64_t from = std::min(bytes, share * rank);
  return {from, std::min(share, bytes - from)};
}

}  // namespace monarch
