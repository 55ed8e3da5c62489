"""Polling of completion queues, by the engine's thread after an event or by a thread that waits for a request.

An event costs a thread switch. So a small request that was posted whole requests no event: it is `quiet`. The thread
that waits for it polls, and requests an event before it sleeps (`listen`). The engine's thread polls for the rest every
SWEEP_INTERVAL_S. connections/connection.py handles completions.
"""

from __future__ import annotations

import logging
import os
import threading
import time
from collections import deque
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from monarch_backend._verbs.errors import SUCCESS

if TYPE_CHECKING:
    from monarch_backend._verbs.open_device import Device
    from monarch_backend._verbs.work_requests import Done, Request

log = logging.getLogger("monarch_backend")

SWEEP_INTERVAL_S = 0.02
"""Seconds between polls of the engine's thread for quiet requests."""

MAX_UNSIGNALED_BYTES = 2 << 20
"""Largest quiet request in bytes: a larger one is seldom posted whole, and can afford a thread switch."""

_POLL_BATCH = 64

SLEEP_COST_S = 50e-6
"""Seconds for sleeping and waking up."""

WORTH, WORTH_YIELDING = 1e-3, 5e-3
"""Seconds from which a transfer is so long that a sleep costs little beside it.

The second value is for a polling thread that yields the processor after each poll.
"""

_POLLS_PER_CLOCK_READ = 8
"""Polls of a waiting thread before it reads the clock. In some guests that takes as long as a small transfer."""

_LOOKS_WITH_GIL = 4
"""Polls before other Python threads get the GIL, for which they would wait 5 ms each time."""


