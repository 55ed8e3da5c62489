// Copying past the processor's cache, for results so large that they would not stay there anyway.
//
// An ordinary store first reads the line that it overwrites; a streaming one does not, which saves a third of the
// memory traffic of a copy. What is written is visible to other processors after the fence at the end.
#pragma once

#include <cstdint>
#include <cstring>

#if defined(__x86_64__)
#include <emmintrin.h>
#endif

namespace monarch {

// Bytes of a result from which a copy bypasses the cache. Results of kernels often lie where their sources do, and are
// stored as usual.
inline constexpr std::uint64_t past_cache = 4 << 20;

inline void stream(char* to, const char* from, std::uint64_t bytes) {
#if defined(__x86_64__)
  constexpr std::uint64_t line = 64;
  const std::uint64_t ahead = (line - reinterpret_cast<std::uintptr_t>(to) % line) % line;
  if (bytes < ahead + line) {
    std::memcpy(to, from, bytes);
    return;
  }
  std::memcpy(to, from, ahead);
  to += ahead, from += ahead, bytes -= ahead;
  for (; bytes >= line; to += line, from += line, bytes -= line) {
    const auto* in = reinterpret_cast<const __m128i*>(from);
    auto* out = reinterpret_cast<__m128i*>(to);
    const __m128i a = _mm_loadu_si128(in), b = _mm_loadu_si128(in + 1), c = _mm_loadu_si128(in + 2), d = _mm_loadu_si128(in + 3);
    _mm_stream_si128(out, a);
    _mm_stream_si128(out + 1, b);
    _mm_stream_si128(out + 2, c);
    _mm_stream_si128(out + 3, d);
  }
  std::memcpy(to, from, bytes);
  _mm_sfence();
#else
  std::memcpy(to, from, bytes);
#endif
}

// A part of a result that has `whole` bytes.
inline void put(char* to, const char* from, std::uint64_t bytes, std::uint64_t whole) {
  if (to == from || bytes == 0) return;
  if (whole < past_cache) {
    std::memcpy(to, from, bytes);
  } else {
    stream(to, from, bytes);
  }
}

}  // namespace monarch
