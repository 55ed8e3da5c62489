// Model of the flag protocol of ../group.cpp (operations, doorbell, deaths, time-outs) for the model checker spin.
// README.md explains the abstractions and how to run it. Each rank is one worker, and `pc` is its position. A d_step is
// one atomic step. After each step any rank or watcher may take the next one, and a rank may die.
//
// Parameters (-D):
//   N                  number of ranks
//   K1..K6             kinds of the operations; all ranks call the same sequence
//   DEATHS, TIMEOUTS   largest number of each in a run
//   EXITS              a rank exits cleanly after its last operation or after a failure
//   STAGE              units of the stage
//   QUIET_TAKEN        an idea that the code does not use: publish `taken` without ring()
//   M_...              mutants: wrong on purpose, or the code before a correction
// Without QUIET_TAKEN and M_... the model matches the code.

#ifndef N
#define N 2
#endif
#ifndef DEATHS
#define DEATHS 0
#endif
#ifndef TIMEOUTS
#define TIMEOUTS 0
#endif

#ifndef M_NO_RETRY
#define RETRY  // look once more between finding a failure and acting on it
#endif
#ifndef M_NO_REREAD
#define REREAD  // after seeing that a rank has ended, load its culprit word again
#endif

#ifndef STAGE
#define STAGE 2  // units, a power of two
#endif

// Kinds: 0: in slots; 1..3: large, with this number of chunks of one unit of the stage; + 4: in two shots (all_reduce);
// + 16: chunks of two units; 8: direct reads.
#define none 99
#ifndef K1
#define K1 0
#endif
#ifndef K2
#define K2 none
#endif
#ifndef K3
#define K3 none
#endif
#ifndef K4
#define K4 none
#endif
#ifndef K5
#define K5 none
#endif
#ifndef K6
#define K6 none
#endif
#define late_kind_of(s) ((s) == 4 -> K4 : ((s) == 5 -> K5 : ((s) == 6 -> K6 : none)))
#define kind_of(s) ((s) == 1 -> K1 : ((s) == 2 -> K2 : ((s) == 3 -> K3 : late_kind_of(s))))

#define is_slot (kind == 0)
#define is_direct (kind == 8)
#define two_shot (kind & 4)
#define chunks (kind & 3)
#define stride (kind & 16 -> 2 : 1)

#ifdef M_ONE_SLOT
#define which(s) 0
#else
#define which(s) ((s) & 1)
#endif
// The first unit of a chunk in the stage, and its end, counted in units since the group was made.
#ifdef M_ONE_BUFFER
#define unit(k) 0
#else
#define unit(k) ((base + (k) * stride) & (STAGE - 1))
#endif
#define end_of(k) (base + ((k) + 1) * stride)

// Control blocks: rank i writes only the entries with index i.
byte entered[N], filled[N], reduced[N], taken[N];
byte culprit[N];  // 0: not failed; otherwise kind * 16 + culprit rank + 1, or kind * 16 without a culprit
#define k_dead 1
#define k_left 2
#define k_late 3

// A datum is the number of its operation, or the end of its chunk. During a write it is `writing`.
#define writing 255
byte slots[2 * N];          // data, header and table
byte stage_in[STAGE * N];   // the rank's input
byte stage_sum[STAGE * N];  // the rank's reduced slice; a one-shot operation fills both
byte memory[N];             // the caller's tensors: the operation that may read them, 0 after the return to the caller

// Bit set of what a rank is reading from all peers now.
#define r_units(k) ((stride == 2 -> 3 : 1) << unit(k))
#define r_slot(s) (1 << which(s))
#define r_in(k) (r_units(k) << 2)
#define r_sum(k) (r_units(k) << 6)
#define r_memory 1024
short reading[N];
bit bad[N];  // the rank has read a caller's memory that was not, or no longer, valid

// Doorbells (index: rank). ring_count: it has changed since the rank loaded it. asleep: the rank is in futex wait.
bit sleepers[N], ring_count[N], asleep[N];

