#include "channel/stress/message.h"

#include <algorithm>
#include <cstring>

#include "shm/copy.h"

namespace monarch::stress {

namespace {

constexpr std::uint64_t pool_bytes = 8 << 20;
std::vector<char> pool;

Slice piece(Random& random, std::uint64_t bytes) {
  return {pool.data() + random() % (pool_bytes - bytes), bytes};
}

// `bytes` in up to `most` pieces, some of which may be empty.
std::vector<Slice> pieces(Random& random, std::uint64_t bytes, int most) {
  std::vector<Slice> slices;
  for (int left = below(random, most + 1); left > 0; --left) {
    const std::uint64_t part = left == 1 ? bytes : random() % (bytes + 1);
    slices.push_back(piece(random, part));
    bytes -= part;
  }
  return slices;
}

void fill(Message& message, Random& random, const Round& round) {
  Payload& payload = message.payload;
  const bool large = round.large && message.id.caller != reply_caller && message.id.from != round.malicious_rank();
  const int kind = below(random, 1000);
  const int size = round.weight == Weight::light && kind < 900 ? 0 : round.weight == Weight::heavy && kind < 500 ? 900 : kind;
  const auto up_to = [&](std::uint64_t bytes) { return random() % bytes; };
  payload.prefix = piece(random, up_to(120));
  if (size < 600) {
    payload.body = pieces(random, up_to(round.weight == Weight::light ? 100 : 1000), 3);
    if (round.weight == Weight::light) return;
    for (int n = below(random, 4); n > 0; --n) payload.buffers.push_back(piece(random, up_to(300)));
  } else if (size < 740) {
    payload.body = pieces(random, up_to(most_inline), 2);
    payload.buffers.push_back(piece(random, up_to(4000)));
  } else if (size < 840) {  // about as much as goes through a ring
    const std::uint64_t whole = most_inline - 64 + up_to(129);
    payload.body = {piece(random, whole - sizeof(std::uint64_t) - payload.prefix.bytes)};
  } else if (size < 955) {
    payload.body = pieces(random, up_to(50'000), 3);
    payload.buffers = pieces(random, most_inline + up_to(180'000), 4);
  } else if (size < 980 && !round.tiny) {
    payload.buffers = {piece(random, 200'000 + up_to(800'000))};
  } else if (size < 985 && large) {
    payload.buffers = {piece(random, past_cache + up_to(1 << 20)), piece(random, 100)};
  } else {
    message.many_buffers = true;
    for (int n = 300 + below(random, 2000); n > 0; --n) payload.buffers.push_back(piece(random, up_to(4)));
  }
}

void choose_receivers(Message& message, Random& random, const Round& round) {
  const bool many = below(random, 4) == 0;
  const int one = below(random, round.ranks - 1);
  int index = 0;
  for (int r = 0; r < round.ranks; ++r) {
    if (r == message.id.from) continue;
    if (many ? below(random, 2) == 0 : index == one) message.to.push_back(r);
    ++index;
  }
  const bool no_replies = round.end == End::dropped && (message.id.from == round.culprit || (!message.to.empty() && message.to[0] == round.culprit));
  message.wants_reply = message.to.size() == 1 && below(random, round.weight == Weight::light ? 300 : 6) == 0 && !no_replies;
}

std::string text_of(const Message& message) {
  const MessageId& id = message.id;
  return "message " + std::to_string(id.number) + " of rank " + std::to_string(id.from) + ", caller " + std::to_string(id.caller) +
         (id.requester < 0 ? "" : " to caller " + std::to_string(id.requester_caller) + " of rank " + std::to_string(id.requester)) + ": ";
}

}  // namespace

void fill_pool() {
  Random random(1);
  pool.resize(pool_bytes);
  for (std::uint64_t i = 0; i < pool_bytes; i += sizeof(std::uint64_t)) {
    const std::uint64_t word = random();
    std::memcpy(pool.data() + i, &word, sizeof word);
  }
}

std::uint64_t Message::bytes() const {
  std::uint64_t bytes = 8 + 8 * payload.buffers.size() + payload.prefix.bytes;
  for (const Slice& slice : payload.body) bytes += slice.bytes;
  for (const Slice& slice : payload.buffers) bytes = (bytes + 63) / 64 * 64 + slice.bytes;
  return bytes;
}

Message make_message(const Round& round, const MessageId& id) {
  std::seed_seq seeds{static_cast<std::uint32_t>(round.seed), static_cast<std::uint32_t>(round.seed >> 32),
                      static_cast<std::uint32_t>(id.from), static_cast<std::uint32_t>(id.caller),
                      static_cast<std::uint32_t>(id.number), static_cast<std::uint32_t>(id.requester + 1),
                      static_cast<std::uint32_t>(id.requester_caller + 1)};
  Random random(seeds);
  Message message;
  message.id = id;
  message.header.kind = static_cast<std::uint8_t>(below(random, 256));
  message.header.epoch = static_cast<std::uint32_t>(random());
  message.header.target = static_cast<std::uint64_t>(id.caller) | static_cast<std::uint64_t>(id.requester_caller & 0xff) << 8;
  message.header.ref = id.number;
  if (id.caller != reply_caller) choose_receivers(message, random, round);
  fill(message, random, round);
  return message;
}

MessageId id_in(const FrameHeader& header, int from, int me) {
  MessageId id;
  id.from = from;
  id.caller = static_cast<int>(header.target & 0xff);
  id.number = header.ref;
  if (id.caller == reply_caller) id.requester = me, id.requester_caller = static_cast<int>(header.target >> 8);
  return id;
}

std::string mismatch_in(const Message& message, const Event& event, int me) {
  const FrameHeader &is = event.header, &want = message.header;
  const auto wrong = [&](const std::string& what) { return text_of(message) + what; };
  if (is.kind != want.kind || is.target != want.target || is.ref != want.ref) return wrong("another kind, target or reference");
  if (is.rank != static_cast<std::uint32_t>(me) || is.epoch != want.epoch) return wrong("another rank or epoch");
  if (is.bytes != message.bytes()) return wrong(std::to_string(is.bytes) + " bytes, not " + std::to_string(message.bytes()));
  if ((event.block != nullptr) != (message.bytes() > most_inline)) return wrong("through the ring, not in a block, or the reverse");
  return payload_mismatch(message, event);
}

std::string payload_mismatch(const Message& message, const Event& event) {
  const Payload& payload = message.payload;
  const auto wrong = [&](const std::string& what) { return text_of(message) + what; };
  const char* at = event.payload();
  const char* start = at;
  const auto same = [&](const Slice& slice) {
    const bool same = std::memcmp(at, slice.data, slice.bytes) == 0;
    at += slice.bytes;
    return same;
  };
  if (event.header.prefix != payload.prefix.bytes || event.header.buffers != payload.buffers.size()) return wrong("another table");
  std::uint64_t body = 0;
  for (const Slice& slice : payload.body) body += slice.bytes;
  at += 8 + 8 * payload.buffers.size();
  if (!same(payload.prefix)) return wrong("another prefix");
  if (event.length(0) != body) return wrong("another length of the body");
  for (const Slice& slice : payload.body) {
    if (!same(slice)) return wrong("another body");
  }
  for (std::size_t i = 0; i < payload.buffers.size(); ++i) {
    at = start + (at - start + 63) / 64 * 64;
    if (event.length(i + 1) != payload.buffers[i].bytes) return wrong("another length of buffer " + std::to_string(i));
    if (!same(payload.buffers[i])) return wrong("another buffer " + std::to_string(i));
  }
  return "";
}

}  // namespace monarch::stress
