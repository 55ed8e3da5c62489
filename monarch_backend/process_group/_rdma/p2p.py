"""Large messages between ranks of different hosts: the receiver's NIC reads them from the sender's memory.

An inner group for point to point, and for messages between the stages of a hierarchy. If NICs may connect ranks of two
hosts, all ranks of the group use it for all messages above a size. It does not depend on the two ranks, because a
receive from any rank does not know its sender. Size and tag are all that both sides know in advance.

The two ranks exchange control messages over Gloo (p2p_protocol.py). Until the receiver confirms the message, it can ask
the sender to send it over Gloo. So a failing NIC costs a warning but no message, and the pair stays with Gloo.

Gloo's messages are started in the caller's thread, which keeps their order. The rest runs in the same thread if the
caller waits for this message only, else in a thread of the exchange. peer_reads.py uses the NICs.
"""

from __future__ import annotations

import itertools
import logging
import math
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Sequence
from datetime import timedelta
from types import FrameType
from typing import Any

import torch
from torch import Tensor

from monarch_backend.process_group import _c10d_internals
from monarch_backend.process_group._errors import ProcessGroupError
from monarch_backend.process_group._rdma import p2p_protocol, peer_reads
from monarch_backend.process_group._rdma.p2p_protocol import (
    ANSWER,
    DONE,
    OFFER,
    PLAIN,
    REFUSED,
    ControlMessage,
    SendHeader,
)
from monarch_backend.process_group._shm.shm_backend import ShmWork, call_by_operator, explained
from monarch_backend.process_group._work_queue import Operation, in_a_thread

log = logging.getLogger("monarch_backend")

_CLOSE_TIMEOUT_S = 5.0  # seconds for exchanges to notice that their group is closed
_NO_TIMEOUT_S = 3e7  # seconds, because Gloo needs a number
_GLANCE, _LAST_GLANCE = 0.001, 0.05  # seconds between checks for a message from any rank before the first wait


class _Failure(Exception):
    """Failure of a message, as in the compiled core: kind, failed rank, text."""


class _Message(Operation):
    """A send or a receive; ``source`` is the rank that sent the received message."""

    def __init__(self, body: Callable[[_Message], None], clock: _Clock, source: int = -1) -> None:
        super().__init__(lambda: body(self), None)
        self.clock, self.source = clock, source
        self.cannot_cancel = False  # only a message or the timeout ends Gloo's receive from any rank

    def abandon(self, failure: _Failure) -> None:
        """Fail the message now, whatever its body does later."""
        self.failure, self.done = failure, True
        self._ended.set()


class _Clock:
    """Time left for a message; zero once the group is closed.

    It starts with the first wait, as Gloo's does, because a receive may be posted long before its message.
    """

    def __init__(self, rdma_p2p: RdmaP2P, seconds: float) -> None:
        self._rdma_p2p, self.seconds = rdma_p2p, seconds
        self.begun = threading.Event()
        self._end = 0.0

    def begin(self) -> None:
        """Start the time; later calls do nothing."""
        if not self.begun.is_set():
            self._end = time.monotonic() + self.seconds
            self.begun.set()

    def left(self) -> float:
        if self._rdma_p2p.closed:
            return 0.0
        return max(0.0, self._end - time.monotonic()) if self.begun.is_set() else _NO_TIMEOUT_S


