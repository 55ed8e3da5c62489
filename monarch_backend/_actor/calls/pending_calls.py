"""Calls that wait for replies: futures and streams at the caller.

They send only cancellations, and the credit of a stream.
"""

from __future__ import annotations

import asyncio
import threading
import weakref
from collections import deque
from collections.abc import Iterator, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, Generic, TypeVar

from monarch_backend._actor.calls.codec import supervision_error
from monarch_backend._actor.calls.future import Future
from monarch_backend._actor.calls.unread_errors import CallSite
from monarch_backend._actor.calls.wait_notice import late_text
from monarch_backend._actor.errors import CancelledError, MeshFailure
from monarch_backend._mesh.extent import Extent
from monarch_backend._mesh.rank_text import ranks_in_words
from monarch_backend._mesh.value_mesh import ValueMesh
from monarch_backend._serialization.pickling import loads
from monarch_backend._transport.local.event_loop import release
from monarch_backend._transport.local.frames import Frame, MoreCredit, Status
from monarch_backend._transport.local.peer import Peer

if TYPE_CHECKING:
    from monarch_backend._actor.meshes.mesh_state import ActorMeshState
    from monarch_backend._actor.runtime import Runtime
    from monarch_backend._mesh.proc_mesh import ProcMeshState

T = TypeVar("T")

STREAM_WINDOW = 64
"""Values of one generator that may be in flight or not yet taken. The generator waits beyond this."""


def _delivery(peer: Peer, failure: MeshFailure) -> str:
    """Return what is known of a call to a process that has ended: "not sent" or "unknown"."""
    if any(death.at_start for death in failure.deaths):
        return "not sent"
    # Messages to own processes are kept here until these connect. Others may be reached without a link of this process.
    return "not sent" if peer.expected and peer.link < 0 else "unknown"


def _error_of(item: Future[Any]) -> BaseException:
    error = item.exception()
    assert error is not None
    return error


loading = threading.RLock()
"""Lock of the counts of pending `choose` calls."""


class _Call(Future[T]):
    """A call that waits for replies, of one rank or of all."""

    __slots__ = ("core", "endpoint", "has_limit", "program", "ref", "site")

    core: ActorMeshState
    endpoint: str
    has_limit: bool  # unset without a limit of time: such a call spends no time on it
    program: Runtime
    ref: int

    def _label(self) -> str:
        return f"{self.core.name}.{self.endpoint}"

    def cancel(self, reason: str = "cancelled by the caller") -> bool:
        if self.ready:
            return False
        self.program.pending.pop(self.ref, None)
        self.expire(CancelledError(reason))
        return True

    def expire(self, error: BaseException) -> None:
        """Fail with this error, and cancel the call at the actors that have not replied."""
        raise NotImplementedError

    def missing(self) -> list[tuple[int, Peer]]:
        """Return the ranks that have not replied, with their processes."""
        raise NotImplementedError

    def _late_text(self, seconds: float) -> str:
        return late_text(self, seconds)

    def _begin_await(self, awaited: asyncio.Future[T]) -> None:
        self.program.awaits.begin(self, self, awaited)

    def _end_await(self, awaited: asyncio.Future[T]) -> None:
        self.program.awaits.end(self, awaited)


class UnaryCall(_Call[T]):
    __slots__ = ("base_rank", "load", "peer")

    def __init__(
        self,
        program: Runtime,
        core: ActorMeshState,
        base_rank: int,
        peer: Peer,
        endpoint: str,
        ref: int,
        site: CallSite | None = None,
    ) -> None:
        self.ready = False
        self.wait_lock = None
        self._wait = program.wait
        self._error = self._raw = self._callbacks = self._lock = self._cancel = None
        self.program, self.core = program, core
        self.base_rank, self.peer = base_rank, peer
        self.endpoint = endpoint
        self.ref = ref
        self.load: list[int] | None = None
        self.site = site

    def on_reply(self, frame: Frame) -> None:
        self.program.pending.pop(self.ref, None)  # absent if it has just been cancelled
        status = frame.prefix
        if status == Status.VALUE:
            self.set_lazy_result(partial(loads, frame.body, frame.buffers))
        else:
            self.core.set_error(self, frame, self.endpoint, self.base_rank, self.site)

    def missing(self) -> list[tuple[int, Peer]]:
        return [] if self.ready else [(self.base_rank, self.peer)]

    def on_gone(self, peer: Peer, failure: MeshFailure) -> None:
        if peer is self.peer and self.program.pending.pop(self.ref, None) is not None:
            self._fail(supervision_error(failure, self._label(), _delivery(peer, failure)))

    def expire(self, error: BaseException) -> None:
        self._fail(error)
        self.program.withdraw(self.core, self.ref, [self.peer], str(error))

    def _finish(self) -> None:
        if self.load is not None:
            with loading:
                load, self.load = self.load, None  # a reply and a cancellation may arrive at once
                if load is not None:
                    load[self.base_rank] -= 1
        super()._finish()


