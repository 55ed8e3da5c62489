#include "memory/registration_table.h"

#include <algorithm>
#include <cerrno>
#include <csignal>
#include <cstdio>
#include <cstring>
#include <optional>
#include <stdexcept>
#include <string>

#if defined(__APPLE__)
#include <mach/mach.h>
#endif
#include <sys/mman.h>
#include <unistd.h>

#include "platform/process.h"
#include "platform/random.h"

namespace monarch {

namespace {

constexpr std::uint64_t ticks = (std::uint64_t{1} << 40) - 1;
constexpr auto claim_poll_interval = std::chrono::milliseconds(1);  // how often `drop` checks claims: their end is not reported

// Whether the page is read-only, for example in a read-only mapping of a file: the owner's threads must not write to
// it.
bool is_read_only(const char* at) {
#if defined(__APPLE__)
  vm_address_t start = reinterpret_cast<std::uintptr_t>(at);
  vm_size_t bytes = 0;
  vm_region_basic_info_data_64_t region{};
  mach_msg_type_number_t count = VM_REGION_BASIC_INFO_COUNT_64;
  mach_port_t object = MACH_PORT_NULL;
  const kern_return_t result = vm_region_64(mach_task_self(), &start, &bytes, VM_REGION_BASIC_INFO_64,
                                              reinterpret_cast<vm_region_info_t>(&region), &count, &object);
  const bool is_mapped = result == KERN_SUCCESS && start <= reinterpret_cast<std::uintptr_t>(at);
  return is_mapped && (region.protection & VM_PROT_READ) != 0 && (region.protection & VM_PROT_WRITE) == 0;
#else
  constexpr int populate_read = 22, populate_write = 23;  // of madvise, Linux 5.14
  auto* start = reinterpret_cast<void*>(reinterpret_cast<std::uintptr_t>(at) / page * page);
  return madvise(start, page, populate_write) != 0 && madvise(start, page, populate_read) == 0;
#endif
}

std::uint64_t random_key() {
  std::uint64_t key = 0;
  while (key == 0) {
    if (!fill_random(&key, sizeof key)) throw system_failure("random numbers");
  }
  return key;
}

// Zero at first: memory of an arena may have been used before.
TableMemory* cleared(char* at) {
  std::memset(at, 0, offsetof(TableMemory, entries));
  return reinterpret_cast<TableMemory*>(at);
}

// Take a claim or request for this process, if it has no owner, or a dead one.
template <class Cell>
bool take(Cell& cell, bool from_dead_owner) {
  Owner owner = cell.owner.load(std::memory_order_acquire);
  if (owner != 0 && (!from_dead_owner || alive(owner))) return false;
  return cell.owner.compare_exchange_strong(owner, this_process());
}

Claim* take_claim(TableMemory& table) {
  for (std::uint32_t i = 0;; ++i) {
    // After a whole round all claims are in use. One of them will end soon, or its process has died.
    const bool again = i >= most_claims;
    if (again && i % most_claims == 0) usleep(100);
    Claim& claim = table.claims[(pid_of(this_process()) + i) % most_claims];
    if (take(claim, again)) return &claim;
  }
}

}  // namespace

Owner this_process() {
  thread_local std::uint32_t known = 0;
  thread_local Owner own = 0;
  const auto pid = static_cast<std::uint32_t>(getpid());
  if (known != pid) known = pid, own = Owner{pid} << 40 | (start_of(pid) & ticks);  // also in a fork
  return own;
}

bool alive(Owner owner) {
  const std::uint64_t started = start_of(pid_of(owner)), known = owner & ticks;
  return started != 0 && (started == unknown_start || known == unknown_start || (started & ticks) == known);
}

Refusal Entry::check(const Ticket& ticket, std::uint64_t offset, std::uint64_t length, Access access) const {
  if (epoch.load(std::memory_order_acquire) != ticket.epoch) return Refusal::dropped;
  if (key.load(std::memory_order_relaxed) != ticket.key) return Refusal::wrong_key;
  const std::uint64_t size = bytes.load(std::memory_order_relaxed);
  if (offset > size || length > size - offset) return Refusal::out_of_range;
  if (changes(access) && writable.load(std::memory_order_relaxed) == 0) return Refusal::read_only;
  const bool atomic = access == Access::fetch_add || access == Access::compare_and_swap;
  if (atomic && device() != gpu::none) return Refusal::no_atomics;
  if (atomic && (length != 8 || (address.load(std::memory_order_relaxed) + offset) % 8 != 0)) return Refusal::misaligned;
  return Refusal::none;
}

Claimed::Claimed(TableMemory& table, const Ticket& ticket) : epoch_(ticket.epoch) {
  if (ticket.slot >= most_registrations || ticket.key == 0) {
    refusal_ = Refusal::wrong_key;
    return;
  }
  claim_ = take_claim(table);
  claim_->key.store(ticket.key, std::memory_order_seq_cst);
  std::atomic_thread_fence(std::memory_order_seq_cst);  // with drop's: it sees the claim, or we see that it was dropped
  const Entry& entry = table.entries[ticket.slot];
  refusal_ = entry.check(ticket, 0, 0, Access::read);
  if (refusal_ == Refusal::none) entry_ = &entry;
}

Claimed::~Claimed() { release(); }

void Claimed::release() {
  if (claim_ != nullptr) {
    claim_->key.store(0, std::memory_order_relaxed);
    claim_->owner.store(0, std::memory_order_release);
  }
  claim_ = nullptr;
}

Table::Table(std::shared_ptr<Host> host) : host_(std::move(host)), at_(host_->allocate(sizeof(TableMemory))) {
  if (at_ == 0) throw std::system_error(ENOMEM, std::generic_category(), "no room in the arena for a table of registered memory");
  memory_ = cleared(host_->arena().mapping().at(at_));
  host_->arena().mapping().header().table.store(at_, std::memory_order_release);
}

Table::~Table() {
  host_->arena().mapping().header().table.store(0, std::memory_order_release);
  host_->release(at_);
}

namespace {

// Nothing for memory that others can't map, such as torch's of expandable segments: a thread copies it for them.
std::optional<gpu::Export> export_of(const void* data) {
  try {
    return gpu::exported(data);
  } catch (const gpu::Failure&) {
    return {};
  }
}

}  // namespace

Ticket Table::add(void* data, std::uint64_t bytes, bool writable) {
  const int device = gpu::device_of(data);
  const std::optional<gpu::Export> exported = device == gpu::none ? std::nullopt : export_of(data);
  const std::lock_guard lock(mutex_);
  std::uint32_t slot;
  if (!free_.empty()) {
    slot = free_.back();
    free_.pop_back();
  } else if (used_ < most_registrations) {
    slot = used_++;
    std::memset(static_cast<void*>(&memory_->entries[slot]), 0, sizeof(Entry));
    // Random, so that handles of an earlier table in this memory, or guesses, do not match.
    memory_->entries[slot].epoch.store(random_key() & ~std::uint64_t{1}, std::memory_order_relaxed);
  } else {
    throw std::length_error("65536 registrations are the most that a process has at once: drop() what is not needed any more");
  }
  Entry& entry = memory_->entries[slot];
  const Mapping& own = host_->arena().mapping();
  const auto* at = static_cast<const char*>(data);
  const std::uint64_t key = random_key();
  entry.key.store(key, std::memory_order_relaxed);
  entry.address.store(reinterpret_cast<std::uintptr_t>(data), std::memory_order_relaxed);
  entry.bytes.store(bytes, std::memory_order_relaxed);
  entry.shared_at.store(own.holds(at, bytes) ? static_cast<std::uint64_t>(at - own.at(0)) : 0, std::memory_order_relaxed);
  const bool can_be_written = device != gpu::none || (!is_read_only(at) && !is_read_only(at + bytes - 1));
  entry.writable.store(writable && can_be_written, std::memory_order_relaxed);
  entry.device_plus_one.store(static_cast<std::uint32_t>(device + 1), std::memory_order_relaxed);
  entry.is_exported.store(exported.has_value(), std::memory_order_relaxed);
  if (exported) memory_->exports[slot] = *exported;
  const std::uint64_t epoch = entry.epoch.load(std::memory_order_relaxed) + 1;
  entry.epoch.store(epoch, std::memory_order_release);
  count_.fetch_add(1, std::memory_order_relaxed);
  return {slot, epoch, key};
}

Table::Dropped Table::drop(const Ticket& ticket, double seconds) {
  if (ticket.slot >= most_registrations) return Dropped::not_registered;
  Entry& entry = memory_->entries[ticket.slot];
  if (entry.key.load(std::memory_order_relaxed) != ticket.key) return Dropped::not_registered;
  std::uint64_t epoch = ticket.epoch;
  entry.epoch.compare_exchange_strong(epoch, ticket.epoch + 1, std::memory_order_seq_cst);
  if (epoch != ticket.epoch && epoch != ticket.epoch + 1) return Dropped::not_registered;
  std::atomic_thread_fence(std::memory_order_seq_cst);  // pairs with the fence of Claimed
  const auto deadline = Clock::now() + std::chrono::duration_cast<Clock::duration>(std::chrono::duration<double>(seconds));
  while (entry.holds.load(std::memory_order_seq_cst) != 0 || user_of(ticket) != 0) {
    if (Clock::now() >= deadline) return Dropped::still_used;
    usleep(static_cast<useconds_t>(std::chrono::microseconds(claim_poll_interval).count()));
  }
  const std::lock_guard lock(mutex_);
  // If two threads drop it at the same time, the other one may have freed the slot, and it may be in use again.
  if (entry.key.load(std::memory_order_relaxed) != ticket.key) return Dropped::not_registered;
  entry.key.store(0, std::memory_order_relaxed);
  free_.push_back(ticket.slot);
  count_.fetch_sub(1, std::memory_order_relaxed);
  if (entry.is_exported.load(std::memory_order_relaxed) != 0) request_unmap();
  return Dropped::yes;
}

// Request all peers to unmap its allocation, unless they use other registrations in it.
void Table::request_unmap() {
  for (const std::shared_ptr<Peer>& peer : host_->peers()) {
    TableMemory* table = table_of(*peer);
    if (table == nullptr) continue;
    table->unmap_requested.store(1, std::memory_order_release);
    table->doorbell.ring();
  }
}

std::uint32_t Table::user_of(const Ticket& ticket) const {
  for (const Claim& claim : memory_->claims) {
    if (claim.key.load(std::memory_order_seq_cst) != ticket.key) continue;
    const Owner owner = claim.owner.load(std::memory_order_acquire);
    if (owner != 0 && alive(owner)) return pid_of(owner);
  }
  return 0;
}

Refusal Table::hold(const Ticket& ticket, std::uint64_t offset, std::uint64_t bytes, Access access, char** data) {
  if (ticket.slot >= most_registrations || ticket.key == 0) return Refusal::wrong_key;
  Entry& entry = memory_->entries[ticket.slot];
  entry.holds.fetch_add(1, std::memory_order_seq_cst);
  std::atomic_thread_fence(std::memory_order_seq_cst);
  const Refusal refusal = entry.check(ticket, offset, bytes, access);
  if (refusal != Refusal::none) {
    entry.holds.fetch_sub(1, std::memory_order_release);
  } else {
    *data = reinterpret_cast<char*>(entry.address.load(std::memory_order_relaxed)) + offset;
  }
  return refusal;
}

void Table::release(const Ticket& ticket) { memory_->entries[ticket.slot].holds.fetch_sub(1, std::memory_order_release); }

Request* take_request(TableMemory& table) {
  for (const bool from_dead_owner : {false, true}) {
    for (Request& request : table.requests) {
      // A request that the thread is serving is not free, even if its owner is dead.
      if (request.state.load(std::memory_order_acquire) == Request::serving || !take(request, from_dead_owner)) continue;
      std::uint32_t asked = Request::asked;
      request.state.compare_exchange_strong(asked, Request::idle);
      if (asked != Request::serving) return &request;
      request.owner.store(0, std::memory_order_release);
    }
  }
  return nullptr;
}

void release_request(Request& request) {
  request.state.store(Request::idle, std::memory_order_relaxed);
  request.owner.store(0, std::memory_order_release);
}

TableMemory* table_of(const Peer& peer) {
  const std::uint64_t at = peer.mapping->header().table.load(std::memory_order_acquire);
  if (at == 0 || at > peer.mapping->size() - sizeof(TableMemory)) return nullptr;
  return reinterpret_cast<TableMemory*>(peer.mapping->at(at));
}

std::uint64_t do_atomic(char* at, Access access, std::uint64_t operand, std::uint64_t expected) {
  auto* cell = reinterpret_cast<std::uint64_t*>(at);  // not std::atomic_ref, which older releases of libc++ lack
  if (access == Access::fetch_add) return __atomic_fetch_add(cell, operand, __ATOMIC_SEQ_CST);
  __atomic_compare_exchange_n(cell, &expected, operand, false, __ATOMIC_SEQ_CST, __ATOMIC_SEQ_CST);
  return expected;
}

}  // namespace monarch
