#include "shm/p2p_channel.h"

#include <algorithm>
#include <cstring>
#include <new>
#include <utility>

#include "shm/copy.h"

namespace monarch {

namespace {

constexpr std::uint64_t line = 64;
constexpr std::uint64_t portion = 128 << 10;  // bytes after which the other side is notified

// Copies between a ring and memory; `position` is where in the ring, which has `size` bytes.
void into_ring(char* ring, std::uint64_t size, std::uint64_t position, const char* from, std::uint64_t bytes) {
  const std::uint64_t offset = position & (size - 1), first = std::min(bytes, size - offset);
  if (first != 0) std::memcpy(ring + offset, from, first);
  if (bytes > first) std::memcpy(ring, from + first, bytes - first);
}

// The reverse: copies out of a ring. The bytes are a part of a message of `whole` bytes.
void out_of_ring(char* to, const char* ring, std::uint64_t size, std::uint64_t position, std::uint64_t bytes, std::uint64_t whole) {
  const std::uint64_t offset = position & (size - 1), first = std::min(bytes, size - offset);
  put(to, ring + offset, first, whole);
  put(to + first, ring, bytes - first, whole);
}

}  // namespace

P2pChannels::P2pChannels(Host& host, int rank, Layout layout)
    : host_(host), rank_(rank), size_(static_cast<int>(layout.arenas.size())), layout_(std::move(layout)), out_(size_), in_(size_) {}

void P2pChannels::submit(std::shared_ptr<Operation> operation) {
  if (operation->header.collective == Collective::send) {
    out_[operation->header.root].queue.push_back(std::move(operation));
    ++sending_;
  } else {
    posted_.push_back(std::move(operation));
    check_unexpected_ = true;
  }
}

bool P2pChannels::advance(const std::function<void(Operation&)>& finish) {
  bool moved = false;
  for (int r = 0; sending_ != 0 && r < size_; ++r) {
    if (!out_[r].queue.empty()) moved |= push(r, finish);
  }
  if (check_unexpected_) moved |= match_unexpected(finish);
  for (int r = 0; r < size_; ++r) {
    if (in_[r].message || !posted_.empty()) moved |= pull(r, finish);
  }
  return moved;
}

std::vector<std::shared_ptr<Operation>> P2pChannels::pending() const {
  std::vector<std::shared_ptr<Operation>> all(posted_.begin(), posted_.end());
  for (const Out& out : out_) all.insert(all.end(), out.queue.begin(), out.queue.end());
  for (const In& in : in_) {
    if (in.message && in.message->to) all.push_back(in.message->to);
  }
  return all;
}

void P2pChannels::drop(const Operation& operation) {
  const auto same = [&](const std::shared_ptr<Operation>& other) { return other.get() == &operation; };
  posted_.remove_if(same);
  for (Out& out : out_) sending_ -= std::erase_if(out.queue, same);
  for (In& in : in_) {
    if (in.message && in.message->to.get() == &operation) in.message.reset();
  }
}

std::vector<std::uint64_t> P2pChannels::rings() const {
  std::vector<std::uint64_t> all;
  for (int r = 0; r < size_; ++r) {
    const std::uint64_t offset = layout_.send_rings[rank_][r].offset.load(std::memory_order_relaxed);
    if (offset != 0) all.push_back(offset);
  }
  return all;
}

// Sending ----------------------------------------------------------------------------------------------------------

// Allocate the ring; false if the arena is full.
bool P2pChannels::open(int to) {
  SendRing& channel = layout_.send_rings[rank_][to];
  std::uint64_t offset = 0;
  std::size_t size = 2 * largest_p2p_ring;
  while (offset == 0 && size > smallest_p2p_ring) {
    size /= 2;
    offset = host_.allocate(size);
  }
  if (offset == 0) return false;
  channel.size = size;
  channel.offset.store(offset, std::memory_order_release);
  return true;
}

bool P2pChannels::push(int to, const std::function<void(Operation&)>& finish) {
  SendRing& channel = layout_.send_rings[rank_][to];
  Out& out = out_[to];
  bool moved = false;
  while (!out.queue.empty()) {
    const std::shared_ptr<Operation> op = out.queue.front();
    if (channel.offset.load(std::memory_order_relaxed) == 0 && !open(to)) {
      op->failure = Failure{Failure::full, rank_, "has no room in MONARCH_SHM_ARENA_BYTES for messages to rank " + std::to_string(to)};
      out.queue.pop_front();
      --sending_;
      finish(*op);
      return true;
    }
    char* ring = layout_.arenas[rank_] + channel.offset.load(std::memory_order_relaxed);
    const std::uint64_t bytes = op->header.bytes, total = line + whole_lines(bytes);
    const std::uint64_t unread = out.written - layout_.read_counts[to][rank_].read.load(std::memory_order_acquire);
    const std::uint64_t part = std::min({channel.size - unread, total - out.sent, portion});
    if (part == 0) break;
    std::uint64_t position = out.written, left = part;
    if (out.sent == 0) {
      const Envelope envelope{bytes, op->tag, op->header.dtype};
      into_ring(ring, channel.size, position, reinterpret_cast<const char*>(&envelope), sizeof envelope);
      out.sent += line, position += line, left -= line;
    }
    const std::uint64_t done = out.sent - line;
    if (done < bytes) into_ring(ring, channel.size, position, op->in[0].data + done, std::min(left, bytes - done));
    out.sent += left;
    out.written += part;
    channel.written.store(out.written, std::memory_order_release);
    layout_.ring(to);
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

bool P2pChannels::is_expected(int from) const {
  return std::any_of(posted_.begin(), posted_.end(), [from](const auto& op) { return op->header.root < 0 || op->header.root == from; });
}

P2pChannels::PostedReceives::iterator P2pChannels::match(int from, const Envelope& envelope) {
  return std::find_if(posted_.begin(), posted_.end(), [&](const auto& op) {
    return (op->header.root < 0 || op->header.root == from) && op->tag == envelope.tag;
  });
}

void P2pChannels::fail_mismatch(Operation& op, int from, const Envelope& sent) {
  const auto what = [](Dtype dtype, std::uint64_t bytes) {
    return std::to_string(bytes / size_of(dtype)) + (dtype == Dtype::bytes ? " bytes" : std::string(" elements of ") + name_of(dtype));
  };
  op.failure = Failure{Failure::mismatch, -1,
                       "rank " + std::to_string(from) + " sent " + what(sent.dtype, sent.bytes) + " with tag " + std::to_string(sent.tag) +
                           ", and the receive is of " + what(op.header.dtype, op.header.bytes)};
}

// Match receives with unexpected messages.
bool P2pChannels::match_unexpected(const std::function<void(Operation&)>& finish) {
  check_unexpected_ = false;
  bool moved = false;
  for (int r = 0; r < size_; ++r) {
    auto& unexpected = in_[r].unexpected;
    for (auto message = unexpected.begin(); message != unexpected.end();) {
      const auto posted = match(r, message->envelope);
      if (posted == posted_.end()) {
        ++message;
        continue;
      }
      const std::shared_ptr<Operation> op = *posted;
      posted_.erase(posted);
      const Envelope& envelope = message->envelope;
      op->source = r;
      if (envelope.bytes != op->header.bytes || envelope.dtype != op->header.dtype) {
        fail_mismatch(*op, r, envelope);
      } else if (envelope.bytes != 0) {
        std::memcpy(op->out[0].data, message->buffered.get(), envelope.bytes);
      }
      message = unexpected.erase(message);
      moved = true;
      finish(*op);
    }
  }
  return moved;
}

// Choose the memory for a message; false if it stays in the ring.
bool P2pChannels::begin(int from, const Envelope& envelope) {
  Message message{envelope, 0, nullptr, nullptr};
  const auto posted = match(from, envelope);
  if (posted != posted_.end() && envelope.bytes == (*posted)->header.bytes && envelope.dtype == (*posted)->header.dtype) {
    message.to = *posted;
    posted_.erase(posted);
  } else {
    if (envelope.bytes != 0) {
      message.buffered.reset(new (std::nothrow) char[envelope.bytes]);
      if (!message.buffered) return false;
    }
  }
  in_[from].message = std::move(message);
  return true;
}

void P2pChannels::deliver(int from, const std::function<void(Operation&)>& finish) {
  Message message = std::move(*in_[from].message);
  in_[from].message.reset();
  if (message.to) {
    message.to->source = from;
    finish(*message.to);
  } else {
    in_[from].unexpected.push_back(std::move(message));
    check_unexpected_ = true;
    match_unexpected(finish);
  }
}

bool P2pChannels::pull(int from, const std::function<void(Operation&)>& finish) {
  const SendRing& channel = layout_.send_rings[from][rank_];
  In& in = in_[from];
  bool moved = false;
  for (;;) {
    const std::uint64_t ready = channel.written.load(std::memory_order_acquire) - in.read;
    if (ready == 0 || (!in.message && !is_expected(from))) break;
    const char* ring = layout_.arenas[from] + channel.offset.load(std::memory_order_acquire);
    std::uint64_t taken = 0;
    if (!in.message) {
      Envelope envelope;
      out_of_ring(reinterpret_cast<char*>(&envelope), ring, channel.size, in.read, sizeof envelope, sizeof envelope);
      if (!begin(from, envelope)) break;
      taken = line;
    }
    Message& message = *in.message;
    const std::uint64_t bytes = message.envelope.bytes, total = whole_lines(bytes);
    const std::uint64_t part = std::min({ready - taken, total - message.received, portion});
    if (message.received < bytes) {
      char* to = (message.to ? message.to->out[0].data : message.buffered.get()) + message.received;
      out_of_ring(to, ring, channel.size, in.read + taken, std::min(part, bytes - message.received), bytes);
    }
    message.received += part;
    in.read += taken + part;
    layout_.read_counts[rank_][from].read.store(in.read, std::memory_order_release);
    layout_.ring(from);
    moved = true;
    if (message.received == total) deliver(from, finish);
  }
  return moved;
}

}  // namespace monarch
