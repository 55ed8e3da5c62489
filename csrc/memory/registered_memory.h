// Memory that this process has registered, and its ways to that of others on this host: the table, its service, and Near.
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
      : host_(host), table_(std::make_shared<Table>(host)), near_(host, kernel, ipc, threads), service_(table_, near_.imports()) {}

  Host& host() { return *host_; }
  Table& table() { return *table_; }
  std::shared_ptr<Table> shared_table() { return table_; }
  Near& near() { return near_; }

  // Waits for one who does not answer at once. nullptr: it is gone, or the caller waits no more.
  std::shared_ptr<Peer> meet(const std::string& token, const Patient& patient) {
    bool waiting = false;
    std::shared_ptr<Peer> peer = host_->connect(token, 1.0, &waiting);
    while (peer == nullptr && waiting && Clock::now() < patient.deadline && !patient.is_cancelled()) peer = host_->accepted(token, 0.02);
    return peer;
  }

 private:
  std::shared_ptr<Host> host_;
  std::shared_ptr<Table> table_;
  Near near_;
  Service service_;
};

}  // namespace monarch
