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

enum : int { tokens_told, all_connected, all_finished, all_released, all_checked };

constexpr int most_asked = 6;
constexpr std::uint64_t most_till_death = 64 << 10;  // so that what stays cuts up no arena
constexpr std::uint64_t nearly = 128;  // bytes around what goes through a ring at most
constexpr auto long_time = std::chrono::hours(1);
constexpr auto short_time = std::chrono::milliseconds(2);
constexpr auto time_to_end = std::chrono::seconds(30);  // of a process that is no longer heard of

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

// Shelf --------------------------------------------------------------------------------------------------------------

void Shelf::put(Letter letter, Event event) {
  const std::lock_guard lock(mutex_);
  const bool stays = letter.name.from == doomed_ && till_death_.empty() && letter.bytes() <= most_till_death;
  (stays ? till_death_ : kept_).emplace_back(std::move(letter), std::move(event));
}

void Shelf::died() {
  const std::lock_guard lock(mutex_);
  doomed_ = -1;
  std::move(till_death_.begin(), till_death_.end(), std::back_inserter(kept_));
  till_death_.clear();
}

void Shelf::clear(int n) {
  for (; n > 0; --n) {
    std::pair<Letter, Event> one;
    {
      const std::lock_guard lock(mutex_);
      if (kept_.empty()) return;
      const auto at = kept_.begin() + below(random_, static_cast<int>(kept_.size()));
      one = std::move(*at);
      kept_.erase(at);
    }
    if (const auto wrong = wrong_in(one.first, one.second); !wrong.empty()) die("not as it was when it was kept: " + wrong);
    ++counting_;
    one.second.block.reset();
    --counting_;
  }
}

bool Shelf::keep(Block& block) {
  ++counting_;
  const bool kept = block.keep();
  --counting_;
  return kept;
}

int Shelf::size() {
  const std::lock_guard lock(mutex_);
  return static_cast<int>(kept_.size());
}

bool Shelf::has(int from) {
  const std::lock_guard lock(mutex_);
  const auto is_from = [&](const auto& one) { return one.first.name.from == from; };
  return std::any_of(kept_.begin(), kept_.end(), is_from) || std::any_of(till_death_.begin(), till_death_.end(), is_from);
}

// Meeting ------------------------------------------------------------------------------------------------------------

Station::Station(World& world, const Round& round, int rank)
    : world_(world), round_(round), rank_(rank), host_(std::make_shared<Host>(round.arena_bytes)),
      shelf_(round.seed * 37 + static_cast<std::uint64_t>(rank), world.counting[static_cast<std::size_t>(rank)],
             round.end == End::killed ? round.culprit : -1),
      unexposed_(round.lives),
      random_(round.seed * 31 + static_cast<std::uint64_t>(rank)) {
  // Where letters are heavy, a receiver that has read little is refused more: whoever is quick meets that for sure.
  const std::uint64_t share = round.weight == Weight::heavy ? round.arena_bytes / 16 : UINT64_MAX;
  post_ = std::make_unique<Post>(host_, below(random_, 2) == 0, share);
  links_.fill(-1);
  for (int from = 0; from < round.ranks; ++from) {
    // Whoever drops its links sends as much as it does; what there is must be right.
    if (from == rank || (round.end == End::dropped && from == round.culprit)) continue;
    for (int lane = 0; lane < round.lanes; ++lane) {
      for (int n = 0; n < round.letters; ++n) {
        const auto to = letter_of(round, {from, lane, static_cast<std::uint64_t>(n)}).to;
        missing_[static_cast<std::size_t>(from)] += std::count(to.begin(), to.end(), rank);
      }
    }
  }
  standby_ = std::thread([this] { stand_by(); });
  std::memcpy(world.tokens[static_cast<std::size_t>(rank)].data(), host_->token().data(), 32);
  world.meet(tokens_told, round.ranks);
  connect();
  world.meet(all_connected, round.ranks);
}

Station::~Station() {
  if (standby_.joinable()) leave();
}

void Station::leave() {
  closing_ = true;
  post_->close();
  standby_.join();
}

