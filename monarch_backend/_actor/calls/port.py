"""Ports, one-way addresses that values can be sent to, and their receivers."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import threading
import weakref
from collections import deque
from collections.abc import Callable, Generator
from typing import TYPE_CHECKING, Any, Generic, TypeVar

from monarch_backend._actor.calls.codec import Address, pack_error, read_error
from monarch_backend._actor.calls.future import Future
from monarch_backend._actor.current_runtime import program
from monarch_backend._core.errors import MonarchError, public
from monarch_backend._serialization.pickling import dumps, loads
from monarch_backend._transport.local.frames import Frame, Kind, Status
from monarch_backend._transport.local.peer import Peer

if TYPE_CHECKING:
    from monarch_backend._actor.runtime import Runtime

T = TypeVar("T")


@public("monarch_backend.actor")
class PortClosedError(MonarchError, RuntimeError):
    """No value can arrive any more: the receiver is closed, or has received its only value.

    `PortReceiver.recv` raises it, and so do futures that wait when the receiver is closed.

    >>> from monarch_backend.actor import Channel
    >>> port, receiver = Channel.open()
    >>> receiver.close()
    >>> receiver.recv()
    Traceback (most recent call last):
        ...
    monarch_backend.actor.PortClosedError: this receiver was closed, or had its one value already
    """


class Port(Generic[T]):
    """One-way address of a `PortReceiver`. Values arrive in the order of sending. It can be sent to any actor.

    >>> from monarch_backend.actor import Channel
    >>> port, receiver = Channel.open()
    >>> port.send(1)
    >>> port.exception(ValueError("no data"))
    >>> receiver.recv().get(), repr(receiver.recv().exception().__cause__)
    (1, "ValueError('no data')")
    """

    def __init__(self, token: str, number: int, rank: int = 0) -> None:
        self._address = (token, number)
        self._rank = rank

    @property
    def address(self) -> Address:
        """Address for calls whose replies go to this port."""
        return (*self._address, -1)

    def send(self, value: T) -> None:
        """Send a value. Blocks while the receiver's queue is full.

        Raises SerializationError if the value cannot be pickled, and PeerGoneError if the receiver's process has ended.
        A value for a closed receiver is dropped.
        """
        self._send(Status.VALUE, *dumps(value))

    def exception(self, error: BaseException) -> None:
        """Send an error: the future of the receiver's ``recv`` raises `ActorError` with this error as its cause.

        Raises PeerGoneError if the receiver's process has ended.
        """
        self._send(Status.ERROR, pack_error(error), None)

    def _send(self, status: bytes, body: Any, buffers: Any) -> None:
        router = program().router
        token, number = self._address
        router.send(router.peer(token), Kind.PORT, number, 0, self._rank, status, body, buffers)

    def __reduce__(self) -> Any:
        return type(self), (*self._address, self._rank)

    def __repr__(self) -> str:
        return f"<Port {self._address[1]} of process {self._address[0][:8]}>"


class ReplyPort(Port[T]):
    """Port to the caller, for endpoints with an explicit response port. In other processes it is a `HandedPort`."""

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
    """Port to a caller that the called actor has passed on to another process.

    The call fails if the process of the called actor ends. If the process that holds the port ends without a reply, the
    caller is not informed: it waits until its timeout. A value for a caller that has ended is dropped.
    """

    @property
    def address(self) -> Address:
        return (*self._address, self._rank)

    def _send(self, status: bytes, body: Any, buffers: Any) -> None:
        router = program().router
        token, ref = self._address
        if ref:  # 0: the call has no reply
            router.reply(router.peer(token), ref, self._rank, status, body, buffers)

    def __repr__(self) -> str:
        return f"<Port to a caller in process {self._address[0][:8]}>"


def port_at(address: Address, rank: int) -> Port[Any]:
    token, number, answers = address
    return Port(token, number, rank) if answers < 0 else HandedPort(token, number, answers)


class _Arrival:
    __slots__ = ("frame", "peer", "place", "processed")

    def __init__(self, place: int, peer: Peer, frame: Frame) -> None:
        self.place, self.peer, self.frame = place, peer, frame
        self.processed = False  # its credit went back to the sender


class _Next(Future[T]):
    """Future of a receiver's next value. Once it is collected, after a timeout for example, it takes no value.

    A value that arrives at that moment goes back to the receiver.
    """

    __slots__ = ("_awaiting", "_given", "_home", "_receiver")

    def __init__(self, receiver: PortReceiver[T]) -> None:
        super().__init__(receiver._program.wait)
        self._receiver: PortReceiver[T] | None = receiver
        self._home = receiver
        self._awaiting = 0  # number of tasks
        self._given: _Arrival | None = None  # given, and not read yet

    def _label(self) -> str:
        return f"a message on port {self._home.number}"

    def _begin_await(self, _awaited: asyncio.Future[T]) -> None:
        self._home._program.awaits.notices.begin(self, self)

    def _end_await(self, _awaited: asyncio.Future[T]) -> None:
        self._home._program.awaits.notices.end(self)

    def add_done_callback(self, call: Callable[[Future[T]], None]) -> None:
        receiver = self._receiver
        if receiver is not None and not self.ready:
            receiver._keep(self)
            if self.done():  # finished meanwhile
                receiver._let_go(self)
        super().add_done_callback(call)

    def result(self, timeout: float | None = None) -> T:
        if self._raw is not None:
            self._given = None
        return super().result(timeout)

    def __await__(self) -> Generator[Any, None, T]:
        """Await the value. It goes back if the task is cancelled between its arrival and the task's next step."""
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
    """Receiver of a port's values. Values of one sender arrive in the order of sending. Pickling it raises TypeError.

    >>> from monarch_backend.actor import Channel
    >>> port, receiver = Channel.open()
    >>> value = receiver.recv()
    >>> port.send("hello")
    >>> value.get(timeout=30.0)
    'hello'
    """

    def __init__(self, program: Runtime, number: int, once: bool, ranked: bool) -> None:
        self._program, self.number, self._once, self._ranked = program, number, once, ranked
        self._lock = threading.RLock()  # of values and futures; reentrant, as a signal handler may send
        self._values: deque[_Arrival] = deque()
        self._returned: deque[_Arrival] = deque()  # given to futures that were never read
        self._waiting: deque[weakref.ref[_Next[Any]]] = deque()
        self._places = itertools.count()
        self._kept: set[_Next[Any]] = set()  # futures with callbacks
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
        """Put back a value. Takes no lock, because the garbage collector may call it anywhere."""
        self._returned.append(arrival)
        if self._waiting:
            self._program.call_soon(self._match)

    def _match(self) -> None:
        """Give values to waiting futures, both in their order."""
        while True:
            with self._lock:
                while self._returned:
                    self._put_back(self._returned.popleft())
                future = self._next() if self._values else None
                if future is None:
                    return
                if not self._values:  # a signal handler has taken it
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
        """Return a `Future` of the next value, or of (rank, value) for a port of `Channel.open_ranked`.

        The future raises `ActorError` for an error that was sent. Raises PortClosedError if no value can arrive any
        more.
        """
        future: _Next[Any] = _Next(self)
        with self._lock:
            if self._closed and not self._values and not self._returned:
                raise PortClosedError("this receiver was closed, or had its one value already")
            while self._waiting and self._waiting[0]() is None:  # collected: polling with a timeout leaves many
                self._waiting.popleft()
            self._waiting.append(weakref.ref(future))
        self._match()
        return future

    def _next(self) -> _Next[Any] | None:
        while self._waiting:
            future = self._waiting.popleft()()
            if future is not None and not future.ready:
                return future
        return None

    def _keep(self, future: _Next[Any]) -> None:
        """Keep a future with a callback, and this receiver, alive until the future is done."""
        self._kept.add(future)
        self._program.expecting.add(self)

    def _let_go(self, future: _Next[Any]) -> None:
        self._kept.discard(future)
        if not self._kept:
            self._program.expecting.discard(self)

    def close(self) -> None:
        """Receive nothing more, and drop the values that have arrived. Waiting futures raise `PortClosedError`."""
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
        if values:  # return their credit; not here, where the garbage collector may have interrupted any code
            program.call_soon(lambda: _give_back(program, values))

    def __reduce__(self) -> Any:
        raise TypeError("a receiver cannot leave its process: send its port")


def _give_back(program: Runtime, values: list[_Arrival]) -> None:
    """Return the credit of values that will not be received."""
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
        """Return a new port and its receiver. With ``once=True`` it receives a single value."""
        return _open(once, ranked=False)

    @staticmethod
    def open_ranked(once: bool = False) -> tuple[Port[Any], PortReceiver[Any]]:
        """Return a port as `open` does; the receiver gives (sender's rank in the called mesh or slice, value)."""
        return _open(once, ranked=True)


def _open(once: bool, ranked: bool) -> tuple[Port[Any], PortReceiver[Any]]:
    here = program()
    number = next(here.ids)
    receiver: PortReceiver[Any] = PortReceiver(here, number, once, ranked)
    here.ports[number] = receiver
    return Port(here.router.token, number), receiver