class BroadcastCall(_Call[ValueMesh[T]]):
    """A call of all ranks of a mesh or slice. It is done with the last reply, or with the first error."""

    __slots__ = ("_bodies", "_left", "bases", "extent", "peers")

    def __init__(
        self,
        program: Runtime,
        core: ActorMeshState,
        extent: Extent,
        bases: tuple[int, ...],
        peers: list[Peer],
        endpoint: str,
        ref: int,
        site: CallSite | None = None,
    ) -> None:
        super().__init__(program.wait)
        self.site = site
        self.program, self.core, self.extent, self.bases, self.peers = program, core, extent, bases, peers
        self.endpoint, self.ref = endpoint, ref
        self._bodies: list[Any] = [None] * len(peers)
        self._left = len(peers)

    def on_reply(self, frame: Frame) -> None:
        rank, status = frame.rank, frame.prefix
        if self.ready or rank >= len(self._bodies) or self._bodies[rank] is not None:
            return
        if status == Status.VALUE:
            self._bodies[rank] = (frame.body, frame.buffers)
            self._left -= 1
            if self._left == 0:
                self.program.pending.pop(self.ref, None)
                self.set_lazy_result(self._values)
        else:
            self.program.pending.pop(self.ref, None)
            self.core.set_error(self, frame, self.endpoint, self.bases[rank], self.site)

    def _values(self) -> ValueMesh[T]:
        bodies, self._bodies = self._bodies, []
        return ValueMesh(self.extent, [loads(body, buffers) for body, buffers in bodies])

    def missing(self) -> list[tuple[int, Peer]]:
        replies = zip(self.bases, self.peers, list(self._bodies), strict=False)
        return [(base, peer) for base, peer, body in replies if body is None]

    def on_gone(self, peer: Peer, failure: MeshFailure) -> None:
        for rank, asked in enumerate(self.peers):
            if asked is peer and not self.ready and self._bodies[rank] is None:
                self.program.pending.pop(self.ref, None)
                self._fail(supervision_error(failure, self._label(), _delivery(peer, failure)))

    def expire(self, error: BaseException) -> None:
        waiting = [peer for _, peer in self.missing()]
        self._fail(error)
        self.program.withdraw(self.core, self.ref, waiting, str(error))


class DerivedFuture(Future[T]):
    """Result that is made of the replies of ``call``, such as their fold. A wait for it is a wait for the call."""

    __slots__ = ("_program", "call")

    def __init__(self, wait: Any, cancel: Any, call: _Call[Any] | StreamCollector[Any]) -> None:
        super().__init__(wait, cancel)
        self.call: _Call[Any] | StreamCollector[Any] | None = call  # None once it is done
        self._program = call.program

    def _begin_await(self, awaited: asyncio.Future[T]) -> None:
        if self.call is not None:
            self._program.awaits.begin(self, self.call, awaited)

    def _end_await(self, awaited: asyncio.Future[T]) -> None:
        self._program.awaits.end(self, awaited)

    def _finish(self) -> None:
        self.call = None
        super()._finish()

    def _late_text(self, seconds: float) -> str:
        call = self.call
        return "" if call is None else late_text(call, seconds)


def asked_of(what: Any) -> Any:
    """Return the call that must be replied to before the wait for this object ends, or the object itself."""
    return (what.call if isinstance(what, DerivedFuture) else None) or what


