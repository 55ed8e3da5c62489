// One rank of the stress driver: a Host and a Post, lanes that send what the seed says, and the readers: a lane that
// waits reads for all, the standby reads while none does. Whatever arrives is compared with what its sender must have
// sent; every stream of frames must be there from the first on, in order, each once, and end where it may end.
#pragma once

#include <array>
#include <atomic>
#include <condition_variable>
#include <deque>
#include <functional>
#include <memory>
#include <mutex>
#include <set>
#include <string>
#include <thread>
#include <tuple>
#include <utility>
#include <vector>

#include "channel/mailbox.h"
#include "channel/stress/coverage.h"
#include "channel/stress/message.h"
#include "channel/stress/schedule.h"
#include "channel/stress/fixture.h"

namespace monarch::stress {

// Payloads that are kept where they lie. Each is compared again when it is let go: its memory must not have been used
// for others meanwhile, whatever became of its owner.
class Shelf {
 public:
  // `counting`: threads that are about to say what they keep, which a death may cut short.
  // `doomed`: a rank that will die, or -1. Its first block stays here until then: something is kept beyond each death.
  Shelf(std::uint64_t seed, std::atomic<int>& counting, int doomed) : random_(seed), counting_(counting), doomed_(doomed) {}
  void put(Letter letter, Event event);
  void died();
  void clear(int n = 1 << 30);  // lets go of so many, anywhere
  bool keep(Block& block);
  int size();
  bool has(int from);

 private:
  std::mutex mutex_;
  Random random_;
  std::atomic<int>& counting_;
  int doomed_;
  std::deque<std::pair<Letter, Event>> kept_, till_death_;
};

class Station {
 public:
  Station(World& world, const Round& round, int rank);  // all ranks have met when it is there
  ~Station();

  void play();

 private:
  using Key = std::tuple<int, int, std::uint64_t>;  // of an answer: from whom, to which lane, to which letter

  // Of lanes.
  void connect();
  int link_to(int rank, int lane);  // -1: nobody is there any more
  void play_lane(int lane);
  bool goes_on(int lane, int number);  // what the culprit does here; false: the lane ends
  void send(int lane, const Letter& letter, Random& random);
  void await_answers(int lane, const Letter& letter, Random& random);
  void run_errand(int lane);
  void sit(int lane);
  void stand_up(int lane);
  void relieve(int lane);
  void wait(int lane, const std::function<bool()>& ready);  // `ready` is asked under mutex_
  void finish();
  void await_flushed();
  void check_dropped();
  void check_memory();
  void leave();

  // Of whoever has the turn.
  bool take();
  void pass_on();
  bool read(bool standby, Clock::duration longest);  // false if nothing came
  void stand_by();
  void handle(Event& event);
  void handle_met(const Event& event);
  void handle_gone(const Event& event);
  void handle_frame(Event& event);
  void handle_forged(Event& event, int life);
  void keep_some(Letter letter, Event& event);
  void answer();
  void greet(std::uint32_t link);

  bool post_letter(const Letter& letter, const std::vector<Receiver>& to, bool exact);
  void tell_written(int lane, int to);
  bool all_here() const;  // under mutex_
  void count(Seen what) { world_.coverage->count(what); }
  [[noreturn]] void blame(const std::string& what) const;

  World& world_;
  const Round& round_;
  int rank_;
  std::shared_ptr<Host> host_;
  std::unique_ptr<Post> post_;
  Shelf shelf_;
  std::thread standby_;
  std::atomic<int> readers_{0};
  std::atomic<int> rings_{0};  // of links that are not gone
  std::atomic<bool> closing_{false};
  std::atomic<bool> over_{false};     // the others may go now
  std::atomic<bool> dropped_{false};  // our links
  std::array<std::array<std::uint64_t, max_ranks>, max_lanes> sent_{};  // the lane's own; answers': with the turn
  std::array<bool, max_lanes> sits_{};                                  // has the turn and does not read

  std::mutex mutex_;
  std::condition_variable changed_;
  std::array<int, max_ranks> links_;               // -1: not yet; -2: never
  std::array<std::int64_t, max_ranks> missing_{};  // frames that are still to come
  std::array<bool, max_ranks> gone_{};
  std::set<Key> asked_;                            // answers that are still to come
  int unexposed_;                                  // forgers that we were not told of yet
  int unanswered_ = 0;                             // by us

  // With the turn only, and no lock: so ThreadSanitizer sees whether turns are passed on as they should be.
  struct Sender {
    int rank = -1, life = -1;  // life: of the forger
    std::uint64_t frames = 0;
    bool gone = false;
  };
  struct Stream {
    std::uint64_t seq = 0, next = 0;
  };
  Random random_;
  std::vector<Sender> senders_;  // by link
  std::array<std::array<Stream, max_lanes>, max_ranks> received_{};
  std::deque<Name> owed_;  // answers
};

}  // namespace monarch::stress
