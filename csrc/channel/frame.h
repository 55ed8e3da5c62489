// Layout of a frame: a header of one cache line, then the payload, in the ring or in a block of the sender's arena.
//
// The payload is a table of lengths (of the body, then of each buffer), the prefix, the body, and the buffers, each at
// a multiple of 64 bytes. Prefix and body have no meaning here. The reader checks all fields before it uses them.
#pragma once

#include <cstddef>
#include <cstdint>

namespace monarch {

inline constexpr std::uint32_t frame_magic = 0x48434e4d;  // "MNCH"
inline constexpr std::uint8_t frame_version = 1;
inline constexpr std::size_t line = 64;
inline constexpr std::size_t most_inline = 16 << 10;      // bytes of a payload that go through the ring itself
inline constexpr std::size_t most_buffers = 0xffff;

struct FrameHeader {
  std::uint32_t magic = frame_magic;
  std::uint8_t version = frame_version;
  std::uint8_t kind = 0;
  std::uint16_t buffers = 0;
  std::uint32_t epoch = 0;   // of the receiver, as the sender knows it
  std::uint32_t rank = 0;    // of the receiver, in the mesh that was sent to
  std::uint64_t target = 0;  // the actor or the port
  std::uint64_t ref = 0;     // the call
  std::uint64_t seq = 0;     // of this sender's messages to this receiver
  std::uint32_t prefix = 0;  // bytes
  std::uint32_t reader = 0;  // which of the block's readers the receiver is
  std::uint64_t bytes = 0;   // of the payload
  std::uint64_t block = 0;   // of the sender's arena; 0: the payload follows
};
static_assert(sizeof(FrameHeader) == line);

inline std::uint64_t whole_lines(std::uint64_t bytes) { return (bytes + line - 1) / line * line; }

}  // namespace monarch