class _NextValue(Future[None]):
    """Future that is done once a stream has a value, or has ended."""

    __slots__ = ("_stream",)

    def __init__(self, stream: Stream[Any]) -> None:
        super().__init__(stream.program.wait)
        self._stream = stream

    def _begin_await(self, awaited: asyncio.Future[None]) -> None:
        self._stream.program.awaits.begin(self, self._stream, awaited)

    def _end_await(self, awaited: asyncio.Future[None]) -> None:
        self._stream.program.awaits.end(self, awaited)


class Stream(Generic[T]):
    """Values that arrive one after the other: replies of many ranks, or the values of a generator.

    Iterate over it with ``for`` or ``async for``. `Endpoint.stream` gives Futures, `Endpoint.call_one` and
    `Endpoint.choose` give values. Actors wait for the reader: at most 64 values of each rank are in flight. `close`,
    the end of a ``with`` block and the collection of the stream end generators that still run.

    Iteration raises the errors that a call's future raises, see `Endpoint`. Pickling a stream raises TypeError.

    >>> from monarch_backend.actor import Actor, endpoint, this_proc
    >>> class Counter(Actor):
    ...     @endpoint
    ...     def count(self, n):
    ...         yield from range(n)
    >>> mesh = this_proc().spawn("counter", Counter)
    >>> list(mesh.count.call_one(3))
    [0, 1, 2]
    >>> [future.get() for future in mesh.count.stream(2)]
    [0, 1]
    """

    def __init__(
        self,
        program: Runtime,
        core: ActorMeshState,
        bases: tuple[int, ...],
        peers: list[Peer],
        endpoint: str,
        ref: int,
        *,
        futures: bool,
        generator: bool,
        first: int = 0,
        site: CallSite | None = None,
    ) -> None:
        self.site = site
        self.ready = False
        self.wait_lock: threading.Lock | None = None
        self.program, self.core, self.bases, self.peers = program, core, bases, peers
        self.endpoint, self.ref = endpoint, ref
        self._futures, self._generator = futures, generator
        self._first = first  # the rank in the mesh or slice of bases[0]
        self._queue: deque[tuple[int, Any]] = deque()
        self._open = set(range(len(peers)))
        self._unended = set(self._open)  # ranks whose end was not noted yet
        self._taken = [0] * len(peers)
        self._arrived = [0] * len(peers)  # values of each generator
        self.has_limit = False  # of time
        self._waiting: deque[Future[Any]] = deque()
        self._closed = False

    # ---- for the runtime

    def pending(self) -> Any:
        """Return the object that the runtime keeps while replies are expected. It does not keep the stream alive."""
        return _Watched(self)

    def on_reply(self, frame: Frame) -> None:
        """Handle a reply. The runtime calls it."""
        rank, status = frame.rank - self._first, frame.prefix
        if rank not in self._open:
            return
        if status == Status.ITEM:
            self._arrived[rank] += 1
            self._put(rank, partial(loads, frame.body, frame.buffers), None)
            return
        if not self._ends(rank):
            return
        # The value before the mark: a reader that finds no value and no open rank ends.
        if status == Status.VALUE:
            self._put(-1, partial(loads, frame.body, frame.buffers), None)
        elif status != Status.END:
            item: Future[T] = Future(self.program.wait)
            self.core.set_error(item, frame, self.endpoint, self.bases[rank], self.site)
            self._append(-1, item)
        self._open.discard(rank)
        self._settle()

    def on_gone(self, peer: Peer, failure: MeshFailure) -> None:
        """Handle the end of a called process. The runtime calls it."""
        for rank in [r for r in list(self._open) if self.peers[r] is peer and self._ends(r)]:
            label = f"{self.core.name}.{self.endpoint}"
            self._put(-1, None, supervision_error(failure, label, _delivery(peer, failure)))
            self._open.discard(rank)
        self._settle()

    def missing(self) -> list[tuple[int, Peer]]:
        """Return the ranks that have not ended, with their processes."""
        return [(self.bases[rank], self.peers[rank]) for rank in sorted(self._open)]

    def last_sender(self) -> tuple[Peer, int] | None:
        """Return the process of the only rank that has not ended, and how many values have arrived from it.

        Return None if several ranks may send the next value.
        """
        ranks = list(self._open)
        return (self.peers[ranks[0]], self._arrived[ranks[0]]) if len(ranks) == 1 else None

    def awaited_senders(self) -> list[tuple[Peer, int]]:
        """Return the processes that each must send a value before a wait ends, and how many values have arrived."""
        last = self.last_sender()
        return [] if last is None else [last]

    def refuse(self, rank: int, error: BaseException) -> None:
        """Note that nothing was sent to this rank."""
        if self._ends(rank):
            self._put(-1, None, error)
            self._open.discard(rank)
            self._settle()

    def _ends(self, rank: int) -> bool:
        """Return True for the first caller. The reading and the sending thread may both find the same death."""
        try:
            self._unended.remove(rank)
        except KeyError:
            return False
        return True

    def _put(self, rank: int, cook: Any, error: BaseException | None) -> None:
        item: Future[T] = Future(self.program.wait)
        if error is not None:
            item._fail(error)
        else:
            item.set_lazy_result(cook)
        self._append(rank, item)

    def _append(self, rank: int, item: Future[T]) -> None:
        self._queue.append((rank, item))
        self._tell()

    def _settle(self) -> None:
        if not self._open:
            self.program.pending.pop(self.ref, None)
            self._tell()

    def _tell(self) -> None:
        self.ready = True
        if self.wait_lock is not None:
            release(self)
        while self._waiting and (self._queue or not self._open):
            self._waiting.popleft()._set(None)

    # ---- for users

    def _take(self) -> Any:
        item = self._take_future()
        return item if self._futures else item.get()

    def _take_future(self) -> Any:
        rank, item = self._queue.popleft()
        if rank >= 0:
            self._taken[rank] += 1
            if self._taken[rank] >= STREAM_WINDOW // 2 and rank in self._open:
                count, self._taken[rank] = self._taken[rank], 0
                self.program.router.tell(self.peers[rank], MoreCredit(self.core.actor, self.ref, count))
        return item

    def __iter__(self) -> Iterator[Any]:
        return self

    def __next__(self) -> Any:
        if self._closed:  # values that have arrived since are dropped
            raise StopIteration
        while not self._queue:
            if not self._open:
                raise StopIteration
            self.wait_lock = None
            self.ready = False
            if self._queue or not self._open:
                continue
            self.program.wait(self, None)
        return self._take()

    def __aiter__(self) -> Stream[T]:
        return self

    async def __anext__(self) -> Any:
        if self._closed:
            raise StopAsyncIteration
        while not self._queue:
            if not self._open:
                raise StopAsyncIteration
            some = _NextValue(self)
            self._waiting.append(some)
            if self._queue or not self._open:
                self._tell()
            await some
        return self._take()

    def close(self, reason: str = "the stream was closed by its reader") -> None:
        """End generators that still run, and drop values and errors that have not been taken."""
        for _, item in list(self._queue):
            item.ignore()
        self._close(reason)

    def _close(self, reason: str) -> None:
        if self._open and not self._closed:
            self._closed = True
            self.program.pending.pop(self.ref, None)
            waiting = [self.peers[rank] for rank in list(self._open)]
            self._open.clear()
            self._queue.clear()
            self.program.withdraw(self.core, self.ref, waiting, reason)
            self._tell()

    cancel = close

    def expire(self, error: BaseException) -> None:
        """Fail the ranks that have not ended with this error, and cancel the call at their actors."""
        late = sorted(self._open)
        for rank in late:
            self.refuse(rank, error)
        self.program.withdraw(self.core, self.ref, [self.peers[rank] for rank in late], str(error))

    def __enter__(self) -> Stream[T]:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def __del__(self) -> None:
        if self._open and not self._closed:
            if self._generator:
                self.program.call_soon(partial(self._close, "the stream was dropped by its reader"))
            else:  # its calls run all the same, and errors in their replies are reported
                self.program.pending[self.ref] = _Unread(self)

    def __reduce__(self) -> Any:
        raise TypeError("a Stream cannot leave its process: send its values")

    def __repr__(self) -> str:
        where = ranks_in_words(self.core.extent, self.bases)
        return f"<Stream of {self.core.name}.{self.endpoint} on {where}: {len(self._open)} still open>"


