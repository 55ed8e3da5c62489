#include "shm/p2p_channel.h"

#include <algorithm>
#include <cstring>
#include <new>
#include <utility>

#include "shm/copy.h"

namespace monarch {

namespace {

constexpr std::uint64_t line = 64;
constexpr std::uint64_t portion = 128 << 10;  // bytes after which the other side hears of them

// Copies between a ring and memory; `position` is where in the ring, which has `size` bytes.
void into_ring(char* ring, std::uint64_t size, std::uint64_t position, const char* from, std::uint64_t bytes) {
  const std::uint64_t at = position & (size - 1), first = std::min(bytes, size - at);
  if (first != 0) std::memcpy(ring + at, from, first);
  if (bytes > first) std::memcpy(ring, from + first, bytes - first);
}

// The same the other way; it is a part of something that has `whole` bytes.
void out_of_ring(char* to, const char* ring, std::uint64_t size, std::uint64_t position, std::uint64_t bytes, std::uint64_t whole) {
  const std::uint64_t at = position & (size - 1), first = std::min(bytes, size - at);
  put(to, ring + at, first, whole);
  put(to + first, ring, bytes - first, whole);
}

}  // namespace

Lanes::Lanes(Host& host, int rank, Places places)
    : host_(host), rank_(rank), size_(static_cast<int>(places.arenas.size())), places_(std::move(places)), out_(size_), in_(size_) {}

void Lanes::submit(std::shared_ptr<Operation> operation) {
  if (operation->header.collective == Collective::send) {
    out_[operation->header.root].queue.push_back(std::move(operation));
    ++sending_;
  } else {
    posted_.push_back(std::move(operation));
    look_early_ = true;
  }
}

bool Lanes::advance(const std::function<void(Operation&)>& finish) {
  bool moved = false;
  for (int r = 0; sending_ != 0 && r < size_; ++r) {
    if (!out_[r].queue.empty()) moved |= push(r, finish);
  }
  if (look_early_) moved |= serve_early(finish);
  for (int r = 0; r < size_; ++r) {
    if (in_[r].letter || !posted_.empty()) moved |= pull(r, finish);
  }
  return moved;
}

std::vector<std::shared_ptr<Operation>> Lanes::pending() const {
  std::vector<std::shared_ptr<Operation>> all(posted_.begin(), posted_.end());
  for (const Out& out : out_) all.insert(all.end(), out.queue.begin(), out.queue.end());
  for (const In& in : in_) {
    if (in.letter && in.letter->to) all.push_back(in.letter->to);
  }
  return all;
}

void Lanes::drop(const Operation& operation) {
  const auto same = [&](const std::shared_ptr<Operation>& other) { return other.get() == &operation; };
  posted_.remove_if(same);
  for (Out& out : out_) sending_ -= std::erase_if(out.queue, same);
  for (In& in : in_) {
    if (in.letter && in.letter->to.get() == &operation) in.letter.reset();
  }
}

std::vector<std::uint64_t> Lanes::rings() const {
  std::vector<std::uint64_t> all;
  for (int r = 0; r < size_; ++r) {
    const std::uint64_t at = places_.lanes[rank_][r].at.load(std::memory_order_relaxed);
    if (at != 0) all.push_back(at);
  }
  return all;
}

// Sending ----------------------------------------------------------------------------------------------------------

// Makes the ring; false where the arena has no room.
bool Lanes::open(int to) {
  Lane& lane = places_.lanes[rank_][to];
  std::uint64_t at = 0;
  std::size_t size = 2 * largest_lane;
  while (at == 0 && size > smallest_lane) {
    size /= 2;
    at = host_.allocate(size);
  }
  if (at == 0) return false;
  lane.size = size;
  lane.at.store(at, std::memory_order_release);
  return true;
}

bool Lanes::push(int to, const std::function<void(Operation&)>& finish) {
  Lane& lane = places_.lanes[rank_][to];
  Out& out = out_[to];
  bool moved = false;
  while (!out.queue.empty()) {
    const std::shared_ptr<Operation> op = out.queue.front();
    if (lane.at.load(std::memory_order_relaxed) == 0 && !open(to)) {
      op->failure = Failure{Failure::full, rank_, "has no room in MONARCH_SHM_ARENA_BYTES for messages to rank " + std::to_string(to)};
      out.queue.pop_front();
      --sending_;
      finish(*op);
      return true;
    }
    char* ring = places_.arenas[rank_] + lane.at.load(std::memory_order_relaxed);
    const std::uint64_t bytes = op->header.bytes, total = line + whole_lines(bytes);
    const std::uint64_t unread = out.written - places_.receipts[to][rank_].read.load(std::memory_order_acquire);
    const std::uint64_t part = std::min({lane.size - unread, total - out.sent, portion});
    if (part == 0) break;
    std::uint64_t position = out.written, left = part;
    if (out.sent == 0) {
      const Envelope envelope{bytes, op->tag, op->header.dtype};
      into_ring(ring, lane.size, position, reinterpret_cast<const char*>(&envelope), sizeof envelope);
      out.sent += line, position += line, left -= line;
    }
    const std::uint64_t done = out.sent - line;
    if (done < bytes) into_ring(ring, lane.size, position, op->in[0].data + done, std::min(left, bytes - done));
    out.sent += left;
    out.written += part;
    lane.written.store(out.written, std::memory_order_release);
    places_.ring(to);
    moved = true;
    if (out.sent < total) continue;
    out.sent = 0;
    out.queue.pop_front();
    --sending_;
    finish(*op);
  }
  return moved;
}

// Receiving --------------------------------------------------------------------------------------------------------

bool Lanes::wanted(int from) const {
  return std::any_of(posted_.begin(), posted_.end(), [from](const auto& op) { return op->header.root < 0 || op->header.root == from; });
}

Lanes::Posts::iterator Lanes::match(int from, const Envelope& envelope) {
  return std::find_if(posted_.begin(), posted_.end(), [&](const auto& op) {
    return (op->header.root < 0 || op->header.root == from) && op->tag == envelope.tag;
  });
}

void Lanes::refuse(Operation& op, int from, const Envelope& sent) {
  const auto what = [](Dtype dtype, std::uint64_t bytes) {
    return std::to_string(bytes / size_of(dtype)) + (dtype == Dtype::bytes ? " bytes" : std::string(" elements of ") + name_of(dtype));
  };
  op.failure = Failure{Failure::mismatch, -1,
                       "rank " + std::to_string(from) + " sent " + what(sent.dtype, sent.bytes) + " with tag " + std::to_string(sent.tag) +
                           ", and the receive is of " + what(op.header.dtype, op.header.bytes)};
}

// Messages that came before they were asked for.
bool Lanes::serve_early(const std::function<void(Operation&)>& finish) {
  look_early_ = false;
  bool moved = false;
  for (int r = 0; r < size_; ++r) {
    auto& early = in_[r].early;
    for (auto letter = early.begin(); letter != early.end();) {
      const auto post = match(r, letter->envelope);
      if (post == posted_.end()) {
        ++letter;
        continue;
      }
      const std::shared_ptr<Operation> op = *post;
      posted_.erase(post);
      const Envelope& envelope = letter->envelope;
      op->source = r;
      if (envelope.bytes != op->header.bytes || envelope.dtype != op->header.dtype) {
        refuse(*op, r, envelope);
      } else if (envelope.bytes != 0) {
        std::memcpy(op->out[0].data, letter->kept.get(), envelope.bytes);
      }
      letter = early.erase(letter);
      moved = true;
      finish(*op);
    }
  }
  return moved;
}

// Decides where a message goes; false where it stays in the ring.
bool Lanes::begin(int from, const Envelope& envelope) {
  Letter letter{envelope, 0, nullptr, nullptr};
  const auto post = match(from, envelope);
  if (post != posted_.end() && envelope.bytes == (*post)->header.bytes && envelope.dtype == (*post)->header.dtype) {
    letter.to = *post;
    posted_.erase(post);
  } else {
    if (envelope.bytes != 0) {
      letter.kept.reset(new (std::nothrow) char[envelope.bytes]);
      if (!letter.kept) return false;
    }
  }
  in_[from].letter = std::move(letter);
  return true;
}

void Lanes::deliver(int from, const std::function<void(Operation&)>& finish) {
  Letter letter = std::move(*in_[from].letter);
  in_[from].letter.reset();
  if (letter.to) {
    letter.to->source = from;
    finish(*letter.to);
  } else {
    in_[from].early.push_back(std::move(letter));
    look_early_ = true;
    serve_early(finish);
  }
}

bool Lanes::pull(int from, const std::function<void(Operation&)>& finish) {
  const Lane& lane = places_.lanes[from][rank_];
  In& in = in_[from];
  bool moved = false;
  for (;;) {
    const std::uint64_t ready = lane.written.load(std::memory_order_acquire) - in.read;
    if (ready == 0 || (!in.letter && !wanted(from))) break;
    const char* ring = places_.arenas[from] + lane.at.load(std::memory_order_acquire);
    std::uint64_t taken = 0;
    if (!in.letter) {
      Envelope envelope;
      out_of_ring(reinterpret_cast<char*>(&envelope), ring, lane.size, in.read, sizeof envelope, sizeof envelope);
      if (!begin(from, envelope)) break;
      taken = line;
    }
    Letter& letter = *in.letter;
    const std::uint64_t bytes = letter.envelope.bytes, total = whole_lines(bytes);
    const std::uint64_t part = std::min({ready - taken, total - letter.arrived, portion});
    if (letter.arrived < bytes) {
      char* to = (letter.to ? letter.to->out[0].data : letter.kept.get()) + letter.arrived;
      out_of_ring(to, ring, lane.size, in.read + taken, std::min(part, bytes - letter.arrived), bytes);
    }
    letter.arrived += part;
    in.read += taken + part;
    places_.receipts[rank_][from].read.store(in.read, std::memory_order_release);
    places_.ring(from);
    moved = true;
    if (letter.arrived == total) deliver(from, finish);
  }
  return moved;
}

}  // namespace monarch
