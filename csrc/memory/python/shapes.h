// Conversion of transfers between Python and the core: tuples of numbers, the same for all routes.
#pragma once

#include <cstdint>
#include <string>
#include <tuple>
#include <vector>

#include "memory/status.h"

namespace monarch {

using PyTicket = std::tuple<std::uint32_t, std::uint64_t, std::uint64_t>;                      // slot, epoch, key
using PySegments = std::vector<std::tuple<std::uint64_t, std::uint64_t, std::uint64_t>>;       // offset, local address, bytes
using PyResult = std::tuple<std::uint32_t, std::uint32_t, int, std::uint64_t, std::string>;    // as _rdma/routes/protocol.py's Result

inline Ticket ticket_of(const PyTicket& ticket) { return {std::get<0>(ticket), std::get<1>(ticket), std::get<2>(ticket)}; }

inline std::vector<Segment> segments_of(const PySegments& parts) {
  std::vector<Segment> segments;
  segments.reserve(parts.size());
  for (const auto& [offset, local, bytes] : parts) segments.push_back({offset, reinterpret_cast<char*>(local), bytes});
  return segments;
}

inline PyResult result_of(const Result& result) {
  return {static_cast<std::uint32_t>(result.outcome), static_cast<std::uint32_t>(result.refusal), result.error, result.found, result.text};
}

}  // namespace monarch
