// Memory that the processes of one host share: each process owns one arena and maps those of its peers.
//
// An arena is shared memory of fixed size. It has no name that could be guessed or left behind. Pages are committed at first
// use and then reused instead of released, because a fresh shared page costs more than copying it. An offset in an
// arena has the same meaning in every process that maps it.
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <map>
#include <mutex>
#include <system_error>

#include "platform/system.h"
#include "shm/futex_waiter.h"

namespace monarch {

inline constexpr std::size_t page = 4096;
// Bytes at the beginning of an arena, which are allocated first, and whose pages stay committed.
inline constexpr std::size_t warm = std::size_t{512} << 20;

// The first page of every arena.
struct ArenaHeader {
  Doorbell doorbell;
  alignas(64) std::atomic<std::uint32_t> left;  // 1 once its owner has left without a failure
  alignas(64) std::atomic<std::uint64_t> retained;  // bytes of messages that their receivers keep where they lie
  alignas(64) std::atomic<std::uint64_t> self;   // where its owner has it mapped
  std::atomic<std::uint64_t> table;              // of registered memory (memory/registration_table.h), an offset; 0: nothing is registered
};
static_assert(sizeof(ArenaHeader) <= page);

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

  // Page-aligned offset; 0 when the arena is full. The memory keeps its earlier contents. Thread-safe.
  std::uint64_t allocate(std::size_t bytes);
  void release(std::uint64_t offset);

  int fd() const { return fd_; }
  Mapping& mapping() { return *mapping_; }
  std::size_t used() const;

  // Commit the pages of the first `bytes`, which are allocated first. Contents do not change. Returns early once `stop`.
  void prefault(std::uint64_t bytes, const std::atomic<bool>& stop);
  // Give free pages back to the system that no allocation has used since the last call; all free pages if there was no
  // allocation. It covers the first half gigabyte, where `release` keeps the pages. As with `release`, no registration of
  // free memory with a device may be used again: the device would access the old pages. See arena.cpp.
  void trim();
  // Whether a later `trim` may find pages to give back.
  bool trimmable() const;

 private:
  int fd_;
  Mapping* mapping_;
  mutable std::mutex mutex_;
  std::uint64_t committed_ = 0;  // end of the pages that may be committed
  std::uint64_t peak_ = 0;       // end of the memory that was allocated at any time since the last trim
  bool used_ = false;            // an allocation was made since the last trim
  bool trimmable_ = false;
  std::map<std::uint64_t, std::size_t> free_;  // offset -> bytes
  std::map<std::uint64_t, std::size_t> taken_;
};

}  // namespace monarch
