// Allocations of other processes' GPUs that are mapped here: opened with the first transfer, closed when all that was
// registered in them is dropped, or their process is gone. What is copied, and who may, is near.h's.
#pragma once

#include <map>
#include <memory>
#include <mutex>
#include <set>
#include <string>
#include <tuple>
#include <utility>

#include "memory/table.h"

namespace monarch {

class Imports {
 public:
  // One allocation for one GPU of ours. Who has it keeps it mapped.
  struct Import {
    std::unique_ptr<gpu::Imported> memory;  // nullptr: the driver has refused it
    std::string why_not;
    std::shared_ptr<Peer> owner;
    std::set<std::pair<std::uint32_t, std::uint64_t>> registrations;  // slots and epochs; under the lock of Imports
  };

  // For a registration that the caller has a claim on: it stays as it is meanwhile. Never nullptr.
  std::shared_ptr<const Import> get(const std::shared_ptr<Peer>& owner, TableMemory& table, const Ticket& ticket, int device);
  // What the driver has said when it refused to map it; empty if it has not.
  std::string why_not(const Peer& owner, const TableMemory& table, const Ticket& ticket);
  // Closes what nobody can ask for any more.
  void sweep();
  std::size_t count();

 private:
  // The owner's token, the handle, the allocation's number, our GPU.
  using Key = std::tuple<std::string, std::string, std::uint64_t, int>;
  static Key key_of(const Peer& owner, const gpu::Export& exported, int device);
  void sweep_locked();

  std::mutex mutex_;
  std::map<Key, std::shared_ptr<Import>> all_;
};

}  // namespace monarch
