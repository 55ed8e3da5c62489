// One frame: sender, receivers and contents. It can be made again from its id and the seed, so that the expected values
// do not come from the code under test. No links, no waiting.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "channel/mailbox.h"
#include "channel/stress/schedule.h"

namespace monarch::stress {

inline constexpr int reply_caller = max_callers - 1;  // the caller number of frames that are replies

struct MessageId {
  int from = 0, caller = 0;
  std::uint64_t number = 0;
  int requester = -1, requester_caller = -1;  // of a reply: the rank and the caller that sent the request
};

struct Message {
  MessageId id;
  FrameHeader header;         // kind, target, ref; its epoch is every receiver's
  std::vector<int> to;        // of a message that is no reply
  bool wants_reply = false;
  bool many_buffers = false;
  Payload payload;            // in the pool

  std::uint64_t bytes() const;  // of the payload as it travels
};

// Random bytes for the contents of messages, made once, before the ranks.
void fill_pool();

Message make_message(const Round& round, const MessageId& id);
// The id that a frame claims to have.
MessageId id_in(const FrameHeader& header, int from, int me);
// "" if the frame is this message without errors.
std::string mismatch_in(const Message& message, const Event& event, int me);
// The same of its payload alone.
std::string payload_mismatch(const Message& message, const Event& event);

}  // namespace monarch::stress