// Processes. gone: the true state, 1 dead, 2 exited. known: Peer::state. news: departures() != departures_.
byte gone[N], known[N * N];
bit news[N], over[N];
byte deaths = DEATHS, timeouts = TIMEOUTS;
bit timed_out;  // used by assertions only

#ifdef M_NO_FENCE
// Store buffers: a store that other ranks do not see yet.
byte pending[N], value[N];
#define store(counter, id, v) pending[me] = id; value[me] = v
#define drained (pending[me] == 0)
#else
// A store followed by a fence is one step: the rank takes no other step until the store has left the store buffer.
#define store(counter, id, v) counter[me] = v
#define drained true
#endif

#if N == 2
#define all_others(test) (test(1 - me))
#define some_other(test) (test(1 - me))
#else
#define all_others(test) (test((me + 1) % 3) && test((me + 2) % 3))
#define some_other(test) (test((me + 1) % 3) || test((me + 2) % 3))
#endif
// REREAD: a rank that has ended may have stored its culprit word after find_failure loaded it.
#if defined(REREAD) && !defined(M_BLAME_LAST)
#define unheard (said == 0 && culprit[i] != 0)
#else
#define unheard false
#endif

#if defined(M_NO_RING)
#define hears(r) (sleepers[r] && then != check)
#elif defined(QUIET_TAKEN)
#define hears(r) (sleepers[r] && then != pass_end)
#else
#define hears(r) sleepers[r]
#endif

#define first_other (me == 0 -> 1 : 0)

// all_reach and any_rank_failed are one step each: counters only grow and culprit is written once. So the result of
// their loop is true at one moment: "all reached" at the last load, "not all" at the failing load, "none has failed" at
// the first load.
#define t_entered(r) (entered[r] >= s)
#define t_taken(r) (taken[r] + STAGE >= end_of(f))
#define t_filled(r) (filled[r] >= end_of(r_))
#define t_filled_take(r) (filled[r] >= end_of(t))
#define t_reduced(r) (reduced[r] >= end_of(t))
#define t_taken_all(r) (taken[r] >= end_of(0))
#define t_gave_up(r) (culprit[r] != 0)
#define t_slot(r) (slots[2 * (r) + which(s)] == s)
#define last_unit(k) (unit(k) + stride - 1)
#define holds(data, r, k) (data[STAGE * (r) + unit(k)] == end_of(k) && data[STAGE * (r) + last_unit(k)] == end_of(k))
#define t_in(r) holds(stage_in, r, r_)
#define t_in_take(r) holds(stage_in, r, t)
#define t_sum(r) holds(stage_sum, r, t)
#define put(data, k, v) data[STAGE * me + unit(k)] = v; data[STAGE * me + last_unit(k)] = v
#define t_unread(r) ((reading[r] & what) == 0)
#define t_memory(r) (memory[r] == s || gone[r] != 0)
#define t_gone(r) (gone[r] != 0)

#define i_have_taken (t_taken(me) || (t > 0 && end_of(t - 1) + STAGE >= end_of(f)))
#define can_fill (end_of(f) <= STAGE || (i_have_taken && all_others(t_taken)))
#ifdef M_NO_TAKEN
#undef can_fill
#define can_fill true
#endif

mtype = { look, enter, check, plan, fill, fill_end, reduce, reduce_end, take, take_end, pass_end,
          read_1, read_1_end, read_2, read_2_end, all_taken,
          ring, wake, news_1, news_2, find, said_1, said_2, fail, returned,
          pause, sleep, sleeping, expire, idle, stopped };

// Progress of the operation at the start of a look (`st`).
#define queued 0
#define entering 1
#define moving 2
#define direct_1 3
#define direct_2 4
#define direct_3 5

