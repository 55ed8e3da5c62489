// What a transfer is and how it ends, whichever way it takes.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "memory/registration_table.h"

namespace monarch {

// A part of a transfer: so many bytes from `offset` in what was registered, and where they are in this process.
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

// The numbers are Python's, too. `unreachable`: nothing was asked for; `lost`: it may have been done.
enum class Outcome : std::uint32_t { done, refused, lost, late, cancelled, failed, unreachable };

struct Result {
  Outcome outcome = Outcome::done;
  Refusal refusal = Refusal::none;
  int error = 0;            // of the kernel's, where it failed
  std::uint64_t found = 0;  // by an atomic
  std::string text = {};    // for people, of ways that know more
};

}  // namespace monarch
