// A peer that writes invalid data to its rings. It has several incarnations in a round, each with another token. Each
// one sends some valid frames and then one attack to every rank, and waits until all ranks have reported its end. The
// layout of frames is written here a second time, independent of the code under test.
#pragma once

#include <cstdint>
#include <string>

#include "channel/stress/message.h"
#include "channel/stress/schedule.h"
#include "channel/stress/fixture.h"

namespace monarch::stress {

enum class Attack {
  magic, version, inline_too_long, endless, longer_than_written, far_ahead, backwards, part_of_a_line,
  block_in_header, block_beyond, block_over_the_end, block_without_end, reader_before_arena, no_table,
  table_short, table_long, table_wraps, prefix_too_long, block_table_wraps, block_table_beyond,
  no_ring, misaligned_ring, ring_beyond, random_bits, changing_table, count
};
inline constexpr int attacks = static_cast<int>(Attack::count);

const char* name_of(Attack attack);
// Whether the effect of an attack is random: then no rank may crash, and nothing else is expected. Only between
// processes, because ThreadSanitizer would report the peer's own writes.
bool is_random(Attack attack);
std::string expected_report(Attack attack);  // the text that its victims report

Attack attack_of(const Round& round, int incarnation);
std::uint64_t valid_frames(const Round& round, int incarnation);
MessageId malicious_id(const Round& round, int incarnation, std::uint64_t number);

void run_malicious_peer(Fixture& fixture, const Round& round);

}  // namespace monarch::stress
