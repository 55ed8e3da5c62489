"""This process's NICs, for frames between hosts: connections to other gateways, parts of frames that these may read,
and the reading. All of it on a thread of its own, since opening, registering and importing take their time.

The engine is the process's one (_verbs/shared_engine.py), which is imported when there is something to do. What the
gateways say to each other is rdma_send.py's.
"""

from __future__ import annotations

import logging
import os
import queue
import threading
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from monarch_backend._core import fork
from monarch_backend._transport.network.rdma_frame_header import Part
from monarch_backend._verbs import eligibility

if TYPE_CHECKING:
    from monarch_backend._verbs import Engine, Region

log = logging.getLogger("monarch_backend")

Key = tuple[int, int]
"""Address and bytes: whoever holds memory holds both."""

Done = Callable[[BaseException | None], None]


@dataclass(frozen=True)
class PeerLink:
    """A gateway on another host, as the engine knows it: a session of one of this process's; ``name`` is for people."""

    who: bytes
    session: bytes
    name: str = field(default="", compare=False)

    def __str__(self) -> str:
        return self.name


class UnusableError(Exception):
    """No NIC here may carry anything; the log says why, or `monarch-backend doctor`."""


@dataclass
class _Exposed:
    region: Region
    users: int = 0


class Nics:
    """Of one gateway. Methods are called on its thread, but for `start`, `do` and `close`.

    ``dial(gate)`` is called, on another thread, when something is to be read of a gate to which a connection broke: it
    has an offer taken there and the answer back, or gives up. ``who`` is the gateway's own token.
    """

    def __init__(self, who: bytes, dial: Callable[[PeerLink], None]) -> None:
        self._who, self._dial = who, dial
        self._queue: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None
        self._engine: Engine | None = None
        self._exposed: dict[Key, _Exposed] = {}
        self._gates: set[PeerLink] = set()
        self._closed = False
        self._starting = threading.Lock()

    def start(self) -> bool:
        """From now on there is a thread; False if there is none to be had."""
        with self._starting:  # whoever sends, and whoever hears, may be the first
            if self._thread is None and not self._closed:
                thread = threading.Thread(target=self._run, name="monarch-lending", daemon=True)
                try:
                    thread.start()
                except RuntimeError as error:
                    log.warning("frames between hosts do without NICs: pid %d starts no thread: %s", os.getpid(), error)
                    return False
                self._thread = thread
            return self._thread is not None

    def do(self, call: Callable[[], None]) -> None:
        """Have it called on the thread, if there is one."""
        if self._thread is not None:
            self._queue.put(call)

    def close(self) -> None:
        """Nobody reads from here any more; nothing is read."""
        with self._starting:
            self._closed = True
            thread, self._thread = self._thread, None
        if thread is not None:
            self._queue.put(None)
            thread.join()
        if self._engine is None:
            return
        for gate in list(self._gates):
            self.forget(gate, "this gateway has ended")
        for exposed in self._exposed.values():
            self._engine.release(exposed.region)
        self._exposed.clear()
        self._engine = None
        _leave(self._who)

    def _run(self) -> None:
        while (call := self._queue.get()) is not None:
            try:
                call()
            except Exception:
                log.exception("something about NICs between hosts failed in an unknown way; the rest goes on")

    def _started(self) -> Engine:
        if self._engine is None:
            if not eligibility.usable():
                raise UnusableError("this process may use no NIC")
            self._engine = _join(self._who, self._dial)
        return self._engine

    # ---- connecting

    def offer(self, gate: PeerLink) -> bytes:
        """For the other side's `accept`: we want to read from there. Raises VerbsError and its like."""
        self._gates.add(gate)
        return self._started().offer(gate)

    def renew(self, gate: PeerLink) -> None:
        """What was said about a connection was lost, if there is none that works."""
        if self._engine is not None and not self._engine.connected(gate):
            self._engine.give_up(gate, f"the connection to {gate} broke")

    def accept(self, gate: PeerLink, offer: bytes) -> bytes:
        """The answer to one that wants to read from here."""
        self._gates.add(gate)
        return self._started().accept(gate, offer)

    def connect(self, gate: PeerLink, answer: bytes) -> None:
        """We may read from there."""
        self._started().connect(gate, answer)

    def forget(self, gate: PeerLink, why: str) -> None:
        """Its session is over: what is read of it fails now, and it reads nothing."""
        self._gates.discard(gate)
        if self._engine is not None:
            self._engine.peer_gone(gate, why)

    def give_up(self, gate: PeerLink, why: str) -> None:
        """What is read of it fails now."""
        if self._engine is not None:
            self._engine.give_up(gate, why)

    # ---- memory for others

    def expose(self, lent: dict[int, memoryview]) -> tuple[list[Part], list[Key]]:
        """Others may read these parts of a body, by where they begin, until the keys are released.

        A body that goes to several hosts is registered once. All of them or none.
        """
        parts: list[Part] = []
        keys: list[Key] = []
        try:
            for offset, view in lent.items():
                region, key = self._exposed_once(view)
                keys.append(key)
                parts.append(Part(offset, view.nbytes, region.to_bytes()))
        except BaseException:
            self.release(keys)
            raise
        return parts, keys

    def _exposed_once(self, view: memoryview) -> tuple[Region, Key]:
        from monarch_backend._verbs.registration_cache import allocation_of

        key = allocation_of(view).address, view.nbytes
        exposed = self._exposed.get(key)
        if exposed is None:
            made = self._started().expose(*key, view, writable=False)
            exposed = self._exposed[key] = _Exposed(made)
        exposed.users += 1
        return exposed.region, key

    def release(self, keys: Iterable[Key]) -> None:
        """One frame less that needs them."""
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

    def read(self, gate: PeerLink, parts: Sequence[Part], body: memoryview, whole: memoryview, done: Done) -> None:
        """Into their places in ``body``, which lies in ``whole``: that is registered for as long as it lives.

        ``done`` is called once, from any thread, with None or the error, when nothing writes there any more.
        """
        from monarch_backend._verbs import Region
        from monarch_backend._verbs.registration_cache import allocation_of

        together = _Together(len(parts), done)
        for index, part in enumerate(parts):
            try:
                address = allocation_of(body).address + part.offset
                segments = [(0, address, part.nbytes)]
                region = Region.from_bytes(part.region)
                self._started().transfer(gate, "read", region, segments, whole, together.one)
            except Exception as error:  # of any kind: the other side hears that it is to send it plainly
                for _ in parts[index:]:
                    together.one(error)
                return


class _Together:
    """Several reads, of which the last one tells; they end on several threads."""

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


# ---- the engine, which all gateways of this process share

_lock = threading.Lock()
_dials: dict[bytes, Callable[[PeerLink], None]] = {}  # by gateway
_engine: Engine | None = None


def _join(who: bytes, dial: Callable[[PeerLink], None]) -> Engine:
    global _engine
    from monarch_backend._verbs import shared_engine

    with _lock:
        if _engine is None:
            _engine = shared_engine.borrow(PeerLink, _dial)
        _dials[who] = dial
        return _engine


def _leave(who: bytes) -> None:
    global _engine
    from monarch_backend._verbs import shared_engine

    with _lock:
        del _dials[who]
        if not _dials:
            _engine = None
            shared_engine.give_back(PeerLink)


def _dial(gate: PeerLink) -> None:
    dial = _dials.get(gate.who)
    if dial is not None:  # else it has closed, and all of its gates are gone
        dial(gate)


def _in_forked_child() -> None:
    global _lock, _engine
    _lock, _engine = threading.Lock(), None
    _dials.clear()


fork.register(fork.Step.RDMA_READER, after_in_child=_in_forked_child)
