// Memory that the processes of one host share: each process owns one arena and maps those of its peers.
//
// An arena is a memfd of fixed size: it has no name that anybody could guess or that could be left behind, its pages
// exist once they are touched, and they are touched again and again instead of being given back, because a fresh
// shared page costs more than copying it. Offsets in an arena mean the same in every process that maps it.
#pragma once

#include <cstddef>
#include <cstdint>
#include <map>
#include <mutex>
#include <system_error>

#include "shm/futex_waiter.h"

namespace monarch {

inline constexpr std::size_t page = 4096;
// Bytes at the beginning of an arena, where room is looked for first, whose pages stay once they have been touched.
inline constexpr std::size_t warm = std::size_t{512} << 20;

// The first page of every arena.
struct ArenaHeader {
  Bell bell;
  alignas(64) std::atomic<std::uint32_t> left;  // 1 once its owner has gone in peace
  alignas(64) std::atomic<std::uint64_t> kept;  // bytes of messages that their receivers keep where they lie
  alignas(64) std::atomic<std::uint64_t> self;   // where its owner has it mapped
  std::atomic<std::uint64_t> table;              // of registered memory (memory/registration_table.h), an offset; 0: nothing is registered
};
static_assert(sizeof(ArenaHeader) <= page);

// What the last system call failed with.
std::system_error system_failure(const char* what);

// A mapping, ours or a peer's.
class Mapping {
 public:
  Mapping(int fd, std::size_t size);  // throws std::system_error
  ~Mapping();
  Mapping(const Mapping&) = delete;
  Mapping& operator=(const Mapping&) = delete;

  char* at(std::uint64_t offset) const { return base_ + offset; }
  bool holds(const char* data, std::uint64_t bytes) const {
    return data >= base_ && data <= base_ + size_ && bytes <= static_cast<std::uint64_t>(base_ + size_ - data);
  }
  ArenaHeader& header() const { return *reinterpret_cast<ArenaHeader*>(base_); }
  std::size_t size() const { return size_; }

 private:
  char* base_;
  std::size_t size_;
};

class Arena {
 public:
  explicit Arena(std::size_t size);  // throws std::system_error
  ~Arena();

  // Page-aligned; 0 when there is no room. What it holds is what was there before. Thread-safe.
  std::uint64_t allocate(std::size_t bytes);
  void release(std::uint64_t offset);

  int fd() const { return fd_; }
  Mapping& mapping() { return *mapping_; }
  std::size_t used() const;

 private:
  int fd_;
  Mapping* mapping_;
  mutable std::mutex mutex_;
  std::map<std::uint64_t, std::size_t> free_;  // offset -> bytes
  std::map<std::uint64_t, std::size_t> taken_;
};

}  // namespace monarch
