// Pipeline for GPU memory on the client's side of a connection: through pinned memory, so that one part is copied while
// another one is sent or received. The server has its own for registered memory.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>

#include "memory/gpu.h"
#include "memory/status.h"

namespace monarch {

// The places of a piece, one after the other.
class LocalCursor {
 public:
  LocalCursor(const Segment* first, std::size_t count) : first_(first), count_(count) {}
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

class GpuPipeline {
 public:
  explicit GpuPipeline(int device) : copies_(device) {}

  // `send(from, bytes)`. While it sends one part, the next one is copied.
  template <class Send>
  void send(const Segment* first, std::size_t count, Send&& send) {
    LocalCursor cursor(first, count);
    std::uint64_t ready = gather(cursor);
    while (ready != 0) {
      const int sent = stream_;
      copies_.finish(sent);
      stream_ = 1 - stream_;
      const std::uint64_t next = gather(cursor);
      send(copies_.pinned_buffer(sent), ready);
      ready = next;
    }
  }
  // `receive(to, bytes)` reads a piece into pinned memory; `wanted()` returns whether to copy it to the GPU. The copy
  // is in progress when this returns, and done after `finish`.
  template <class Receive, class Wanted>
  void receive(const Segment* first, std::size_t count, Receive&& receive, Wanted&& wanted) {
    LocalCursor cursor(first, count);
    const std::uint64_t bytes = cursor.left();
    copies_.finish(stream_);
    receive(copies_.pinned_buffer(stream_), bytes);
    if (!wanted()) return;
    cursor.each(bytes, [&](char* to, std::uint64_t at, std::uint64_t part) { copies_.begin(stream_, to, copies_.pinned_buffer(stream_) + at, part); });
    stream_ = 1 - stream_;
  }
  void finish() {
    for (int stream = 0; stream < gpu::Copies::stream_count; ++stream) copies_.finish(stream);
  }

 private:
  static constexpr std::uint64_t part_bytes = gpu::pinned_buffer_bytes / 4;

  std::uint64_t gather(LocalCursor& cursor) {
    return cursor.each(part_bytes, [&](char* from, std::uint64_t at, std::uint64_t part) { copies_.begin(stream_, copies_.pinned_buffer(stream_) + at, from, part); });
  }

  gpu::Copies copies_;
  int stream_ = 0;
};

}  // namespace monarch
