// An operation of a group: its header, which all ranks compare, its state and its failure. Accesses no other rank's
// memory, and never waits.
#pragma once

#include <array>
#include <atomic>
#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "shm/futex_waiter.h"
#include "shm/reduce.h"
#include "telemetry/operation_recording.h"

namespace monarch {

enum class Collective : std::uint8_t {
  barrier, all_reduce, reduce, broadcast, all_gather, gather, scatter, reduce_scatter, all_to_all,
  send, recv,  // point to point: not in the order of the collectives
  count
};

// Properties of a collective. Its data move in algorithms_staged.cpp and algorithms_cma.cpp. Python has the same rows, in the same
// order, without the messages: process_group/_collective_specs.py.
struct CollectiveTraits {
  const char* name;
  bool has_root;
  bool by_pieces;  // each rank brings something of its own for every other rank
  bool reduces;
};
inline constexpr std::array<CollectiveTraits, static_cast<std::size_t>(Collective::count)> collective_traits{{
    {"barrier", false, false, false},
    {"all_reduce", false, false, true},
    {"reduce", true, false, true},
    {"broadcast", true, false, false},
    {"all_gather", false, false, false},
    {"gather", true, false, false},
    {"scatter", true, true, false},
    {"reduce_scatter", false, true, true},
    {"all_to_all", false, true, false},
    {"send", false, false, false},
    {"recv", false, false, false},
}};
constexpr const CollectiveTraits& traits_of(Collective c) { return collective_traits[static_cast<std::size_t>(c)]; }
constexpr const char* name_of(Collective c) { return traits_of(c).name; }
constexpr bool has_root(Collective c) { return traits_of(c).has_root; }
constexpr bool by_pieces(Collective c) { return traits_of(c).by_pieces; }
constexpr bool is_point_to_point(Collective c) { return c == Collective::send || c == Collective::recv; }
constexpr bool reduces(Collective c) { return traits_of(c).reduces; }

// How the other ranks access the data that a rank contributes to an operation.
enum class Offer : std::uint8_t {
  stage,   // chunk by chunk, in the stage
  slot,    // all of it is in the slot already
  shared,  // it lies in the rank's arena
  memory,  // it lies in the rank's private memory, for process_vm_readv
};

// The algorithms for an operation.
enum class Algorithm : std::uint8_t { slots, one_shot, two_shot, direct, count };

// What a rank called; all ranks compare all headers before any of them touches data.
struct Header {
  std::uint64_t bytes;      // of one piece; all_to_all has a table instead
  std::int32_t root;        // -1 where there is none; of a send or receive the other rank, -1: any
  Collective collective;
  Dtype dtype;
  ReduceOp op;
  Offer offer;              // not compared
  bool operator==(const Header&) const = default;
};
static_assert(sizeof(Header) == 16);

// Pieces begin on cache lines, which are a multiple of every element size.
constexpr std::uint64_t whole_lines(std::uint64_t bytes) { return (bytes + 63) / 64 * 64; }

struct Span {
  char* data;
  std::uint64_t bytes;
};

struct Failure {
  enum Kind { dead, left, late, mismatch, closed, full, unreadable };
  Kind kind;
  int rank;          // the culprit in this group, -1 for all ranks
  std::string text;  // what happened, to stand after the name of the culprit
};

struct Operation {
  Header header{};
  std::vector<Span> in, out;  // one per rank, or one
  int tag = 0;                // of a send or receive
  int source = -1;            // of a receive, once it is done
  std::shared_ptr<void> keep;  // owner of the memory, until the caller keeps it
  Clock::time_point deadline = Clock::time_point::max();

  std::atomic<int> waiters{0};  // threads of ours that move it themselves
  std::atomic<bool> done{false};
  std::optional<Failure> failure;  // before done
  Algorithm algorithm = Algorithm::slots;            // the one it took, if it succeeded

 private:
  friend class Group;
  enum State { queued, entering, moving };
  State state = queued;
  std::uint64_t sequence = 0;
  telemetry::OperationRecording::Started recorded;
  // Large ones: piece or vector bytes in a chunk; bytes of the stage that a chunk takes; where the first one lies.
  std::uint64_t width = 0, stride = 0, base = 0;
  std::uint64_t chunks = 0, filled = 0, reduced = 0, taken = 0;
  bool published_reduced = false, published_taken = false;  // of a direct one
};

}  // namespace monarch
