"""This process's NICs, for messages between ranks of all its groups: connections, readable memory, reads.

The process has one engine (_verbs/shared_engine.py). It opens devices at the first registration or read. _verbs is
imported only on a machine that has NICs. p2p.py has the control messages between ranks.
"""

from __future__ import annotations

import threading
import weakref
from collections import OrderedDict, deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from torch import Tensor

from monarch_backend._core import fork

if TYPE_CHECKING:
    from monarch_backend._verbs import Engine, Region

_MAX_TRIES = 3  # connections for one message, in case others break meanwhile
_CHECK_INTERVAL_S = 0.2  # seconds between checks of a waiting thread whether its message is still wanted


class UnusableError(Exception):
    """NICs can't carry the message, for this reason; no NIC accesses its memory any more."""


class UnregisteredError(UnusableError):
    """This memory can't be registered; NICs may carry other messages."""


@dataclass(frozen=True)
class Rank:
    """Name of a process for the engine, with its description for messages."""

    token: str
    who: str = field(default="", compare=False)

    def __str__(self) -> str:
        return self.who


@dataclass
class _Other:
    peer: Rank
    groups: int = 0
    connected: bool = False
    connecting: threading.Lock = field(default_factory=threading.Lock)


@dataclass
class ReadableRegion:
    """A storage that other processes may read, from its first message until it is freed."""

    region: Region
    anchor: weakref.ref[Any]
    users: int = 0
    kept: bool = True


