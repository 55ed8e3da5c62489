// The memory that this process has registered for others to read and write: which bytes, who may, and who does so now.
//
// The table lies in the process's arena, so that peers of the same host look into it themselves: nobody's Python has a
// part in it. A registration is named by its Ticket. Whoever touches its memory claims it first: a peer by writing the key into
// its own arena (a claim of one who dies is void, and nobody has to clean up after him), a thread of this process by
// `hold`. A registration that was dropped can't be claimed, and `drop` returns when nobody has a claim left.
#pragma once

#include <atomic>
#include <cstdint>
#include <memory>
#include <mutex>
#include <vector>

#include "shm/host.h"

namespace monarch {

// Names a registration; who has it may touch the memory. Epochs are odd, and no slot has the same one twice.
struct Ticket {
  std::uint32_t slot = 0;
  std::uint64_t epoch = 0;
  std::uint64_t key = 0;  // random
};

enum class Access : std::uint32_t { read, write, fetch_add, compare_and_swap };

// Why memory can't be touched. The numbers travel.
enum class Refusal : std::uint32_t { none, dropped, wrong_key, out_of_range, read_only, misaligned };

// Of a range of a registration: what its owner, and whoever claims it, checks. Atomics are of 8 aligned bytes.
struct Entry {
  std::atomic<std::uint64_t> epoch;  // odd: registered
  std::uint64_t key, address, bytes;
  std::uint64_t shared_at;           // where it lies in the owner's arena; 0: elsewhere
  std::uint32_t writable;
  std::atomic<std::uint32_t> holds;  // of threads of the owner's

  Refusal check(const Ticket& ticket, std::uint64_t offset, std::uint64_t length, Access access) const;
};

inline constexpr std::uint32_t most_registrations = 1 << 16;

class Table {
 public:
  explicit Table(std::shared_ptr<Host> host);  // throws std::system_error if the arena has no room for it
  ~Table();
  Table(const Table&) = delete;
  Table& operator=(const Table&) = delete;

  // Throws std::length_error when most_registrations are there.
  Ticket add(void* data, std::uint64_t bytes, bool writable);
  enum class Dropped { yes, was_not_there, still_used };
  // From now on nobody can claim it. `still_used`: somebody did not let go of it for so many seconds; call it again.
  Dropped drop(const Ticket& ticket, double seconds);
  std::uint32_t count() const { return count_.load(std::memory_order_relaxed); }

  // For threads of this process that serve others. Refusal::none: the memory is at `*data` until `let_go`, even if it is
  // dropped meanwhile (whoever drops it waits, so do not hold it while you wait for a network: hold it for a piece).
  Refusal hold(const Ticket& ticket, std::uint64_t offset, std::uint64_t bytes, Access access, char** data);
  void let_go(const Ticket& ticket);

  Host& host() { return *host_; }

 private:
  Entry& entry(std::uint32_t slot) const;
  bool claimed(std::uint64_t key) const;

  std::shared_ptr<Host> host_;
  std::uint64_t at_;  // in the arena
  std::mutex mutex_;
  std::vector<std::uint32_t> free_;
  std::uint32_t used_ = 0;  // slots that were ever used
  std::atomic<std::uint32_t> count_{0};
};

// What an atomic operation on 8 bytes finds there, having done its work.
std::uint64_t do_atomic(char* at, Access access, std::uint64_t operand, std::uint64_t expected);

}  // namespace monarch
