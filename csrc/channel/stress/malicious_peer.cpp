#include "channel/stress/malicious_peer.h"

#include <algorithm>
#include <array>
#include <atomic>
#include <cstring>
#include <limits>
#include <memory>
#include <thread>
#include <vector>

#include <unistd.h>

#include "channel/ring.h"

namespace monarch::stress {

namespace {

constexpr std::size_t arena_bytes = 48 << 20;
constexpr std::uint64_t huge = std::numeric_limits<std::uint64_t>::max() - 100;
constexpr int random_frames = 40, changing_frames = 200;
constexpr std::uint32_t sole_reader = 1u << 31;

constexpr const char* names[attacks] = {
    "magic", "version", "an inline frame that is too long", "an endless frame", "a frame longer than written", "too much written",
    "a count that goes backwards", "a part of a line", "a block in the header", "a block beyond the arena", "a block over its end",
    "a block without end", "a reader before the arena", "a frame without its table", "a table that is short", "a table that is long",
    "a table that wraps", "a prefix that is too long", "a block's table that wraps", "a block's table beyond it", "no ring",
    "a misaligned ring", "a ring beyond the arena", "random bits", "a table that changes"};

std::uint64_t lines(std::uint64_t bytes) { return (bytes + 63) / 64 * 64; }

struct Draft {
  FrameHeader header;
  std::vector<char> payload;
};

Draft draft_of(const Payload& payload) {
  Draft draft;
  draft.header.buffers = static_cast<std::uint16_t>(payload.buffers.size());
  draft.header.prefix = static_cast<std::uint32_t>(payload.prefix.bytes);
  draft.header.reader = sole_reader;
  const auto add = [&](const void* data, std::uint64_t bytes) {
    const char* from = static_cast<const char*>(data);
    draft.payload.insert(draft.payload.end(), from, from + bytes);
  };
  std::uint64_t body = 0;
  for (const Slice& slice : payload.body) body += slice.bytes;
  add(&body, sizeof body);
  for (const Slice& slice : payload.buffers) add(&slice.bytes, sizeof slice.bytes);
  add(payload.prefix.data, payload.prefix.bytes);
  for (const Slice& slice : payload.body) add(slice.data, slice.bytes);
  for (const Slice& slice : payload.buffers) {
    draft.payload.resize(lines(draft.payload.size()));
    add(slice.data, slice.bytes);
  }
  draft.header.bytes = draft.payload.size();
  return draft;
}

// A prefix of 10 bytes, a body of 100, a buffer of 50.
Draft small_draft() {
  static const std::string text(100, 't');
  return draft_of({{text.data(), 10}, {{text.data(), 100}}, {{text.data(), 50}}});
}

void set_length(Draft& draft, std::size_t i, std::uint64_t bytes) { std::memcpy(draft.payload.data() + 8 * i, &bytes, sizeof bytes); }

// Lengths that add up to what the payload has, modulo 2^64.
void wrap(Draft& draft) {
  set_length(draft, 0, huge);
  set_length(draft, 1, draft.header.bytes - lines(8 * 2 + draft.header.prefix + huge));
}

class MaliciousPeer {
 public:
  MaliciousPeer(Fixture& fixture, const Round& round, int incarnation)
      : fixture_(fixture), round_(round), incarnation_(incarnation), attack_(attack_of(round, incarnation)), random_(round.seed * 100 + static_cast<std::uint64_t>(incarnation)) {
    const auto& token = fixture.malicious_tokens[static_cast<std::size_t>(incarnation)];
    host_ = std::make_unique<Host>(arena_bytes, std::string(token.data(), token.size()));
    host_->set_hooks({[this] { return ring_offset(); }, [this](std::uint64_t ring) { host_->release(ring); }, {}});
    for (int rank = 0; rank < round.ranks; ++rank) connect_to(rank);
  }

  void run() {
    for (Victim& victim : victims_) {
      for (std::uint64_t n = 0; n < valid_frames(round_, incarnation_); ++n) send_valid(victim, n);
      attack_victim(victim);
    }
    if (attack_ == Attack::changing_table) change_tables();
    if (is_random(attack_)) {  // there may be nothing to expose
      victims_.clear();
      host_.reset();
    }
    while (detected() < round_.ranks) usleep(100);
  }

 private:
  struct Victim {
    int rank;
    std::shared_ptr<Peer> peer;
    Ring* ring;
    std::uint64_t written = 0;
  };

