// Staging memory: pinned host memory for a peer whose NIC does not reach a GPU of this process. The peer's NIC reads
// and writes it, and a thread of the server copies between it and registered memory.
//
// It is divided into slots. Each request names a slot and a sequence number that grows with each of the peer's
// requests. A late request, from a connection that the peer has abandoned, finds a higher number in the slot and has no
// effect.
#pragma once

#include <cstdint>
#include <map>
#include <memory>
#include <mutex>

#include "memory/registration_table.h"

namespace monarch {

class StagingBuffer {
 public:
  // `keep` owns the memory.
  StagingBuffer(std::shared_ptr<void> keep, char* base, std::uint64_t slot_bytes, std::uint32_t slots)
      : keep_(std::move(keep)), base_(base), slot_bytes_(slot_bytes), slots_(slots), states_(new Slot[slots]) {}

  // Run `copy(slot)` when no other thread copies to or from that slot, if the sequence number is new and the bytes fit.
  template <class Copy>
  Refusal use(std::uint32_t slot, std::uint64_t sequence, std::uint64_t bytes, Copy&& copy) {
    if (slot >= slots_ || bytes > slot_bytes_) return Refusal::no_staging;
    Slot& state = states_[slot];
    const std::scoped_lock lock(state.mutex);
    if (sequence <= state.sequence) return Refusal::no_staging;
    state.sequence = sequence;
    return copy(base_ + slot * slot_bytes_);
  }

 private:
  struct Slot {
    std::mutex mutex;
    std::uint64_t sequence = 0;
  };

  const std::shared_ptr<void> keep_;
  char* const base_;
  const std::uint64_t slot_bytes_;
  const std::uint32_t slots_;
  const std::unique_ptr<Slot[]> states_;
};

// The staging buffers of a server. Each has a random key, which is sent to one peer only.
class StagingBuffers {
 public:
  void add(std::uint64_t key, std::shared_ptr<StagingBuffer> buffer) {
    const std::scoped_lock lock(mutex_);
    all_[key] = std::move(buffer);
  }
  // Requests that have begun go on, and keep the memory.
  void remove(std::uint64_t key) {
    const std::scoped_lock lock(mutex_);
    all_.erase(key);
  }
  std::shared_ptr<StagingBuffer> find(std::uint64_t key) {
    const std::scoped_lock lock(mutex_);
    const auto found = all_.find(key);
    return found == all_.end() ? nullptr : found->second;
  }

 private:
  std::mutex mutex_;
  std::map<std::uint64_t, std::shared_ptr<StagingBuffer>> all_;
};

}  // namespace monarch
