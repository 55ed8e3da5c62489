// Segments and results of a transfer, the same for all routes.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "memory/registration_table.h"

namespace monarch {

// A part of a transfer: `bytes` from `offset` in the registration, and their address in this process.
struct Segment {
  std::uint64_t offset;
  char* local;
  std::uint64_t bytes;
};

inline std::uint64_t bytes_of(const std::vector<Segment>& segments) {
  std::uint64_t bytes = 0;
  for (const Segment& segment : segments) bytes += segment.bytes;
  return bytes;
}

// Python has the same numbers. `unreachable`: no request was sent; `lost`: it may have run.
enum class Outcome : std::uint32_t { done, refused, lost, late, cancelled, failed, unreachable };

struct Result {
  Outcome outcome = Outcome::done;
  Refusal refusal = Refusal::none;
  int error = 0;            // of the kernel's, where it failed
  std::uint64_t found = 0;  // by an atomic
  std::string text = {};    // details, from routes that have any
};

}  // namespace monarch
