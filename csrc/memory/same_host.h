// Reading and writing what a peer of this host has registered, without a part of its Python in it.
//
// Three ways, each one copy but the last: memory in the peer's arena is mapped here; other memory is read and written by
// the kernel (process_vm_readv); where the kernel does not let us, the peer's own thread copies through a room in our
// arena. Memory of a GPU is mapped by its driver (ipc_mapping_cache.h), or else copied by that thread. Atomics are done in mapped memory, or by that thread. Nothing here waits longer than the deadline, and a caller
// who has changed his mind, or a peer who has died, ends it.
#pragma once

#include <atomic>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <thread>
#include <vector>

#include "memory/ipc_mapping_cache.h"
#include "memory/socket_connection.h"
#include "memory/status.h"

namespace monarch {

// What can end a transfer before its time.
class Patient {
 public:
  explicit Patient(Clock::time_point deadline = Clock::time_point::max()) : deadline(deadline) {}
  void cancel();
  bool is_cancelled() const { return cancelled_.load(std::memory_order_relaxed); }
  // For those who wait for descriptors. Throws std::system_error if there are none.
  const Cancel* event() const;

  const Clock::time_point deadline;

 private:
  std::atomic<bool> cancelled_{false};
  mutable std::mutex mutex_;
  mutable std::optional<Cancel> event_;  // made when somebody asks for it
};

// unseen: whether the driver maps it is seen with the first transfer.
enum class Way : int { mapped, kernel, thread, gpu, lent, unseen };

class Near {
 public:
  // `kernel`, `ipc`: whether process_vm_readv, and mappings of GPU memory, may be used where they work. `threads`: how many
  // of this process make one large copy, the caller's among them.
  Near(std::shared_ptr<Host> host, bool kernel, bool ipc, unsigned threads)
      : host_(std::move(host)), kernel_(kernel), ipc_(ipc), threads_(threads), imports_(std::make_shared<Imports>()) {}
  std::shared_ptr<Imports> imports() const { return imports_; }

  // To memory of a peer; nullptr if it can't be reached as one of this host.
  std::shared_ptr<Peer> peer(const std::string& token) { return host_->connect(token); }
  Result move(const std::shared_ptr<Peer>& peer, const Ticket& ticket, Access access, const std::vector<Segment>& segments, const Patient& patient);
  Result change(const std::shared_ptr<Peer>& peer, const Ticket& ticket, Access access, std::uint64_t offset,
                std::uint64_t operand, std::uint64_t expected, const Patient& patient);
  // The one that `move` would take now.
  Way way(Peer& peer, const Ticket& ticket);
  // Nothing of memory of a GPU: asks for no lock.
  std::optional<Way> way_of_cpu(Peer& peer, const Ticket& ticket);
  // Of memory of a GPU: why it is not mapped here, for people.
  std::string why_not(Peer& peer, const Ticket& ticket);

 private:
  struct Transfer;
  class Question;
  bool kernel_lets_us(Peer& peer);
  // The whole, and a part of it: until that is done or somebody says stop; then it is `done`, too.
  Result by_mapping(Transfer& transfer, const char* base);
  Result by_mapping(const Transfer& transfer, const char* base, const std::vector<Segment>& segments, const std::atomic<bool>& stop);
  Result by_kernel(Transfer& transfer, std::uint64_t base);
  Result by_kernel(const Transfer& transfer, std::uint64_t base, const std::vector<Segment>& segments, const std::atomic<bool>& stop);
  Result by_gpu(Transfer& transfer);
  Result by_import(Transfer& transfer, const char* base, int device);
  Result by_thread(Transfer& transfer, int device = gpu::none);

  std::shared_ptr<Host> host_;
  const bool kernel_, ipc_;
  const unsigned threads_;
  std::shared_ptr<Imports> imports_;
};

// The thread of an owner that does for its peers what they can't do themselves.
class Service {
 public:
  Service(std::shared_ptr<Table> table, std::shared_ptr<Imports> imports);
  ~Service();

 private:
  void run();
  bool serve_all();
  void serve(Request& request);

  std::shared_ptr<Table> table_;
  std::shared_ptr<Imports> imports_;  // of this process: whoever drops what is in them rings the bell
  std::atomic<bool> ending_{false};
  std::thread thread_;
};

}  // namespace monarch
