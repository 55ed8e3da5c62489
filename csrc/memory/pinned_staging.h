// Memory of the host between a GPU's and a NIC that does not reach the GPU: lent to one peer, whose NIC reads and writes it,
// and who has a server's thread copy between it and what is registered.
//
// It is cut into slots. The peer says which slot, and its turn, a number that grows with each of its requests: what arrives
// late, out of a connection that the peer has given up, finds that the slot's turn is over, and touches nothing.
#pragma once

#include <cstdint>
#include <map>
#include <memory>
#include <mutex>

#include "memory/registration_table.h"

namespace monarch {

class StagingBuffer {
 public:
  // `keep` is what the memory is of.
  StagingBuffer(std::shared_ptr<void> keep, char* base, std::uint64_t slot_bytes, std::uint32_t slots)
      : keep_(std::move(keep)), base_(base), slot_bytes_(slot_bytes), slots_(slots), states_(new Slot[slots]) {}

  // `copy(slot)`, when nobody else copies to or from that slot any more, if its turn has come and it has room.
  template <class Copy>
  Refusal use(std::uint32_t slot, std::uint64_t turn, std::uint64_t bytes, Copy&& copy) {
    if (slot >= slots_ || bytes > slot_bytes_) return Refusal::no_staging;
    Slot& state = states_[slot];
    const std::scoped_lock lock(state.mutex);
    if (turn <= state.turn) return Refusal::no_staging;
    state.turn = turn;
    return copy(base_ + slot * slot_bytes_);
  }

 private:
  struct Slot {
    std::mutex mutex;
    std::uint64_t turn = 0;
  };

  const std::shared_ptr<void> keep_;
  char* const base_;
  const std::uint64_t slot_bytes_;
  const std::uint32_t slots_;
  const std::unique_ptr<Slot[]> states_;
};

// Those of a server, by their keys: random numbers, each of which one peer was told.
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
