// Cache of mappings of other processes' GPU allocations. A mapping is opened with the first transfer, and closed when
// all registrations in it are dropped or its process has ended. External mappings are made by the caller, for example
// by torch. same_host.h copies and checks access.
#pragma once

#include <map>
#include <memory>
#include <mutex>
#include <set>
#include <string>
#include <tuple>
#include <utility>
#include <vector>

#include "memory/registration_table.h"

namespace monarch {

class IpcMappingCache {
 public:
  // One allocation, mapped for one GPU of this process. A reference keeps it mapped.
  struct IpcMapping {
    char* base = nullptr;  // of the allocation, or of the externally mapped registration; nullptr: the driver has refused it
    std::unique_ptr<gpu::Imported> memory;
    std::string why_not;
    std::shared_ptr<Peer> owner;
    std::set<std::pair<std::uint32_t, std::uint64_t>> registrations;  // slots and epochs; under the lock of IpcMappingCache
  };

  // For a registration that the caller has a claim on: it stays as it is meanwhile. Never nullptr.
  std::shared_ptr<const IpcMapping> get(const std::shared_ptr<Peer>& owner, TableMemory& table, const Ticket& ticket, int device);
  // State of a registration that was read or written before: with several GPUs of this process, the worst.
  enum class Known { nothing, mapped, refused };
  // `why_not`: receives the driver's text if it refused the mapping. Does not wait for the driver.
  Known known(const Peer& owner, const TableMemory& table, const Ticket& ticket, std::string* why_not = nullptr);
  // Add a mapping of this registration at `base`, made by the caller, which keeps it until `take_unused_external`
  // returns it.
  void add_external(const std::shared_ptr<Peer>& owner, const Ticket& ticket, char* base);
  std::shared_ptr<const IpcMapping> external(const Peer& owner, const Ticket& ticket);
  // The external mappings that are not used any more: the owner's token, slot and epoch. Each is returned once.
  using Registration = std::tuple<std::string, std::uint32_t, std::uint64_t>;
  std::vector<Registration> take_unused_external();
  // Close mappings that no transfer can use any more.
  void sweep();
  std::size_t count();

 private:
  // The owner's token, the handle, the allocation's number, our GPU.
  using Key = std::tuple<std::string, std::string, std::uint64_t, int>;
  static Key key_of(const Peer& owner, const gpu::Export& exported, int device);
  std::shared_ptr<IpcMapping> find(const Key& key, const Ticket& ticket);  // nullptr: not in the cache
  void close_ended();  // with `driver_`

  // Old mappings are closed before new ones are opened. Locked before `mutex_`, which is never held during a call of
  // the driver: the driver may wait for a GPU's work, which may call Python, and threads that hold the GIL may want
  // `mutex_`.
  std::mutex driver_;
  std::mutex mutex_;
  std::map<Key, std::shared_ptr<IpcMapping>> all_;
  std::map<Registration, std::shared_ptr<IpcMapping>> external_;
  std::vector<std::pair<Registration, std::shared_ptr<IpcMapping>>> ended_;  // external mappings of ended registrations; a transfer may still use them
};

}  // namespace monarch
