"""Ports: where values can be sent to from anywhere, and the receivers that wait for them."""

from __future__ import annotations

import contextlib
import itertools
import threading
import weakref
from collections import deque
from collections.abc import Callable, Generator
from typing import TYPE_CHECKING, Any, Generic, TypeVar

from monarch_backend._actor.codec import Address, pack_error, read_error
from monarch_backend._actor.future import Future
from monarch_backend._core.errors import MonarchError, public
from monarch_backend._serialization.pickling import dumps, loads
from monarch_backend._transport.local.frames import Frame, Kind, Status
from monarch_backend._transport.local.peer import Peer

if TYPE_CHECKING:
    from monarch_backend._actor.runtime import Runtime

T = TypeVar("T")


@public("monarch_backend.actor")
class PortClosedError(MonarchError, RuntimeError):
    """The receiver is gone, or took its one value already."""


class Port(Generic[T]):
    """Sends values to its receiver, in order. Can itself be sent in messages."""

    def __init__(self, token: str, number: int, rank: int = 0) -> None:
        self._address = (token, number)
        self._rank = rank

    @property
    def address(self) -> Address:
        """For calls whose replies go here."""
        return (*self._address, -1)

    def send(self, value: T) -> None:
        """Raises SerializationError for what can't be sent, PeerGoneError if the receiver's process is gone."""
        self._send(Status.VALUE, *dumps(value))

    def exception(self, error: BaseException) -> None:
        """The receiver's ``recv`` raises ActorError with this cause."""
        self._send(Status.ERROR, pack_error(error), None)

    def _send(self, status: bytes, body: Any, buffers: Any) -> None:
        from monarch_backend._actor.runtime import program

        router = program().router
        token, number = self._address
        router.send(router.peer(token), Kind.PORT, number, 0, self._rank, status, body, buffers)

    def __reduce__(self) -> Any:
        return type(self), (*self._address, self._rank)

    def __repr__(self) -> str:
        return f"<Port {self._address[1]} of process {self._address[0][:8]}>"


class ReplyPort(Port[T]):
    """The way back to a caller, for endpoints with an explicit response port. Elsewhere it is a `HandedPort`."""

    def __init__(self, answer: Any) -> None:
        self._answer = answer

    @property
    def address(self) -> Address:
        handed: Port[T] = self._answer.hand_on()
        return handed.address

    def _send(self, status: bytes, body: Any, buffers: Any) -> None:
        self._answer(status, body, buffers)

    def __reduce__(self) -> Any:
        return self._answer.hand_on().__reduce__()

    def __repr__(self) -> str:
        return "<Port to the caller>"

    def __del__(self) -> None:
        with contextlib.suppress(Exception):  # the interpreter may be ending
            self._answer.dropped()


class HandedPort(Port[T]):
    """The way back to a caller, with whomever the actor that was called has given it to.

    The call fails if the process of that actor ends. Of those who have the port the caller knows nothing: if they end
    without a word, it waits for ever, or for its timeout. What is sent to a caller that is gone is dropped.
    """

    @property
    def address(self) -> Address:
        return (*self._address, self._rank)

    def _send(self, status: bytes, body: Any, buffers: Any) -> None:
        from monarch_backend._actor.runtime import program

        router = program().router
        token, ref = self._address
        if ref:  # else nobody waits for it
            router.reply(router.peer(token), ref, self._rank, status, body, buffers)

    def __repr__(self) -> str:
        return f"<Port to a caller in process {self._address[0][:8]}>"


def port_at(address: Address, rank: int) -> Port[Any]:
    """The port with this address, for the replies of this rank."""
    token, number, answers = address
    return Port(token, number, rank) if answers < 0 else HandedPort(token, number, answers)


class _Arrival:
    """A value that has come, and its place in the order."""

    __slots__ = ("frame", "peer", "place", "processed")

    def __init__(self, place: int, peer: Peer, frame: Frame) -> None:
        self.place, self.peer, self.frame = place, peer, frame
        self.processed = False  # its sender has been told


class _Next(Future[T]):
    """The next value of a receiver. One that nobody holds any more, after a timeout perhaps, takes none.

    If its value came in that very moment, the value goes back.
    """

    __slots__ = ("_awaiting", "_given", "_home", "_receiver")

    def __init__(self, receiver: PortReceiver[T]) -> None:
        super().__init__(receiver._program.wait)
        self._receiver: PortReceiver[T] | None = receiver
        self._home = receiver
        self._awaiting = 0  # tasks
        self._given: _Arrival | None = None  # and not seen by anybody

    def add_done_callback(self, call: Callable[[Future[T]], None]) -> None:
        receiver = self._receiver
        if receiver is not None and not self.ready:
            receiver._keep(self)
            if self.done():  # since then
                receiver._let_go(self)
        super().add_done_callback(call)

    def result(self, timeout: float | None = None) -> T:
        if self._raw is not None:
            self._given = None
        return super().result(timeout)

    def __await__(self) -> Generator[Any, None, T]:
        """Until the task that waits runs again, it may be cancelled: only then has it seen the value."""
        self._awaiting += 1
        try:
            value = yield from self._as_asyncio(super().result).__await__()
        except BaseException as error:
            self._awaiting -= 1
            given = self._given
            if error is self._error or self._awaiting == 0:
                self._given = None
                if given is not None and error is not self._error:
                    self._home._take_back(given)
            raise
        self._awaiting -= 1
        self._given = None
        return value

    def _finish(self) -> None:
        receiver, self._receiver = self._receiver, None
        super()._finish()
        if receiver is not None:
            receiver._let_go(self)

    def __del__(self) -> None:
        if self._given is not None:
            self._home._take_back(self._given)


