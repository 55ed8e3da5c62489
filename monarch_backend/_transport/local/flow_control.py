"""Flow control between processes: windows of credits, and waits for credit and for space in shared memory.

A message takes one credit, and one more for each `tuning.BYTES_PER_CREDIT`. The receiver returns them when the message
has left its queue.
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from monarch_backend._core import env
from monarch_backend._transport.local import tuning
from monarch_backend._transport.local.event_loop import release
from monarch_backend._transport.local.frames import Frame, Kind, size_of
from monarch_backend._transport.local.peer import CreditWaiter, Peer, PeerGoneError

if TYPE_CHECKING:
    from monarch_backend._transport.local.router import Router

log = logging.getLogger("monarch_backend")


def places_of(size: int) -> int:
    """Return the credits that a message of ``size`` bytes takes, at its sender and at its receiver."""
    return 1 + size // tuning.BYTES_PER_CREDIT


def credit_of(frame: Frame) -> int:
    """Return the credits that a received message holds until it leaves its queue."""
    return places_of(size_of(frame.body, frame.buffers))


class FlowControl:
    """Credits of the messages to and from each peer. The counts themselves are fields of `Peer`."""

    def __init__(self, router: Router) -> None:
        self._router, self._me = router, router.me

    @staticmethod
    def has_room(peer: Peer) -> bool:
        """Whether a message could be sent at once, even if other threads send some first."""
        return peer.credit > tuning.CREDIT_RESERVE or peer.gone is not None

    def wait_for_credit(self, peer: Peer, kind: int, target: int) -> None:
        """Wait until one more message may be sent to this peer. Raises PeerGoneError if it is gone."""
        if peer.gone is not None:
            raise PeerGoneError.of(peer)
        if peer.credit > 0:
            return
        mib = tuning.CREDIT_WINDOW * tuning.BYTES_PER_CREDIT >> 20
        limit = f"{tuning.CREDIT_WINDOW} messages to {peer}, or {mib} MiB"
        why = f"{limit}, are not processed yet: waiting"
        self._router.on_wait(peer, kind, target, why)
        report: Any = None
        if not self._router.has_notices:
            report = self.report(why, "the receiver is busy, or does not read its messages")
        try:
            while True:
                waiter = self._waiter_of(peer, kind, target)  # first: a change after the checks below wakes this waiter
                if peer.gone is not None:
                    raise PeerGoneError.of(peer)
                if peer.credit > 0:
                    return
                self._router.wait(waiter, None, False)
        finally:
            if report is not None:
                report.cancel()

    def wait_for_all(self, to: Sequence[tuple[Peer, int]], kind: int, target: int) -> None:
        for peer, _ in to:
            if peer.credit <= 0:
                try:
                    self.wait_for_credit(peer, kind, target)
                except PeerGoneError:
                    continue  # supervision reports it

    def lacks_credit(self, to: Sequence[tuple[Peer, int]]) -> bool:
        """Whether another thread has taken the credit meanwhile. Call under the lock."""
        return any(peer.credit <= 0 and peer.gone is None for peer, _ in to)

    def _waiter_of(self, peer: Peer, kind: int, target: int) -> CreditWaiter:
        """Return the one object on which all threads wait for this peer: of several, only the last would be woken.

        It loses its kind and target if they differ between the threads.
        """
        new = CreditWaiter()
        new.receiver, new.kind, new.target = peer, kind, target
        with self._router.lock:
            # No call in between: a signal handler may send to this peer, too.
            credit_waiter = peer.credit_waiter = peer.credit_waiter or new
        if (credit_waiter.kind, credit_waiter.target) != (kind, target):
            credit_waiter.kind = credit_waiter.target = 0
        return credit_waiter

    def report(self, why: str, guess: str) -> Any:
        """Schedule a log line for a wait of MONARCH_WAIT_NOTICE seconds; cancel the result when the wait is over.

        Return None where no line is wanted.
        """
        after = env.get("MONARCH_WAIT_NOTICE")
        if not after:
            return None
        return self._router.later(after, lambda: log.warning("%s since %.0f s; %s", why, after, guess))

    def processed(self, peer: Peer, frame: Frame) -> None:
        """Return the credit of a message that has left its queue."""
        body, buffers = frame.body, frame.buffers
        places = places_of(len(body) if not buffers else size_of(body, buffers))
        if peer is self._me:
            self.refill(peer, places)
            return
        peer.done += places
        # Often enough that nearly the whole window can be used.
        if peer.done - peer.returned >= tuning.CREDIT_WINDOW // 16:
            self.return_credit(peer)

    def return_credit(self, peer: Peer) -> None:
        """Return the credit of processed messages that was kept back."""
        with self._router.lock:
            done = peer.done  # another thread may add to it meanwhile, so it is not set back
            count, peer.returned = done - peer.returned, done
            if count and peer.gone is None and self._router.reach(peer):
                self._router.links.send(peer.link, Kind.CREDIT, count, 0, 0, 0, peer.epoch, b"", b"", None)

    def refill(self, peer: Peer, count: int) -> None:
        with self._router.lock:  # other threads take credit meanwhile
            peer.credit += count
            has_credit = peer.credit > 0
        if has_credit:  # a large message can have taken more credit than there was
            self.release(peer)

    def release(self, peer: Peer) -> None:
        with self._router.lock:
            credit_waiter, peer.credit_waiter = peer.credit_waiter, None
        if credit_waiter is not None:
            credit_waiter.ready = True
            release(credit_waiter)
            self._router.wake()


class SharedMemoryWait:
    """Wait, by polling, until receivers release shared memory. ``whole``: within a message, so not interruptible."""

    def __init__(self, router: Router, to: Sequence[Peer], whole: bool = False) -> None:
        self._router, self._to, self._whole = router, to, whole
        self._report: Any = None

    def wait(self) -> None:
        """Wait for a millisecond. Report the first wait, and log a warning if the waiting takes long."""
        if self._report is None:
            why = self._why()
            self._router.on_full(why)
            self._report = self._router.flow.report(why, "a receiver that does not read delays other receivers")
        self._router.wait(CreditWaiter(), 0.001, self._whole)

    def _why(self) -> str:
        router = self._router
        unread = [str(peer) for link, peer in list(router.by_link.items()) if router.links.unread(link) > 0]
        more = f" and {len(unread) - 3} others" if len(unread) > 3 else ""
        behind = (
            f"messages that {', '.join(unread[:3])}{more} did not read" if unread else "messages that receivers keep"
        )
        to = str(self._to[0]) if len(self._to) == 1 else f"{len(self._to)} processes"
        return f"no room in shared memory for a message to {to}: {behind} fill it: waiting"

    def close(self) -> None:
        if self._report is not None:
            self._report.cancel()


class RetryQueue:
    """Sends that found no space in shared memory and must not wait."""

    def __init__(self, router: Router) -> None:
        self._router = router
        self.waiting: deque[tuple[int, Callable[[], bool]]] = deque()  # link, send

    def add(self, send: Callable[[], bool], link: int = -1) -> None:
        """Retry ``send`` until it returns True, in order for each link. A full link does not delay the others."""
        with self._router.lock:
            self.waiting.append((link, send))
            if len(self.waiting) == 1:
                self._router.later(0.001, self._retry)

    def _retry(self) -> None:
        with self._router.lock:
            self.run()
            if self.waiting:
                self._router.later(0.001, self._retry)

    def run(self) -> None:
        with self._router.lock:
            full: set[int] = set()
            for _ in range(len(self.waiting)):
                link, send = self.waiting.popleft()
                if link in full or not send():
                    self.waiting.append((link, send))
                    if link >= 0:
                        full.add(link)
