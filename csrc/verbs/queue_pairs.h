// A completion queue and its queue pairs, made by a Python package for libibverbs: posting, polling and arming without
// the package's Python code. The package does everything else, including their destruction.
//
// The packages have no function that returns their pointers, which are C fields of their objects. So an object's memory
// is searched for the one word that points to a queue with the properties that the object reports. Memory is read only
// through the kernel, which reports invalid addresses. Without a unique match the result is "not found".
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>
#include <utility>

#include "verbs/pyverbs_abi.h"

namespace monarch::verbs {

struct Work {  // as Work of _verbs/providers/provider.py
  std::uint64_t id;
  int opcode;
  bool signaled;
  std::uint64_t local;
  std::uint32_t bytes, lkey;
  std::uint64_t remote;
  std::uint32_t rkey;
  std::uint64_t compare_add, swap;
};

// Throws std::system_error where the device refuses.
class CompletionQueue {
 public:
  // Find the queue in the memory of an object: with `entries` entries, and a channel with this descriptor. nullptr: not
  // found.
  static std::shared_ptr<CompletionQueue> find(std::span<const std::uintptr_t> object, int fd, int entries);

  void arm();
  std::size_t poll(std::span<Wc> into);  // how many have completed
  void forget() { queue_ = nullptr; }    // it is about to be destroyed

 private:
  friend class QueuePair;
  explicit CompletionQueue(Cq* queue) : queue_(queue) {}
  Cq& open() const;

  Cq* queue_;
};

class QueuePair {
 public:
  // The reliable connection of this number that completes in that queue. nullptr: not found.
  static std::shared_ptr<QueuePair> find(std::span<const std::uintptr_t> object, std::uint32_t number, std::shared_ptr<const CompletionQueue> queue);

  // In one go.
  void post(std::span<const Work> works);
  void forget() { pair_ = nullptr; }

 private:
  QueuePair(Qp* pair, std::shared_ptr<const CompletionQueue> queue) : pair_(pair), queue_(std::move(queue)) {}

  Qp* pair_;
  std::shared_ptr<const CompletionQueue> queue_;  // with which it ends
};

}  // namespace monarch::verbs
