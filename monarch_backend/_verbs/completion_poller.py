"""Who looks at completion queues: the engine's thread when their channels tell it, or a thread that waits itself.

An announcement costs a change of threads, so a small request that was posted whole is not announced: it is `quiet`.
Whoever waits for it looks, and has all others announced before he sleeps (`listen`). What nobody has looked for within
a SWEEP the engine's thread finds. What is done about a completion is the links' business (connection.py).
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
"""Seconds after which the engine's thread looks for what was not announced."""

MAX_UNSIGNALED_BYTES = 2 << 20
"""Bytes of a request that may be quiet: a larger one is seldom posted whole, and can afford a change of threads."""

_POLL_BATCH = 64

SLEEP_COST_S = 50e-6
"""Seconds that a sleep and its end take."""

WORTH, WORTH_YIELDING = 1e-3, 5e-3
"""Seconds of a transfer that takes so long that a sleep is little beside it; the second where whoever looks has the
kernel give the processor to others each time.
"""

_POLLS_PER_CLOCK_READ = 8
"""Of one who waits, before he looks at the clock: in some guests that takes as long as a small transfer."""

_LOOKS_WITH_GIL = 4
"""Before other threads of Python may go on: they would wait for the GIL for 5 ms each time."""


class Completions:
    """Of one engine. Under its lock, but for `help`, `heard`, `look` and `tell`, which take it."""

    def __init__(
        self, lock: Any, nudge: Callable[[], None], room: Callable[[], None], is_restless: Callable[[], bool]
    ) -> None:
        """``nudge``: have the engine's thread come. ``room``: there is some in a queue again. ``is_restless``: there is
        something to be announced that is no request.
        """
        self._lock, self._nudge, self._room, self._is_restless = lock, nudge, room, is_restless
        self._quiet: set[Request] = set()
        self._announced = 0  # requests that are not quiet
        self._next_sweep: float | None = None
        self._recent = False  # there was a quiet one since the last sweep
        self._looking = False
        self._over: deque[tuple[Done, Any]] = deque()  # callbacks and what they are given, for whoever holds no lock
        self._telling = threading.local()
        self.devices: list[Device] = []
        # A NIC needs nobody's processor; but where there is only one, the kernel may have to do a NIC's work on it.
        self.yields = len(os.sched_getaffinity(0)) == 1
        self._spinning = threading.Lock()  # of who looks for longer than a sleep takes: several would be in the way

    # ---- requests

    def begins(self, request: Request) -> None:
        """Before it is posted. If it raises, it has not begun."""
        if request.quiet:
            self._quiet.add(request)
            self._recent = True
            if self._next_sweep is None:
                self._next_sweep = time.monotonic() + SWEEP_INTERVAL_S
                self._nudge()  # the engine's thread may sleep for longer
        else:
            self.arm()
            self._announced += 1

    def ends(self, request: Request, done: Done, outcome: Any) -> None:
        """``done``: what is to be called then."""
        if request.quiet:
            self._quiet.discard(request)
        else:
            self._announced -= 1
        self._over.append((done, outcome))
        if not self._looking:  # else whoever looks will tell
            self._nudge()

    def announce(self, request: Request) -> bool:
        """It is not quiet any more; True if somebody has to `look` now, for what has come before."""
        if request.finished or not request.quiet:
            return False
        self._quiet.discard(request)
        request.quiet = False
        self._announced += 1
        return self.arm()

    def arm(self) -> bool:
        """The next completion is announced; True if it would not have been."""
        deaf = [device for device in self.devices if not device.armed]
        for device in deaf:
            device.nic.arm()
            device.armed = True
        return bool(deaf)

    # ---- the engine's thread

    def heard(self, device: Device) -> None:
        """Its channel has told of something."""
        with self._lock:
            device.nic.take_event()
            device.armed = False
            if self._announced or self._is_restless():
                device.nic.arm()  # before looking, or what comes in between would go unheard
                device.armed = True
        self.look(device, prompt=True)

    def deadline(self) -> float | None:
        """When to sweep."""
        return self._next_sweep

    def sweep(self) -> None:
        """Find what nobody has looked for, and have announced what is left of it."""
        if self._next_sweep is None or time.monotonic() < self._next_sweep:
            return
        try:
            self._look_at_all()
        except BaseException:
            self._next_sweep = None  # or it would be tried again at once, and for ever: with the next request
            raise
        with self._lock:
            late = [self.announce(request) for request in list(self._quiet)]
            self._next_sweep = time.monotonic() + SWEEP_INTERVAL_S if self._recent else None
            self._recent = False
        if any(late):
            self._look_at_all()

    @property
    def has_calls(self) -> bool:
        """Somebody has to `tell`."""
        return bool(self._over)

    # ---- looking

    def look(self, device: Device, prompt: bool = False) -> None:
        """Until there is nothing more."""
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
        """Polling and what it leads to are one step: a lane must hear of its requests in their order. ``prompt``: what
        is found has come a moment ago.
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
                elif lane.posted and lane.posted[0].id <= id_:  # else it is of a lane that had this number before
                    lane.link.broke(lane, id_, status, vendor)
                    self._nudge()  # the link may have a deadline now, and the engine's thread sleep for longer
            if found and device.starved:
                device.starved = False
                self._room()
            return len(found)
        finally:
            self._looking = False

    def help(self, request: Request, seconds: float) -> None:
        """On a thread that waits for it: look, for so long at most, and not longer than is worth it."""
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
        """Look until then; True if it has finished."""
        while time.perf_counter() < until:
            os.sched_yield()  # lets go of the GIL, too
            for _ in range(1 if self.yields else _LOOKS_WITH_GIL):
                if self._look_for(request, prompt=True):
                    return True
        return request.finished

    def _worth_it(self, request: Request) -> float:
        """Seconds. Twice what the devices have shown that it takes; but no more than a sleep where that is long."""
        taken = 2 * request.nbytes * max((device.pace for device in self.devices), default=0.0)
        return SLEEP_COST_S + (taken if taken < (WORTH_YIELDING if self.yields else WORTH) else 0.0)

    def _look_for(self, request: Request, prompt: bool = False) -> bool:
        """At the devices that do it, if nobody else is at them; True if it has finished. ``prompt``: the last look of
        this thread was a moment ago.
        """
        if not self._lock.acquire(blocking=False):
            time.sleep(0)  # somebody looks, or posts, and may need the GIL for it
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
        """Before somebody sleeps until it is over."""
        with self._lock:
            late = self.announce(request)
        if not late:
            return
        if getattr(self._telling, "now", False):  # a callback has begun it: not one within another, without end
            with self._lock:
                self._next_sweep = 0.0
                self._nudge()
        else:
            self._look_at_all()

    def tell(self) -> None:
        """Call what is to be called. Without the lock."""
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
