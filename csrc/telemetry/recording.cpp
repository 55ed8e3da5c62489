#include "telemetry/recording.h"

#include <pthread.h>
#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <cstring>
#include <mutex>
#include <string>
#include <unordered_map>

#include "platform/system.h"

namespace monarch::telemetry {

std::atomic<Slot*> slot{nullptr};

namespace {

// Never destroyed: threads may record while the process ends.
struct Names {
  std::mutex lock;
  std::unordered_map<std::string, std::uint32_t> offsets;
};

Names& names() {
  static Names* const all = new Names;
  return *all;
}

std::mutex& cell_lock() {
  static std::mutex* const lock = new std::mutex;
  return *lock;
}

std::atomic<std::uint32_t> threads{0};
std::atomic<Slot*> paused{nullptr};

// The slot belongs to the parent. Locks may be held by a thread that the child does not have.
void in_forked_child() {
  for (auto* const each : {&slot, &paused}) {
    if (Slot* const parents = each->exchange(nullptr)) munmap(parents, slot_bytes);
  }
  new (&names()) Names;
  new (&cell_lock()) std::mutex;
}

void watch_forks() {
  static const int once = pthread_atfork(nullptr, nullptr, in_forked_child);
  (void)once;
}

}  // namespace

std::uint32_t thread_number() {
  thread_local const std::uint32_t number = threads.fetch_add(1, std::memory_order_relaxed);
  return number;
}

std::uint32_t intern(std::string_view name) {
  Slot* const here = slot.load(std::memory_order_acquire);
  if (here == nullptr) return 0;
  Names& all = names();
  const std::lock_guard guard(all.lock);
  const std::string text(name.substr(0, 512));
  const auto found = all.offsets.find(text);
  if (found != all.offsets.end()) return found->second;
  const std::uint32_t at = here->names_used.load(std::memory_order_relaxed);
  const std::size_t needed = sizeof(std::uint16_t) + text.size();
  if (at + needed > names_bytes) return 0;
  const auto length = static_cast<std::uint16_t>(text.size());
  std::memcpy(here->names + at, &length, sizeof length);
  std::memcpy(here->names + at + sizeof length, text.data(), text.size());
  here->names_used.store(at + static_cast<std::uint32_t>(needed), std::memory_order_release);
  all.offsets.emplace(text, at);
  return at;
}

std::uint32_t record_text(std::string_view text) {
  Slot* const here = slot.load(std::memory_order_acquire);
  if (here == nullptr) return 0;
  const std::uint64_t number = here->texts_written.fetch_add(1, std::memory_order_relaxed);
  Text& entry = here->texts[number & (text_count - 1)];
  entry.stamp.store(0, std::memory_order_relaxed);
  std::atomic_thread_fence(std::memory_order_release);
  entry.length = static_cast<std::uint16_t>(std::min(text.size(), text_bytes));
  std::memcpy(entry.bytes, text.data(), entry.length);
  entry.stamp.store(number + 1, std::memory_order_release);
  return text_flag | static_cast<std::uint32_t>(number & (text_flag - 1));
}

Cell* take_cell(Kind kind, std::uint32_t name, std::uint32_t rank, std::uint64_t trace) {
  Slot* const here = slot.load(std::memory_order_acquire);
  if (here == nullptr) return nullptr;
  const std::lock_guard guard(cell_lock());
  for (Cell& cell : here->cells) {
    if (cell.kind != 0) continue;
    update(cell, [&](Cell& fields) {
      fields.kind = static_cast<std::uint16_t>(kind);
      fields.state = 0;
      fields.name = name;
      fields.detail = 0;
      fields.since_ns = now_ns();
      fields.count = fields.reference = fields.value = 0;
      fields.trace = trace;
      fields.waiting = 0;
      fields.rank = rank;
    });
    return &cell;
  }
  return nullptr;
}

void release_cell(Cell* cell) {
  if (!owns(cell)) return;
  const std::lock_guard guard(cell_lock());
  update(*cell, [](Cell& fields) { fields.kind = fields.state = 0; });
}

void use_slot(int descriptor, std::size_t index, std::string_view label) {
  watch_forks();
  void* const start = mmap(nullptr, slot_bytes, PROT_READ | PROT_WRITE, MAP_SHARED, descriptor,
                           static_cast<off_t>(header_bytes + index * slot_bytes));
  if (start == MAP_FAILED) throw system_failure("mapping the memory of the recording");
  auto* const mine = static_cast<Slot*>(start);
  {
    Names& all = names();
    const std::lock_guard guard(all.lock);
    all.offsets.clear();
    if (mine->names_used.load() == 0) mine->names_used.store(2);  // offset 0 is the empty name
  }
  mine->pid = static_cast<std::uint32_t>(getpid());
  mine->started_ns = now_ns();
  const std::size_t length = std::min(label.size(), sizeof(mine->label) - 1);
  std::memcpy(mine->label, label.data(), length);
  mine->label[length] = '\0';
  mine->state.store(2, std::memory_order_release);
  slot.store(mine, std::memory_order_release);  // a former slot stays mapped: other threads may be writing to it
}

void set_identity(std::uint64_t identity) {
  if (Slot* const here = slot.load(std::memory_order_acquire)) here->identity = identity;
}

void pause_recording() {
  if (Slot* const here = slot.exchange(nullptr)) paused.store(here);
}

void resume_recording() {
  if (Slot* const here = paused.exchange(nullptr)) slot.store(here, std::memory_order_release);
}

}  // namespace monarch::telemetry