void Station::connect() {
  if (round_.meeting == Meeting::late) return;
  const auto connect_all = [this](int lane) {
    for (int i = 1; i < round_.ranks; ++i) {
      const int to = (rank_ + i) % round_.ranks;
      if (round_.meeting == Meeting::both_sides || to > rank_) link_to(to, lane);
    }
  };
  std::thread another;
  if (round_.meeting == Meeting::both_sides) another = std::thread(connect_all, 1);
  connect_all(0);
  if (another.joinable()) another.join();
}

int Station::link_to(int rank, int lane) {
  const auto to = static_cast<std::size_t>(rank);
  for (;; relieve(lane)) {
    {
      const std::lock_guard lock(mutex_);
      if (links_[to] != -1) return std::max(links_[to], -1);
    }
    world_.note(rank_, lane, "connecting to rank " + std::to_string(rank));
    const bool departed = world_.departed[to];
    int link = -1;
    try {
      link = post_->connect({world_.tokens[to].data(), world_.tokens[to].size()});
    } catch (const std::system_error& error) {
      if (error.code().value() != ENOMEM) blame(error.what());
    }
    const std::lock_guard lock(mutex_);
    if (links_[to] == -1 && link >= 0) links_[to] = link;
    if (links_[to] == -1 && departed) {
      count(Seen::unreachable);
      links_[to] = -2;
      missing_[to] = 0;
    }
    if (links_[to] != -1) return std::max(links_[to], -1);
    // There was no room for a ring, here or there.
  }
}

// Lanes --------------------------------------------------------------------------------------------------------------

void Station::play() {
  std::vector<std::thread> lanes;
  for (int lane = 1; lane < round_.lanes; ++lane) lanes.emplace_back([this, lane] { play_lane(lane); });
  play_lane(0);
  for (auto& lane : lanes) lane.join();
  if (rank_ != round_.culprit || round_.end != End::left) return finish();
  if (round_.seed % 2 == 0) await_flushed();  // otherwise what waits for room is lost with us
  world_.departed[static_cast<std::size_t>(rank_)] = true;
  leave();
}

void Station::play_lane(int lane) {
  Random random(round_.seed * 1000 + static_cast<std::uint64_t>(rank_ * max_lanes + lane));
  for (int n = 0; n < round_.letters; ++n) {
    world_.note(rank_, lane, "at letter " + std::to_string(n));
    if (rank_ == round_.culprit && n == round_.stops[static_cast<std::size_t>(lane)] && !goes_on(lane, n)) return stand_up(lane);
    const Letter letter = letter_of(round_, {rank_, lane, static_cast<std::uint64_t>(n)});
    send(lane, letter, random);
    await_answers(lane, letter, random);
    switch (below(random, round_.weight == Weight::light ? 300 : 60)) {
      case 0: run_errand(lane); break;
      case 1: sit(lane); break;
      case 2: stand_up(lane); break;
      case 3: post_->wake(); break;
      case 4: post_->crowd(below(random, 2) == 0); break;
      default: break;
    }
  }
  stand_up(lane);
}

bool Station::goes_on(int lane, int) {
  if (round_.end == End::left) return false;
  if (lane != round_.fatal_lane) return true;
  if (round_.end == End::killed) {
    world_.departed[static_cast<std::size_t>(rank_)] = true;
    raise(SIGKILL);
  }
  dropped_ = true;
  const std::lock_guard lock(mutex_);
  for (const int link : links_) {
    if (link >= 0) post_->drop(static_cast<std::uint32_t>(link));
  }
  count(Seen::dropped);
  return true;
}

