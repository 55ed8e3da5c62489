// A stand-in until csrc/memory/table.cpp comes: enough of table.h for what serves it over TCP to be tried.
#include "memory/table.h"

#include <chrono>
#include <cstring>
#include <stdexcept>
#include <thread>

#include <sys/random.h>

namespace monarch {

Refusal Entry::check(const Ticket& ticket, std::uint64_t offset, std::uint64_t length, Access access) const {
  const bool atomic = access == Access::fetch_add || access == Access::compare_and_swap;
  if (epoch.load() != ticket.epoch || ticket.epoch % 2 == 0) return Refusal::dropped;
  if (key != ticket.key) return Refusal::wrong_key;
  if (offset > bytes || length > bytes - offset) return Refusal::out_of_range;
  if (access != Access::read && writable == 0) return Refusal::read_only;
  if (atomic && (length != 8 || (address + offset) % 8 != 0)) return Refusal::misaligned;
  return Refusal::none;
}

Table::Table(std::shared_ptr<Host> host) : host_(std::move(host)), at_(host_->allocate(sizeof(Entry) * most_registrations)) {
  if (at_ == 0) throw std::system_error(ENOMEM, std::generic_category(), "a table of registrations");
  std::memset(host_->arena().mapping().at(at_), 0, sizeof(Entry) * most_registrations);
}

Table::~Table() { host_->release(at_); }

Entry& Table::entry(std::uint32_t slot) const { return reinterpret_cast<Entry*>(host_->arena().mapping().at(at_))[slot]; }

Ticket Table::add(void* data, std::uint64_t bytes, bool writable) {
  const std::scoped_lock lock(mutex_);
  if (free_.empty() && used_ == most_registrations) throw std::length_error("too many registrations");
  std::uint32_t slot = used_;
  if (free_.empty()) ++used_;
  else slot = free_.back(), free_.pop_back();
  Entry& made = entry(slot);
  made.address = reinterpret_cast<std::uint64_t>(data), made.bytes = bytes, made.writable = writable;
  (void)!getrandom(&made.key, sizeof made.key, 0);
  ++count_;
  return {slot, ++made.epoch, made.key};
}

Table::Dropped Table::drop(const Ticket& ticket, double seconds) {
  Entry& dropped = entry(ticket.slot);
  {
    const std::scoped_lock lock(mutex_);
    if (ticket.epoch % 2 == 1 && dropped.epoch.load() == ticket.epoch) ++dropped.epoch, --count_, free_.push_back(ticket.slot);
    else if (dropped.epoch.load() != ticket.epoch + 1) return Dropped::was_not_there;
  }
  for (const auto end = Clock::now() + std::chrono::duration<double>(seconds); dropped.holds.load() != 0;) {
    if (Clock::now() >= end) return Dropped::still_used;
    std::this_thread::sleep_for(std::chrono::microseconds(50));
  }
  return Dropped::yes;
}

Refusal Table::hold(const Ticket& ticket, std::uint64_t offset, std::uint64_t bytes, Access access, char** data) {
  if (ticket.slot >= most_registrations) return Refusal::dropped;
  Entry& held = entry(ticket.slot);
  ++held.holds;
  const Refusal refusal = held.check(ticket, offset, bytes, access);
  if (refusal == Refusal::none) *data = reinterpret_cast<char*>(held.address) + offset;
  else --held.holds;
  return refusal;
}

void Table::let_go(const Ticket& ticket) { --entry(ticket.slot).holds; }

std::uint64_t do_atomic(char* at, Access access, std::uint64_t operand, std::uint64_t expected) {
  const std::atomic_ref<std::uint64_t> word(*reinterpret_cast<std::uint64_t*>(at));
  if (access == Access::fetch_add) return word.fetch_add(operand);
  word.compare_exchange_strong(expected, operand);
  return expected;
}

}  // namespace monarch
