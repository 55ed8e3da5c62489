"""Sending while shared memory is full: a thread that waits for space, and sends that are retried later."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from monarch_backend._transport.local.peer import CreditWaiter, Peer

if TYPE_CHECKING:
    from monarch_backend._transport.local.router import Router


class SharedMemoryWait:
    """Wait of a sender until receivers release shared memory. They release it without a notification: `wait` polls.

    ``whole``: the sender is in the middle of a message and can't be interrupted.
    """

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
        """Retry ``send`` until it returns True.

        Sends on one link keep their order. A link without space does not delay other links.
        """
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
