// Recording of what a process does, in shared memory that another process owns, so that it survives a kill.
//
// A recording area has one slot per process. A slot has a ring of events, a cell for each activity that goes on now,
// and the names that both refer to. Only the slot's process writes to it. Readers need no lock: they check an event's
// stamp before and after they copy it. monarch_backend/_telemetry/reader.py is the reader.
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <ctime>
#include <string_view>

namespace monarch::telemetry {

inline constexpr std::uint32_t layout_version = 3;  // raise it also for a new meaning of a field
inline constexpr std::size_t event_count = 8192;  // a power of two
inline constexpr std::size_t cell_count = 64;
inline constexpr std::size_t header_bytes = 4096;
inline constexpr std::size_t names_bytes = 56 << 10;
inline constexpr std::size_t text_count = 4096;  // a power of two
inline constexpr std::size_t text_bytes = 118;

// What an event or an activity is about. _telemetry/kinds.py has the names.
enum class Kind : std::uint16_t {
  none = 0,
  process = 1,
  actor = 2,
  sent = 3,
  message = 4,
  collective = 5,
  transfer = 6,
  wait = 7,
  span = 8,
  metric = 9,
  mesh = 10,
  controller = 11,
  log = 12,
  step = 13,
  connection = 14,
  host = 15,
  queue = 16,
  failure = 17,
  link = 18,  // the span of another program in which a message was sent
};

// Routes of collectives. _telemetry/payloads.py has all of them, with their names.
enum class Route : std::uint16_t { shm = 1 };

// Dtype and route of a collective as one number. Dtype 0: no data. The others are those of shm/reduce.h, plus 1.
constexpr std::uint32_t payload(std::uint16_t dtype, Route route) {
  return dtype | static_cast<std::uint32_t>(route) << 16;
}

struct Event {
  std::atomic<std::uint64_t> stamp;  // its number, from 1; 0 while it is written
  std::uint64_t end_ns;              // of CLOCK_MONOTONIC, as all times
  std::uint64_t duration_ns;
  std::uint16_t kind;
  std::uint16_t status;
  std::uint32_t thread;
  std::uint32_t name;    // offset of a name in the slot
  std::uint32_t detail;  // likewise
  std::uint64_t reference;  // number of the call, collective or transfer
  std::uint64_t value;      // bytes, or the bits of a double
  std::uint64_t trace;      // identity of the trace; of a collective: its payload
};
static_assert(sizeof(Event) == 64);

struct Cell {
  std::atomic<std::uint32_t> version;  // odd while it is written
  std::uint16_t kind;                  // none: the cell is free
  std::uint16_t state;                 // with ASYNC_FLAG of _telemetry/kinds.py where a coroutine handles the message
  std::uint32_t name;
  std::uint32_t detail;
  std::uint64_t since_ns;
  std::uint64_t count;      // activities that have ended; of an actor, in its first cell
  std::uint64_t reference;
  std::uint64_t value;
  std::uint32_t waiting;    // messages in the queue; of a collective: its payload
  std::uint32_t rank;
  std::uint64_t trace;      // of a collective: its group
};
static_assert(sizeof(Cell) == 64);

// A text that is used once, such as attributes of a span. Newer texts overwrite it; names stay.
struct Text {
  std::atomic<std::uint64_t> stamp;  // its number, from 1; 0 while it is written
  std::uint16_t length;
  char bytes[text_bytes];
};
static_assert(sizeof(Text) == 128);
inline constexpr std::uint32_t text_flag = 1u << 31;  // in place of a name's offset: the other bits are of a text's number

struct alignas(64) Slot {
  std::atomic<std::uint32_t> state;  // 0 free, 1 reserved, 2 in use, 3 its process has ended
  std::uint32_t pid;
  std::uint64_t started_ns;
  std::atomic<std::uint64_t> events_written;
  std::atomic<std::uint32_t> names_used;
  std::int32_t exit_code;
  std::uint64_t identity;  // by which the events of other processes refer to this one
  char label[192];
  std::uint64_t ended_ns;  // when the owner has noted the end; 0 if it has not. Written by recording_area.py
  std::uint32_t restarts;  // processes that had the same rank of the same mesh before. Written by recording_area.py
  char reserved[header_bytes - 244];
  Cell cells[cell_count];
  char names[names_bytes];  // each a 16-bit length and UTF-8
  Event events[event_count];
  std::atomic<std::uint64_t> texts_written;
  char texts_reserved[header_bytes - 8];
  Text texts[text_count];
};
static_assert(offsetof(Slot, cells) == header_bytes);
static_assert(sizeof(Slot) % header_bytes == 0);  // each slot is mapped alone
inline constexpr std::size_t slot_bytes = sizeof(Slot);

// The slot of this process; null while nothing is recorded.
extern std::atomic<Slot*> slot;

inline std::uint64_t now_ns() {
  timespec time;
  clock_gettime(CLOCK_MONOTONIC, &time);
  return static_cast<std::uint64_t>(time.tv_sec) * 1'000'000'000u + static_cast<std::uint64_t>(time.tv_nsec);
}

std::uint32_t thread_number();

struct Entry {
  Kind kind;
  std::uint16_t status = 0;
  std::uint32_t name = 0;
  std::uint32_t detail = 0;
  std::uint64_t end_ns = 0;
  std::uint64_t duration_ns = 0;
  std::uint64_t reference = 0;
  std::uint64_t value = 0;
  std::uint64_t trace = 0;
};

// Append an event; no effect while nothing is recorded. Safe on every thread.
inline void record(const Entry& entry) {
  Slot* const here = slot.load(std::memory_order_acquire);
  if (here == nullptr) return;
  const std::uint64_t number = here->events_written.fetch_add(1, std::memory_order_relaxed);
  Event& event = here->events[number & (event_count - 1)];
  event.stamp.store(0, std::memory_order_relaxed);
  std::atomic_thread_fence(std::memory_order_release);
  event.end_ns = entry.end_ns;
  event.duration_ns = entry.duration_ns;
  event.kind = static_cast<std::uint16_t>(entry.kind);
  event.status = entry.status;
  event.thread = thread_number();
  event.name = entry.name;
  event.detail = entry.detail;
  event.reference = entry.reference;
  event.value = entry.value;
  event.trace = entry.trace;
  event.stamp.store(number + 1, std::memory_order_release);
}

// The offset of this name in the slot, 0 if there is no room left or nothing is recorded. Takes a lock: keep the result.
std::uint32_t intern(std::string_view name);

// Append a text, cut to text_bytes. Returns its number, to be used as that of a name; 0 while nothing is recorded.
std::uint32_t record_text(std::string_view text);

// Take a free cell. Returns null if there is none or nothing is recorded.
Cell* take_cell(Kind kind, std::uint32_t name, std::uint32_t rank, std::uint64_t trace = 0);

// Whether this process still has the cell: a fork has none of its parent's.
inline bool owns(const Cell* cell) {
  const Slot* const here = slot.load(std::memory_order_acquire);
  return here != nullptr && cell >= here->cells && cell < here->cells + cell_count;
}

// Change a cell. One thread at a time changes it.
template <class Change>
void update(Cell& cell, Change&& change) {
  const std::uint32_t version = cell.version.load(std::memory_order_relaxed);
  cell.version.store(version + 1, std::memory_order_relaxed);
  std::atomic_thread_fence(std::memory_order_release);
  change(cell);
  cell.version.store(version + 2, std::memory_order_release);
}

// Free a cell, if this process still has it.
void release_cell(Cell* cell);

// Record into this slot of the area from now on. Throws std::system_error.
void use_slot(int descriptor, std::size_t index, std::string_view label);

// Say how events of other processes refer to this one.
void set_identity(std::uint64_t identity);

// Record nothing until resume_recording: for measurements. Cells that are released meanwhile stay taken.
void pause_recording();
void resume_recording();

}  // namespace monarch::telemetry
