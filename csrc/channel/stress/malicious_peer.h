// A peer that writes its rings itself, and wrongly. It lives several times in a round, each time with another token:
// it sends some frames that are right, then one of its forgeries, to every rank, and waits until all are told that it
// is gone. How frames are laid out is written here once more, from frame.h: the code under test has no part in it.
#pragma once

#include <cstdint>
#include <string>

#include "channel/stress/message.h"
#include "channel/stress/schedule.h"
#include "channel/stress/fixture.h"

namespace monarch::stress {

enum class Forgery {
  magic, version, inline_too_long, endless, longer_than_written, far_ahead, backwards, part_of_a_line,
  block_in_header, block_beyond, block_over_the_end, block_without_end, reader_before_arena, no_table,
  table_short, table_long, table_wraps, prefix_too_long, block_table_wraps, block_table_beyond,
  no_ring, crooked_ring, ring_beyond, noise, changing_table, count
};
inline constexpr int forgeries = static_cast<int>(Forgery::count);

const char* name_of(Forgery forgery);
// Nothing certain is to be expected of it, but that nobody comes to harm. Only between processes: ThreadSanitizer would
// tell what the forger does.
bool is_wild(Forgery forgery);
std::string words_about(Forgery forgery);  // what its victims are told

Forgery forgery_of(const Round& round, int life);
std::uint64_t honest_frames(const Round& round, int life);
Name forged_name(const Round& round, int life, std::uint64_t number);

void play_forger(World& world, const Round& round);

}  // namespace monarch::stress
