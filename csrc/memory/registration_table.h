// The memory that this process has registered for others to read and write: which bytes, who may, and who does so now.
//
// The table lies in the process's arena, so that peers of the same host look into it themselves: nobody's Python has a
// part in it. A registration is named by its Ticket. Whoever touches its memory claims it first, and looks whether it is
// still there after that: `drop` ends the registration first and waits for the claims after that, so one of both sees the
// other. A claim of one who has died is void. What peers ask of the owner's own thread (service.h) lies here, too.
#pragma once

#include <atomic>
#include <cstdint>
#include <memory>
#include <mutex>
#include <vector>

#include "memory/gpu.h"
#include "shm/peer_table.h"

namespace monarch {

// Names a registration; who has it may touch the memory. Epochs are odd, and no slot has the same one twice.
struct Ticket {
  std::uint32_t slot = 0;
  std::uint64_t epoch = 0;
  std::uint64_t key = 0;  // random, never 0
};

enum class Access : std::uint32_t { read, write, fetch_add, compare_and_swap };
inline bool changes(Access access) { return access != Access::read; }

// Why memory can't be touched. The numbers travel.
// `device`: the driver of the owner's GPU has failed; `no_atomics`: it is memory of a GPU, which processors can't change;
// `no_staging`: the owner has lent no such staging memory (any more), or it is another request's turn.
enum class Refusal : std::uint32_t { none, dropped, wrong_key, out_of_range, read_only, misaligned, device, no_atomics, no_staging };

// Which process, also when its pid is used again: the pid, and when it started, in ticks since the machine did. One word,
// so that a place is taken, and taken from the dead, in one step. 0: nobody.
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
  std::atomic<std::uint32_t> place;  // 0: memory of the CPU; else 1 more than the number that its GPU has in the owner
  std::atomic<std::uint32_t> is_exported;  // memory of a GPU that others can map: TableMemory::exports says how

  int device() const { return static_cast<int>(place.load(std::memory_order_relaxed)) - 1; }  // or gpu::none

  // For whoever has a claim or a hold: then it stays as it is.
  Refusal check(const Ticket& ticket, std::uint64_t offset, std::uint64_t length, Access access) const;
};

struct alignas(64) Claim {
  std::atomic<Owner> owner;
  std::atomic<std::uint64_t> key;  // of the registration; of no meaning while nobody has it
};

// What one process asks of another one's thread.
struct alignas(64) Request {
  enum State : std::uint32_t { idle, asked, serving, served };
  std::atomic<Owner> owner;
  std::atomic<std::uint32_t> state;
  Bell bell;  // who asks waits here
  char token[32];
  Ticket ticket;
  Access access;
  Refusal refusal;
  std::uint64_t offset, bytes;
  std::uint64_t room;  // in the arena of who asks
  std::uint64_t operand, expected, found;
};

inline constexpr std::uint32_t most_registrations = 1 << 16, most_claims = 512, most_requests = 64;

struct TableMemory {
  Bell bell;  // the owner's thread waits here for requests
  std::atomic<std::uint32_t> serves;  // there is such a thread
  std::atomic<std::uint32_t> let_go;  // by peers: some of their GPU memory was dropped, so its thread unmaps what it can
  Claim claims[most_claims];
  Request requests[most_requests];
  Entry entries[most_registrations];
  gpu::Export exports[most_registrations];
};

// A claim of this process on what a peer has registered, or nothing: `refusal` says why.
class Claimed {
 public:
  Claimed(TableMemory& table, const Ticket& ticket);
  ~Claimed();
  Claimed(const Claimed&) = delete;
  Claimed& operator=(const Claimed&) = delete;

  const Entry* entry() const { return entry_; }  // nullptr: it is not registered (any more), or its key is another one
  Refusal refusal() const { return refusal_; }
  // From now on its owner need not wait for us: somebody else looks after the memory.
  void let_go();
  // Again: it may have been dropped since, and then its owner waits for us.
  bool still_there() const { return entry_ != nullptr && entry_->epoch.load(std::memory_order_acquire) == epoch_; }

 private:
  Claim* claim_ = nullptr;
  const Entry* entry_ = nullptr;
  std::uint64_t epoch_;
  Refusal refusal_ = Refusal::none;
};

class Table {
 public:
  explicit Table(std::shared_ptr<Host> host);  // throws std::system_error if the arena has no room for it
  ~Table();
  Table(const Table&) = delete;
  Table& operator=(const Table&) = delete;

  // Throws std::length_error when most_registrations are there.
  Ticket add(void* data, std::uint64_t bytes, bool writable);
  enum class Dropped { yes, was_not_there, still_used };
  // From now on nobody can claim it. `still_used`: somebody has not let go of it for so many seconds; call it again.
  Dropped drop(const Ticket& ticket, double seconds);
  std::uint32_t count() const { return count_.load(std::memory_order_relaxed); }
  // Who still uses what was dropped, for people; 0 if it is a thread of this process.
  std::uint32_t user_of(const Ticket& ticket) const;

  // For threads of this process that serve others. Refusal::none: the memory is at `*data` until `let_go`, even if it is
  // dropped meanwhile (whoever drops it waits, so it is not held while somebody waits for a network: only for a piece).
  Refusal hold(const Ticket& ticket, std::uint64_t offset, std::uint64_t bytes, Access access, char** data);
  void let_go(const Ticket& ticket);
  // Of what is held.
  int device(const Ticket& ticket) const { return memory_->entries[ticket.slot].device(); }

  Host& host() { return *host_; }
  TableMemory& memory() { return *memory_; }

 private:
  void have_it_unmapped();

  std::shared_ptr<Host> host_;
  std::uint64_t at_;  // in the arena
  TableMemory* memory_;
  std::mutex mutex_;
  std::vector<std::uint32_t> free_;
  std::uint32_t used_ = 0;  // slots that were ever used
  std::atomic<std::uint32_t> count_{0};
};

// A place of those that are free, or of the dead: it is this process's until `give_back`. nullptr: there is none now.
Request* take_request(TableMemory& table);
void give_back(Request& request);

// A peer's table; nullptr if it has registered nothing yet.
TableMemory* table_of(const Peer& peer);

// What an atomic operation on 8 bytes finds there, having done its work.
std::uint64_t do_atomic(char* at, Access access, std::uint64_t operand, std::uint64_t expected);

}  // namespace monarch