void Station::send(int lane, const Letter& letter, Random& random) {
  std::vector<Receiver> to;
  auto& sent = sent_[static_cast<std::size_t>(lane)];
  for (const int rank : letter.to) {
    const int link = link_to(rank, lane);
    const auto r = static_cast<std::size_t>(rank);
    if (link >= 0) to.push_back({static_cast<std::uint32_t>(link), ++sent[r], static_cast<std::uint32_t>(rank), letter.header.epoch});
  }
  if (letter.wants_answer && !to.empty()) {
    const std::lock_guard lock(mutex_);
    const int rank = letter.to[0];
    if (!gone_[static_cast<std::size_t>(rank)]) asked_.insert({rank, lane, letter.name.number});
  }
  while (!post_letter(letter, to, below(random, 8) == 0)) {
    count(Seen::no_room);
    relieve(lane);
  }
  for (const Receiver& receiver : to) tell_written(lane, static_cast<int>(receiver.rank));
  const bool block = letter.bytes() > most_inline;
  count(block ? Seen::block : Seen::inlined);
  if (to.size() > 1) count(block ? Seen::cast_block : Seen::cast_inlined);
  if (letter.bytes() + nearly > most_inline && letter.bytes() < most_inline + nearly) count(Seen::nearly_inlined);
  if (letter.bytes() >= past_cache) count(Seen::streamed);
  if (letter.many_buffers) count(Seen::many_buffers);
  if (post_->kept_back() != 0) count(Seen::full_ring);
}

bool Station::post_letter(const Letter& letter, const std::vector<Receiver>& to, bool exact) {
  if (exact) return post_->send(letter.header, Exact(letter.payload).payload, to);
  return post_->send(letter.header, letter.payload, to);
}

// While nothing at all is kept back, all that was sent is in the rings, unless the links were dropped before.
void Station::tell_written(int lane, int to) {
  if (post_->kept_back() != 0 || dropped_) return;
  const auto l = static_cast<std::size_t>(lane), r = static_cast<std::size_t>(to);
  world_.written[static_cast<std::size_t>(rank_)][l][r] = sent_[l][r];
}

void Station::await_answers(int lane, const Letter& letter, Random& random) {
  const auto mine = [&] {
    return std::count_if(asked_.begin(), asked_.end(), [&](const Key& key) { return std::get<1>(key) == lane; });
  };
  const bool last = letter.name.number + 1 == static_cast<std::uint64_t>(round_.letters);
  if (last) return wait(lane, [&] { return mine() == 0; });
  if (!letter.wants_answer) return;
  if (below(random, 2) == 0) return wait(lane, [&] { return mine() < most_asked; });
  wait(lane, [&] { return asked_.count({letter.to[0], lane, letter.name.number}) == 0; });
}

// Something that this process does itself, and wakes the reader for.
void Station::run_errand(int lane) {
  bool done = false;
  std::thread errand([&] {
    {
      const std::lock_guard lock(mutex_);
      done = true;
    }
    changed_.notify_all();
    post_->wake();
  });
  wait(lane, [&] { return done; });
  errand.join();
  count(Seen::woken);
}

void Station::sit(int lane) {
  bool& sits = sits_[static_cast<std::size_t>(lane)];
  if (!sits) sits = take();
}

void Station::stand_up(int lane) {
  if (std::exchange(sits_[static_cast<std::size_t>(lane)], false)) pass_on();
}

// Lets the others go on, and comes back soon.
void Station::relieve(int lane) {
  stand_up(lane);
  shelf_.clear();
  if (take()) {
    read(false, short_time);
    pass_on();
  } else {
    usleep(200);
  }
}

void Station::wait(int lane, const std::function<bool()>& ready) {
  stand_up(lane);
  const auto is_ready = [&] {
    const std::lock_guard lock(mutex_);
    return ready();
  };
  if (is_ready()) return;
  if (take()) {
    while (!is_ready()) read(false, long_time);
    return pass_on();
  }
  count(Seen::followed);
  std::unique_lock lock(mutex_);
  changed_.wait(lock, ready);
}

// The end of a round -------------------------------------------------------------------------------------------------

bool Station::all_here() const {
  const bool none_missing = std::all_of(missing_.begin(), missing_.end(), [](std::int64_t n) { return n <= 0; });
  return none_missing && asked_.empty() && unanswered_ == 0 && unexposed_ == 0;
}

