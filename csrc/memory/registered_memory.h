// Registered memory of this process, and access to that of others on this host: the table, its service thread, and
// SameHost.
#pragma once

#include <memory>
#include <string>
#include <utility>

#include "memory/same_host.h"
#include "memory/registration_table.h"

namespace monarch {

class Registered {
 public:
  Registered(std::shared_ptr<Host> host, bool kernel, bool ipc, unsigned threads)
      : host_(host), table_(std::make_shared<Table>(host)), same_host_(host, kernel, ipc, threads), service_(table_, same_host_.mappings()) {}

  Host& host() { return *host_; }
  Table& table() { return *table_; }
  std::shared_ptr<Table> shared_table() { return table_; }
  SameHost& same_host() { return same_host_; }

  // Wait for a process that does not answer at once. nullptr: it has ended, or the scope is over.
  std::shared_ptr<Peer> connect_peer(const std::string& token, const CancelScope& scope) {
    bool waiting = false;
    std::shared_ptr<Peer> peer = host_->connect(token, 1.0, &waiting);
    while (peer == nullptr && waiting && Clock::now() < scope.deadline && !scope.is_cancelled()) peer = host_->accepted(token, 0.02);
    return peer;
  }

 private:
  std::shared_ptr<Host> host_;
  std::shared_ptr<Table> table_;
  SameHost same_host_;
  Service service_;
};

}  // namespace monarch
