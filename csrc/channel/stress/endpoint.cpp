#include "channel/stress/endpoint.h"

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <iterator>

#include <signal.h>
#include <unistd.h>

#include "channel/stress/malicious_peer.h"
#include "shm/copy.h"

namespace monarch::stress {

namespace {

enum : int { tokens_published, all_connected, all_finished, all_released, all_checked };

constexpr int max_awaited_replies = 6;
constexpr std::uint64_t max_until_exit = 64 << 10;  // so that what stays cuts up no arena
constexpr std::uint64_t nearly = 128;  // bytes around the limit for payloads in a ring
constexpr auto long_time = std::chrono::hours(1);
constexpr auto short_time = std::chrono::milliseconds(2);
constexpr auto time_to_end = std::chrono::seconds(30);  // until the end of a closed process is known

std::size_t whole_pages(std::size_t bytes) { return (bytes + page - 1) / page * page; }

// A payload in memory of its own, piece by piece: AddressSanitizer sees what is read beside it.
struct Exact {
  explicit Exact(const Payload& from) {
    const auto copy = [this](const Slice& slice) {
      copies.emplace_back(new char[slice.bytes]);
      std::memcpy(copies.back().get(), slice.data, slice.bytes);
      return Slice{copies.back().get(), slice.bytes};
    };
    payload.prefix = copy(from.prefix);
    for (const Slice& slice : from.body) payload.body.push_back(copy(slice));
    for (const Slice& slice : from.buffers) payload.buffers.push_back(copy(slice));
  }
  std::vector<std::unique_ptr<char[]>> copies;
  Payload payload;
};

}  // namespace

// RetainedFrames --------------------------------------------------------------------------------------------------------------

void RetainedFrames::put(Message message, Event event) {
  const std::lock_guard lock(mutex_);
  const bool stays = message.id.from == doomed_ && until_exit_.empty() && message.bytes() <= max_until_exit;
  (stays ? until_exit_ : frames_).emplace_back(std::move(message), std::move(event));
}

void RetainedFrames::release_after_exit() {
  const std::lock_guard lock(mutex_);
  doomed_ = -1;
  std::move(until_exit_.begin(), until_exit_.end(), std::back_inserter(frames_));
  until_exit_.clear();
}

void RetainedFrames::clear(int n) {
  for (; n > 0; --n) {
    std::pair<Message, Event> one;
    {
      const std::lock_guard lock(mutex_);
      if (frames_.empty()) return;
      const auto at = frames_.begin() + below(random_, static_cast<int>(frames_.size()));
      one = std::move(*at);
      frames_.erase(at);
    }
    if (const auto wrong = payload_mismatch(one.first, one.second); !wrong.empty()) die("changed since it was retained: " + wrong);
    ++counting_;
    one.second.block.reset();
    --counting_;
  }
}

bool RetainedFrames::retain(Block& block) {
  ++counting_;
  const bool retained = block.retain();
  --counting_;
  return retained;
}

int RetainedFrames::size() {
  const std::lock_guard lock(mutex_);
  return static_cast<int>(frames_.size());
}

bool RetainedFrames::has(int from) {
  const std::lock_guard lock(mutex_);
  const auto is_from = [&](const auto& one) { return one.first.id.from == from; };
  return std::any_of(frames_.begin(), frames_.end(), is_from) || std::any_of(until_exit_.begin(), until_exit_.end(), is_from);
}

// ConnectOrder ------------------------------------------------------------------------------------------------------------

Endpoint::Endpoint(Fixture& fixture, const Round& round, int rank)
    : fixture_(fixture), round_(round), rank_(rank), host_(std::make_shared<Host>(round.arena_bytes)),
      retained_(round.seed * 37 + static_cast<std::uint64_t>(rank), fixture.counting[static_cast<std::size_t>(rank)],
             round.end == End::killed ? round.culprit : -1),
      undetected_(round.incarnations),
      random_(round.seed * 31 + static_cast<std::uint64_t>(rank)) {
  // With heavy messages, a smaller share makes sure that fast senders reach the limit of unread blocks.
  const std::uint64_t share = round.weight == Weight::heavy ? round.arena_bytes / 16 : UINT64_MAX;
  mailbox_ = std::make_unique<Mailbox>(host_, below(random_, 2) == 0, share);
  links_.fill(-1);
  for (int from = 0; from < round.ranks; ++from) {
    // A rank that drops its links sends an unknown number of frames; those that arrive must be right.
    if (from == rank || (round.end == End::dropped && from == round.culprit)) continue;
    for (int caller = 0; caller < round.callers; ++caller) {
      for (int n = 0; n < round.messages; ++n) {
        const auto to = make_message(round, {from, caller, static_cast<std::uint64_t>(n)}).to;
        missing_[static_cast<std::size_t>(from)] += std::count(to.begin(), to.end(), rank);
      }
    }
  }
  standby_ = std::thread([this] { acquire_turn_as_standby(); });
  std::memcpy(fixture.tokens[static_cast<std::size_t>(rank)].data(), host_->token().data(), 32);
  fixture.arrive_and_wait(tokens_published, round.ranks);
  connect();
  fixture.arrive_and_wait(all_connected, round.ranks);
}

Endpoint::~Endpoint() {
  if (standby_.joinable()) leave();
}

void Endpoint::leave() {
  closing_ = true;
  mailbox_->close();
  standby_.join();
}

void Endpoint::connect() {
  if (round_.connect_order == ConnectOrder::late) return;
  const auto connect_all = [this](int caller) {
    for (int i = 1; i < round_.ranks; ++i) {
      const int to = (rank_ + i) % round_.ranks;
      if (round_.connect_order == ConnectOrder::both_sides || to > rank_) link_to(to, caller);
    }
  };
  std::thread another;
  if (round_.connect_order == ConnectOrder::both_sides) another = std::thread(connect_all, 1);
  connect_all(0);
  if (another.joinable()) another.join();
}

int Endpoint::link_to(int rank, int caller) {
  const auto to = static_cast<std::size_t>(rank);
  for (;; let_others_run(caller)) {
    {
      const std::lock_guard lock(mutex_);
      if (links_[to] != -1) return std::max(links_[to], -1);
    }
    fixture_.note(rank_, caller, "connecting to rank " + std::to_string(rank));
    const bool departed = fixture_.departed[to];
    int link = -1;
    try {
      link = mailbox_->connect({fixture_.tokens[to].data(), fixture_.tokens[to].size()});
    } catch (const std::system_error& error) {
      if (error.code().value() != ENOMEM) fail(error.what());
    }
    const std::lock_guard lock(mutex_);
    if (links_[to] == -1 && link >= 0) links_[to] = link;
    if (links_[to] == -1 && departed) {
      count(Seen::unreachable);
      links_[to] = -2;
      missing_[to] = 0;
    }
    if (links_[to] != -1) return std::max(links_[to], -1);
    // No space for a ring in one of the two arenas: try again.
  }
}

// Callers ------------------------------------------------------------------------------------------------------------

void Endpoint::run() {
  std::vector<std::thread> callers;
  for (int caller = 1; caller < round_.callers; ++caller) callers.emplace_back([this, caller] { run_caller(caller); });
  run_caller(0);
  for (auto& caller : callers) caller.join();
  if (rank_ != round_.culprit || round_.end != End::left) return finish();
  if (round_.seed % 2 == 0) await_flushed();  // otherwise the backlog is lost with this rank
  fixture_.departed[static_cast<std::size_t>(rank_)] = true;
  leave();
}

void Endpoint::run_caller(int caller) {
  Random random(round_.seed * 1000 + static_cast<std::uint64_t>(rank_ * max_callers + caller));
  for (int n = 0; n < round_.messages; ++n) {
    fixture_.note(rank_, caller, "at message " + std::to_string(n));
    if (rank_ == round_.culprit && n == round_.stops[static_cast<std::size_t>(caller)] && !continues(caller, n)) return give_up_turn(caller);
    const Message message = make_message(round_, {rank_, caller, static_cast<std::uint64_t>(n)});
    send(caller, message, random);
    await_replies(caller, message, random);
    switch (below(random, round_.weight == Weight::light ? 300 : 60)) {
      case 0: run_local_task(caller); break;
      case 1: take_turn(caller); break;
      case 2: give_up_turn(caller); break;
      case 3: mailbox_->wake(); break;
      case 4: mailbox_->set_oversubscribed(below(random, 2) == 0); break;
      default: break;
    }
  }
  give_up_turn(caller);
}

bool Endpoint::continues(int caller, int) {
  if (round_.end == End::left) return false;
  if (caller != round_.fatal_caller) return true;
  if (round_.end == End::killed) {
    fixture_.departed[static_cast<std::size_t>(rank_)] = true;
    raise(SIGKILL);
  }
  dropped_ = true;
  const std::lock_guard lock(mutex_);
  for (const int link : links_) {
    if (link >= 0) mailbox_->drop(static_cast<std::uint32_t>(link));
  }
  count(Seen::dropped);
  return true;
}

void Endpoint::send(int caller, const Message& message, Random& random) {
  std::vector<Receiver> to;
  auto& sent = sent_[static_cast<std::size_t>(caller)];
  for (const int rank : message.to) {
    const int link = link_to(rank, caller);
    const auto r = static_cast<std::size_t>(rank);
    if (link >= 0) to.push_back({static_cast<std::uint32_t>(link), ++sent[r], static_cast<std::uint32_t>(rank), message.header.epoch});
  }
  if (message.wants_reply && !to.empty()) {
    const std::lock_guard lock(mutex_);
    const int rank = message.to[0];
    if (!disconnected_[static_cast<std::size_t>(rank)]) awaited_replies_.insert({rank, caller, message.id.number});
  }
  while (!send_message(message, to, below(random, 8) == 0)) {
    count(Seen::no_room);
    let_others_run(caller);
  }
  for (const Receiver& receiver : to) publish_written(caller, static_cast<int>(receiver.rank));
  const bool block = message.bytes() > most_inline;
  count(block ? Seen::block : Seen::inlined);
  if (to.size() > 1) count(block ? Seen::multicast_block : Seen::multicast_inlined);
  if (message.bytes() + nearly > most_inline && message.bytes() < most_inline + nearly) count(Seen::nearly_inlined);
  if (message.bytes() >= past_cache) count(Seen::streamed);
  if (message.many_buffers) count(Seen::many_buffers);
  if (mailbox_->backlog_bytes() != 0) count(Seen::full_ring);
}

bool Endpoint::send_message(const Message& message, const std::vector<Receiver>& to, bool exact) {
  if (exact) return mailbox_->send(message.header, Exact(message.payload).payload, to);
  return mailbox_->send(message.header, message.payload, to);
}

// While nothing at all is kept back, all that was sent is in the rings, unless the links were dropped before.
void Endpoint::publish_written(int caller, int to) {
  if (mailbox_->backlog_bytes() != 0 || dropped_) return;
  const auto l = static_cast<std::size_t>(caller), r = static_cast<std::size_t>(to);
  fixture_.written[static_cast<std::size_t>(rank_)][l][r] = sent_[l][r];
}

void Endpoint::await_replies(int caller, const Message& message, Random& random) {
  const auto mine = [&] {
    return std::count_if(awaited_replies_.begin(), awaited_replies_.end(), [&](const Key& key) { return std::get<1>(key) == caller; });
  };
  const bool last = message.id.number + 1 == static_cast<std::uint64_t>(round_.messages);
  if (last) return wait(caller, [&] { return mine() == 0; });
  if (!message.wants_reply) return;
  if (below(random, 2) == 0) return wait(caller, [&] { return mine() < max_awaited_replies; });
  wait(caller, [&] { return awaited_replies_.count({message.to[0], caller, message.id.number}) == 0; });
}

// Something that this process does itself, and wakes the reader for.
void Endpoint::run_local_task(int caller) {
  bool done = false;
  std::thread task([&] {
    {
      const std::lock_guard lock(mutex_);
      done = true;
    }
    changed_.notify_all();
    mailbox_->wake();
  });
  wait(caller, [&] { return done; });
  task.join();
  count(Seen::woken);
}

void Endpoint::take_turn(int caller) {
  bool& has_turn = has_turn_[static_cast<std::size_t>(caller)];
  if (!has_turn) has_turn = acquire_turn();
}

void Endpoint::give_up_turn(int caller) {
  if (std::exchange(has_turn_[static_cast<std::size_t>(caller)], false)) release_turn();
}

// Lets the others go on, and comes back soon.
void Endpoint::let_others_run(int caller) {
  give_up_turn(caller);
  retained_.clear();
  if (acquire_turn()) {
    read(false, short_time);
    release_turn();
  } else {
    usleep(200);
  }
}

void Endpoint::wait(int caller, const std::function<bool()>& ready) {
  give_up_turn(caller);
  const auto is_ready = [&] {
    const std::lock_guard lock(mutex_);
    return ready();
  };
  if (is_ready()) return;
  if (acquire_turn()) {
    while (!is_ready()) read(false, long_time);
    return release_turn();
  }
  count(Seen::followed);
  std::unique_lock lock(mutex_);
  changed_.wait(lock, ready);
}

// The end of a round -------------------------------------------------------------------------------------------------

bool Endpoint::is_complete() const {
  const bool none_missing = std::all_of(missing_.begin(), missing_.end(), [](std::int64_t n) { return n <= 0; });
  return none_missing && awaited_replies_.empty() && unanswered_ == 0 && undetected_ == 0;
}

void Endpoint::finish() {
  for (int rank = 0; rank < round_.ranks; ++rank) {
    if (rank != rank_) link_to(rank, 0);
  }
  fixture_.note(rank_, 0, "waiting for what is still to come");
  wait(0, [this] { return is_complete(); });
  fixture_.note(rank_, 0, "waiting until all is read");
  await_flushed();
  fixture_.arrive_and_wait(all_finished, round_.survivors());
  if (round_.end == End::dropped) check_dropped();
  retained_.clear();
  fixture_.arrive_and_wait(all_released, round_.survivors());
  fixture_.note(rank_, 0, "checking memory");
  check_memory();
  over_ = true;
  fixture_.arrive_and_wait(all_checked, round_.survivors());
  leave();
}

// Without reading here: the standby thread is woken when a ring has space.
void Endpoint::await_flushed() {
  retained_.clear();
  for (;; usleep(200)) {
    const std::lock_guard lock(mutex_);
    bool all = mailbox_->backlog_bytes() == 0;
    for (std::size_t rank = 0; rank < max_ranks; ++rank) {
      if (links_[rank] >= 0 && !disconnected_[rank]) all = all && mailbox_->unread(static_cast<std::uint32_t>(links_[rank])) == 0;
    }
    if (all) return;
  }
}

// After dropped links the number of frames is unknown, but frames that were certainly written must have arrived.
void Endpoint::check_dropped() {
  if (rank_ == round_.culprit) return;
  while (!acquire_turn()) usleep(200);
  while (read(false, Clock::duration::zero())) {
  }
  const auto from = static_cast<std::size_t>(round_.culprit), me = static_cast<std::size_t>(rank_);
  for (std::size_t caller = 0; caller < max_callers; ++caller) {
    if (received_[from][caller].seq < fixture_.written[from][caller][me]) fail("frames of a rank that dropped its links later have not come");
  }
  release_turn();
}

void Endpoint::check_memory() {
  // Threads that leave stay as a process: what they might still read is theirs till its end.
  if (round_.threads && (round_.end == End::left || round_.end == End::malicious)) return;
  const auto deadline = Clock::now() + time_to_end;
  for (;;) {
    host_->release(host_->allocate(1));  // first frees blocks that no receiver uses any more
    const std::size_t used = host_->arena().used(), rings = static_cast<std::size_t>(rings_);
    if (used == rings * whole_pages(sizeof(Ring))) break;
    if (Clock::now() > deadline) fail(std::to_string(used) + " bytes of the arena in use, with " + std::to_string(rings) + " rings");
    usleep(500);
  }
  const std::uint64_t retained = host_->arena().mapping().header().retained;
  const bool cut_short = round_.end == End::killed && fixture_.counting[static_cast<std::size_t>(round_.culprit)] != 0;
  if (cut_short ? retained > round_.arena_bytes : retained != 0) fail(std::to_string(retained) + " bytes count as retained");
}

// With the turn ------------------------------------------------------------------------------------------------------

bool Endpoint::acquire_turn() {
  if (!mailbox_->acquire_turn()) return false;
  if (readers_.exchange(1) != 0) fail("two threads have the turn to read");
  return true;
}

void Endpoint::release_turn() {
  readers_ = 0;
  mailbox_->release_turn();
}

void Endpoint::acquire_turn_as_standby() {
  while (mailbox_->acquire_turn_as_standby()) {
    if (readers_.exchange(1) != 0) fail("the standby took a turn that was taken");
    count(Seen::standby);
    while (!closing_) {
      if (!read(true, long_time) && mailbox_->is_turn_wanted()) {
        if (!closing_) count(Seen::standby_preempted);
        break;
      }
    }
    release_turn();
  }
}

bool Endpoint::read(bool standby, Clock::duration limit) {
  const bool has_work = !pending_replies_.empty() || retained_.size() != 0;
  auto events = mailbox_->receive(Clock::now() + (has_work ? std::min<Clock::duration>(limit, short_time) : limit), standby);
  if (events.size() >= 256) count(Seen::full_batch);
  for (Event& event : events) handle(event);
  send_replies();
  if (events.empty()) retained_.clear();
  return !events.empty();
}

void Endpoint::handle(Event& event) {
  switch (event.kind) {
    case Event::connected: return handle_connected(event);
    case Event::disconnected: return handle_disconnected(event);
    case Event::frame: return handle_frame(event);
    case Event::refused: return;  // it is called again, or has departed
  }
}

void Endpoint::handle_connected(const Event& event) {
  if (event.link != senders_.size()) fail("connected on link " + std::to_string(event.link) + ", not the next one");
  const auto same = [&](const auto& token) { return event.text == std::string(token.data(), token.size()); };
  const auto rank = std::find_if(fixture_.tokens.begin(), fixture_.tokens.end(), same);
  const auto incarnation = std::find_if(fixture_.malicious_tokens.begin(), fixture_.malicious_tokens.end(), same);
  Sender& sender = senders_.emplace_back();
  ++rings_;
  if (rank != fixture_.tokens.end()) {
    sender.rank = static_cast<int>(rank - fixture_.tokens.begin());
    const std::lock_guard lock(mutex_);
    int& link = links_[static_cast<std::size_t>(sender.rank)];
    if (link == -1) link = static_cast<int>(event.link);
    else if (link != static_cast<int>(event.link)) count(Seen::two_links);
    if (round_.connect_order == ConnectOrder::late) count(Seen::connected_late);
  } else if (incarnation != fixture_.malicious_tokens.end()) {
    sender.incarnation = static_cast<int>(incarnation - fixture_.malicious_tokens.begin());
    fill_ring(event.link);
  } else {
    fail("connected to an unknown process");
  }
}

// More frames than a ring can hold, and blocks that a malicious peer never releases. If it is detected already, they
// are dropped.
void Endpoint::fill_ring(std::uint32_t link) {
  const std::string words(15'000, 'w');
  for (int i = 0; i < 10; ++i) mailbox_->send({}, {{words.data(), 0}, {{words.data(), words.size()}}, {}}, {{link, 1, 0, 0}});
  for (int i = 0; i < 3; ++i) mailbox_->send({}, {{words.data(), 0}, {{words.data(), words.size()}}, {{words.data(), words.size()}}}, {{link, 1, 0, 0}});
  if (mailbox_->backlog_bytes() != 0) count(Seen::full_ring);
}

void Endpoint::handle_frame(Event& event) {
  Sender& sender = senders_.at(event.link);
  ++sender.frames;
  if (sender.disconnected) fail("a frame on a disconnected link");
  if (sender.incarnation >= 0) return handle_malicious(event, sender.incarnation);
  const auto from = static_cast<std::size_t>(sender.rank);
  const MessageId id = id_in(event.header, sender.rank, rank_);
  if (id.caller != reply_caller && id.caller >= round_.callers) fail("a frame of a caller that does not exist");
  Message message = make_message(round_, id);
  if (const auto wrong = mismatch_in(message, event, rank_); !wrong.empty()) fail(wrong);
  Stream& stream = received_[from][static_cast<std::size_t>(id.caller)];
  if (event.header.seq != ++stream.seq) {
    fail("frame " + std::to_string(event.header.seq) + " of caller " + std::to_string(id.caller) + " of rank " +
          std::to_string(sender.rank) + " where " + std::to_string(stream.seq) + " comes next");
  }
  {
    const std::lock_guard lock(mutex_);
    if (disconnected_[from]) fail("a frame of rank " + std::to_string(from) + ", which has ended");
    if (id.caller == reply_caller) {
      if (awaited_replies_.erase({sender.rank, id.requester_caller, id.number}) == 0) fail("a reply without a request");
      count(Seen::answered);
    } else {
      if (id.number < stream.next) fail("a message arrived twice");
      if (std::count(message.to.begin(), message.to.end(), rank_) != 1) fail("a message for other ranks");
      stream.next = id.number + 1;
      --missing_[from];
      unanswered_ += message.wants_reply;
    }
  }
  changed_.notify_all();
  if (message.wants_reply) pending_replies_.push_back({rank_, reply_caller, id.number, sender.rank, id.caller});
  if (event.block) retain_some(std::move(message), event);
}

void Endpoint::retain_some(Message message, Event& event) {
  if (below(random_, 2) == 0) return;
  const bool sole = message.to.size() == 1 || message.id.caller == reply_caller;
  const bool retained = retained_.retain(*event.block);
  if (retained && !sole) fail("a payload with other readers could be retained");
  count(retained ? Seen::retained : Seen::not_retained);
  retained_.put(std::move(message), std::move(event));  // those that are not kept may be held for a while, too
  if (const int most = round_.weight == Weight::heavy ? 60 : 8; below(random_, most) < retained_.size()) retained_.clear(1);
}

void Endpoint::send_replies() {
  while (!pending_replies_.empty()) {
    const MessageId& id = pending_replies_.front();
    const auto to = static_cast<std::size_t>(id.requester);
    int link = -1;
    {
      const std::lock_guard lock(mutex_);
      link = links_[to];
    }
    if (link >= 0) {
      const Message message = make_message(round_, id);
      std::uint64_t& sent = sent_[reply_caller][to];
      const Receiver receiver{static_cast<std::uint32_t>(link), sent + 1, static_cast<std::uint32_t>(id.requester), message.header.epoch};
      if (!send_message(message, {receiver}, false)) return count(Seen::no_room);
      ++sent;
      publish_written(reply_caller, id.requester);
    }
    pending_replies_.pop_front();
    const std::lock_guard lock(mutex_);
    --unanswered_;
    changed_.notify_all();
  }
}

void Endpoint::handle_disconnected(const Event& event) {
  Sender& sender = senders_.at(event.link);
  if (sender.disconnected) fail("disconnected twice");
  sender.disconnected = true;
  --rings_;
  const std::lock_guard lock(mutex_);
  if (sender.incarnation >= 0) {
    const Attack attack = attack_of(round_, sender.incarnation);
    const std::string expected = expected_report(attack);
    const bool as_expected = event.text == expected && !event.clean && sender.frames == valid_frames(round_, sender.incarnation);
    if (!is_random(attack) && !as_expected) {
      fail(std::string("a malicious peer with ") + name_of(attack) + " is reported as \"" + event.text + "\" after " + std::to_string(sender.frames) + " frames");
    }
    fixture_.coverage->count_attack(static_cast<int>(attack));
    ++fixture_.detected[static_cast<std::size_t>(sender.incarnation)];
    --undetected_;
  } else if (const auto from = static_cast<std::size_t>(sender.rank); !disconnected_[from]) {
    const bool planned = sender.rank == round_.culprit && (round_.end == End::killed ? !event.clean : round_.end == End::left && event.clean);
    if (!planned && !over_) fail("rank " + std::to_string(from) + " has ended: " + event.text);
    for (std::size_t caller = 0; caller < max_callers && planned; ++caller) {
      if (received_[from][caller].seq < fixture_.written[from][caller][static_cast<std::size_t>(rank_)]) {
        fail("disconnected before the last frames of caller " + std::to_string(caller));
      }
    }
    disconnected_[from] = true;
    missing_[from] = 0;
    std::erase_if(awaited_replies_, [&](const Key& key) { return std::get<0>(key) == sender.rank; });
    if (planned) count(event.clean ? Seen::left : Seen::dead);
    if (planned && !event.clean && retained_.has(sender.rank)) count(Seen::retained_beyond_exit);
    if (planned) retained_.release_after_exit();
  }
  changed_.notify_all();
}

void Endpoint::handle_malicious(Event& event, int incarnation) {
  const std::uint64_t number = senders_.at(event.link).frames - 1;
  count(Seen::malicious_frames);
  if (is_random(attack_of(round_, incarnation))) {
    // All bytes must be readable, whatever the header says.
    std::uint64_t at = 8 * (1 + std::uint64_t{event.header.buffers}) + event.header.prefix, sum = 0;
    for (std::size_t i = 0; i <= event.header.buffers; ++i) {
      if (i > 0) at = (at + 63) / 64 * 64;
      for (const std::uint64_t end = at + event.length(i); at < end; ++at) sum += static_cast<unsigned char>(event.payload()[at]);
    }
    if (at != event.header.bytes || sum == ~0ull) fail("lengths that do not add up");
    return;
  }
  Message message = make_message(round_, malicious_id(round_, incarnation, number));
  if (const auto wrong = mismatch_in(message, event, rank_); !wrong.empty()) fail("of a malicious peer: " + wrong);
  if (event.block && below(random_, 2) == 0) retained_.put(std::move(message), std::move(event));
}

void Endpoint::fail(const std::string& what) const {
  die("seed " + std::to_string(round_.seed) + ": rank " + std::to_string(rank_) + ": " + what);
}

}  // namespace monarch::stress