void Station::finish() {
  for (int rank = 0; rank < round_.ranks; ++rank) {
    if (rank != rank_) link_to(rank, 0);
  }
  world_.note(rank_, 0, "waiting for what is still to come");
  wait(0, [this] { return all_here(); });
  world_.note(rank_, 0, "waiting until all is read");
  await_flushed();
  world_.meet(all_finished, round_.survivors());
  if (round_.end == End::dropped) check_dropped();
  shelf_.clear();
  world_.meet(all_released, round_.survivors());
  world_.note(rank_, 0, "checking memory");
  check_memory();
  over_ = true;
  world_.meet(all_checked, round_.survivors());
  leave();
}

// Without reading here: the standby hears of room in a ring when there is some.
void Station::await_flushed() {
  shelf_.clear();
  for (;; usleep(200)) {
    const std::lock_guard lock(mutex_);
    bool all = post_->kept_back() == 0;
    for (std::size_t rank = 0; rank < max_ranks; ++rank) {
      if (links_[rank] >= 0 && !gone_[rank]) all = all && post_->unread(static_cast<std::uint32_t>(links_[rank])) == 0;
    }
    if (all) return;
  }
}

// Where frames no longer say how many there were: what was surely written before must have come.
void Station::check_dropped() {
  if (rank_ == round_.culprit) return;
  while (!take()) usleep(200);
  while (read(false, Clock::duration::zero())) {
  }
  const auto from = static_cast<std::size_t>(round_.culprit), me = static_cast<std::size_t>(rank_);
  for (std::size_t lane = 0; lane < max_lanes; ++lane) {
    if (received_[from][lane].seq < world_.written[from][lane][me]) blame("frames of a rank that dropped its links later have not come");
  }
  pass_on();
}

void Station::check_memory() {
  // Threads that leave stay as a process: what they might still read is theirs till its end.
  if (round_.threads && (round_.end == End::left || round_.end == End::forged)) return;
  const auto deadline = Clock::now() + time_to_end;
  for (;;) {
    host_->release(host_->allocate(1));  // gives back first what nobody looks at any more
    const std::size_t used = host_->arena().used(), rings = static_cast<std::size_t>(rings_);
    if (used == rings * whole_pages(sizeof(Ring))) break;
    if (Clock::now() > deadline) blame(std::to_string(used) + " bytes of the arena in use, with " + std::to_string(rings) + " rings");
    usleep(500);
  }
  const std::uint64_t kept = host_->arena().mapping().header().kept;
  const bool cut_short = round_.end == End::killed && world_.counting[static_cast<std::size_t>(round_.culprit)] != 0;
  if (cut_short ? kept > round_.arena_bytes : kept != 0) blame(std::to_string(kept) + " bytes count as kept");
}

// With the turn ------------------------------------------------------------------------------------------------------

bool Station::take() {
  if (!post_->take()) return false;
  if (readers_.exchange(1) != 0) blame("two threads have the turn");
  return true;
}

void Station::pass_on() {
  readers_ = 0;
  post_->pass_on();
}

void Station::stand_by() {
  while (post_->stand_by()) {
    if (readers_.exchange(1) != 0) blame("the standby took a turn that was taken");
    count(Seen::standby);
    while (!closing_) {
      if (!read(true, long_time) && post_->wanted()) {
        if (!closing_) count(Seen::called_off);
        break;
      }
    }
    pass_on();
  }
}

bool Station::read(bool standby, Clock::duration longest) {
  const bool soon = !owed_.empty() || shelf_.size() != 0;
  auto events = post_->receive(Clock::now() + (soon ? std::min<Clock::duration>(longest, short_time) : longest), standby);
  if (events.size() >= 256) count(Seen::full_batch);
  for (Event& event : events) handle(event);
  answer();
  if (events.empty()) shelf_.clear();
  return !events.empty();
}

void Station::handle(Event& event) {
  switch (event.kind) {
    case Event::met: return handle_met(event);
    case Event::gone: return handle_gone(event);
    case Event::frame: return handle_frame(event);
    case Event::refused: return;  // it is called again, or has departed
  }
}

