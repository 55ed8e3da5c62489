// One frame: whose it is, for whom, and what is in it. Anybody can make it again from its name and the seed, so what is
// expected takes nothing from the code under test. No links, no waiting.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "channel/mailbox.h"
#include "channel/stress/schedule.h"

namespace monarch::stress {

inline constexpr int answers = max_lanes - 1;  // the lane of frames that answer others

struct Name {
  int from = 0, lane = 0;
  std::uint64_t number = 0;
  int asker = -1, asker_lane = -1;  // of an answer: whose letter of this number it answers
};

struct Letter {
  Name name;
  FrameHeader header;         // kind, target, ref; its epoch is every receiver's
  std::vector<int> to;        // of a lane's
  bool wants_answer = false;
  bool many_buffers = false;
  Payload payload;            // in the pool

  std::uint64_t bytes() const;  // of the payload as it travels
};

// Random bytes that letters are made of; made once, before the ranks.
void fill_pool();

Letter letter_of(const Round& round, const Name& name);
// Whose a frame says that it is.
Name name_in(const FrameHeader& header, int from, int me);
// "" if the frame is this letter, and is right.
std::string wrong_with(const Letter& letter, const Event& event, int me);
// The same of its payload alone.
std::string wrong_in(const Letter& letter, const Event& event);

}  // namespace monarch::stress