class Nics:
    """NICs of this process, from the first group that can use them to the last; see :func:`join`."""

    def __init__(self) -> None:
        from monarch_backend._verbs import shared_engine

        self._engine: Engine = shared_engine.borrow(Rank, self._dial)
        self._others: dict[str, _Other] = {}
        self._lent: OrderedDict[int, ReadableRegion] = OrderedDict()  # by the storage's id; least recently used first
        self._nbytes = 0  # bytes of these
        self._gone: deque[int] = deque()
        self._lock = threading.Lock()

    # Memory for other processes ---------------------------------------------------------------------------------

    def lend(self, tensor: Tensor, owner: Tensor | None = None) -> tuple[ReadableRegion, bytes, int]:
        """Let other processes read the tensor until `give_back`.

        Return (region, region as bytes, tensor's offset in it).

        The storage is registered as a whole, and stays registered while it lives. Raises UnusableError.
        """
        from monarch_backend._verbs import VerbsError

        storage = (tensor if owner is None else owner).untyped_storage()
        self.sweep()
        key, address, nbytes = id(storage), storage.data_ptr(), storage.nbytes()
        with self._lock:
            lent = self._lent.get(key)
            same = lent is not None and (lent.region.address, lent.region.nbytes) == (address, nbytes)
            if lent is not None and not (same and lent.anchor() is storage):
                self._forget(key)  # it was resized, or another storage has its id
                lent = None
            if lent is not None:
                lent.users += 1
                self._lent.move_to_end(key)
        if lent is None:
            try:
                self._engine.devices()
            except VerbsError as error:
                raise UnusableError(str(error)) from None
            try:
                region = self._engine.expose(address, nbytes, None, writable=False)
            except VerbsError as error:
                raise UnregisteredError(str(error)) from None
            lent = self._keep(key, ReadableRegion(region, weakref.ref(storage, self._ended(key)), users=1))
        return lent, lent.region.to_bytes(), tensor.data_ptr() - address

    def give_back(self, lent: ReadableRegion) -> None:
        with self._lock:
            lent.users -= 1
            over = not lent.users and not lent.kept
        if over:
            self._engine.release(lent.region)
        self._make_room()

    def sweep(self) -> None:
        with self._lock:
            while self._gone:
                key = self._gone.popleft()
                if key in self._lent and self._lent[key].anchor() is None:
                    self._forget(key)

    def _ended(self, key: int) -> Callable[[object], None]:
        gone, engine, sweep = self._gone, self._engine, weakref.WeakMethod(self.sweep)

        def later() -> None:
            if (call := sweep()) is not None:
                call()

        def ended(_: object) -> None:  # called at any point of other code, so it takes no lock
            gone.append(key)
            engine.call_soon(later)

        return ended

    def _keep(self, key: int, lent: ReadableRegion) -> ReadableRegion:
        with self._lock:
            other = self._lent.get(key)
            if other is None or other.anchor() is None:  # no other thread has registered it meanwhile
                if other is not None:
                    self._forget(key)
                self._lent[key] = lent
                self._nbytes += lent.region.nbytes
                return lent
            other.users += 1
        self._engine.release(lent.region)
        return other

    def _forget(self, key: int) -> None:
        lent = self._lent.pop(key)
        lent.kept = False
        self._nbytes -= lent.region.nbytes
        if not lent.users:
            self._engine.release(lent.region)

    def _make_room(self) -> None:
        most = self._engine.settings
        with self._lock:
            while len(self._lent) > most.cache_entries or self._nbytes > most.cache_bytes:
                idle = next((key for key, each in self._lent.items() if not each.users), None)
                if idle is None:
                    return
                self._forget(idle)

    # Memory of other processes ----------------------------------------------------------------------------------

    def accept(self, token: str, offer: bytes) -> bytes:
        """Return the reply to the connection offer of a process that wants to read memory of this one.

        Raises UnusableError.
        """
        from monarch_backend._verbs import VerbsError

        try:
            return self._engine.accept(self._others[token].peer, offer)
        except VerbsError as error:
            raise UnusableError(str(error)) from None

    def read(
        self,
        token: str,
        region: bytes,
        offset: int,
        into: Tensor,
        owner: Tensor,
        introduce: Callable[[bytes], bytes],
        left: Callable[[], float],
    ) -> None:
        """Read a process's memory into ours. ``introduce`` sends an offer to it and returns the reply.

        Raises UnusableError, TimeoutError after the time limit, and what ``introduce`` and ``left`` raise.
        """
        from monarch_backend._verbs import Region, VerbsError

        other, why = self._others[token], ""
        for _ in range(_MAX_TRIES):
            try:
                self._connect(other, introduce, left)
                self._transfer(other, Region.from_bytes(region), offset, into, owner, left)
                return
            except VerbsError as error:
                why = str(error)
                if other.connected:  # the connection is not the cause
                    break
        raise UnusableError(why)

    def _connect(self, other: _Other, introduce: Callable[[bytes], bytes], left: Callable[[], float]) -> None:
        from monarch_backend._verbs import VerbsError

        while not other.connecting.acquire(timeout=_CHECK_INTERVAL_S):
            if not left():
                raise TimeoutError
        try:
            if other.connected:
                return
            answer = introduce(self._engine.offer(other.peer))
            if not answer:
                raise VerbsError(f"{other.peer} can't be connected with: its log says why")
            self._engine.connect(other.peer, answer)
            other.connected = True
        except BaseException:
            self._engine.give_up(other.peer, "no connection came of it")
            raise
        finally:
            other.connecting.release()

    def _transfer(
        self, other: _Other, region: Region, offset: int, into: Tensor, owner: Tensor, left: Callable[[], float]
    ) -> None:
        from monarch_backend._verbs import VerbsError

        ended, outcome = threading.Event(), []

        def done(error: BaseException | None) -> None:
            outcome.append(error)
            ended.set()

        segments = [(offset, into.data_ptr(), into.nbytes)]
        try:
            self._engine.transfer(other.peer, "read", region, segments, owner, done)
        except (TypeError, ValueError) as error:  # the region is smaller than the message
            raise UnusableError(str(error)) from None
        except VerbsError as error:
            raise UnregisteredError(str(error)) from None
        try:
            while not ended.wait(_CHECK_INTERVAL_S):
                if not left():
                    raise TimeoutError
        except BaseException:
            if not ended.is_set():
                other.connected = False
                self._engine.give_up(other.peer, "another message from it was given up")
                ended.wait()  # after it no NIC writes there
            raise
        if outcome[0] is not None:
            raise outcome[0]

    def _dial(self, peer: Rank) -> None:
        # A connection has broken. The reading side connects anew, because only it has an exchange for its offer.
        other = self._others.get(peer.token)
        if other is not None:
            other.connected = False  # first, because messages that fail by the next steps check this
        self._engine.give_up(peer, f"the connection to {peer} broke")

    # Groups -----------------------------------------------------------------------------------------------------

    def add(self, others: Iterable[Rank]) -> None:
        for peer in others:
            self._others.setdefault(peer.token, _Other(peer)).groups += 1

    def remove(self, others: Iterable[Rank]) -> bool:
        """Remove a group's processes; True if none is left."""
        for peer in others:
            other = self._others[peer.token]
            other.groups -= 1
            if not other.groups:
                del self._others[peer.token]
                self._engine.peer_gone(peer, f"no group has {peer} any more")
        return not self._others

    def close(self) -> None:
        from monarch_backend._verbs import shared_engine

        with self._lock:
            for key in list(self._lent):
                self._forget(key)
        shared_engine.give_back(Rank)


_process: Nics | None = None
_joining = threading.Lock()


def join(others: Iterable[Rank]) -> Nics:
    """Return the process's NICs for a group with these processes; call :func:`leave` with the same arguments."""
    global _process
    with _joining:
        if _process is None:
            _process = Nics()
        _process.add(others)
        return _process


def leave(nics: Nics, others: Iterable[Rank]) -> None:
    global _process
    with _joining:
        if nics is not _process:  # it is of a fork's parent
            return
        if nics.remove(others):
            _process = None
            nics.close()


def _in_forked_child() -> None:
    global _process, _joining
    _process, _joining = None, threading.Lock()


fork.register(fork.Step.PEER_READS, after_in_child=_in_forked_child)