// The rest of this pass through the loop of move(), starting at `from`. It has only local effects.
inline go_on(from) {
  pc = from;
  do
  :: pc == fill && f < chunks -> break
  :: pc == fill && !(f < chunks) -> pc = reduce
  :: pc == reduce && two_shot && r_ < f -> break
  :: pc == reduce && !(two_shot && r_ < f) -> pc = take
  :: pc == take && t < (two_shot -> r_ : f) -> break
  :: pc == take && !(t < (two_shot -> r_ : f)) -> pc = pass_end
  :: pc == pass_end && again -> again = 0; pc = fill
  :: pc == pass_end && !again && t == chunks -> base = end_of(chunks - 1); end_well(); break
  :: pc == pass_end && !again && t != chunks -> not_yet(); break
  od
}

// A look has ended, and the operation has not.
inline not_yet() {
  if
  :: moved -> awake(); pc = look
  :: else -> pc = (verdict != 0 -> fail : news_1)
  fi
}

inline awake() {
  if
  :: announced -> announced = 0; sleepers[me] = 0
  :: else
  fi;
  moved = 0;
  if
  :: verdict != 0 -> verdict = 0; news[me] = 1  // RETRY: the rank could advance; check again when it cannot
  :: else
  fi
}

inline end_well() {
  assert(!bad[me]);  // the data are correct
  assert(all_others(t_entered));
  what = r_memory;
  assert(!is_direct || all_others(t_unread));
  memory[me] = 0;
  moved = 1;
  awake();
  s++;
  kind = kind_of(s);
  st = queued; f = 0; r_ = 0; t = 0; again = 0;
  if
  :: kind == none -> pc = idle; s = 0; base = 0
  :: else -> pc = look
  fi
}

inline ring_then(next) {
  i = first_other; then = next; pc = ring
}

inline next_peer(next) {
  i++;
  if
  :: i == me -> i++
  :: else
  fi;
  if
  :: i >= N -> i = 0; pc = next
  :: else
  fi
}

inline next_to_ring() {
  next_peer(then);
  if
  :: pc == reduce || pc == take || pc == pass_end -> go_on(pc)
  :: else
  fi
}