class PortReceiver(Generic[T]):
    """Takes what is sent to its port, in the order of each sender."""

    def __init__(self, program: Runtime, number: int, once: bool, ranked: bool) -> None:
        self._program, self.number, self._once, self._ranked = program, number, once, ranked
        self._lock = threading.RLock()  # values and those who wait; a signal's handler may send in between
        self._values: deque[_Arrival] = deque()
        self._returned: deque[_Arrival] = deque()  # by whoever was given them and did not look
        self._waiting: deque[weakref.ref[_Next[Any]]] = deque()
        self._places = itertools.count()
        self._kept: set[_Next[Any]] = set()  # those that somebody hears of by a callback
        self._closed = False

    def _take(self, peer: Peer, frame: Frame) -> None:
        with self._lock:
            closed = self._closed
            if self._once:
                self._closed = True
            if not closed:
                self._values.append(_Arrival(next(self._places), peer, frame))
        if closed:
            self._program.router.processed(peer, frame)
            return
        if self._once:
            self._program.ports.pop(self.number, None)
        self._match()

    def _take_back(self, arrival: _Arrival) -> None:
        """Wherever the garbage collection has struck: no lock here."""
        self._returned.append(arrival)
        if self._waiting:
            self._program.soon(self._match)

    def _match(self) -> None:
        """Give the values to those who wait, the first to the first."""
        while True:
            with self._lock:
                while self._returned:
                    self._put_back(self._returned.popleft())
                future = self._next() if self._values else None
                if future is None:
                    return
                if not self._values:  # a signal's handler has taken it
                    self._waiting.appendleft(weakref.ref(future))
                    continue
                arrival = self._values.popleft()
            self._answer(future, arrival)

    def _put_back(self, arrival: _Arrival) -> None:
        index = next((i for i, other in enumerate(self._values) if other.place > arrival.place), len(self._values))
        self._values.insert(index, arrival)

    def _answer(self, future: _Next[Any], arrival: _Arrival) -> None:
        peer, frame = arrival.peer, arrival.frame
        if not arrival.processed:
            arrival.processed = True
            self._program.router.processed(peer, frame)
        future._given = arrival
        if frame.prefix != Status.VALUE:
            future.set_lazy_exception(
                lambda: read_error(frame.prefix, frame.body, "port", "exception", f"process {peer}", frame.rank)
            )
        elif self._ranked:
            future.set_lazy_result(lambda: (frame.rank, loads(frame.body, frame.buffers)))
        else:
            future.set_lazy_result(lambda: loads(frame.body, frame.buffers))

    def recv(self) -> Future[Any]:
        """A Future of the next value; of (rank, value) for ranked ports.

        Raises PortClosedError when nothing can come any more.
        """
        future: _Next[Any] = _Next(self)
        with self._lock:
            if self._closed and not self._values and not self._returned:
                raise PortClosedError("this receiver was closed, or had its one value already")
            while self._waiting and self._waiting[0]() is None:  # given up: who polls with a timeout leaves many
                self._waiting.popleft()
            self._waiting.append(weakref.ref(future))
        self._match()
        return future

    def _next(self) -> _Next[Any] | None:
        """The first that still waits."""
        while self._waiting:
            future = self._waiting.popleft()()
            if future is not None and not future.ready:
                return future
        return None

    def _keep(self, future: _Next[Any]) -> None:
        """It has a callback: it is there until it is done, and so are we, whether or not somebody holds us."""
        self._kept.add(future)
        self._program.expecting.add(self)

    def _let_go(self, future: _Next[Any]) -> None:
        self._kept.discard(future)
        if not self._kept:
            self._program.expecting.discard(self)

    def close(self) -> None:
        """Nothing more is taken, what has come is dropped; whoever waits hears of it."""
        with self._lock:
            self._closed = True
            dropped = [*self._values, *self._returned]
            self._values.clear()
            self._returned.clear()
            waiting = []
            while (future := self._next()) is not None:
                waiting.append(future)
        self._program.ports.pop(self.number, None)
        _give_back(self._program, dropped)
        for future in waiting:
            future.ignore()._fail(PortClosedError("the receiver was closed"))

    def __del__(self) -> None:
        program, values = self._program, list(self._values)
        if values:  # places in the window; not here, wherever the garbage collection has struck
            program.soon(lambda: _give_back(program, values))

    def __reduce__(self) -> Any:
        raise TypeError("a receiver stays where it was opened: send its port")


def _give_back(program: Runtime, values: list[_Arrival]) -> None:
    """Values that nobody will take leave their places in the window to others."""
    for arrival in values:
        if not arrival.processed:
            arrival.processed = True
            program.router.processed(arrival.peer, arrival.frame)


class Channel:
    """Opens ports.

    >>> from monarch_backend.actor import Channel
    >>> port, receiver = Channel.open()
    >>> port.send("hello")
    >>> receiver.recv().get()
    'hello'
    """

    @staticmethod
    def open(once: bool = False) -> tuple[Port[Any], PortReceiver[Any]]:
        """A port and its receiver; with ``once`` for a single value."""
        return _open(once, ranked=False)

    @staticmethod
    def open_ranked(once: bool = False) -> tuple[Port[Any], PortReceiver[Any]]:
        """As `open`; the receiver gives (rank of the sender in the mesh that was called, value)."""
        return _open(once, ranked=True)


def _open(once: bool, ranked: bool) -> tuple[Port[Any], PortReceiver[Any]]:
    from monarch_backend._actor.runtime import program

    here = program()
    number = next(here.ids)
    receiver: PortReceiver[Any] = PortReceiver(here, number, once, ranked)
    here.ports[number] = receiver
    return Port(here.router.token, number), receiver
