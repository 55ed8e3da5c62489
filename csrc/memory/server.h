// The owner's side of one-sided memory between hosts: serves what the table allows, and nobody's Python has a part in it.
//
// One thread accepts, one for each connection serves it. Whoever has proved nothing yet has five seconds and one of a few
// places. Registered memory is held for one piece at a time and never while a connection is waited for, so that a peer that
// stands still holds up nobody who drops a registration.
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
  virtual void let_go(const Ticket& ticket) = 0;
  // Of what is held: the GPU whose memory it is, or gpu::none.
  virtual int device(const Ticket&) { return gpu::none; }
};

template <typename Kept>
class MemoryOf final : public Memory {
 public:
  explicit MemoryOf(std::shared_ptr<Kept> kept) : kept_(std::move(kept)) {}
  Refusal hold(const Ticket& ticket, std::uint64_t offset, std::uint64_t bytes, Access access, char** data) override {
    return kept_->hold(ticket, offset, bytes, access, data);
  }
  void let_go(const Ticket& ticket) override { kept_->let_go(ticket); }
  int device(const Ticket& ticket) override { return kept_->device(ticket); }

 private:
  std::shared_ptr<Kept> kept_;
};

class Server {
 public:
  // `most`: connections of those who have proved who they are; who comes next is told so.
  Server(std::shared_ptr<Memory> memory, std::shared_ptr<const Identity> identity, std::size_t most = 1024);
  ~Server();
  Server(const Server&) = delete;
  Server& operator=(const Server&) = delete;

  // The port. A numeric address, IPv4 or IPv6; may be called for several. Throws std::system_error or std::invalid_argument.
  std::uint16_t listen(const std::string& address, std::uint16_t port = 0);
  std::size_t connections() const;  // of those who have proved who they are
  StagingBuffers& staging();         // that peers' requests may name
  // Ends all connections and threads; a second call does nothing.
  void close();
  // In a forked child: closes what belongs to the parent, without a word to anybody.
  void abandon();

 private:
  class Doorkeeper;
  Doorkeeper* keeper_;  // left behind, not freed, in a forked child: it has none of the threads
};

}  // namespace monarch