class Completions:
    """Completions of one engine.

    Its lock is held in all methods but `help`, `heard`, `look` and `tell`, which take it.
    """

    def __init__(
        self, lock: Any, wake: Callable[[], None], room: Callable[[], None], is_restless: Callable[[], bool]
    ) -> None:
        """``wake`` wakes the engine's thread.

        ``room`` is called when a queue has room again. ``is_restless`` returns True if completions other than requests'
        need events.
        """
        self._lock, self._wake, self._room, self._is_restless = lock, wake, room, is_restless
        self._quiet: set[Request] = set()
        self._announced = 0  # requests with events
        self.next_sweep: float | None = None
        self._recent = False  # there was a quiet request since the last sweep
        self._looking = False
        self._over: deque[tuple[Done, Any]] = deque()  # callbacks with their arguments, to be called without the lock
        self._telling = threading.local()
        self.devices: list[Device] = []
        # A NIC needs no processor. But on a single processor the kernel may have to do a software NIC's work.
        self.yields = len(os.sched_getaffinity(0)) == 1
        # For the thread that polls for longer than a sleep takes; several would slow each other.
        self._spinning = threading.Lock()

    # ---- requests

    def begins(self, request: Request) -> None:
        """Register a request before it is posted. If this raises, it was not registered."""
        if request.quiet:
            self._quiet.add(request)
            self._recent = True
            if self.next_sweep is None:
                self.next_sweep = time.monotonic() + SWEEP_INTERVAL_S
                self._wake()  # the engine's thread may be in a longer sleep
        else:
            self.arm()
            self._announced += 1

    def ends(self, request: Request, done: Done, outcome: Any) -> None:
        if request.quiet:
            self._quiet.discard(request)
        else:
            self._announced -= 1
        self._over.append((done, outcome))
        if not self._looking:  # else the polling thread calls it
            self._wake()

    def announce(self, request: Request) -> bool:
        """Request events for a quiet request; True if earlier completions must be polled now."""
        if request.finished or not request.quiet:
            return False
        self._quiet.discard(request)
        request.quiet = False
        self._announced += 1
        return self.arm()

    def arm(self) -> bool:
        """Request an event for the next completion; True if a device had none requested."""
        unarmed = [device for device in self.devices if not device.armed]
        for device in unarmed:
            device.nic.arm()
            device.armed = True
        return bool(unarmed)

    # ---- the engine's thread

    def heard(self, device: Device) -> None:
        with self._lock:
            device.nic.take_event()
            device.armed = False
            if self._announced or self._is_restless():
                device.nic.arm()  # before polling, or completions in between would give no event
                device.armed = True
        self.look(device, prompt=True)

    def sweep(self) -> None:
        """Poll for quiet requests, and request events for those that remain."""
        if self.next_sweep is None or time.monotonic() < self.next_sweep:
            return
        try:
            self._look_at_all()
        except BaseException:
            self.next_sweep = None  # else the next request would repeat the failure at once, without end
            raise
        with self._lock:
            late = [self.announce(request) for request in list(self._quiet)]
            self.next_sweep = time.monotonic() + SWEEP_INTERVAL_S if self._recent else None
            self._recent = False
        if any(late):
            self._look_at_all()

    @property
    def has_calls(self) -> bool:
        return bool(self._over)

    # ---- polling

    def look(self, device: Device, prompt: bool = False) -> None:
        while True:
            with self._lock:
                found = self._look(device, prompt)
            self.tell()
            if found < _POLL_BATCH:
                return

    def _look_at_all(self) -> None:
        for device in self.devices:
            self.look(device)

    def _look(self, device: Device, prompt: bool) -> int:
        """Poll once and handle the completions in one step, so that a queue pair gets them in order.

        ``prompt``: this thread polled a moment ago, so completions are new.
        """
        if device not in self.devices:
            return 0
        self._looking, device.looked_promptly = True, prompt
        try:
            found = device.nic.poll(_POLL_BATCH)
            for id_, status, number, vendor in found:
                lane = device.lanes.get(number)
                if lane is None:
                    continue  # closed meanwhile
                if status == SUCCESS:
                    lane.link.completed(lane, id_)
                # Else it belongs to an earlier queue pair of this number.
                elif lane.posted and lane.posted[0].id <= id_:
                    lane.link.broke(lane, id_, status, vendor)
                    # The connection may have a deadline now, and the engine's thread may be in a longer sleep.
                    self._wake()
            if found and device.starved:
                device.starved = False
                self._room()
            return len(found)
        finally:
            self._looking = False

    def help(self, request: Request, seconds: float) -> None:
        """Poll while a thread waits for the request, for at most ``seconds`` and as long as a sleep would cost more."""
        for _ in range(_POLLS_PER_CLOCK_READ if seconds > 0 else 1):
            if self._look_for(request):
                return
        if seconds <= 0:
            return
        began, worth = time.perf_counter(), min(seconds, self._worth_it(request))
        if (
            not self._spin(request, began + min(worth, SLEEP_COST_S))
            and worth > SLEEP_COST_S
            and self._spinning.acquire(False)
        ):
            try:
                self._spin(request, began + worth)
            finally:
                self._spinning.release()

    def _spin(self, request: Request, until: float) -> bool:
        while time.perf_counter() < until:
            os.sched_yield()  # also releases the GIL
            for _ in range(1 if self.yields else _LOOKS_WITH_GIL):
                if self._look_for(request, prompt=True):
                    return True
        return request.finished

    def _worth_it(self, request: Request) -> float:
        """Return the seconds for which polling pays: twice the expected time, or a sleep's cost if that is long."""
        taken = 2 * request.nbytes * max((device.pace for device in self.devices), default=0.0)
        return SLEEP_COST_S + (taken if taken < (WORTH_YIELDING if self.yields else WORTH) else 0.0)

    def _look_for(self, request: Request, prompt: bool = False) -> bool:
        """Poll the request's devices unless another thread does so; True if it has finished.

        ``prompt``: this thread polled a moment ago.
        """
        if not self._lock.acquire(blocking=False):
            time.sleep(0)  # another thread polls or posts, and may need the GIL
            return request.finished
        try:
            for device in self.devices:
                if request.is_for(device):
                    self._look(device, prompt)
        finally:
            self._lock.release()
        self.tell()
        return request.finished

    def listen(self, request: Request) -> None:
        """Request an event, so that a thread can sleep until the request is over."""
        with self._lock:
            late = self.announce(request)
        if not late:
            return
        if getattr(self._telling, "now", False):  # no callback within another, without end
            with self._lock:
                self.next_sweep = 0.0
                self._wake()
        else:
            self._look_at_all()

    def tell(self) -> None:
        """Call the callbacks that are due. The lock must not be held."""
        if not self._over:
            return
        self._telling.now, before = True, getattr(self._telling, "now", False)
        try:
            while self._over:
                try:
                    done, outcome = self._over.popleft()
                except IndexError:  # another thread was faster
                    return
                try:
                    done(outcome)
                except Exception:
                    log.exception("verbs: a callback has failed")
        finally:
            self._telling.now = before
