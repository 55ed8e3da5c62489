// Server of registered memory for other hosts: serves what the table permits, without Python.
//
// One thread accepts, and one thread per connection serves it. An unauthenticated connection has five seconds and one
// of a limited number of slots. Registered memory is held for one piece at a time and never during a wait for a
// connection. So a peer that stops does not block a drop of a registration.
#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <utility>

#include "memory/handshake.h"
#include "memory/pinned_staging.h"
#include "memory/registration_table.h"

namespace monarch {

// What a server needs of a Table.
class Memory {
 public:
  virtual ~Memory() = default;
  // A thread may hold several pieces of a GPU's at a time.
  virtual Refusal hold(const Ticket& ticket, std::uint64_t offset, std::uint64_t bytes, Access access, char** data) = 0;
  virtual void release(const Ticket& ticket) = 0;
  // Of what is held: the GPU whose memory it is, or gpu::none.
  virtual int device(const Ticket&) { return gpu::none; }
};

template <typename Target>
class MemoryAdapter final : public Memory {
 public:
  explicit MemoryAdapter(std::shared_ptr<Target> target) : target_(std::move(target)) {}
  Refusal hold(const Ticket& ticket, std::uint64_t offset, std::uint64_t bytes, Access access, char** data) override {
    return target_->hold(ticket, offset, bytes, access, data);
  }
  void release(const Ticket& ticket) override { target_->release(ticket); }
  int device(const Ticket& ticket) override { return target_->device(ticket); }

 private:
  std::shared_ptr<Target> target_;
};

class Server {
 public:
  // `most`: limit of authenticated connections; further ones get a reply that says so.
  Server(std::shared_ptr<Memory> memory, std::shared_ptr<const Identity> identity, std::size_t most = 1024);
  ~Server();
  Server(const Server&) = delete;
  Server& operator=(const Server&) = delete;

  // The port. A numeric address, IPv4 or IPv6; may be called for several. Throws std::system_error or std::invalid_argument.
  std::uint16_t listen(const std::string& address, std::uint16_t port = 0);
  std::size_t connections() const;  // authenticated ones
  StagingBuffers& staging();         // that peers' requests may name
  // Ends all connections and threads; a second call does nothing.
  void close();
  // In a forked child: close inherited descriptors without a message to the peers.
  void abandon();

 private:
  class Acceptor;
  Acceptor* acceptor_;  // left behind, not freed, in a forked child: it has none of the threads
};

}  // namespace monarch
