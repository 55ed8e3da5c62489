// A completion queue and its queue pairs, which a Python package for libibverbs has made: posting, polling and arming
// without its Python between. Everything else about them, their ends too, is the package's.
//
// The packages keep their pointers to themselves, as C fields of their objects. So an object's memory is looked through
// for the one word that is such a pointer: to what the object itself says of its queue. Not one byte is read but by the
// kernel, which says so where a word is no address; what is not found for certain is not found.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>
#include <utility>

#include "verbs/pyverbs_abi.h"

namespace monarch::verbs {

struct Work {  // as _binding.py's Work
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
  // Of the object whose memory this is: with so many entries, and a channel of this descriptor. nullptr: not found.
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