@_c10d_internals.hide_from_dynamo
class RdmaP2P:
    """Inner group whose messages NICs carry.

    ``tokens``: for each rank, the token of its process if NICs connect it to this one, else "". ``members`` describe
    the ranks in messages.
    """

    def __init__(
        self,
        gloo: Any,
        members: Sequence[str],
        rank: int,
        timeout: Callable[[], timedelta],
        tokens: Sequence[str],
        least: int,
        label: str = "",
    ) -> None:
        self._gloo, self._members, self._rank, self._timeout = gloo, members, rank, timeout
        self._tokens, self.least, self._label = tokens, least, label
        self._others = [peer_reads.Rank(t, f"rank {r} ({members[r]})") for r, t in enumerate(tokens) if t]
        self._nics = peer_reads.join(self._others) if self._others else None
        self._numbers = itertools.count()
        self._said: set[tuple[int, bool]] = set()  # (rank, whether it was permanent) of warnings that were given
        self.closed = False
        self.closed_why = ""  # set before it is closed
        self._change = threading.Condition()
        self._under_way: dict[_Message, ShmWork] = {}
        self.carried: Counter[str] = Counter()  # messages received, by their carrier

    @property
    def native(self) -> RdmaP2P:
        """Self, as works expect it.

        An attribute would be a cycle that keeps Gloo's threads until a garbage collection.
        """
        return self

    # As an inner group ------------------------------------------------------------------------------------------

    def takes(self, tensors: Sequence[Tensor], tag: int) -> bool:
        """Whether messages of this size and tag use this group; the same on both sides."""
        return len(tensors) == 1 and tensors[0].nbytes >= self.least and 0 <= tag < p2p_protocol.MAX_TAG

    def send(
        self, tensors: list[Tensor], rank: int, tag: int, owner: Tensor | None = None, seconds: float | None = None
    ) -> ShmWork:
        """Send a tensor. The send is done once the tensor was received, so that it may change again.

        ``owner``: a tensor that lives longer, over the same memory. ``seconds``: time limit from now on.
        """
        clock = self._clock(seconds)
        self._check_open()
        (x,) = tensors
        number = next(self._numbers) % p2p_protocol.MAX_EXCHANGES
        exchange = _PeerExchange(self, rank, p2p_protocol.exchange_tag(number, self._rank, rank), clock)
        lent, announcement = self._announce(x, rank, number, owner)
        try:
            first = exchange.listen()
            announced = exchange.post(announcement.pack(), p2p_protocol.announced(tag))
        except BaseException:
            self._take_back(lent)
            raise

        def body(_: _Message) -> None:
            try:
                exchange.wait(announced)
                self._serve(exchange, x, first)
            finally:
                self._take_back(lent)

        try:
            return self._start(_Message(body, clock), tensors, sys._getframe(2))
        except RuntimeError:  # no thread runs the body
            self._take_back(lent)
            raise

    def recv(
        self, tensors: list[Tensor], rank: int, tag: int, owner: Tensor | None = None, seconds: float | None = None
    ) -> ShmWork:
        return self._receive(tensors, rank, tag, owner, seconds)

    def recv_anysource(self, tensors: list[Tensor], tag: int) -> ShmWork:
        """Receive from the rank that sends first."""
        return self._receive(tensors, -1, tag, None)

    def dispatched(self, opts: Any, name: str, args: tuple[Any, ...]) -> ShmWork:
        with _c10d_internals.profiled(f"verbs:{name.rstrip('_')}", list(args[0])):
            work: ShmWork = call_by_operator(self, opts, name, args)
            return work

    def wait(self, operation: _Message, seconds: float) -> bool:
        """Return whether the operation is done within the time; fail one whose own time is over. Works call this."""
        operation.clock.begin()
        left = operation.clock.left()
        if operation.wait(min(seconds, left)) or seconds < left:
            return operation.done
        # A receive that its thread started before the first wait has no timeout of its own.
        _c10d_internals.close_gloo_links(self._gloo)
        return operation.wait(_CLOSE_TIMEOUT_S)

    def error(self, failure: Any) -> Exception:
        if isinstance(failure, _Failure):
            cause = ("closed", -1, "") if self.closed else failure.args[0]
            error: Any = explained(cause, self._members, self._rank, self.closed_why)
            error.failure = cause  # for callers that report it in other words
            return error  # type: ignore[no-any-return]
        return failure if isinstance(failure, Exception) else RuntimeError(repr(failure))

    def close(self) -> None:
        """Close the group: messages in progress fail, here and on the other ranks, because Gloo's connections close."""
        if self.closed:
            return
        self.closed = True
        with self._change:
            under_way = dict(self._under_way)
        if under_way:
            _c10d_internals.close_gloo_links(self._gloo)
        for message, work in under_way.items():
            message.clock.begin()
            if message.cannot_cancel:
                message.abandon(_Failure(("closed", -1, "")))
                work.ended()
        with self._change:
            self._change.wait_for(lambda: all(message.cannot_cancel for message in self._under_way), _CLOSE_TIMEOUT_S)
        if self._nics is not None:
            peer_reads.leave(self._nics, self._others)

    def _clock(self, seconds: float | None) -> _Clock:
        clock = _Clock(self, self._timeout().total_seconds() if seconds is None else seconds)
        if seconds is not None:
            clock.begin()
        return clock

    def _check_open(self) -> None:
        if self.closed:
            raise self.error(_Failure(("closed", -1, "")))

    def _start(self, message: _Message, tensors: list[Tensor], caller: FrameType | None) -> ShmWork:
        work = ShmWork(self, tensors)  # type: ignore[arg-type]  # it uses `native` and `error` only
        work._operation = message
        with self._change:
            self._under_way[message] = work

        def run() -> None:
            try:
                message.run()
            finally:
                with self._change:
                    del self._under_way[message]
                    self._change.notify_all()

        if _c10d_internals.is_waited_for(caller):
            message.clock.begin()
            run()
            if message.failure is not None and not isinstance(message.failure, Exception):
                raise message.failure  # an interrupt
            return work
        work._lock, work._keep = threading.RLock(), tensors

        def run_aside() -> None:
            run()
            work.ended()

        try:
            in_a_thread(run_aside)
        except RuntimeError:  # too many threads
            with self._change:
                del self._under_way[message]
            message.abandon(_Failure(("closed", -1, "")))
            raise
        return work

    # The sender's side ------------------------------------------------------------------------------------------

    def _announce(
        self, x: Tensor, rank: int, number: int, owner: Tensor | None
    ) -> tuple[peer_reads.ReadableRegion | None, SendHeader]:
        if self._nics is not None and self._tokens[rank] and not self._is_plain(rank):
            try:
                lent, region, offset = self._nics.lend(x, owner)
            except peer_reads.UnregisteredError as error:
                self._say(rank, str(error), for_good=False)
            except Exception as error:  # such as a verbs package that does not fit
                self._say(rank, _why(error), for_good=True)
            else:
                if p2p_protocol.fits(region):
                    return lent, SendHeader(number, x.nbytes, offset, region)
                self._take_back(lent)
        return None, SendHeader(number, x.nbytes)

    def _take_back(self, lent: peer_reads.ReadableRegion | None) -> None:
        if lent is not None and self._nics is not None:
            self._nics.give_back(lent)

    def _serve(self, exchange: _PeerExchange, x: Tensor, first: tuple[Any, bytearray]) -> None:
        """Do what the receiver requests, until it has the message."""
        control, rest = exchange.receive_control(first)
        while control.kind == OFFER:
            exchange.send_control(ANSWER, 0, self._answer(exchange.rank, rest))
            control, rest = exchange.receive_control()
        if control.kind == PLAIN:
            if rest:
                self._say(exchange.rank, rest.decode(errors="replace"), for_good=True)
            exchange.wait(exchange.begin(self._gloo.send, x))
        elif control.kind == REFUSED:
            expected = f"the receive of rank {exchange.rank} is of {control.value}"
            what = f"rank {self._rank} sent {x.nbytes} bytes, and {expected}"
            raise _Failure(("mismatch", -1, what))

    def _answer(self, rank: int, offer: bytes) -> bytes:
        if self._nics is None or not self._tokens[rank]:
            return b""
        try:
            return self._nics.accept(self._tokens[rank], offer)
        except Exception as error:
            self._say(rank, _why(error), for_good=True)
        return b""

    # The receiver's side ----------------------------------------------------------------------------------------

    def _receive(
        self, tensors: list[Tensor], rank: int, tag: int, owner: Tensor | None, seconds: float | None = None
    ) -> ShmWork:
        clock = self._clock(seconds)
        self._check_open()
        (x,) = tensors
        exchange = _PeerExchange(self, rank, p2p_protocol.announced(tag), clock)
        posted = exchange.listen(p2p_protocol.SEND_HEADER_BYTES)

        def body(message: _Message) -> None:
            message.cannot_cancel = rank < 0
            if message.cannot_cancel:
                _glance(posted[1], clock)
            exchange.wait(posted[0])
            message.cannot_cancel = False
            if self.closed:
                raise _Failure(("closed", -1, ""))
            message.source = rank if rank >= 0 else int(posted[0]._source_rank())
            self._fetch(message.source, exchange.read(SendHeader.unpack, posted[1]), x, owner, clock)

        return self._start(_Message(body, clock, rank), tensors, sys._getframe(3))

    def _fetch(self, source: int, it: SendHeader, x: Tensor, owner: Tensor | None, clock: _Clock) -> None:
        exchange = _PeerExchange(self, source, p2p_protocol.exchange_tag(it.number, source, self._rank), clock)
        if it.nbytes != x.nbytes:
            exchange.send_control(REFUSED, x.nbytes)
            what = f"rank {source} sent {it.nbytes} bytes, and the receive of rank {self._rank} is of {x.nbytes}"
            raise _Failure(("mismatch", -1, what))
        why = self._read(exchange, it, x, owner)
        if why is None:
            exchange.send_control(DONE)
            self._count("verbs", source)
            return
        posted = exchange.begin(self._gloo.recv, x)
        exchange.send_control(PLAIN, 0, why.encode()[: p2p_protocol.MAX_CONTROL_BYTES])
        exchange.wait(posted)
        self._count("gloo", source)

    def _read(self, exchange: _PeerExchange, it: SendHeader, x: Tensor, owner: Tensor | None) -> str | None:
        """Read the message by NIC. Return None, or why that failed; "" if the reason was reported before."""
        if not it.region or self._nics is None or not self._tokens[exchange.rank] or self._is_plain(exchange.rank):
            return ""
        try:
            self._nics.read(
                self._tokens[exchange.rank],
                it.region,
                it.offset,
                x,
                x if owner is None else owner,
                exchange.introduce,
                exchange.clock.left,
            )
        except peer_reads.UnregisteredError as error:
            self._say(exchange.rank, str(error), for_good=False)
            return ""
        except TimeoutError:
            _c10d_internals.close_gloo_links(self._gloo)  # as Gloo does if a message of its own is late
            raise exchange.late() from None
        except (_Failure, ProcessGroupError):  # of the exchange
            raise
        except Exception as error:
            why = _why(error)
            self._say(exchange.rank, why, for_good=True)
            return why
        return None

    # Both sides -------------------------------------------------------------------------------------------------

    def _is_plain(self, rank: int) -> bool:
        return (rank, True) in self._said

    def _say(self, rank: int, why: str, *, for_good: bool) -> None:
        """Warn once for each rank, and once more if it is permanent."""
        with self._change:
            known = (rank, for_good) in self._said
            self._said.add((rank, for_good))
        if not known and not self.closed:
            which = "large messages" if for_good else "this message"
            log.warning(
                "%s between rank %d and rank %d (%s) carried by gloo: %s",
                which, self._rank, rank, self._members[rank], why,
            )  # fmt: skip

    def _count(self, way: str, rank: int) -> None:
        with self._change:
            self.carried[way] += 1
            self.carried[f"{way} from {rank}"] += 1
            first = self.carried[f"{way} from {rank}"] == 1
        if first and self._label:
            sys.stderr.write(f"{self._label}messages from rank {rank} of {self.least} bytes and more: {way}\n")
            sys.stderr.flush()


