#include "channel/mailbox.h"

#include <algorithm>
#include <array>
#include <cstring>

#include <unistd.h>

#include "shm/copy.h"

namespace monarch {

namespace {

constexpr std::size_t batch = 256;                   // events of one look
// With more processes than processors each yield switches processes: sleep almost at once.
constexpr int oversubscribed_yields = 2;
constexpr std::int64_t tick_ns = 1'000'000;             // ns
constexpr double connect_wait_s = 0.02;                // seconds within which a process answers a call; it takes a tenth of a millisecond
constexpr std::uint32_t sole_reader = 1u << 31;      // in FrameHeader::reader

// What a reader does with a block, one byte for each reader, before the payload, the first reader's last.
enum ReaderState : std::uint8_t { block_unread, block_released, block_retained };
std::atomic<std::uint8_t>& state_of(char* payload, std::uint32_t reader) {
  return *reinterpret_cast<std::atomic<std::uint8_t>*>(payload - 1 - (reader & ~sole_reader));
}
static_assert(sizeof(std::atomic<std::uint8_t>) == 1);

std::uint64_t sum(const std::vector<Slice>& slices) {
  std::uint64_t bytes = 0;
  for (const Slice& slice : slices) bytes += slice.bytes;
  return bytes;
}

std::uint64_t payload_bytes(const Payload& payload, std::uint64_t body) {
  std::uint64_t bytes = sizeof(std::uint64_t) * (1 + payload.buffers.size()) + payload.prefix.bytes + body;
  for (const Slice& buffer : payload.buffers) bytes = whole_lines(bytes) + buffer.bytes;
  return bytes;
}

// Write the payload at `to`, which has enough space.
void write_payload(const Payload& payload, std::uint64_t body, std::uint64_t whole, char* to) {
  char* at = to;
  const auto add = [&](const void* from, std::uint64_t bytes) {
    put(at, static_cast<const char*>(from), bytes, whole);
    at += bytes;
  };
  add(&body, sizeof body);
  for (const Slice& buffer : payload.buffers) add(&buffer.bytes, sizeof buffer.bytes);
  add(payload.prefix.data, payload.prefix.bytes);
  for (const Slice& part : payload.body) add(part.data, part.bytes);
  for (const Slice& buffer : payload.buffers) {
    at = to + whole_lines(static_cast<std::uint64_t>(at - to));
    add(buffer.data, buffer.bytes);
  }
}

std::uint64_t table_bytes(const FrameHeader& header) { return sizeof(std::uint64_t) * (1 + std::uint64_t{header.buffers}); }

// Whether the lengths in the table match the payload.
bool table_is_right(const FrameHeader& header, const Event& event) {
  const std::uint64_t table = table_bytes(header);
  std::uint64_t end = table + header.prefix;
  for (std::size_t i = 0; i <= header.buffers; ++i) {
    const std::uint64_t bytes = event.length(i);
    if (i > 0) end = whole_lines(end);
    if (end > header.bytes || bytes > header.bytes - end) return false;
    end += bytes;
  }
  return end == header.bytes;
}

std::uint64_t new_ring(Host& host) {
  const std::uint64_t at = host.allocate(sizeof(Ring));
  if (at == 0) throw std::system_error(ENOMEM, std::generic_category(), "no room for a ring in shared memory");
  auto* ring = reinterpret_cast<Ring*>(host.arena().mapping().at(at));
  ring->written = ring->read = 0;
  ring->full = 0;
  return at;
}

// True if the block lies inside the arena, with the byte before it by which its reader releases it.
bool is_inside(const Mapping& arena, const FrameHeader& header) {
  const std::uint64_t before = 1 + std::uint64_t{header.reader & ~sole_reader};
  return header.block >= page + before && header.block <= arena.size() && header.bytes <= arena.size() - header.block;
}

std::size_t frame_bytes(const FrameHeader& header) { return line + (header.block == 0 ? whole_lines(header.bytes) : 0); }

}  // namespace

Block::~Block() {
  if (process_ != getpid()) return;
  state_of(data(), reader_).store(block_released, std::memory_order_release);
  // In this order: if the process is killed in between, fill_block must not subtract the bytes twice.
  if (retained_) peer_->mapping->header().retained.fetch_sub(bytes_, std::memory_order_relaxed);
}

char* Block::data() const { return peer_->mapping->at(at_); }

bool Block::retain() {
  if ((reader_ & sole_reader) == 0) return false;
  auto& retained = peer_->mapping->header().retained;
  if (retained.fetch_add(bytes_, std::memory_order_relaxed) + bytes_ > peer_->mapping->size() / 2) {
    retained.fetch_sub(bytes_, std::memory_order_relaxed);
    return false;
  }
  state_of(data(), reader_).store(block_retained, std::memory_order_release);
  return retained_ = true;
}

Mailbox::Mailbox(std::shared_ptr<Host> host, bool oversubscribed, std::uint64_t share) : host_(std::move(host)), oversubscribed_(oversubscribed), share_(share) {
  // Rings are allocated and released while this Mailbox may be ending; `connected` is not called any more then.
  host_->set_hooks({[host = host_.get()] { return new_ring(*host); }, [host = host_.get()](std::uint64_t ring) { host->release(ring); },
                 [this](std::shared_ptr<Peer> peer) { connected(std::move(peer)); }, [this](const std::string& token) { refused(token); }});
  start_tick(tick_ns);
}

Mailbox::~Mailbox() { host_->set_hooks({}); }

void Mailbox::connected(std::shared_ptr<Peer> peer) {
  const std::lock_guard lock(mutex_);
  Link& link = links_.emplace_back();
  link.peer = peer;
  link.unread_blocks = std::make_shared<std::atomic<std::uint64_t>>(0);
  link.out = reinterpret_cast<Ring*>(host_->arena().mapping().at(peer->ring_sent));
  const std::uint64_t theirs = peer->ring_received, size = peer->mapping->size();
  if (theirs >= page && theirs % line == 0 && theirs <= size && sizeof(Ring) <= size - theirs) {
    link.in = reinterpret_cast<Ring*>(peer->mapping->at(theirs));
  }
  Event event;
  event.kind = Event::connected;
  event.link = static_cast<std::uint32_t>(links_.size() - 1);
  alive_.push_back(event.link);
  event.text = peer->token;
  event.pid = peer->pid;
  new_events_.push_back(std::move(event));
  host_->doorbell().wake();
}

void Mailbox::refused(const std::string& token) {
  const std::lock_guard lock(mutex_);
  Event event;
  event.kind = Event::refused;
  event.text = token;
  new_events_.push_back(std::move(event));
  host_->doorbell().wake();
}

int Mailbox::connect(const std::string& token) {
  bool waiting = false;
  const std::shared_ptr<Peer> peer = host_->connect(token, connect_wait_s, &waiting);
  if (!peer) return waiting ? no_answer : -1;
  const std::lock_guard lock(mutex_);
  for (const std::uint32_t i : alive_) {
    if (links_[i].peer == peer) return static_cast<int>(i);
  }
  return -1;
}

void Mailbox::drop(std::uint32_t number) {
  const std::lock_guard lock(mutex_);
  Link& link = links_.at(number);
  link.closed = true;
  discard(link);
}

std::uint64_t Mailbox::unread(std::uint32_t number) {
  const std::lock_guard lock(mutex_);
  const Link& link = links_.at(number);
  return link.closed ? 0 : link.written - link.out->read.load(std::memory_order_relaxed);
}

bool Mailbox::write(Link& link, const char* frame, std::size_t bytes) {
  Ring& ring = *link.out;
  if (link.written - ring.read.load(std::memory_order_acquire) + bytes > ring_bytes) {
    ring.full.store(1, std::memory_order_seq_cst);
    if (link.written - ring.read.load(std::memory_order_seq_cst) + bytes > ring_bytes) return false;
    ring.full.store(0, std::memory_order_relaxed);
  }
  ring.copy_in(link.written, frame, bytes);
  link.written += bytes;
  ring.written.store(link.written, std::memory_order_release);
  link.peer->mapping->header().doorbell.ring();
  return true;
}

void Mailbox::flush(Link& link) {
  while (!link.backlog.empty() && write(link, link.backlog.front().data(), link.backlog.front().size())) {
    backlog_bytes_.fetch_sub(link.backlog.front().size(), std::memory_order_relaxed);
    link.backlog.pop_front();
  }
}

void Mailbox::discard(Link& link) {
  for (const std::vector<char>& frame : link.backlog) {
    backlog_bytes_.fetch_sub(frame.size(), std::memory_order_relaxed);
    FrameHeader header;
    std::memcpy(&header, frame.data(), line);
    if (header.block != 0) state_of(host_->arena().mapping().at(header.block), header.reader).store(block_released);
  }
  link.backlog.clear();
}

std::uint64_t Mailbox::fill_block(const FrameHeader& header, const Payload& payload, std::vector<Reader> readers) {
  const std::size_t state_bytes = (readers.size() + page - 1) / page * page;
  const std::uint64_t start = host_->allocate(state_bytes + header.bytes);
  if (start == 0) return 0;
  char* data = host_->arena().mapping().at(start + state_bytes);
  std::memset(data - readers.size(), block_unread, readers.size());
  write_payload(payload, sum(payload.body), header.bytes, data);
  for (const Reader& reader : readers) reader.unread_blocks->fetch_add(header.bytes, std::memory_order_relaxed);
  auto& retained = host_->arena().mapping().header().retained;
  host_->release_when_unused({start}, [data, readers = std::move(readers), bytes = header.bytes, &retained]() mutable {
    bool unused = true;
    for (std::size_t i = 0; i < readers.size(); ++i) {
      const std::uint8_t state = state_of(data, static_cast<std::uint32_t>(i)).load(std::memory_order_acquire);
      if (state != block_unread && readers[i].unread_blocks) {
        readers[i].unread_blocks->fetch_sub(bytes, std::memory_order_relaxed);
        readers[i].unread_blocks.reset();
      }
      if (state == block_released) continue;
      if (readers[i].peer == nullptr || !readers[i].peer->ended.load(std::memory_order_acquire)) {
        unused = false;
      } else if (state == block_retained) {
        retained.fetch_sub(bytes, std::memory_order_relaxed);  // its only reader, which retained it, has ended
      }
    }
    return unused;
  });
  return start + state_bytes;
}

// False if one of them has not read its share.
bool Mailbox::readers_of(const std::vector<Receiver>& to, std::uint64_t bytes, std::vector<Reader>& readers) {
  const std::lock_guard lock(mutex_);
  readers.clear();
  for (const Receiver& receiver : to) {
    const Link& link = links_.at(receiver.link);
    const std::uint64_t unread = link.unread_blocks->load(std::memory_order_relaxed);
    if (unread > 0 && unread + bytes > share_ && sendable(link)) return false;
    readers.push_back({link.peer, link.unread_blocks});
  }
  return true;
}

bool Mailbox::send(FrameHeader header, const Payload& payload, const std::vector<Receiver>& to) {
  const std::uint64_t body = sum(payload.body);
  header.buffers = static_cast<std::uint16_t>(payload.buffers.size());
  header.prefix = static_cast<std::uint32_t>(payload.prefix.bytes);
  header.bytes = payload_bytes(payload, body);
  if (header.bytes > most_inline) {
    std::vector<Reader> readers;
    if (!readers_of(to, header.bytes, readers)) {
      host_->release_unused();
      if (!readers_of(to, header.bytes, readers)) return false;
    }
    header.block = fill_block(header, payload, std::move(readers));
    if (header.block == 0) return false;
  }
  thread_local std::vector<char> frame;
  frame.resize(frame_bytes(header));
  if (header.block == 0) write_payload(payload, body, header.bytes, frame.data() + line);
  const std::lock_guard lock(mutex_);
  for (std::size_t i = 0; i < to.size(); ++i) {
    Link& link = links_.at(to[i].link);
    header.seq = to[i].seq, header.rank = to[i].rank, header.epoch = to[i].epoch;
    header.reader = static_cast<std::uint32_t>(i) | (to.size() == 1 ? sole_reader : 0);
    std::memcpy(frame.data(), &header, line);
    if (!sendable(link)) {
      if (header.block != 0) state_of(host_->arena().mapping().at(header.block), header.reader).store(block_released);
      continue;
    }
    if (!link.backlog.empty()) flush(link);
    if (!link.backlog.empty() || !write(link, frame.data(), frame.size())) {
      backlog_bytes_.fetch_add(frame.size(), std::memory_order_relaxed);
      link.backlog.push_back(frame);
    }
  }
  return true;
}

void Mailbox::disconnected(std::uint32_t number, Link& link, std::vector<Event>& events, std::string text, bool clean) {
  Event event;
  event.kind = Event::disconnected;
  event.link = number;
  event.text = std::move(text);
  event.clean = clean;
  event.pid = link.peer->pid;
  events.push_back(std::move(event));
  link.reported = link.closed = true;
  discard(link);
  closed_peers_.push_back(std::move(link.peer));  // what is still held of its arena keeps it mapped
}

void Mailbox::read(std::uint32_t number, Link& link, std::vector<Event>& events) {
  if (link.in == nullptr) return disconnected(number, link, events, "offered no ring of frames", false);
  const std::uint64_t written = link.in->written.load(std::memory_order_acquire);
  if (written == link.read) return;
  while (link.read != written && events.size() < batch) {
    Event event;
    event.link = number;
    FrameHeader& header = event.header;
    link.in->copy_out(link.read, &header, line);
    const std::uint64_t there = written - link.read;
    const bool known = line <= there && there <= ring_bytes && header.magic == frame_magic && header.version == frame_version;
    const bool whole = known && (header.block != 0 || (header.bytes <= most_inline && frame_bytes(header) <= there));
    if (!whole || (header.block != 0 && !is_inside(*link.peer->mapping, header))) {
      return disconnected(number, link, events, "sent bytes that are no frame of this version", false);
    }
    const std::uint64_t table = table_bytes(header);
    if (header.bytes >= table) {
      event.inlined = std::unique_ptr<char[]>(new char[header.block == 0 ? header.bytes : table]);
      if (header.block == 0) {
        link.in->copy_out(link.read + line, event.inlined.get(), header.bytes);
      } else {
        event.block = std::make_shared<Block>(link.peer, header.block, header.reader, header.bytes);
        std::memcpy(event.inlined.get(), event.block->data(), table);
      }
    }
    if (header.bytes < table || !table_is_right(header, event)) {
      return disconnected(number, link, events, "sent a frame whose lengths do not add up", false);
    }
    link.read += frame_bytes(header);
    events.push_back(std::move(event));
  }
  link.in->read.store(link.read, std::memory_order_seq_cst);
  if (link.in->full.load(std::memory_order_seq_cst) != 0) {
    link.in->full.store(0, std::memory_order_relaxed);
    link.peer->mapping->header().doorbell.ring();
  }
}

// True if all frames of the process with this token were read. If both sides connected at once, there are two links.
bool Mailbox::is_drained(const std::string& token) const {
  return std::none_of(alive_.begin(), alive_.end(), [&](const std::uint32_t i) {
    const Link& link = links_[i];
    return !link.reported && link.in != nullptr && link.peer->token == token && link.in->written.load(std::memory_order_acquire) != link.read;
  });
}

bool Mailbox::poll_links(std::vector<Event>& events) {
  std::vector<std::shared_ptr<Peer>> closed;
  {
    const std::lock_guard lock(mutex_);
    if (!new_events_.empty()) {
      std::move(new_events_.begin(), new_events_.end(), std::back_inserter(events));
      new_events_.clear();
    }
    // Check the ends before the rings: frames that a process wrote before its end are there by now, and are reported
    // first.
    std::vector<std::uint32_t> ends;
    for (const std::uint32_t i : alive_) {
      if (links_[i].peer->state.load(std::memory_order_acquire) != Peer::alive) ends.push_back(i);
    }
    for (std::size_t n = 0, first = first_; n < alive_.size(); ++n) {
      const std::size_t place = (first + n) % alive_.size();
      Link& link = links_[alive_[place]];
      if (!link.backlog.empty()) flush(link);
      if (events.size() >= batch) continue;
      read(alive_[place], link, events);
      first_ = events.size() < batch ? 0 : place + 1;
    }
    for (const std::uint32_t i : ends) {
      Link& link = links_[i];
      if (!link.reported && is_drained(link.peer->token)) disconnected(i, link, events, link.peer->exit_description, link.peer->state == Peer::left);
    }
    std::erase_if(alive_, [&](const std::uint32_t i) { return links_[i].reported; });
    closed.swap(closed_peers_);
  }
  for (const auto& peer : closed) host_->release_when_unused({peer->ring_sent}, [peer] { return peer->ended.load(std::memory_order_acquire); });
  return !events.empty();
}

std::vector<Event> Mailbox::receive(Clock::time_point deadline, bool standby, bool (*before_sleep)()) {
  std::vector<Event> events;
  FutexWaiter waiter(host_->doorbell(), oversubscribed_, oversubscribed_ ? oversubscribed_yields : FutexWaiter::default_yields);
  bool woken = false;
  const auto found = [&] {
    const std::uint32_t wakes = wakes_.load(std::memory_order_acquire);
    if (wakes != seen_wakes_ || (standby && turn_waiters_.load(std::memory_order_acquire) != 0)) {
      seen_wakes_ = wakes;
      woken = true;
    }
    return poll_links(events) || woken;
  };
  const auto last_look = [&] {
    if (before_sleep != nullptr && !before_sleep()) return woken = true;
    return found();
  };
  while (!found() && waiter.wait(last_look, deadline) && events.empty() && !woken && !waiter.interrupted()) {
  }
  return events;
}

void Mailbox::wake() {
  wakes_.fetch_add(1, std::memory_order_release);
  host_->doorbell().wake();
}

void Mailbox::start_tick(std::int64_t nanoseconds) {
  tick_.start(nanoseconds);
  ticking_ = true;
}

bool Mailbox::acquire_turn() {
  std::unique_lock lock(turn_mutex_);
  if (turn_taken_ && standby_has_turn_) {
    ++turn_waiters_;
    host_->doorbell().wake();
    turn_free_.wait(lock, [this] { return !turn_taken_ || !standby_has_turn_; });
    --turn_waiters_;
  }
  if (turn_taken_) return false;
  turn_taken_ = true;
  return true;
}

void Mailbox::release_turn() {
  const std::lock_guard lock(turn_mutex_);
  turn_taken_ = standby_has_turn_ = false;
  ++turns_;
  if (turn_waiters_ != 0) turn_free_.notify_all();
  if (!ticking_) start_tick(tick_ns);
}

bool Mailbox::acquire_turn_as_standby() {
  {
    const std::lock_guard lock(turn_mutex_);
    if (closed_) return false;
  }
  for (std::uint64_t seen = ~0ull;;) {
    tick_.wait();
    const std::lock_guard lock(turn_mutex_);
    ticking_ = false;
    if (closed_) return false;
    if (turn_taken_ || turn_waiters_ != 0) continue;  // the reader starts the next tick
    if (turns_ == seen) {
      turn_taken_ = standby_has_turn_ = true;
      return true;
    }
    seen = turns_;
    start_tick(tick_ns);
  }
}

void Mailbox::close() {
  {
    const std::lock_guard lock(turn_mutex_);
    closed_ = true;
    start_tick(1);
  }
  ++turn_waiters_;  // a reading standby thread releases the turn and does not return
  wake();
}

}  // namespace monarch