  int detected() const { return fixture_.detected[static_cast<std::size_t>(incarnation_)]; }
  char* at(std::uint64_t offset) { return host_->arena().mapping().at(offset); }

  std::uint64_t ring_offset() {
    if (attack_ == Attack::no_ring) return 0;
    if (attack_ == Attack::ring_beyond) return arena_bytes - page;
    const std::uint64_t ring = host_->allocate(sizeof(Ring));
    return attack_ == Attack::misaligned_ring ? ring + 8 : ring;
  }

  void connect_to(int rank) {
    const auto& token = fixture_.tokens[static_cast<std::size_t>(rank)];
    std::shared_ptr<Peer> peer;
    while ((peer = host_->connect(std::string(token.data(), token.size()))) == nullptr) usleep(100);
    victims_.push_back({rank, peer, reinterpret_cast<Ring*>(at(peer->ring_sent))});
  }

  void put(Victim& victim, const void* bytes, std::size_t n) {
    victim.ring->copy_in(victim.written, bytes, n);
    victim.written += n;
  }

  void publish(Victim& victim) {
    victim.ring->written.store(victim.written, std::memory_order_release);
    victim.peer->mapping->header().doorbell.ring();
  }

  void await_read(const Victim& victim) {
    while (victim.ring->read.load(std::memory_order_acquire) != victim.written) usleep(100);
  }

  void send_inline(Victim& victim, const Draft& draft) {
    put(victim, &draft.header, sizeof draft.header);
    put(victim, draft.payload.data(), draft.payload.size());
    victim.written = lines(victim.written);
    publish(victim);
  }

  void send_header(Victim& victim, const FrameHeader& header) {
    put(victim, &header, sizeof header);
    publish(victim);
  }

  // With a page before it for its reader.
  std::uint64_t place(const Draft& draft) {
    const std::uint64_t block = host_->allocate(page + draft.payload.size());
    if (block == 0) die("no space in the arena of the malicious peer");
    std::memset(at(block), 0, page);
    std::memcpy(at(block + page), draft.payload.data(), draft.payload.size());
    return block + page;
  }

  void send_in_block(Victim& victim, Draft draft) {
    draft.header.block = place(draft);
    send_header(victim, draft.header);
  }

  void send_valid(Victim& victim, std::uint64_t number) {
    const Message message = make_message(round_, malicious_id(round_, incarnation_, number));
    Draft draft = draft_of(message.payload);
    draft.header.kind = message.header.kind;
    draft.header.target = message.header.target;
    draft.header.ref = message.header.ref;
    draft.header.epoch = message.header.epoch;
    draft.header.rank = static_cast<std::uint32_t>(victim.rank);
    draft.payload.size() <= most_inline ? send_inline(victim, draft) : send_in_block(victim, draft);
  }

  void attack_victim(Victim& victim) {
    Draft draft = small_draft();
    FrameHeader& header = draft.header;
    switch (attack_) {
      case Attack::magic: header.magic ^= 1; break;
      case Attack::version: ++header.version; break;
      case Attack::inline_too_long:
        draft.payload.resize(most_inline + 1);
        header.bytes = draft.payload.size();
        set_length(draft, 1, most_inline + 1 - 128);
        break;
      case Attack::endless: header.bytes = huge; break;
      case Attack::longer_than_written: header.bytes = 1000; break;
      case Attack::far_ahead:
        await_read(victim);
        victim.written += ring_bytes;
        break;
      case Attack::backwards:
        await_read(victim);
        victim.written -= 64;
        return publish(victim);
      case Attack::part_of_a_line:
        header.block = place(draft);
        put(victim, &header, sizeof header);
        victim.written -= 32;
        return publish(victim);
      case Attack::block_in_header: header.block = 64; break;
      case Attack::block_beyond: header.block = arena_bytes + page; break;
      case Attack::block_over_the_end: header.block = arena_bytes - page, header.bytes = page + 1; break;
      case Attack::block_without_end: header.block = page + 64, header.bytes = huge; break;
      case Attack::reader_before_arena: header.reader = 1u << 29; return send_in_block(victim, draft);
      case Attack::no_table: header.buffers = most_buffers; break;
      case Attack::table_short: set_length(draft, 1, 49); break;
      case Attack::table_long: set_length(draft, 1, 51); break;
      case Attack::table_wraps: wrap(draft); break;
      case Attack::prefix_too_long: header.prefix = std::numeric_limits<std::uint32_t>::max(); break;
      case Attack::block_table_wraps: wrap(draft); return send_in_block(victim, draft);
      case Attack::block_table_beyond: header.buffers = most_buffers, header.block = arena_bytes - 256; break;
      case Attack::no_ring:
      case Attack::misaligned_ring:
      case Attack::ring_beyond: return victim.peer->mapping->header().doorbell.ring();
      case Attack::random_bits: return send_random_bits(victim);
      case Attack::changing_table: return send_changing(victim);
      case Attack::count: break;
    }
    send_inline(victim, draft);
  }