def _why(error: Exception) -> str:
    return str(error) if isinstance(error, peer_reads.UnusableError) else repr(error)


def _glance(buffer: bytearray, clock: _Clock) -> None:
    """Wait until a message arrives or the clock runs.

    Gloo's wait for any rank has a fixed end, which ends the group.
    """
    pause = _GLANCE
    while not buffer[0] and not clock.begun.wait(pause):
        pause = min(2 * pause, _LAST_GLANCE)


class _PeerExchange:
    """Exchange with one rank, or with the first that begins one: Gloo messages with a tag of their own."""

    def __init__(self, rdma_p2p: RdmaP2P, rank: int, tag: int, clock: _Clock) -> None:
        self._rdma_p2p, self._gloo = rdma_p2p, rdma_p2p._gloo
        self.rank, self._tag, self.clock = rank, tag, clock

    def begin(self, call: Callable[..., Any], tensor: Tensor) -> Any:
        try:
            return call([tensor], self.rank, self._tag)
        except RuntimeError as error:
            raise self._lost(error) from None

    def post(self, data: bytearray, tag: int) -> Any:
        try:
            return self._gloo.send([_bytes(data)], self.rank, tag)
        except RuntimeError as error:
            raise self._rdma_p2p.error(self._lost(error)) from None

    def listen(self, nbytes: int = p2p_protocol.WORD) -> tuple[Any, bytearray]:
        buffer = bytearray(nbytes)
        try:
            if self.rank < 0:
                return self._gloo.recv_anysource([_bytes(buffer)], self._tag), buffer
            return self._gloo.recv([_bytes(buffer)], self.rank, self._tag), buffer
        except RuntimeError as error:
            raise self._rdma_p2p.error(self._lost(error)) from None

    def wait(self, work: Any) -> None:
        try:
            # Gloo cuts off parts of a millisecond. Then a late message would have time left, and be reported as lost.
            work.wait(timedelta(milliseconds=max(1, math.ceil(1000 * self.clock.left()))))
        except RuntimeError as error:
            raise self._lost(error) from None

    def send_control(self, kind: int, value: int = 0, rest: bytes = b"") -> None:
        """Send a control message and wait until it is received."""
        works = [self.post(ControlMessage(kind, value, len(rest)).pack(), self._tag)]
        if rest:
            works.append(self.post(bytearray(rest), self._tag))
        for work in works:
            self.wait(work)

    def receive_control(self, first: tuple[Any, bytearray] | None = None) -> tuple[ControlMessage, bytes]:
        work, buffer = first or self.listen()
        self.wait(work)
        control = self.read(ControlMessage.unpack, buffer)
        if not control.size:
            return control, b""
        work, rest = self.listen(control.size)
        self.wait(work)
        return control, bytes(rest)

    def introduce(self, offer: bytes) -> bytes:
        self.send_control(OFFER, 0, offer)
        return self.receive_control()[1]

    def read(self, unpack: Callable[[bytearray], Any], data: bytearray) -> Any:
        """Unpack a message; raises what an invalid one fails with."""
        try:
            return unpack(data)
        except p2p_protocol.ProtocolError as error:
            raise _Failure(("dead", self.rank, f"sent {error}: install the same release on all hosts")) from None

    def late(self) -> _Failure:
        least, seconds = self._rdma_p2p.least, self.clock.seconds
        what = f"did not do its part of a message within {seconds:g} s (is its tensor smaller than {least} bytes?)"
        return _Failure(("late", self.rank, what if self.rank >= 0 else f"no rank sent a message within {seconds:g} s"))

    def _lost(self, error: RuntimeError) -> _Failure:
        if not self.clock.left():
            return self.late()
        said = str(error).strip().splitlines()[0]
        return _Failure(("dead", self.rank, f"closed its connection to rank {self._rdma_p2p._rank} (gloo: {said})"))


def _bytes(data: bytearray) -> Tensor:
    return torch.frombuffer(data, dtype=torch.uint8)
