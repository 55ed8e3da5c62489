#include "memory/ipc_mapping_cache.h"

#include <algorithm>
#include <limits>

namespace monarch {

IpcMappingCache::Key IpcMappingCache::key_of(const Peer& owner, const gpu::Export& exported, int device) {
  return {owner.token, std::string(reinterpret_cast<const char*>(exported.handle), sizeof exported.handle), exported.allocation, device};
}

std::shared_ptr<const IpcMappingCache::IpcMapping> IpcMappingCache::get(const std::shared_ptr<Peer>& owner, TableMemory& table, const Ticket& ticket, int device) {
  const gpu::Export exported = table.exports[ticket.slot];
  const Key key = key_of(*owner, exported, device);
  if (const std::shared_ptr<IpcMapping> import = find(key, ticket)) return import;
  const std::scoped_lock lock(driver_);
  close_ended();  // some memory of theirs may have taken the place of what is mapped
  if (const std::shared_ptr<IpcMapping> import = find(key, ticket)) return import;
  const auto made = std::make_shared<IpcMapping>();
  made->owner = owner;
  made->registrations.emplace(ticket.slot, ticket.epoch);
  try {
    made->memory = std::make_unique<gpu::Imported>(exported, device);
    made->base = made->memory->base();
  } catch (const gpu::Failure& failure) {
    made->why_not = failure.what();
  }
  const std::scoped_lock all_lock(mutex_);
  all_.emplace(key, made);
  return made;
}

std::shared_ptr<IpcMappingCache::IpcMapping> IpcMappingCache::find(const Key& key, const Ticket& ticket) {
  const std::scoped_lock lock(mutex_);
  const auto found = all_.find(key);
  if (found == all_.end()) return nullptr;
  found->second->registrations.emplace(ticket.slot, ticket.epoch);
  return found->second;
}

IpcMappingCache::Known IpcMappingCache::known(const Peer& owner, const TableMemory& table, const Ticket& ticket, std::string* why_not) {
  const Key first = key_of(owner, table.exports[ticket.slot], std::numeric_limits<int>::min());
  const auto same_memory = [&](const Key& key) {
    return std::get<0>(key) == std::get<0>(first) && std::get<1>(key) == std::get<1>(first) && std::get<2>(key) == std::get<2>(first);
  };
  Known known = Known::nothing;
  const std::scoped_lock lock(mutex_);
  for (auto at = all_.lower_bound(first); at != all_.end() && same_memory(at->first); ++at) {
    const IpcMapping& import = *at->second;
    if (!import.registrations.contains({ticket.slot, ticket.epoch})) continue;
    known = import.base != nullptr ? std::max(known, Known::mapped) : Known::refused;
    if (why_not != nullptr && import.base == nullptr) *why_not = import.why_not;
  }
  return known;
}

void IpcMappingCache::sweep() {
  const std::scoped_lock lock(driver_);
  close_ended();
}

void IpcMappingCache::add_external(const std::shared_ptr<Peer>& owner, const Ticket& ticket, char* base) {
  const auto made = std::make_shared<IpcMapping>();
  made->base = base;
  made->owner = owner;
  made->registrations.emplace(ticket.slot, ticket.epoch);
  const std::scoped_lock lock(mutex_);
  external_.emplace(Registration{owner->token, ticket.slot, ticket.epoch}, made);
}

std::shared_ptr<const IpcMappingCache::IpcMapping> IpcMappingCache::external(const Peer& owner, const Ticket& ticket) {
  const std::scoped_lock lock(mutex_);
  const auto found = external_.find({owner.token, ticket.slot, ticket.epoch});
  return found == external_.end() ? nullptr : found->second;
}

std::vector<IpcMappingCache::Registration> IpcMappingCache::take_unused_external() {
  sweep();
  std::vector<Registration> free;
  const std::scoped_lock lock(mutex_);
  std::erase_if(ended_, [&](const auto& entry) {
    if (entry.second.use_count() > 1) return false;
    free.push_back(entry.first);
    return true;
  });
  return free;
}

namespace {

// Whether its owner is gone, or has dropped all that lies in it.
bool has_ended(IpcMappingCache::IpcMapping& import) {
  if (import.owner->state.load(std::memory_order_acquire) != Peer::alive) return true;
  const TableMemory* table = table_of(*import.owner);
  std::erase_if(import.registrations, [&](const auto& registration) {
    return table == nullptr || table->entries[registration.first].epoch.load(std::memory_order_acquire) != registration.second;
  });
  return import.registrations.empty();
}

}  // namespace

void IpcMappingCache::close_ended() {
  std::vector<std::shared_ptr<IpcMapping>> closing;  // when this is over, without the lock
  const std::scoped_lock lock(mutex_);
  std::erase_if(all_, [&](auto& entry) {
    if (!has_ended(*entry.second)) return false;
    closing.push_back(entry.second);
    return true;
  });
  std::erase_if(external_, [this](auto& entry) {
    if (!has_ended(*entry.second)) return false;
    ended_.emplace_back(entry.first, entry.second);
    return true;
  });
}

std::size_t IpcMappingCache::count() {
  const std::scoped_lock lock(mutex_);
  return all_.size();
}

}  // namespace monarch