  void send_random_bits(Victim& victim) {
    for (int i = 0; i < random_frames; ++i) {
      Draft draft = small_draft();
      const bool block = below(random_, 2) == 0;
      for (int flips = below(random_, 4); flips > 0; --flips) {
        const int bit = below(random_, 8 * 80);  // of the header, or of the table
        char* byte = bit < 8 * 64 ? reinterpret_cast<char*>(&draft.header) + bit / 8 : draft.payload.data() + bit / 8 - 64;
        *byte = static_cast<char>(*byte ^ 1 << bit % 8);
      }
      if (block) draft.header.block ^= place(draft);
      block ? send_header(victim, draft.header) : send_inline(victim, draft);
    }
  }

  // 64 KiB at the end of the arena, whose table alternates between two valid divisions.
  static constexpr std::uint64_t changing_bytes = 64 << 10, changing_at = arena_bytes - changing_bytes;
  static constexpr std::array<std::uint64_t, 2> small_body{48, changing_bytes - 64}, large_body{changing_bytes - 80, 64};

  void send_changing(Victim& victim) {
    std::memcpy(at(changing_at), small_body.data(), sizeof small_body);
    FrameHeader header = small_draft().header;
    header.prefix = 0;
    header.bytes = changing_bytes;
    header.block = changing_at;
    for (int i = 0; i < changing_frames; ++i) send_header(victim, header);
  }

  void change_tables() {
    const auto is_through = [](const Victim& victim) { return victim.ring->read.load(std::memory_order_acquire) == victim.written; };
    while (std::count_if(victims_.begin(), victims_.end(), is_through) + detected() < round_.ranks) {
      for (int i = 0; i < 1000; ++i) {
        for (const auto& table : {small_body, large_body}) {
          auto* words = reinterpret_cast<std::atomic<std::uint64_t>*>(at(changing_at));
          words[0].store(table[0], std::memory_order_relaxed);
          words[1].store(table[1], std::memory_order_relaxed);
        }
      }
    }
  }

  Fixture& fixture_;
  const Round& round_;
  int incarnation_;
  Attack attack_;
  Random random_;
  std::unique_ptr<Host> host_;
  std::vector<Victim> victims_;
};

}  // namespace

const char* name_of(Attack attack) { return names[static_cast<std::size_t>(attack)]; }

bool is_random(Attack attack) { return attack == Attack::random_bits || attack == Attack::changing_table; }

std::string expected_report(Attack attack) {
  if (attack >= Attack::no_ring) return "offered no ring of frames";
  return attack >= Attack::no_table ? "sent a frame whose lengths do not add up" : "sent bytes that are no frame of this version";
}

Attack attack_of(const Round& round, int incarnation) {
  const int kinds = round.threads ? attacks - 2 : attacks;  // the last two are wild
  const int rounds = static_cast<int>(round.seed / (round.threads ? 4 : 5) % static_cast<std::uint64_t>(kinds));
  return static_cast<Attack>((rounds * round.incarnations + incarnation) % kinds);
}

std::uint64_t valid_frames(const Round& round, int incarnation) {
  const Attack attack = attack_of(round, incarnation);
  return attack >= Attack::no_ring ? 0 : (round.seed + static_cast<std::uint64_t>(incarnation)) % 5;
}

MessageId malicious_id(const Round& round, int incarnation, std::uint64_t number) {
  return {round.malicious_rank(), 0, static_cast<std::uint64_t>(incarnation) * 100 + number};
}

void run_malicious_peer(Fixture& fixture, const Round& round) {
  fixture.await(0, round.ranks);  // until their tokens are published
  for (int incarnation = 0; incarnation < round.incarnations; ++incarnation) {
    fixture.note(round.malicious_rank(), 0, std::string("attack: ") + name_of(attack_of(round, incarnation)));
    MaliciousPeer(fixture, round, incarnation).run();
  }
}

}  // namespace monarch::stress
