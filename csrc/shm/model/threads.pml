// Model of two threads of one process that wait for two successive operations of one group (../group.cpp: wait,
// advance, the mutex; ../futex_waiter.h: FutexWaiter::wait). A peer enters each operation and rings. The thread that
// has the mutex advances the operations of both threads. A thread takes the mutex with try_lock. Only the look between
// announcing the sleep and sleeping waits for it. M_TRY_LOOK is the code before this correction.

byte entered;        // operations that the peer has entered
byte front = 1;      // first operation of the queue; earlier ones are done
bit locked;
byte sleepers;
bit ring_count[2], asleep[2];  // one doorbell, two sleepers; ring_count: it has changed since this thread loaded it

mtype = { look, try, step_1, unlock, finish_ring, futex, sleeping, idle };

#define done (front > me + 1)

proctype thread(byte me) {
  mtype pc = look;
  bit announced, moved;
  do
  :: d_step { pc == look ->
       if
       :: done -> pc = idle; sleepers = sleepers - announced
       :: else -> pc = try
       fi
     }
  :: d_step { pc == try && !locked -> locked = 1; moved = 0; pc = step_1 }
#ifndef M_TRY_LOOK
  :: d_step { pc == try && locked && !announced -> pc = futex }
#else
  :: d_step { pc == try && locked -> pc = futex }
#endif
  :: d_step { pc == step_1 ->
       if
       :: front <= 2 && entered >= front -> front++; moved = 1; pc = finish_ring
       :: else -> pc = unlock
       fi
     }
  :: d_step { pc == finish_ring ->  // the process rings its own doorbell
       if
       :: sleepers != 0 -> ring_count[0] = 1; ring_count[1] = 1; asleep[0] = 0; asleep[1] = 0
       :: else
       fi;
       pc = step_1
     }
  :: d_step { pc == unlock ->
       locked = 0;
       if
       :: moved -> moved = 0; sleepers = sleepers - announced; announced = 0; pc = look
       :: else -> pc = futex
       fi
     }
  :: d_step { pc == futex && !announced -> announced = 1; sleepers++; ring_count[me] = 0; pc = look }
  :: d_step { pc == futex && announced ->
       if
       :: ring_count[me] -> announced = 0; sleepers--; pc = look
       :: else -> asleep[me] = 1; pc = sleeping
       fi
     }
  :: d_step { pc == sleeping && !asleep[me] -> announced = 0; sleepers--; pc = look }
  :: pc == idle -> break
  od
}

proctype peer() {
  do
  :: entered < 2 ->
       entered++;
       if
       :: d_step { sleepers != 0 -> ring_count[0] = 1; ring_count[1] = 1 };
          d_step { asleep[0] = 0; asleep[1] = 0 }
       :: sleepers == 0 -> skip
       fi
  :: entered == 2 -> break
  od
}

init {
  atomic {
    run thread(0);
    run thread(1);
    run peer()
  }
}
