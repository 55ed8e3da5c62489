// Access to registered memory of a peer of this host, without Python code of the peer.
//
// There are three methods, each with one copy but the last. Memory in the peer's arena is mapped here. Other memory is
// read and written by the kernel (process_vm_readv). Where the kernel does not permit that, the peer's service thread
// copies through a bounce buffer in our arena. GPU memory is mapped by its driver (ipc_mapping_cache.h), or copied by
// that thread. Atomics run in mapped memory, or in that thread. Nothing here waits beyond the deadline. A cancellation,
// or the death of the peer, ends the wait.
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
class CancelScope {
 public:
  explicit CancelScope(Clock::time_point deadline = Clock::time_point::max()) : deadline(deadline) {}
  void cancel();
  bool is_cancelled() const { return cancelled_.load(std::memory_order_relaxed); }
  // For waits on descriptors. Throws std::system_error if there are none left.
  const Cancel* event() const;

  const Clock::time_point deadline;

 private:
  std::atomic<bool> cancelled_{false};
  mutable std::mutex mutex_;
  mutable std::optional<Cancel> event_;  // made at the first call of event()
};

// unseen: the first transfer shows whether the driver maps it.
enum class CopyMethod : int { mapped, kernel, thread, gpu, external, unseen };

class SameHost {
 public:
  // `kernel`, `ipc`: whether process_vm_readv, and mappings of GPU memory, may be used where they work. `threads`: the
  // number of threads for one large copy, with the caller's.
  SameHost(std::shared_ptr<Host> host, bool kernel, bool ipc, unsigned threads)
      : host_(std::move(host)), kernel_(kernel), ipc_(ipc), threads_(threads), mappings_(std::make_shared<IpcMappingCache>()) {}
  std::shared_ptr<IpcMappingCache> mappings() const { return mappings_; }

  // To memory of a peer; nullptr if it can't be reached as one of this host.
  std::shared_ptr<Peer> peer(const std::string& token) { return host_->connect(token); }
  Result move(const std::shared_ptr<Peer>& peer, const Ticket& ticket, Access access, const std::vector<Segment>& segments, const CancelScope& scope);
  Result change(const std::shared_ptr<Peer>& peer, const Ticket& ticket, Access access, std::uint64_t offset,
                std::uint64_t operand, std::uint64_t expected, const CancelScope& scope);
  // The one that `move` would take now.
  CopyMethod copy_method(Peer& peer, const Ticket& ticket);
  // For CPU memory only; takes no lock.
  std::optional<CopyMethod> cpu_copy_method(Peer& peer, const Ticket& ticket);
  // Why GPU memory is not mapped here, as text.
  std::string why_not(Peer& peer, const Ticket& ticket);

 private:
  struct Transfer;
  class ServiceRequest;
  bool can_read_memory(Peer& peer);
  // The whole transfer, or a part of it, until it is done or `stop` is set; then the outcome is `done`, too.
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
  std::shared_ptr<IpcMappingCache> mappings_;
};

// The service thread of an owner: it runs copies and atomics that peers cannot run themselves.
class Service {
 public:
  Service(std::shared_ptr<Table> table, std::shared_ptr<IpcMappingCache> mappings);
  ~Service();

 private:
  void run();
  bool serve_all();
  void serve(Request& request);

  std::shared_ptr<Table> table_;
  std::shared_ptr<IpcMappingCache> mappings_;  // of this process; dropping a mapped registration rings the doorbell
  std::atomic<bool> ending_{false};
  std::thread thread_;
};

}  // namespace monarch