class _Unread:
    """Replaces a stream that was collected: waits for the replies of its calls, and reports their errors."""

    __slots__ = ("_left", "core", "endpoint", "program", "ref", "site")

    def __init__(self, stream: Stream[Any]) -> None:
        self.program, self.core, self.endpoint = stream.program, stream.core, stream.endpoint
        self.ref, self.site = stream.ref, stream.site
        # Reply's rank -> rank in the whole mesh, of missing replies.
        self._left = {rank + stream._first: stream.bases[rank] for rank in list(stream._open)}

    def on_reply(self, frame: Frame) -> None:
        base_rank = self._left.pop(frame.rank, None)
        if base_rank is not None:
            self.core.unread_error(frame, self.endpoint, base_rank, self.site)  # collected at once, which reports it
        self._settle()

    def on_gone(self, peer: Peer, _: MeshFailure) -> None:
        for rank, base_rank in list(self._left.items()):
            if self.core.peer(base_rank) is peer:
                del self._left[rank]
        self._settle()

    def expire(self, error: BaseException) -> None:
        self.program.withdraw(self.core, self.ref, [self.core.peer(rank) for rank in self._left.values()], str(error))

    def _settle(self) -> None:
        if not self._left:
            self.program.pending.pop(self.ref, None)


_CONTROLLER = "monarch_backend.dtensor."


