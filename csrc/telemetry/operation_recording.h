// Recording of the operations of one group: a cell for the collective under way, one for messages, and events for
// operations that have ended. The group's lock protects it.
//
// Recording adds at most 2 % to an operation of 8 bytes, which takes 3 us. So it reads the processor's counter, because
// the clock is slower. The cell counts every operation. Of those that follow each other within 0.1 ms, only some have
// events.
#pragma once

#include <array>
#include <cstdint>
#include <string>

#if defined(__x86_64__)
#include <x86intrin.h>
#endif

#include "telemetry/recording.h"

namespace monarch::telemetry {

class OperationRecording {
 public:
  static constexpr std::size_t kinds = 16;  // capacity: kinds of operations, such as all_reduce

  struct Started {
    std::uint64_t ticks = 0;  // 0: not recorded
    std::uint64_t at_ns = 0;  // with the resolution of the system's ticks, some milliseconds
    std::uint64_t number = 0;
  };

  // Record from now on, if this process records at all. All ranks of the group give the same `identity`, and no other
  // group has it.
  void start(std::string_view name, std::uint32_t rank, std::uint64_t identity) {
    name_ = intern(name);
    rank_ = rank;
    identity_ = identity;
    base_ns_ = now_ns();
    base_ticks_ = ticks();
    collectives_ = take();
  }

  bool is_on() const { return owns(collectives_); }

  // What an operation is: its kind, such as all_reduce, the bytes of a piece, and payload().
  struct What {
    std::size_t kind;
    bool is_message;
    std::uint64_t bytes;
    std::uint32_t payload;
  };

  // An operation begins. `reference` is a collective's number, or the other rank of a message. `alone`: no other
  // operation of this sort is under way.
  Started begin(const What& what, const char* operation, std::uint64_t reference, bool alone) {
    const Started started{ticks(), coarse_ns(), reference};
    if (what.is_message && !has_messages_) {
      has_messages_ = true;
      messages_ = take();
    }
    if (operations_[what.kind] == 0) operations_[what.kind] = intern(operation);
    if (alone) show(what, started);
    return started;
  }

  // Show in the cell that this operation is under way.
  void show(const What& what, const Started& started) {
    Cell* const cell = what.is_message ? messages_ : collectives_;
    if (!owns(cell)) return;
    update(*cell, [&](Cell& fields) {
      fields.state = 1;
      fields.detail = operations_[what.kind];
      fields.since_ns = started.at_ns;
      fields.reference = started.number;
      fields.value = what.bytes;
      fields.waiting = what.payload;
    });
  }

  void end(const What& what, const Started& started, bool failed, bool last) {
    const std::uint64_t end = ticks(), duration = end - started.ticks;
    if (failed || duration > apart_ticks || end - last_event_ > apart_ticks) {
      last_event_ = end;
      record_event(what, started, failed, duration);
    }
    Cell* const cell = what.is_message ? messages_ : collectives_;
    if (!owns(cell)) return;
    update(*cell, [&](Cell& fields) {
      ++fields.count;
      if (last) fields.state = 0;
    });
  }

  // The group ends. Its cells are free for other activities.
  void stop() {
    for (Cell** cell : {&collectives_, &messages_}) {
      release_cell(*cell);
      *cell = nullptr;
    }
  }

 private:
  static constexpr std::uint64_t apart_ticks = 1 << 18;  // about 0.1 ms

  static std::uint64_t ticks() {
#if defined(__x86_64__)
    return __rdtsc();
#else
    return now_ns();
#endif
  }

  Cell* take() const { return take_cell(Kind::collective, name_, rank_, identity_); }

  static std::uint64_t coarse_ns() {
#if defined(CLOCK_MONOTONIC_COARSE)
    timespec time;
    clock_gettime(CLOCK_MONOTONIC_COARSE, &time);
    return static_cast<std::uint64_t>(time.tv_sec) * 1'000'000'000u + static_cast<std::uint64_t>(time.tv_nsec);
#else
    return now_ns();
#endif
  }

  void record_event(const What& what, const Started& started, bool failed, std::uint64_t duration) {
    const std::uint64_t now = now_ns();
    const double ratio = static_cast<double>(now - base_ns_) / static_cast<double>(ticks() - base_ticks_ + 1);
    record({.kind = Kind::collective,
            .status = static_cast<std::uint16_t>(failed),
            .name = name_,
            .detail = operations_[what.kind],
            .end_ns = now,
            .duration_ns = static_cast<std::uint64_t>(static_cast<double>(duration) * ratio),
            .reference = started.number,
            .value = what.bytes,
            .trace = what.payload});
  }

  std::uint32_t name_ = 0, rank_ = 0;
  std::uint64_t identity_ = 0;
  bool has_messages_ = false;
  std::array<std::uint32_t, kinds> operations_{};
  Cell* collectives_ = nullptr;
  Cell* messages_ = nullptr;
  std::uint64_t base_ns_ = 0, base_ticks_ = 0, last_event_ = 0;
};

}  // namespace monarch::telemetry