proctype worker(byte me) {
  mtype pc = look, then = look;
  byte s = 1, kind = K1, st = queued;
  // base: end of earlier operations' chunks, aligned when this one starts; f, r_, t: chunks filled, reduced, taken
  byte base, f, r_, t;
  bit moved, again, announced, poisoned, lost;
  byte i, said, verdict;
  short what;

  do
  // step(): enter
  :: d_step { pc == look ->
       if
       :: poisoned -> pc = (verdict != 0 -> fail : news_1)
       :: else ->
         if
         :: st == queued ->
           if
           :: some_other(t_gave_up) -> pc = (verdict != 0 -> fail : news_1)
           :: else ->
             what = r_slot(s);
             assert(all_others(t_unread));
             slots[2 * me + which(s)] = writing;
             memory[me] = s;
             pc = enter
           fi
         :: st == entering -> pc = check
         :: st == moving -> go_on(fill)
         :: st == direct_1 -> pc = read_1
         :: st == direct_2 -> pc = read_2
         :: st == direct_3 -> pc = all_taken
         fi
       fi;
       what = 0
     }
  :: d_step { pc == enter && drained ->
       slots[2 * me + which(s)] = s;
       store(entered, 1, s);
       st = entering; moved = 1;
       ring_then(check)
     }
  // step(): compare, plan, take from slots. This is one long read of all slots, which starts when all have entered.
  :: d_step { pc == check ->
       if
       :: all_others(t_entered) ->
         assert(all_others(t_slot));
         reading[me] = r_slot(s);
         moved = 1;
         pc = plan
       :: else -> not_yet()
       fi
     }
  :: d_step { pc == plan ->
       assert(all_others(t_slot));
       reading[me] = 0;
       if
       :: is_slot -> end_well()
       :: is_direct -> st = direct_1; pc = read_1
       :: else -> st = moving; base = (base + stride - 1) / stride * stride; go_on(fill)
       fi;
       what = 0
     }
  // move()
  :: d_step { pc == fill ->
       if
       :: can_fill ->
         what = r_in(f) | (two_shot -> 0 : r_sum(f));
         assert(all_others(t_unread));
         put(stage_in, f, writing);
         if
         :: !two_shot -> put(stage_sum, f, writing)
         :: else
         fi;
         pc = fill_end
       :: else -> go_on(reduce)
       fi;
       what = 0
     }
  :: d_step { pc == fill_end && drained ->
       put(stage_in, f, end_of(f));
       if
       :: !two_shot -> put(stage_sum, f, end_of(f))
       :: else
       fi;
       f++;
       store(filled, 2, end_of(f - 1));
       moved = 1; again = 1;
       ring_then(reduce)
     }
  :: d_step { pc == reduce ->
       if
       :: all_others(t_filled) ->
         assert(all_others(t_in));
         what = r_sum(r_);
         assert(all_others(t_unread));
         reading[me] = r_in(r_);
         put(stage_sum, r_, writing);
         pc = reduce_end
       :: else -> go_on(take)
       fi;
       what = 0
     }
  :: d_step { pc == reduce_end && drained ->
       assert(all_others(t_in));
       reading[me] = 0;
       put(stage_sum, r_, end_of(r_));
       r_++;
       store(reduced, 3, end_of(r_ - 1));
       moved = 1; again = 1;
       ring_then(take)
     }
  :: d_step { pc == take ->
       if
#ifdef M_NO_REDUCED
       :: all_others(t_filled_take) ->
#else
       :: (two_shot -> all_others(t_reduced) : all_others(t_filled_take)) ->
#endif
         assert(all_others(t_sum));
         reading[me] = r_sum(t);
         if
         :: !two_shot -> assert(all_others(t_in_take)); reading[me] = reading[me] | r_in(t)
         :: else
         fi;
         pc = take_end
       :: else -> go_on(pass_end)
       fi;
       what = 0
     }
  :: d_step { pc == take_end && drained ->
       assert(all_others(t_sum));
       assert(two_shot || all_others(t_in_take));
       reading[me] = 0;
       t++;
       store(taken, 4, end_of(t - 1));
       moved = 1; again = 1;
       ring_then(pass_end)
     }

  // Direct reads: reduce this rank's slice from the peers' memory, take the peers' slices, return when all have taken.
  :: d_step { pc == read_1 || (pc == read_2 && all_others(t_reduced)) ->
       reading[me] = r_memory;
       lost = some_other(t_gone);
       if
       :: all_others(t_memory)
       :: else -> bad[me] = 1
       fi;
       pc = (pc == read_1 -> read_1_end : read_2_end)
     }
  :: d_step { pc == read_2 && !all_others(t_reduced) -> not_yet() }
  :: d_step { (pc == read_1_end || pc == read_2_end) && drained && !lost ->  // the read succeeds
       reading[me] = 0;
#ifndef M_NO_TRUST
       if
       :: some_other(t_gave_up) -> poisoned = 1; bad[me] = 0; pc = news_1
       :: else ->
#else
       if
       :: true ->
#endif
         moved = 1;
         if
         :: pc == read_1_end -> st = direct_2; store(reduced, 3, end_of(0)); ring_then(read_2)
         :: else -> st = direct_3; store(taken, 4, end_of(0)); ring_then(all_taken)
         fi
       fi
     }
  :: d_step { (pc == read_1_end || pc == read_2_end) && (lost || some_other(t_gone)) ->  // the read fails: no process
       reading[me] = 0;
       lost = 0; poisoned = 1; bad[me] = 0;
       pc = news_1
     }
  // A failed rank's caller may have freed its memory. Then the read fails, and the reader looks for the first cause.
  :: d_step { (pc == read_1_end || pc == read_2_end) && bad[me] && !lost && drained ->
       reading[me] = 0;
#ifndef M_NO_CAUSE
       if
       :: some_other(t_gave_up) -> poisoned = 1; bad[me] = 0; pc = news_1
       :: else -> assert(false)  // would blame a rank that is alive for unreadable memory
       fi
#else
       assert(false)
#endif
     }
  :: d_step { pc == all_taken ->
       if
#ifdef M_NO_WAIT
       :: true -> base = end_of(0); end_well()
#else
       :: all_others(t_taken_all) -> base = end_of(0); end_well()
#endif
       :: else -> not_yet()
       fi;
       what = 0
     }

  // ring(): the load of `sleepers` and the change of `ring_count` are one step. A step between them could only add a
  // spurious wake-up.
  :: d_step { pc == ring && (drained || !hears(i)) ->  // an atomic read-modify-write drains the store buffer
       if
       :: hears(i) -> ring_count[i] = 1; pc = wake
       :: else -> next_to_ring()
       fi
     }
  :: d_step { pc == wake -> asleep[i] = 0; pc = ring; next_to_ring() }

  // Failures
  :: d_step { pc == news_1 -> pc = (news[me] -> find : news_2) }
  :: d_step { pc == news_2 -> pc = (some_other(t_gave_up) -> find : pause) }
  :: d_step { pc == find -> news[me] = 0; i = first_other; pc = said_1 }
  :: d_step { pc == said_1 ->
       said = culprit[i];
#ifdef M_BLAME_LAST
       said = 0;
#endif
       if
       :: (said & 15) == me + 1 -> verdict = k_late * 16 + me + 1; said = 0; i = 0; pc = look
       :: else -> pc = said_2
       fi;
#ifndef RETRY
       if
       :: verdict != 0 -> pc = fail
       :: else
       fi
#endif
     }
  :: d_step { pc == said_2 ->
       what = ((said & 15) != 0 -> (said & 15) - 1 : i);  // the culprit
       if
       :: known[me * N + what] != 0 && unheard -> pc = said_1
       :: known[me * N + what] != 0 && !unheard -> verdict = known[me * N + what] * 16 + what + 1
       :: known[me * N + what] == 0 ->
         if
         :: said >> 4 == k_late -> verdict = k_late * 16 + what + 1
         :: else -> next_peer(pause); pc = (pc == pause -> pause : said_1)
         fi
       fi;
       what = 0; said = 0;
       if
       :: verdict != 0 -> i = 0;
#ifdef RETRY
         pc = look
#else
         pc = fail
#endif
       :: else
       fi
     }
  :: d_step { pc == fail && drained ->
       what = (verdict & 15) - 1;
       assert(verdict >> 4 != k_dead || gone[what] == 1);
       assert(timed_out || verdict >> 4 == k_dead);  // a rank that exited has done its part and is never blamed
#ifdef REREAD
       // The first cause is reported: a rank that named a culprit is not blamed itself, dead or not.
       assert(timed_out || culprit[what] == 0);
#endif
       store(culprit, 5, verdict);
       verdict = 0; what = 0;
       ring_then(returned)
     }
  :: d_step { pc == returned ->  // the call has returned, and the caller writes to its tensor
       memory[me] = 0;
       if
       :: reading[0] == r_memory -> bad[0] = 1
       :: else
       fi;
       if
       :: reading[1] == r_memory -> bad[1] = 1
       :: else
       fi;
#if N == 3
       if
       :: reading[2] == r_memory -> bad[2] = 1
       :: else
       fi;
#endif
       moved = 1;
       awake();
       s = 0; kind = none; st = 0; base = 0; f = 0; r_ = 0; t = 0; again = 0; poisoned = 0;
       pc = idle
     }

  // wait() and FutexWaiter. Loading `ring_count` and announcing the sleep are one step: a change between the two can
  // only cause a wake-up. A look that finds nothing has no effect, so a look while spinning equals a later look.
  :: d_step { pc == pause && drained ->
       if
       :: announced -> pc = sleep
       :: else ->
         announced = 1; sleepers[me] = 1; ring_count[me] = 0; moved = 0;
#ifdef M_NO_LOOK
         pc = sleep
#else
         pc = look
#endif
       fi
     }
  :: d_step { pc == sleep ->
#ifdef M_HEARD_LATE
       ring_count[me] = 0;
#endif
       if
       :: ring_count[me] -> awake(); pc = look
       :: else -> asleep[me] = 1; pc = sleeping
       fi
     }
  :: d_step { pc == sleeping && !asleep[me] -> awake(); pc = look }
  :: d_step { (pc == sleep || pc == sleeping) && timeouts > 0 ->
       timeouts--; timed_out = 1;
       asleep[me] = 0; awake();
       pc = expire
     }
  :: d_step { pc == expire ->
       verdict = k_late * 16;
       i = 0;
       do
       :: i < N && i != me && st != queued && entered[i] < s -> verdict = k_late * 16 + i + 1; break
       :: i < N && !(i != me && st != queued && entered[i] < s) -> i++
       :: i == N -> break
       od;
       i = 0;
       pc = fail
     }

  // Ends of processes
  :: d_step { deaths > 0 && pc != stopped && drained ->
       deaths--;
       gone[me] = 1; over[me] = 1;
       reading[me] = 0; memory[me] = 0; bad[me] = 0; news[me] = 0; ring_count[me] = 0; asleep[me] = 0;
       pc = stopped;
       s = 0; kind = none; st = 0; base = 0; f = 0; r_ = 0; t = 0; i = 0; said = 0; verdict = 0; what = 0;
       moved = 0; again = 0; announced = 0; poisoned = 0; lost = 0; then = look
     }
#ifdef EXITS
  :: d_step { pc == idle && drained ->
       gone[me] = 2; over[me] = 1;
       news[me] = 0; ring_count[me] = 0; then = look;
       pc = stopped
     }
#else
  :: d_step { pc == idle && drained ->
       over[me] = 1;
       news[me] = 0; ring_count[me] = 0; then = look;
       pc = stopped
     }
#endif
  :: pc == stopped -> break
  od
}

