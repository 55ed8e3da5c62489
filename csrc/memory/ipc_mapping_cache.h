// Allocations of other processes' GPUs that are mapped here: opened with the first transfer, closed when all that was
// registered in them is dropped, or their process is gone. Others may lend what they have mapped themselves, as torch does.
// What is copied, and who may, is same_host.h's.
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

class Imports {
 public:
  // One allocation for one GPU of ours. Who has it keeps it mapped.
  struct Import {
    char* base = nullptr;  // of the allocation, or of the registration that was lent; nullptr: the driver has refused it
    std::unique_ptr<gpu::Imported> memory;
    std::string why_not;
    std::shared_ptr<Peer> owner;
    std::set<std::pair<std::uint32_t, std::uint64_t>> registrations;  // slots and epochs; under the lock of Imports
  };

  // For a registration that the caller has a claim on: it stays as it is meanwhile. Never nullptr.
  std::shared_ptr<const Import> get(const std::shared_ptr<Peer>& owner, TableMemory& table, const Ticket& ticket, int device);
  // What is known of a registration that somebody has read or written already: of several GPUs of ours, the worst.
  enum class Known { nothing, mapped, refused };
  // `why_not`: gets what the driver has said when it refused to map it. Waits for no driver.
  Known known(const Peer& owner, const TableMemory& table, const Ticket& ticket, std::string* why_not = nullptr);
  // This registration lies at `base` here, mapped by whoever calls, who keeps it so until it is returned.
  void lend(const std::shared_ptr<Peer>& owner, const Ticket& ticket, char* base);
  std::shared_ptr<const Import> lent(const Peer& owner, const Ticket& ticket);
  // Those that nobody uses any more: the owner's token, slot and epoch. Each is told once.
  using Registration = std::tuple<std::string, std::uint32_t, std::uint64_t>;
  std::vector<Registration> returned();
  // Closes what nobody can ask for any more.
  void sweep();
  std::size_t count();

 private:
  // The owner's token, the handle, the allocation's number, our GPU.
  using Key = std::tuple<std::string, std::string, std::uint64_t, int>;
  static Key key_of(const Peer& owner, const gpu::Export& exported, int device);
  std::shared_ptr<Import> find(const Key& key, const Ticket& ticket);  // nullptr: nobody has asked for it
  void close_ended();  // with `driver_`

  // What is closed is closed before more is opened. Before `mutex_`, which nobody has while he waits for the driver: it
  // may wait for a GPU's work, some of which calls Python, whose lock those may have who want `mutex_`.
  std::mutex driver_;
  std::mutex mutex_;
  std::map<Key, std::shared_ptr<Import>> all_;
  std::map<Registration, std::shared_ptr<Import>> lent_;
  std::vector<std::pair<Registration, std::shared_ptr<Import>>> ended_;  // lent once; somebody may be in the middle of it
};

}  // namespace monarch
