// A group of ranks on one host and its operations. Each operation is a state machine and nothing here blocks, so one
// thread can drive any number of groups, and a thread can drive the operation for which it waits.
//
// Every rank has a ControlBlock in its own arena. Only the rank writes it, and all ranks read it. It has counters that only
// grow, a header for each of its last two operations, and a slot for each of these with its data if they are small.
// Larger operations use a stage, a ring of buffers for chunks.
//
// Two slots are enough: an operation ends on a rank only when every rank has entered it, and a rank enters an operation
// only after the one before has ended. So when a rank enters operation s+2, every rank has ended s.
//
// The stage is larger than the caches of one core, because writing to a line that another core has just read costs four
// times as much (9 GB/s against 40) as writing to one that has left that core's cache since.
#pragma once

#include <array>
#include <atomic>
#include <cstdint>
#include <deque>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <vector>

#include "shm/peer_table.h"
#include "shm/p2p_channel.h"
#include "shm/operation.h"

namespace monarch {

inline constexpr std::size_t slot_bytes = 16 << 10;
inline constexpr std::size_t largest_stage = 4 << 20;  // a power of two; smaller if the arena is too full
inline constexpr std::size_t smallest_stage = 256 << 10;

inline constexpr std::size_t place_bytes = 248;   // of a line of code, with its terminator
inline constexpr std::size_t reason_bytes = 256;  // of the text why a rank ends, with its terminator

inline constexpr const char* unreadable_text = "has a tensor in memory that other ranks can't read";

struct ControlBlock {
  // One cache line, one writer.
  alignas(64) std::atomic<std::uint64_t> entered;  // operations
  std::atomic<std::uint64_t> filled;               // bytes of the stage since the group was made, modulo its size ...
  std::atomic<std::uint64_t> reduced;              // ... up to which the rank's slice is reduced
  std::atomic<std::uint64_t> taken;                // ... up to which the rank has taken its data
  std::atomic<std::uint32_t> culprit;              // why the group ended for this rank: kind << 24 | (1 + the rank to blame)
  std::uint32_t stage;                             // its bytes; never changes
  std::uint32_t processors;                        // that this rank may run on
  std::uint32_t reads;                             // 1: it can read the memory of all others with process_vm_readv
  std::uint64_t self;                              // where the control block lies in its owner's address space
  alignas(64) std::array<Header, 2> headers;
  // "raised ValueError: text". Written before `culprit`, or before the process ends; empty if nothing failed here.
  std::array<char, reason_bytes> reason;
  // Line of code that called, or waits for, an operation about which the ranks disagree, and its number.
  std::array<char, place_bytes> place;
  std::atomic<std::uint64_t> placed;
  // Followed by, for n ranks: u32 closed_flags[n] (each set by another rank when it closes), u64 table[2][2 * n] (bytes
  // that all_to_all sends and expects), u64 offers[2][n + 1] (offsets of its pieces and of its result), a SendRing and
  // a ReadCount for each rank, two slots, the stage.
};

class Group {
 public:
  // `peers[i]` is null for the own rank; `control_blocks[i]` is the offset of rank i's control block in its arena. `label` starts the
  // lines on stderr that name the algorithm of an operation; no lines if it is empty.
  Group(std::shared_ptr<Host> host, int rank, std::vector<std::shared_ptr<Peer>> peers, std::vector<std::uint64_t> control_blocks,
        std::uint64_t read_from, std::string label);
  ~Group();

  // The control block for a rank of a group that is made later; 0 when the arena is full.
  static std::uint64_t allocate_control_block(Host& host, int size);

  int rank() const { return rank_; }
  int size() const { return size_; }
  // Number of submitted collectives.
  std::uint64_t sequence() const { return submitted_.load(std::memory_order_relaxed); }
  // The thread that waits in a collective, as pthread_self() gives it; 0 if none does.
  std::uint64_t waiting_thread() const { return waiting_thread_.load(std::memory_order_relaxed); }

  void submit(const std::shared_ptr<Operation>& operation);
  // Move what can be moved. Return false if nothing could, or if another thread is doing it. Before a sleep this waits
  // for that thread, which may have checked before the latest change and may be about to stop.
  bool advance(bool before_sleep = false);
  // Until the operation is done; it fails at its deadline. Gives up at `limit` and leaves the operation as it is.
  void wait(Operation& operation, Clock::time_point limit = Clock::time_point::max());
  // The same, but sleeps first and also gives up at a signal.
  void wait_asleep(Operation& operation, Clock::time_point limit);
  // The same for an operation without a deadline, without a call of the clock if it ends soon.
  void wait_briefly(Operation& operation, Clock::duration limit);
  // A few microseconds at most; true if the operation is done.
  bool spin(const Operation& operation);
  // Whether the other ranks need nothing more of this rank once it has entered the operation.
  bool is_small(const Operation& operation) const;
  // Gives an operation of this thread its deadline, and waits.
  void finish_by(Operation& operation, Clock::time_point deadline);
  // Fails the group if the operation is its next and late.
  void expire_if_due(Operation& operation);
  // Why this rank is about to close the group or to end, for the errors of the others. UTF-8; cut to reason_bytes - 1.
  void set_reason(const std::string& text);
  // The line of code that called, or waits for, an operation about which the ranks disagree. UTF-8; cut to
  // place_bytes - 1. `places` has that of each rank, empty where it is not known yet.
  void set_place(std::uint64_t sequence, const std::string& text);
  std::vector<std::string> places(std::uint64_t sequence);
  void close();
  // Record operations under this name from now on. `identity`: the same on all ranks, and of no other group.
  void record_as(const std::string& name, int rank, std::uint64_t identity);