// Host::watch: the stores of state, departures and doorbell are one step. Separate stores would only be seen later.
proctype watcher(byte me) {
end:
  do
  :: d_step { !over[me] && gone[0] != 0 && known[me * N] == 0 && me != 0 ->
       known[me * N] = gone[0]; news[me] = 1; ring_count[me] = 1; asleep[me] = 0 }
  :: d_step { !over[me] && gone[1] != 0 && known[me * N + 1] == 0 && me != 1 ->
       known[me * N + 1] = gone[1]; news[me] = 1; ring_count[me] = 1; asleep[me] = 0 }
#if N == 3
  :: d_step { !over[me] && gone[2] != 0 && known[me * N + 2] == 0 && me != 2 ->
       known[me * N + 2] = gone[2]; news[me] = 1; ring_count[me] = 1; asleep[me] = 0 }
#endif
  od
}

#ifdef M_NO_FENCE
proctype store_buffer(byte me) {
end:
  do
  :: d_step { pending[me] != 0 ->
       if
       :: pending[me] == 1 -> entered[me] = value[me]
       :: pending[me] == 2 -> filled[me] = value[me]
       :: pending[me] == 3 -> reduced[me] = value[me]
       :: pending[me] == 4 -> taken[me] = value[me]
       :: pending[me] == 5 -> culprit[me] = value[me]
       fi;
       pending[me] = 0; value[me] = 0
     }
  od
}
#endif

init {
  atomic {
    byte r;
    for (r : 0 .. N - 1) {
      run worker(r);
#if DEATHS || defined(EXITS)
      run watcher(r);
#endif
#ifdef M_NO_FENCE
      run store_buffer(r);
#endif
    }
  }
}
