// One rank of the stress driver: a Host, a Mailbox, callers that send messages made from the seed, and the readers. A
// waiting caller reads for all; otherwise the standby thread reads. Every frame is compared with what its sender must
// have sent. Every stream of frames must be complete, in order and without duplicates.
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
class RetainedFrames {
 public:
  // `counting`: threads that are about to count what they retain, which an exit may interrupt. `doomed`: the rank that
  // will be killed, or -1. Its first block stays here until then, so that something is retained beyond each exit.
  RetainedFrames(std::uint64_t seed, std::atomic<int>& counting, int doomed) : random_(seed), counting_(counting), doomed_(doomed) {}
  void put(Message message, Event event);
  void release_after_exit();
  void clear(int n = 1 << 30);  // releases up to n, in random order
  bool retain(Block& block);
  int size();
  bool has(int from);

 private:
  std::mutex mutex_;
  Random random_;
  std::atomic<int>& counting_;
  int doomed_;
  std::deque<std::pair<Message, Event>> frames_, until_exit_;
};

class Endpoint {
 public:
  Endpoint(Fixture& fixture, const Round& round, int rank);  // returns when all ranks have connected
  ~Endpoint();

  void run();

 private:
  using Key = std::tuple<int, int, std::uint64_t>;  // of a reply: sender, caller, message number

  // For callers.
  void connect();
  int link_to(int rank, int caller);  // -1: the rank has ended
  void run_caller(int caller);
  bool continues(int caller, int number);  // runs the planned end of this rank; false: the caller ends
  void send(int caller, const Message& message, Random& random);
  void await_replies(int caller, const Message& message, Random& random);
  void run_local_task(int caller);
  void take_turn(int caller);
  void give_up_turn(int caller);
  void let_others_run(int caller);
  void wait(int caller, const std::function<bool()>& ready);  // calls `ready` under mutex_
  void finish();
  void await_flushed();
  void check_dropped();
  void check_memory();
  void leave();

  // For the thread with the turn.
  bool acquire_turn();
  void release_turn();
  bool read(bool standby, Clock::duration limit);  // false if nothing came
  void acquire_turn_as_standby();
  void handle(Event& event);
  void handle_connected(const Event& event);
  void handle_disconnected(const Event& event);
  void handle_frame(Event& event);
  void handle_malicious(Event& event, int incarnation);
  void retain_some(Message message, Event& event);
  void send_replies();
  void fill_ring(std::uint32_t link);

  bool send_message(const Message& message, const std::vector<Receiver>& to, bool exact);
  void publish_written(int caller, int to);
  bool is_complete() const;  // under mutex_
  void count(Seen what) { fixture_.coverage->count(what); }
  [[noreturn]] void fail(const std::string& what) const;

  Fixture& fixture_;
  const Round& round_;
  int rank_;
  std::shared_ptr<Host> host_;
  std::unique_ptr<Mailbox> mailbox_;
  RetainedFrames retained_;
  std::thread standby_;
  std::atomic<int> readers_{0};
  std::atomic<int> rings_{0};  // of links that are not gone
  std::atomic<bool> closing_{false};
  std::atomic<bool> over_{false};     // the others may go now
  std::atomic<bool> dropped_{false};  // our links
  std::array<std::array<std::uint64_t, max_ranks>, max_callers> sent_{};  // each caller's own; for replies: with the turn
  std::array<bool, max_callers> has_turn_{};                                  // has the turn and does not read

  std::mutex mutex_;
  std::condition_variable changed_;
  std::array<int, max_ranks> links_;               // -1: not yet; -2: never
  std::array<std::int64_t, max_ranks> missing_{};  // frames that are still to come
  std::array<bool, max_ranks> disconnected_{};
  std::set<Key> awaited_replies_;                            // answers that are still to come
  int undetected_;                                  // malicious peers that are not reported yet
  int unanswered_ = 0;                             // by us

  // With the turn and without a lock, so that ThreadSanitizer checks that turns are handed over correctly.
  struct Sender {
    int rank = -1, incarnation = -1;  // incarnation: of the malicious peer
    std::uint64_t frames = 0;
    bool disconnected = false;
  };
  struct Stream {
    std::uint64_t seq = 0, next = 0;
  };
  Random random_;
  std::vector<Sender> senders_;  // by link
  std::array<std::array<Stream, max_callers>, max_ranks> received_{};
  std::deque<MessageId> pending_replies_;  // answers
};

}  // namespace monarch::stress