 private:
  void wait(Operation& operation, Clock::time_point limit, FutexWaiter waiter, bool until_signal);
  bool look();
  bool step(Operation& op);
  bool detect_failures();
  bool enter(Operation& op);
  bool compare(Operation& op);
  bool move(Operation& op);
  // The choice (algorithm_selection.cpp).
  void offer(Operation& op);
  Offer offer_in_place(Operation& op);
  bool overlaps(const Operation& op) const;
  void plan(Operation& op);
  bool all_offer_in_place(const Operation& op) const;
  void lay_out(Operation& op, std::uint64_t bytes);
  void explain(const Operation& op);

  // Data through slots and stage (algorithms_staged.cpp).
  void fill(const Operation& op, std::uint64_t chunk, char* to, bool all) const;
  void take(const Operation& op, std::uint64_t chunk, bool in_slots);
  void reduce_slice(const Operation& op, std::uint64_t chunk, char* to);
  void collect(const Operation& op, std::uint64_t chunk);

  // Data straight from where they are (algorithms_cma.cpp).
  bool probe_reads() const;
  bool move_direct(Operation& op);
  bool reduce_direct(const Operation& op, std::uint64_t chunk);
  bool take_direct(const Operation& op, std::uint64_t chunk);
  bool fetch(const Operation& op, int from, int piece, std::uint64_t at, char* to, std::uint64_t bytes);
  const void* source_address(const Operation& op, int from, int piece, std::uint64_t at) const;
  static bool readable(const Span& span);

  void finish(Operation& op);
  static telemetry::OperationRecording::What what_of(const Operation& op);
  void record_begin(Operation& op);
  void record_end(const Operation& op);
  void fail(Failure failure);
  std::optional<Failure> find_failure(const Operation& op);
  std::string reason(int rank) const;
  void expire(const Operation& op);
  int straggler(const Operation& op) const;
  bool any_rank_failed() const;
  bool all_left() const;
  bool all_reach(std::atomic<std::uint64_t> ControlBlock::*counter, std::uint64_t value) const;
  void ring() const;

  char* at(int rank) const { return bases_[rank]; }
  ControlBlock& control_block(int rank) const { return *reinterpret_cast<ControlBlock*>(bases_[rank]); }
  void ring(int rank) const;
  P2pChannels::Layout p2p_layout() const;
  std::atomic<std::uint32_t>* closed_flags(int rank) const;
  std::uint64_t* table(int rank, std::uint64_t sequence) const;
  std::uint64_t* offered(int rank, std::uint64_t sequence) const;
  char* slot(int rank, std::uint64_t sequence) const;
  char* stage(int rank, std::uint64_t position) const;
  static std::string describe(const Operation& op);
  static std::string describe(const Header& header);

  std::shared_ptr<Host> host_;
  int rank_, size_;
  std::vector<std::shared_ptr<Peer>> peers_;
  std::vector<std::uint64_t> control_blocks_;
  std::vector<char*> arenas_, bases_;  // the arenas and the control blocks in them, in our address space
  std::uint64_t stage_;       // bytes that every rank has
  bool oversubscribed_;              // more ranks than processors
  std::vector<const char*> from_;     // scratch: all ranks' buffers, ...
  std::vector<const void*> sources_;  // ... and what a kernel reads
  std::uint64_t read_from_;           // bytes from which process_vm_readv is taken
  std::string label_;
  std::array<std::array<bool, static_cast<std::size_t>(Algorithm::count)>, static_cast<std::size_t>(Collective::count)> explained_{};

  std::mutex mutex_;
  std::deque<std::shared_ptr<Operation>> queue_;
  std::optional<P2pChannels> p2p_;
  std::atomic<std::uint64_t> submitted_{0}, waiting_thread_{0};
  std::uint64_t sequence_ = 0, position_ = 0;
  std::uint32_t departures_ = 0;
  std::optional<Failure> broken_;
  bool closed_ = false;
  telemetry::OperationRecording recording_;
  std::size_t messages_ = 0;  // under way and recorded
};

}  // namespace monarch