def cancel_calls(
    runtime: Runtime, reason: str, *, procs: ProcMeshState | None = None, ranks: Sequence[int] = (), after: int = 0
) -> int:
    """Cancel calls that wait for replies, as `Future.cancel` does, and return their number.

    ``procs`` and ``ranks``: only calls that wait for one of these processes. ``after``: only calls with higher numbers.
    Calls of a controller's workers go on: a part of their operations would be missing.
    """
    peers = None if procs is None else [procs.peer(rank) for rank in ranks]
    cancelled = 0
    for ref, what in list(runtime.pending.items()):
        call = what.stream() if isinstance(what, _Watched) else what
        if ref <= after or not isinstance(call, _Call | Stream):
            continue
        if call.core.blueprint.cls.__module__.startswith(_CONTROLLER):
            continue
        if peers is not None and not any(peer in peers for _, peer in call.missing()):
            continue
        if runtime.pending.pop(ref, None) is not None:
            call.expire(CancelledError(reason))
            cancelled += 1
    return cancelled


class _Watched:
    """Weak reference to a stream that passes on its replies."""

    __slots__ = ("stream",)

    def __init__(self, stream: Stream[Any]) -> None:
        self.stream = weakref.ref(stream)

    def on_reply(self, frame: Frame) -> None:
        if (stream := self.stream()) is not None:
            stream.on_reply(frame)

    def on_gone(self, peer: Peer, failure: MeshFailure) -> None:
        if (stream := self.stream()) is not None:
            stream.on_gone(peer, failure)

    def expire(self, error: BaseException) -> None:
        if (stream := self.stream()) is not None:
            stream.expire(error)


class StreamCollector(Stream[T]):
    """All values of generators, by rank. ``whole`` is done when all have ended, and fails with the first error."""

    whole: Future[ValueMesh[list[T]]]

    def pending(self) -> Any:
        return self  # its only reader is itself

    def start(self, extent: Extent) -> None:
        """Prepare the result, before anything is sent."""
        self.whole = DerivedFuture(self.program.wait, self.close, self)
        self._extent = extent
        self._values: list[list[Future[T]]] = [[] for _ in self.peers]

    def awaited_senders(self) -> list[tuple[Peer, int]]:
        return [(self.peers[rank], self._arrived[rank]) for rank in sorted(self._open)]

    def _tell(self) -> None:
        super()._tell()
        while self._queue:
            rank, item = self._queue[0]
            self._take_future()
            if rank >= 0:
                self._values[rank].append(item)
            else:
                self.whole.set_lazy_exception(partial(_error_of, item), getattr(item, "_unread", None))
                self.program.call_soon(self.close)
        if not self._open and not self.whole.ready:
            self.whole.set_lazy_result(self._gathered)
        self.ready = self.whole.ready

    def _gathered(self) -> ValueMesh[list[T]]:
        return ValueMesh(self._extent, [[item.get() for item in items] for items in self._values])