void Station::handle_met(const Event& event) {
  if (event.link != senders_.size()) blame("met on link " + std::to_string(event.link) + ", not the next one");
  const auto same = [&](const auto& token) { return event.text == std::string(token.data(), token.size()); };
  const auto rank = std::find_if(world_.tokens.begin(), world_.tokens.end(), same);
  const auto life = std::find_if(world_.forgers.begin(), world_.forgers.end(), same);
  Sender& sender = senders_.emplace_back();
  ++rings_;
  if (rank != world_.tokens.end()) {
    sender.rank = static_cast<int>(rank - world_.tokens.begin());
    const std::lock_guard lock(mutex_);
    int& link = links_[static_cast<std::size_t>(sender.rank)];
    if (link == -1) link = static_cast<int>(event.link);
    else if (link != static_cast<int>(event.link)) count(Seen::two_links);
    if (round_.meeting == Meeting::late) count(Seen::met_late);
  } else if (life != world_.forgers.end()) {
    sender.life = static_cast<int>(life - world_.forgers.begin());
    greet(event.link);
  } else {
    blame("met somebody that nobody knows");
  }
}

// More than a ring has room for, and blocks that a forger never lets go of. It may be exposed by now: then it gets nothing.
void Station::greet(std::uint32_t link) {
  const std::string words(15'000, 'w');
  for (int i = 0; i < 10; ++i) post_->send({}, {{words.data(), 0}, {{words.data(), words.size()}}, {}}, {{link, 1, 0, 0}});
  for (int i = 0; i < 3; ++i) post_->send({}, {{words.data(), 0}, {{words.data(), words.size()}}, {{words.data(), words.size()}}}, {{link, 1, 0, 0}});
  if (post_->kept_back() != 0) count(Seen::full_ring);
}

void Station::handle_frame(Event& event) {
  Sender& sender = senders_.at(event.link);
  ++sender.frames;
  if (sender.gone) blame("a frame on a link that is gone");
  if (sender.life >= 0) return handle_forged(event, sender.life);
  const auto from = static_cast<std::size_t>(sender.rank);
  const Name name = name_in(event.header, sender.rank, rank_);
  if (name.lane != answers && name.lane >= round_.lanes) blame("a frame of a lane that is none");
  Letter letter = letter_of(round_, name);
  if (const auto wrong = wrong_with(letter, event, rank_); !wrong.empty()) blame(wrong);
  Stream& stream = received_[from][static_cast<std::size_t>(name.lane)];
  if (event.header.seq != ++stream.seq) {
    blame("frame " + std::to_string(event.header.seq) + " of lane " + std::to_string(name.lane) + " of rank " +
          std::to_string(sender.rank) + " where " + std::to_string(stream.seq) + " comes next");
  }
  {
    const std::lock_guard lock(mutex_);
    if (gone_[from]) blame("a frame of rank " + std::to_string(from) + ", which is gone");
    if (name.lane == answers) {
      if (asked_.erase({sender.rank, name.asker_lane, name.number}) == 0) blame("an answer to nothing");
      count(Seen::answered);
    } else {
      if (name.number < stream.next) blame("a letter came again");
      if (std::count(letter.to.begin(), letter.to.end(), rank_) != 1) blame("a letter for others");
      stream.next = name.number + 1;
      --missing_[from];
      unanswered_ += letter.wants_answer;
    }
  }
  changed_.notify_all();
  if (letter.wants_answer) owed_.push_back({rank_, answers, name.number, sender.rank, name.lane});
  if (event.block) keep_some(std::move(letter), event);
}

void Station::keep_some(Letter letter, Event& event) {
  if (below(random_, 2) == 0) return;
  const bool sole = letter.to.size() == 1 || letter.name.lane == answers;
  const bool kept = shelf_.keep(*event.block);
  if (kept && !sole) blame("a payload that others read as well could be kept");
  count(kept ? Seen::kept : Seen::not_kept);
  shelf_.put(std::move(letter), std::move(event));  // those that are not kept may be held for a while, too
  if (const int most = round_.weight == Weight::heavy ? 60 : 8; below(random_, most) < shelf_.size()) shelf_.clear(1);
}

void Station::answer() {
  while (!owed_.empty()) {
    const Name& name = owed_.front();
    const auto to = static_cast<std::size_t>(name.asker);
    int link = -1;
    {
      const std::lock_guard lock(mutex_);
      link = links_[to];
    }
    if (link >= 0) {
      const Letter letter = letter_of(round_, name);
      std::uint64_t& sent = sent_[answers][to];
      const Receiver receiver{static_cast<std::uint32_t>(link), sent + 1, static_cast<std::uint32_t>(name.asker), letter.header.epoch};
      if (!post_letter(letter, {receiver}, false)) return count(Seen::no_room);
      ++sent;
      tell_written(answers, name.asker);
    }
    owed_.pop_front();
    const std::lock_guard lock(mutex_);
    --unanswered_;
    changed_.notify_all();
  }
}

void Station::handle_gone(const Event& event) {
  Sender& sender = senders_.at(event.link);
  if (sender.gone) blame("gone twice");
  sender.gone = true;
  --rings_;
  const std::lock_guard lock(mutex_);
  if (sender.life >= 0) {
    const Forgery forgery = forgery_of(round_, sender.life);
    const std::string expected = words_about(forgery);
    const bool as_expected = event.text == expected && !event.peace && sender.frames == honest_frames(round_, sender.life);
    if (!is_wild(forgery) && !as_expected) {
      blame(std::string("a forger of ") + name_of(forgery) + " is told as \"" + event.text + "\" after " + std::to_string(sender.frames) + " frames");
    }
    world_.coverage->count_forgery(static_cast<int>(forgery));
    ++world_.exposed[static_cast<std::size_t>(sender.life)];
    --unexposed_;
  } else if (const auto from = static_cast<std::size_t>(sender.rank); !gone_[from]) {
    const bool planned = sender.rank == round_.culprit && (round_.end == End::killed ? !event.peace : round_.end == End::left && event.peace);
    if (!planned && !over_) blame("rank " + std::to_string(from) + " is gone: " + event.text);
    for (std::size_t lane = 0; lane < max_lanes && planned; ++lane) {
      if (received_[from][lane].seq < world_.written[from][lane][static_cast<std::size_t>(rank_)]) {
        blame("gone before the last frames of lane " + std::to_string(lane));
      }
    }
    gone_[from] = true;
    missing_[from] = 0;
    std::erase_if(asked_, [&](const Key& key) { return std::get<0>(key) == sender.rank; });
    if (planned) count(event.peace ? Seen::left : Seen::dead);
    if (planned && !event.peace && shelf_.has(sender.rank)) count(Seen::kept_beyond_death);
    if (planned) shelf_.died();
  }
  changed_.notify_all();
}

void Station::handle_forged(Event& event, int life) {
  const std::uint64_t number = senders_.at(event.link).frames - 1;
  count(Seen::frames_of_a_forger);
  if (is_wild(forgery_of(round_, life))) {
    // Whatever it says: all of it can be read.
    std::uint64_t at = 8 * (1 + std::uint64_t{event.header.buffers}) + event.header.prefix, sum = 0;
    for (std::size_t i = 0; i <= event.header.buffers; ++i) {
      if (i > 0) at = (at + 63) / 64 * 64;
      for (const std::uint64_t end = at + event.length(i); at < end; ++at) sum += static_cast<unsigned char>(event.payload()[at]);
    }
    if (at != event.header.bytes || sum == ~0ull) blame("lengths that do not add up");
    return;
  }
  Letter letter = letter_of(round_, forged_name(round_, life, number));
  if (const auto wrong = wrong_with(letter, event, rank_); !wrong.empty()) blame("of a forger: " + wrong);
  if (event.block && below(random_, 2) == 0) shelf_.put(std::move(letter), std::move(event));
}

void Station::blame(const std::string& what) const {
  die("seed " + std::to_string(round_.seed) + ": rank " + std::to_string(rank_) + ": " + what);
}

}  // namespace monarch::stress
