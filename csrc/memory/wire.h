// Wire format of registered memory between hosts: layouts only.
//
// All messages have a fixed size, except the ranges of a request and the data, whose lengths precede them. The reader
// checks magic and lengths before it uses other fields. Little-endian, as all supported machines.
//
//   connecting:  caller Hello; owner HelloReply, Proof; caller Proof; owner Welcome.
//   then any number of requests, replied to in order:
//   caller Request, its ranges, and for a write their bytes; owner Reply, and for a read that is not refused, bytes and a Tail.
//   or, where NICs move the bytes between staging memory of both: caller Request with stage_read or stage_write, its ranges;
//   owner Reply when they are copied. No bytes follow either.
#pragma once

#include <bit>
#include <cstdint>

namespace monarch::wire {

static_assert(std::endian::native == std::endian::little);

inline constexpr std::uint16_t version = 1;
inline constexpr std::uint32_t hello_magic = 0x486d6e6d, hello_reply_magic = 0x416d6e6d, welcome_magic = 0x576d6e6d;
inline constexpr std::uint32_t request_magic = 0x526d6e6d, reply_magic = 0x506d6e6d, tail_magic = 0x546d6e6d;

// Of a request. Small enough for the requests that a client sends ahead to fit into any socket's buffers: else each
// side could wait for the other one to read.
inline constexpr std::uint32_t most_ranges = 256;
inline constexpr std::uint64_t most_bytes = 64 << 20;

// Access of a request, in addition to Access of registration_table.h: its ranges are copied to staging memory of the
// owner, one after the other, or from there. `operand` is the staging memory's key, `expected` the slot, and above
// `slot_bits` the sequence number.
inline constexpr std::uint32_t stage_read = 4, stage_write = 5;
inline constexpr int slot_bits = 8;

struct Token {
  unsigned char bytes[16];  // of a process; the text form has 32 hexadecimal digits
};

struct Hello {
  std::uint32_t magic;
  std::uint16_t version;
  std::uint16_t zero;
  Token sender, receiver;
  unsigned char nonce[32];
};
static_assert(sizeof(Hello) == 72);

enum class Denial : std::uint16_t { none, version, other_process };

struct HelloReply {
  std::uint32_t magic;
  std::uint16_t version;
  Denial denial;
  Token sender;
  unsigned char nonce[32];
};
static_assert(sizeof(HelloReply) == 56);

struct Proof {
  unsigned char bytes[32];
};
static_assert(sizeof(Proof) == 32);

struct Welcome {
  std::uint32_t magic;
  std::uint32_t full;  // 1: no place for one more connection
};
static_assert(sizeof(Welcome) == 8);

struct Request {
  std::uint32_t magic;
  std::uint32_t access;  // of registration_table.h, or to stage
  std::uint32_t slot;
  std::uint32_t ranges;
  std::uint64_t epoch, key;
  std::uint64_t number;  // comes back in the reply
  std::uint64_t bytes;   // of all ranges together
  std::uint64_t operand, expected;
};
static_assert(sizeof(Request) == 64);

struct Range {
  std::uint64_t offset, bytes;
};
static_assert(sizeof(Range) == 16);

struct Reply {
  std::uint32_t magic;
  std::uint32_t refusal;
  std::uint64_t number;
  std::uint64_t bytes;  // that follow
  std::uint64_t value;  // what an atomic operation has found
};
static_assert(sizeof(Reply) == 32);

// A registration may be dropped while its bytes are being sent: zeros replace the rest, and this reports it.
struct Tail {
  std::uint32_t magic;
  std::uint32_t refusal;
  std::uint64_t number;
};
static_assert(sizeof(Tail) == 16);

}  // namespace monarch::wire
