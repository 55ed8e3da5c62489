#include "memory/imports.h"

#include <limits>

namespace monarch {

Imports::Key Imports::key_of(const Peer& owner, const gpu::Export& exported, int device) {
  return {owner.token, std::string(reinterpret_cast<const char*>(exported.handle), sizeof exported.handle), exported.allocation, device};
}

std::shared_ptr<const Imports::Import> Imports::get(const std::shared_ptr<Peer>& owner, TableMemory& table, const Ticket& ticket, int device) {
  const gpu::Export exported = table.exports[ticket.slot];
  const std::scoped_lock lock(mutex_);
  std::shared_ptr<Import>& import = all_[key_of(*owner, exported, device)];
  if (import == nullptr) {
    const std::shared_ptr<Import> made = import = std::make_shared<Import>();
    made->owner = owner;
    made->registrations.emplace(ticket.slot, ticket.epoch);
    sweep_locked();  // some memory of theirs may have taken the place of what is mapped
    try {
      made->memory = std::make_unique<gpu::Imported>(exported, device);
      made->base = made->memory->base();
    } catch (const gpu::Failure& failure) {
      made->why_not = failure.what();
    }
    return made;
  }
  import->registrations.emplace(ticket.slot, ticket.epoch);
  return import;
}

std::string Imports::why_not(const Peer& owner, const TableMemory& table, const Ticket& ticket) {
  const std::scoped_lock lock(mutex_);
  const auto found = all_.lower_bound(key_of(owner, table.exports[ticket.slot], std::numeric_limits<int>::min()));
  if (found == all_.end() || !found->second->registrations.contains({ticket.slot, ticket.epoch})) return {};
  return found->second->why_not;
}

void Imports::sweep() {
  const std::scoped_lock lock(mutex_);
  sweep_locked();
}

void Imports::lend(const std::shared_ptr<Peer>& owner, const Ticket& ticket, char* base) {
  const auto made = std::make_shared<Import>();
  made->base = base;
  made->owner = owner;
  made->registrations.emplace(ticket.slot, ticket.epoch);
  const std::scoped_lock lock(mutex_);
  lent_.emplace(Registration{owner->token, ticket.slot, ticket.epoch}, made);
}

std::shared_ptr<const Imports::Import> Imports::lent(const Peer& owner, const Ticket& ticket) {
  const std::scoped_lock lock(mutex_);
  const auto found = lent_.find({owner.token, ticket.slot, ticket.epoch});
  return found == lent_.end() ? nullptr : found->second;
}

std::vector<Imports::Registration> Imports::returned() {
  const std::scoped_lock lock(mutex_);
  sweep_locked();
  std::vector<Registration> free;
  std::erase_if(ended_, [&](const auto& entry) {
    if (entry.second.use_count() > 1) return false;
    free.push_back(entry.first);
    return true;
  });
  return free;
}

namespace {

// Whether its owner is gone, or has dropped all that lies in it.
bool has_ended(Imports::Import& import) {
  if (import.owner->state.load(std::memory_order_acquire) != Peer::alive) return true;
  const TableMemory* table = table_of(*import.owner);
  std::erase_if(import.registrations, [&](const auto& registration) {
    return table == nullptr || table->entries[registration.first].epoch.load(std::memory_order_acquire) != registration.second;
  });
  return import.registrations.empty();
}

}  // namespace

void Imports::sweep_locked() {
  std::erase_if(all_, [](auto& entry) { return has_ended(*entry.second); });
  std::erase_if(lent_, [this](auto& entry) {
    if (!has_ended(*entry.second)) return false;
    ended_.emplace_back(entry.first, entry.second);
    return true;
  });
}

std::size_t Imports::count() {
  const std::scoped_lock lock(mutex_);
  return all_.size();
}

}  // namespace monarch
