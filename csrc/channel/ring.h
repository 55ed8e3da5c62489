// Frames from one process to another, in order: a ring in the sender's arena that the receiver reads.
//
// One writer at a time and one reader. Each side counts its own bytes and publishes the count. Nothing blocks: the
// caller keeps what does not fit.
#pragma once

#include <atomic>
#include <cstdint>
#include <cstring>

#include "channel/frame.h"

namespace monarch {

inline constexpr std::size_t ring_bytes = 128 << 10;  // a power of two

struct Ring {
  alignas(64) std::atomic<std::uint64_t> written;  // bytes since the beginning, whole lines
  alignas(64) std::atomic<std::uint64_t> read;
  alignas(64) std::atomic<std::uint32_t> full;     // 1: the writer waits for space
  alignas(64) char bytes[ring_bytes];

  void copy_in(std::uint64_t at, const void* from, std::size_t n) {
    const std::size_t start = at % ring_bytes, first = n < ring_bytes - start ? n : ring_bytes - start;
    std::memcpy(bytes + start, from, first);
    std::memcpy(bytes, static_cast<const char*>(from) + first, n - first);
  }
  void copy_out(std::uint64_t at, void* to, std::size_t n) const {
    const std::size_t start = at % ring_bytes, first = n < ring_bytes - start ? n : ring_bytes - start;
    std::memcpy(to, bytes + start, first);
    std::memcpy(static_cast<char*>(to) + first, bytes, n - first);
  }
};

}  // namespace monarch
