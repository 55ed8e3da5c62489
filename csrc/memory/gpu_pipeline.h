// Memory of a GPU on its way to or from a connection: through pinned memory, so that one part is copied while another one
// is on the wire. The caller's side; the owner's, which holds registered memory, is the server's.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>

#include "memory/gpu.h"
#include "memory/status.h"

namespace monarch {

// The places of a piece, one after the other.
class Places {
 public:
  Places(const Segment* first, std::size_t count) : first_(first), count_(count) {}
  std::uint64_t left() const {
    std::uint64_t bytes = 0;
    for (std::size_t i = 0; i < count_; ++i) bytes += first_[i].bytes;
    return bytes - at_;
  }
  // The next bytes, no more than `most`, that lie in one piece.
  template <class Take>
  std::uint64_t each(std::uint64_t most, Take&& take) {
    std::uint64_t done = 0;
    while (done < most && count_ != 0) {
      const std::uint64_t bytes = std::min(most - done, first_->bytes - at_);
      if (bytes != 0) take(first_->local + at_, done, bytes);
      done += bytes, at_ += bytes;
      if (at_ == first_->bytes) ++first_, --count_, at_ = 0;
    }
    return done;
  }

 private:
  const Segment* first_;
  std::size_t count_;
  std::uint64_t at_ = 0;  // in the first
};

class Staged {
 public:
  explicit Staged(int device) : copies_(device) {}

  // `send(from, bytes)`. While it sends one part, the next one is copied.
  template <class Send>
  void send(const Segment* first, std::size_t count, Send&& send) {
    Places places(first, count);
    std::uint64_t ready = gather(places);
    while (ready != 0) {
      const int sent = lane_;
      copies_.finish(sent);
      lane_ = 1 - lane_;
      const std::uint64_t next = gather(places);
      send(copies_.room(sent), ready);
      ready = next;
    }
  }
  // `receive(to, bytes)`, of a piece that has room; `wanted()` says whether it is copied on. It is under way to the GPU
  // when this returns, and there after `finish`.
  template <class Receive, class Wanted>
  void receive(const Segment* first, std::size_t count, Receive&& receive, Wanted&& wanted) {
    Places places(first, count);
    const std::uint64_t bytes = places.left();
    copies_.finish(lane_);
    receive(copies_.room(lane_), bytes);
    if (!wanted()) return;
    places.each(bytes, [&](char* to, std::uint64_t at, std::uint64_t part) { copies_.begin(lane_, to, copies_.room(lane_) + at, part); });
    lane_ = 1 - lane_;
  }
  void finish() {
    for (int lane = 0; lane < gpu::Copies::lanes; ++lane) copies_.finish(lane);
  }

 private:
  static constexpr std::uint64_t part_bytes = gpu::room_bytes / 4;

  std::uint64_t gather(Places& places) {
    return places.each(part_bytes, [&](char* from, std::uint64_t at, std::uint64_t part) { copies_.begin(lane_, copies_.room(lane_) + at, from, part); });
  }

  gpu::Copies copies_;
  int lane_ = 0;
};

}  // namespace monarch
