"""Progress loop of a process: reads frames, runs timers, and lets threads wait.

There is one reading thread at a time, which reads for all threads. A thread that waits takes this part if it is free,
so a reply needs no switch of threads (csrc/channel/mailbox.h). A standby thread reads while no other thread waits.
"""

from __future__ import annotations

import heapq
import itertools
import logging
import threading
from collections.abc import Callable
from typing import Any, Protocol

from monarch_backend._core.limits import start_thread
from monarch_backend._transport.local.links import Clock, RealClock

log = logging.getLogger("monarch_backend")


class Waitable(Protocol):
    ready: bool
    wait_lock: threading.Lock | None  # acquired while a thread waits and another one reads; released when ready


class Timer:
    __slots__ = ("_call", "_timers")

    def __init__(self, call: Callable[[], None], timers: Timers | None = None) -> None:
        self._call: Callable[[], None] | None = call
        self._timers = timers

    def cancel(self) -> None:
        """Cancel the call; a call that has begun is not stopped."""
        if self._call is not None and self._timers is not None:
            self._timers.cancelled += 1
        self._call = None

    def _fire(self) -> None:
        call, self._call = self._call, None
        if call is not None:
            call()


class Timers:
    """Queue of scheduled calls, in the order of their times. Without threads of its own."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._heap: list[tuple[float, int, Timer]] = []
        self._count = itertools.count()
        self.cancelled = 0  # approximately, of the entries in the heap

    def add(self, seconds: float, call: Callable[[], None]) -> Timer:
        """Schedule a call in ``seconds``, on the thread that calls `fire`."""
        timer = Timer(call, self)
        heapq.heappush(self._heap, (self._clock.now() + seconds, next(self._count), timer))
        return timer

    def next(self) -> float | None:
        """Return the seconds until the next call, 0.0 if it is due; None if there is none."""
        heap = self._heap
        while heap and heap[0][2]._call is None:
            heapq.heappop(heap)
        return max(0.0, heap[0][0] - self._clock.now()) if heap else None

    def fire(self) -> None:
        if self.cancelled > 1000 and self.cancelled > len(self._heap) // 2:
            self._tidy()
        now = self._clock.now()
        while self._heap and self._heap[0][0] <= now:
            try:
                heapq.heappop(self._heap)[2]._fire()
            except Exception:
                log.exception("a scheduled call failed; the program continues without it")

    def _tidy(self) -> None:
        """Remove cancelled entries. One thread at a time removes entries, while others may add some."""
        self.cancelled, kept = 0, []
        while self._heap:
            entry = heapq.heappop(self._heap)
            if entry[2]._call is not None:
                kept.append(entry)
        for entry in kept:
            heapq.heappush(self._heap, entry)


class ProgressLoop:
    """Reads a mailbox on a waiting or the standby thread: one at a time calls ``handle``, which must not block."""

    def __init__(self, mailbox: Any, handle: Callable[[list[Any]], None]) -> None:
        self._mailbox = mailbox
        self._handle = handle
        self._clock = RealClock()
        self._timers = Timers(self._clock)
        self._reader: int | None = None  # the thread that reads
        self._closed = False
        self._thread = threading.Thread(target=self._run_standby, name="monarch-standby", daemon=True)

    def start(self) -> None:
        start_thread(self._thread)

    def close(self) -> None:
        """Stop the standby thread. No thread may wait any more."""
        self._closed = True
        self._mailbox.close()
        if self._thread.is_alive() and self._thread is not threading.current_thread():
            self._thread.join(timeout=2.0)

    def later(self, seconds: float, call: Callable[[], None]) -> Timer:
        """Schedule a call in ``seconds`` on the reading thread; it must not block."""
        timer = self._timers.add(seconds, call)
        if self._reader != threading.get_ident():
            self._mailbox.wake()  # the reading thread may sleep longer than that
        return timer

    def wake(self) -> None:
        self._mailbox.wake()

    @property
    def reading(self) -> bool:
        """Whether this is the reading thread, which must not wait."""
        return self._reader == threading.get_ident()

    def wait(self, what: Waitable, seconds: float | None = None, given_up: Callable[[], bool] | None = None) -> bool:
        """Wait until ``what.ready``; False after ``seconds``, or if ``given_up()``: then call `release` and `wake`."""
        if self._reader == threading.get_ident():
            raise RuntimeError(
                "a callback runs on the thread that reads messages, and can't wait for one: use another thread"
            )
        deadline = None if seconds is None else self._clock.now() + seconds
        while not what.ready and not (given_up is not None and given_up()):
            if self._mailbox.acquire_turn():
                self._reader = threading.get_ident()
                try:
                    in_time = self._read_until(what, deadline, given_up)
                finally:
                    self._reader = None
                    self._mailbox.release_turn()
                if not in_time:
                    return what.ready
            elif not self._follow(what, deadline, given_up):
                return what.ready
        return what.ready

    def _read_until(self, what: Waitable, deadline: float | None, given_up: Callable[[], bool] | None) -> bool:
        receive, handle, timers = self._mailbox.receive, self._handle, self._timers
        looked = False
        while not what.ready and not (given_up is not None and given_up()):
            left = None
            if deadline is not None:
                left = deadline - self._clock.now()
                if left <= 0 and looked:
                    return False
                left = max(0.0, left)
            looked = True
            if timers._heap:
                due = timers.next()
                left = due if left is None else left if due is None else min(left, due)
            events = receive(left)
            if events:
                handle(events)
            if timers._heap:
                timers.fire()
        return True

    def _follow(self, what: Waitable, deadline: float | None, given_up: Callable[[], bool] | None) -> bool:
        with _gates:
            wait_lock = what.wait_lock
            if wait_lock is None or not wait_lock.locked():
                wait_lock = threading.Lock()
                wait_lock.acquire()
                what.wait_lock = wait_lock
        if what.ready or (given_up is not None and given_up()):  # a release before the lock was there is lost
            return True
        left = -1.0 if deadline is None else deadline - self._clock.now()
        if deadline is not None and left <= 0:
            return False
        if wait_lock.acquire(timeout=left):
            _release_lock(wait_lock)  # other threads may wait for the same
            return True
        return False

    def _run_standby(self) -> None:
        mailbox = self._mailbox
        while mailbox.acquire_turn_as_standby():
            self._reader = threading.get_ident()
            try:
                while not self._closed:
                    events = mailbox.receive(self._timers.next(), True)
                    if events:
                        self._handle(events)
                    self._timers.fire()
                    if mailbox.is_turn_wanted():
                        break
            except BaseException:
                log.exception("a message handler failed; the program continues without that message")
            finally:
                self._reader = None
                mailbox.release_turn()


_gates = threading.Lock()


def release(what: Waitable) -> None:
    """Wake the threads that wait for it. Set ``ready`` first."""
    wait_lock = what.wait_lock
    if wait_lock is not None and wait_lock.locked():
        _release_lock(wait_lock)


def _release_lock(wait_lock: threading.Lock) -> None:
    try:
        wait_lock.release()
    except RuntimeError:  # another thread has released it meanwhile
        return
