// Table of the memory that this process has registered for others to read and write.
//
// The table lies in the process's arena, so that peers of the same host access it without Python. A Ticket names a
// registration. A peer claims the registration first and then checks that it still exists. `drop` ends the registration
// first and then waits for the claims. So one of the two sees the other. A claim of a dead process is void. Requests of
// peers to the owner's own thread (Service in same_host.h) are stored here, too.
#pragma once

#include <atomic>
#include <cstdint>
#include <memory>
#include <mutex>
#include <vector>

#include "memory/gpu.h"
#include "shm/peer_table.h"

namespace monarch {

// Names a registration and permits access to its memory. Epochs are odd, and unique for each slot.
struct Ticket {
  std::uint32_t slot = 0;
  std::uint64_t epoch = 0;
  std::uint64_t key = 0;  // random, never 0
};

enum class Access : std::uint32_t { read, write, fetch_add, compare_and_swap };
inline bool changes(Access access) { return access != Access::read; }

// Why memory can't be accessed. The numbers are part of the protocol. `device`: the driver of the owner's GPU has
// failed. `no_atomics`: it is GPU memory, which CPUs can't change. `no_staging`: the owner has no such staging memory,
// or the slot has a newer request.
enum class Refusal : std::uint32_t { none, dropped, wrong_key, out_of_range, read_only, misaligned, device, no_atomics, no_staging };

// Identity of a process, unique even when its pid is reused: the pid, and its start time in ticks since boot. One word,
// so that a claim is taken, also from a dead process, in one atomic step. 0: none.
using Owner = std::uint64_t;
Owner this_process();
bool alive(Owner owner);
inline std::uint32_t pid_of(Owner owner) { return static_cast<std::uint32_t>(owner >> 40); }

struct alignas(64) Entry {
  std::atomic<std::uint64_t> epoch;  // odd: registered
  std::atomic<std::uint64_t> key, address, bytes;
  std::atomic<std::uint64_t> shared_at;  // where it lies in the owner's arena; 0: elsewhere
  std::atomic<std::uint32_t> writable;
  std::atomic<std::uint32_t> holds;  // of the owner's threads
  std::atomic<std::uint32_t> device_plus_one;  // 0: memory of the CPU; else 1 more than the number that its GPU has in the owner
  std::atomic<std::uint32_t> is_exported;  // GPU memory that others can map, by TableMemory::exports

  int device() const { return static_cast<int>(device_plus_one.load(std::memory_order_relaxed)) - 1; }  // or gpu::none

  // Requires a claim or a hold, which keep the entry unchanged.
  Refusal check(const Ticket& ticket, std::uint64_t offset, std::uint64_t length, Access access) const;
};

struct alignas(64) Claim {
  std::atomic<Owner> owner;
  std::atomic<std::uint64_t> key;  // of the registration; no meaning without an owner
};

// A request of one process to the service thread of another one.
struct alignas(64) Request {
  enum State : std::uint32_t { idle, asked, serving, served };
  std::atomic<Owner> owner;
  std::atomic<std::uint32_t> state;
  Doorbell doorbell;  // the requesting thread waits here
  char token[32];
  Ticket ticket;
  Access access;
  Refusal refusal;
  std::uint64_t offset, bytes;
  std::uint64_t bounce_offset;  // in the arena of the requesting process
  std::uint64_t operand, expected, found;
};

inline constexpr std::uint32_t most_registrations = 1 << 16, most_claims = 512, most_requests = 64;

struct TableMemory {
  Doorbell doorbell;  // the owner's thread waits here for requests
  std::atomic<std::uint32_t> serves;  // there is such a thread
  std::atomic<std::uint32_t> unmap_requested;  // by peers: some of their GPU memory was dropped, so its thread unmaps what it can
  Claim claims[most_claims];
  Request requests[most_requests];
  Entry entries[most_registrations];
  gpu::Export exports[most_registrations];
};

// A claim of this process on a peer's registration, or none: `refusal` says why.
class Claimed {
 public:
  Claimed(TableMemory& table, const Ticket& ticket);
  ~Claimed();
  Claimed(const Claimed&) = delete;
  Claimed& operator=(const Claimed&) = delete;

  const Entry* entry() const { return entry_; }  // nullptr: it is not registered (any more), or its key is another one
  Refusal refusal() const { return refusal_; }
  // End the claim early: the owner need not wait for this process, because another part protects the memory.
  void release();
  // Check again: if it was dropped since the claim, its owner waits for this process.
  bool is_registered() const { return entry_ != nullptr && entry_->epoch.load(std::memory_order_acquire) == epoch_; }

 private:
  Claim* claim_ = nullptr;
  const Entry* entry_ = nullptr;
  std::uint64_t epoch_;
  Refusal refusal_ = Refusal::none;
};

class Table {
 public:
  explicit Table(std::shared_ptr<Host> host);  // throws std::system_error if the arena is full
  ~Table();
  Table(const Table&) = delete;
  Table& operator=(const Table&) = delete;

  // Throws std::length_error when most_registrations are there.
  Ticket add(void* data, std::uint64_t bytes, bool writable);
  enum class Dropped { yes, not_registered, still_used };
  // From now on no process can claim it. `still_used`: a claim or hold did not end within `seconds`; call it again.
  Dropped drop(const Ticket& ticket, double seconds);
  std::uint32_t count() const { return count_.load(std::memory_order_relaxed); }
  // The pid of a process that still uses a dropped registration, for messages; 0 if it is a thread of this process.
  std::uint32_t user_of(const Ticket& ticket) const;

  // For threads of this process that serve others. After Refusal::none the memory stays valid at `*data` until
  // `release`, even if it is dropped meanwhile. `drop` waits for that, so hold only one piece, and never during a wait
  // for a network.
  Refusal hold(const Ticket& ticket, std::uint64_t offset, std::uint64_t bytes, Access access, char** data);
  void release(const Ticket& ticket);
  // Of what is held.
  int device(const Ticket& ticket) const { return memory_->entries[ticket.slot].device(); }

  Host& host() { return *host_; }
  TableMemory& memory() { return *memory_; }

 private:
  void request_unmap();

  std::shared_ptr<Host> host_;
  std::uint64_t at_;  // in the arena
  TableMemory* memory_;
  std::mutex mutex_;
  std::vector<std::uint32_t> free_;
  std::uint32_t used_ = 0;  // slots that were ever used
  std::atomic<std::uint32_t> count_{0};
};

// Take a request that is free, or one of a dead process. It belongs to this process until `release_request`. Returns
// nullptr if all are in use.
Request* take_request(TableMemory& table);
void release_request(Request& request);

// A peer's table; nullptr if it has registered nothing yet.
TableMemory* table_of(const Peer& peer);

// Run an atomic operation on 8 bytes, and return the earlier value.
std::uint64_t do_atomic(char* at, Access access, std::uint64_t operand, std::uint64_t expected);

}  // namespace monarch
