"""This process's NICs, for messages between ranks of all its groups: connections to other processes, memory that these
may read, and the reading.

The engine is the process's one (_verbs/shared_engine.py). It opens devices when something is lent or read, not before;
and rdma is imported only on a machine that has NICs. What ranks say to each other is p2p.py's.
"""

from __future__ import annotations

import logging
import threading
import weakref
from collections import OrderedDict, deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple

from torch import Tensor

from monarch_backend._core import fork

if TYPE_CHECKING:
    from monarch_backend._verbs import Engine, Region

log = logging.getLogger("monarch_backend")

_MAX_TRIES = 3  # connections that one message may need: one that was there has broken, another one broke it meanwhile
_CHECK_INTERVAL_S = 0.2  # seconds after which one who waits looks whether it is still wanted


class UnusableError(Exception):
    """No NIC carries it, for this reason; nothing reads or writes its memory any more."""


class UnregisteredError(UnusableError):
    """Only because this memory can't be registered: other messages may do better."""


@dataclass(frozen=True)
class Rank:
    """A process, as the engine knows it; ``who`` is for messages."""

    token: str
    who: str = field(default="", compare=False)

    def __str__(self) -> str:
        return self.who


@dataclass
class _Other:
    """A process, for as long as groups here have it."""

    peer: Rank
    groups: int = 0
    connected: bool = False
    connecting: threading.Lock = field(default_factory=threading.Lock)


@dataclass
class ReadableRegion:
    """A storage that other processes may read, from the first message out of it until it is gone."""

    region: Region
    anchor: weakref.ref[Any]
    users: int = 0
    kept: bool = True


class ReadTarget(NamedTuple):
    """Where to read to, and whose memory that is."""

    address: int
    nbytes: int
    owner: Tensor


class Nics:
    """Made with the first group that can use them, gone with the last; see :func:`join`."""

    def __init__(self) -> None:
        from monarch_backend._verbs import shared_engine

        self._engine: Engine = shared_engine.borrow(Rank, self._dial)
        self._others: dict[str, _Other] = {}
        self._lent: OrderedDict[int, ReadableRegion] = (
            OrderedDict()
        )  # by the storage's id; the one used last is the last
        self._nbytes = 0  # of these
        self._gone: deque[int] = deque()
        self._lock = threading.Lock()

    # Memory for others ------------------------------------------------------------------------------------------

    def lend(self, tensor: Tensor, owner: Tensor | None = None) -> tuple[ReadableRegion, bytes, int]:
        """Others may read it until it is given back; with the region as bytes, and the tensor's offset in it.

        The storage is registered as a whole, and stays so while it lives. Raises UnusableError.
        """
        from monarch_backend._verbs import VerbsError

        storage = (tensor if owner is None else owner).untyped_storage()
        self.sweep()
        key, address, nbytes = id(storage), storage.data_ptr(), storage.nbytes()
        with self._lock:
            lent = self._lent.get(key)
            if lent is not None and (lent.region.address, lent.region.nbytes) != (address, nbytes):
                self._forget(key)  # it was resized
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
        """This message has no need of it any more."""
        with self._lock:
            lent.users -= 1
            over = not lent.users and not lent.kept
        if over:
            self._engine.release(lent.region)
        self._make_room()

    def sweep(self) -> None:
        """Storages that are gone are not lent any more."""
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

        def ended(_: object) -> None:  # in the middle of anything: no lock is taken here
            gone.append(key)
            engine.soon(later)

        return ended

    def _keep(self, key: int, lent: ReadableRegion) -> ReadableRegion:
        with self._lock:
            other = self._lent.get(key)
            if other is None or other.anchor() is None:  # nobody else has registered it meanwhile
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

    # Other processes' memory ------------------------------------------------------------------------------------

    def accept(self, token: str, offer: bytes) -> bytes:
        """The answer to a process that wants to read from here. Raises UnusableError."""
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
        into: ReadTarget,
        introduce: Callable[[bytes], bytes],
        left: Callable[[], float],
    ) -> None:
        """A process's memory into ours. ``introduce`` takes an offer there and brings the answer.

        Raises UnusableError; TimeoutError when nothing is left of the time; and what ``introduce`` and ``left`` raise.
        """
        from monarch_backend._verbs import Region, VerbsError

        other, why = self._others[token], ""
        for _ in range(_MAX_TRIES):
            try:
                self._connect(other, introduce, left)
                self._transfer(other, Region.from_bytes(region), offset, into, left)
                return
            except VerbsError as error:
                why = str(error)
                if other.connected:  # the connection is not to blame
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
        self, other: _Other, region: Region, offset: int, into: ReadTarget, left: Callable[[], float]
    ) -> None:
        from monarch_backend._verbs import VerbsError

        ended, outcome = threading.Event(), []

        def done(error: BaseException | None) -> None:
            outcome.append(error)
            ended.set()

        segments = [(offset, into.address, into.nbytes)]
        try:
            self._engine.transfer(other.peer, "read", region, segments, into.owner, done)
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
                ended.wait()  # nothing writes there any more
            raise
        if outcome[0] is not None:
            raise outcome[0]

    def _dial(self, peer: Rank) -> None:
        # A connection has broken. Who wants to read connects anew: only it has somebody to say it to.
        other = self._others.get(peer.token)
        if other is not None:
            other.connected = False  # first: whose message fails by what follows asks this
        self._engine.give_up(peer, f"the connection to {peer} broke")

    # Groups -----------------------------------------------------------------------------------------------------

    def add(self, others: Iterable[Rank]) -> None:
        """A group has these."""
        for peer in others:
            self._others.setdefault(peer.token, _Other(peer)).groups += 1

    def remove(self, others: Iterable[Rank]) -> bool:
        """A group has these no more; True if none is left."""
        for peer in others:
            other = self._others[peer.token]
            other.groups -= 1
            if not other.groups:
                del self._others[peer.token]
                self._engine.peer_gone(peer, f"no group has {peer} any more")
        return not self._others

    def close(self) -> None:
        """Nobody reads from here any more."""
        from monarch_backend._verbs import shared_engine

        with self._lock:
            for key in list(self._lent):
                self._forget(key)
        shared_engine.give_back(Rank)


_process: Nics | None = None
_joining = threading.Lock()


def join(others: Iterable[Rank]) -> Nics:
    """The process's NICs, for a group with these processes in it; :func:`leave` with the same."""
    global _process
    with _joining:
        if _process is None:
            _process = Nics()
        _process.add(others)
        return _process


def leave(nics: Nics, others: Iterable[Rank]) -> None:
    """The group is gone."""
    global _process
    with _joining:
        if nics is not _process:  # a fork's parent had it
            return
        if nics.remove(others):
            _process = None
            nics.close()


def _in_forked_child() -> None:
    global _process, _joining
    _process, _joining = None, threading.Lock()


fork.register(fork.Step.PEER_READS, after_in_child=_in_forked_child)
