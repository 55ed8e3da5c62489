"""NICs of this process for frames between hosts: queue pairs to other gateways, registrations, and reads.

The work runs on a thread of its own, because opening devices, registering memory and importing are slow. The engine is
the process's shared one (_verbs/shared_engine.py), which is imported at its first use. rdma_send.py has the protocol
between the gateways.
"""

from __future__ import annotations

import logging
import os
import queue
import threading
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from monarch_backend._transport.network.rdma_frame_header import Part
from monarch_backend._verbs import eligibility

if TYPE_CHECKING:
    from monarch_backend._verbs import Engine, Region

log = logging.getLogger("monarch_backend")

Key = tuple[int, int]
"""Address and bytes of registered memory."""

Done = Callable[[BaseException | None], None]


@dataclass(frozen=True)
class PeerLink:
    """Peer of the engine: a session of a gateway here with one on another host. Messages use ``name``."""

    session: bytes
    name: str = field(default="", compare=False)

    def __str__(self) -> str:
        return self.name


class UnusableError(Exception):
    """This process can't use NICs; the log and `monarch-backend doctor` say why."""


@dataclass
class _Exposed:
    region: Region
    users: int = 0


class Nics:
    """NICs of one gateway. Methods other than `start`, `do` and `close` are called on its thread.

    ``dial(link)`` is called on another thread when a read needs a queue pair that broke. It exchanges an offer and an
    answer with the peer, or gives up.
    """

    def __init__(self, dial: Callable[[PeerLink], None]) -> None:
        class Link(PeerLink):
            """Link of this gateway: the shared engine knows its users by the types of their peers."""

        self.link_type = Link
        self._dial = dial
        self._queue: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None
        self._engine: Engine | None = None
        self._exposed: dict[Key, _Exposed] = {}
        self._links: set[PeerLink] = set()
        self._closed = False
        self._starting = threading.Lock()

    def start(self) -> bool:
        """Start the thread. Return False if that fails, or after `close`."""
        with self._starting:  # sending and receiving threads may both be the first
            if self._thread is None and not self._closed:
                thread = threading.Thread(target=self._run, name="monarch-lending", daemon=True)
                try:
                    thread.start()
                except RuntimeError as error:
                    log.warning("frames between hosts use TCP only: pid %d starts no thread: %s", os.getpid(), error)
                    return False
                self._thread = thread
            return self._thread is not None

    def do(self, call: Callable[[], None]) -> None:
        if self._thread is not None:
            self._queue.put(call)

    def close(self) -> None:
        with self._starting:
            self._closed = True
            thread, self._thread = self._thread, None
        if thread is not None:
            self._queue.put(None)
            thread.join()
        if self._engine is None:
            return
        for link in list(self._links):
            self.forget(link, "this gateway has ended")
        for exposed in self._exposed.values():
            self._engine.release(exposed.region)
        self._exposed.clear()
        self._engine = None
        from monarch_backend._verbs import shared_engine

        shared_engine.give_back(self.link_type)

    def _run(self) -> None:
        while (call := self._queue.get()) is not None:
            try:
                call()
            except Exception:
                log.exception("an operation of NICs between hosts failed unexpectedly; the thread continues")

    def _started(self) -> Engine:
        if self._engine is None:
            if not eligibility.usable():
                raise UnusableError("this process may use no NIC")
            from monarch_backend._verbs import shared_engine

            self._engine = shared_engine.borrow(self.link_type, self._dial)
        return self._engine

    # ---- connecting

    def offer(self, link: PeerLink) -> bytes:
        """Return an offer for the peer's `accept`, in order to read from the peer. Raises VerbsError and others."""
        self._links.add(link)
        return self._started().offer(link)

    def renew(self, link: PeerLink) -> None:
        """Give up a half-open connection: messages about it may be lost."""
        if self._engine is not None and not self._engine.connected(link):
            self._engine.give_up(link, f"the connection to {link} broke")

    def accept(self, link: PeerLink, offer: bytes) -> bytes:
        self._links.add(link)
        return self._started().accept(link, offer)

    def connect(self, link: PeerLink, answer: bytes) -> None:
        self._started().connect(link, answer)

    def forget(self, link: PeerLink, why: str) -> None:
        """Fail the reads from and by a peer whose session is over."""
        self._links.discard(link)
        if self._engine is not None:
            self._engine.peer_gone(link, why)

    def give_up(self, link: PeerLink, why: str) -> None:
        if self._engine is not None:
            self._engine.give_up(link, why)

    # ---- memory for others

    def expose(self, rdma_parts: dict[int, memoryview]) -> tuple[list[Part], list[Key]]:
        """Register parts by offset until their keys are released, all or none; for several hosts once."""
        parts: list[Part] = []
        keys: list[Key] = []
        try:
            for offset, view in rdma_parts.items():
                region, key = self._exposed_once(view)
                keys.append(key)
                parts.append(Part(offset, view.nbytes, region.to_bytes()))
        except BaseException:
            self.release(keys)
            raise
        return parts, keys

    def _exposed_once(self, view: memoryview) -> tuple[Region, Key]:
        from monarch_backend._verbs.registrations.cache import allocation_of

        key = allocation_of(view).address, view.nbytes
        exposed = self._exposed.get(key)
        if exposed is None:
            made = self._started().expose(*key, view, writable=False)
            exposed = self._exposed[key] = _Exposed(made)
        exposed.users += 1
        return exposed.region, key

    def release(self, keys: Iterable[Key]) -> None:
        for key in keys:
            exposed = self._exposed.get(key)
            if exposed is None:  # this gateway was closed meanwhile
                continue
            exposed.users -= 1
            if not exposed.users:
                del self._exposed[key]
                assert self._engine is not None
                self._engine.release(exposed.region)

    # ---- others' memory

    def read(self, link: PeerLink, parts: Sequence[Part], body: memoryview, whole: memoryview, done: Done) -> None:
        """Read parts into ``body``, in ``whole``. Any thread calls ``done(error)`` once, after the last write."""
        from monarch_backend._verbs import Region
        from monarch_backend._verbs.registrations.cache import allocation_of

        together = _Together(len(parts), done)
        for index, part in enumerate(parts):
            try:
                address = allocation_of(body).address + part.offset
                segments = [(0, address, part.nbytes)]
                region = Region.from_bytes(part.region)
                self._started().transfer(link, "read", region, segments, whole, together.one)
            except Exception as error:  # of any kind: the peer then sends the frame over TCP
                for _ in parts[index:]:
                    together.one(error)
                return


class _Together:
    """Calls ``done`` after the last of several reads, which end on several threads."""

    def __init__(self, count: int, done: Done) -> None:
        self._left, self._done = count, done
        self._error: BaseException | None = None
        self._lock = threading.Lock()

    def one(self, error: BaseException | None) -> None:
        with self._lock:
            self._left -= 1
            self._error = self._error or error
            last = not self._left
        if last:
            self._done(self._error)
