"""NIC route to GPU memory: direct if the NICs of both sides reach it, staged otherwise.

Staged transfers are a pipeline through pinned memory of both hosts. A read has three steps. The owner's server copies a
piece from its GPU into a slot of staging memory. The NIC of this process reads the slot, and this process copies the
piece to its own GPU. A write does the reverse. The steps of different pieces overlap. Requests to the owner travel over
a data connection, bytes by NICs.
"""

from __future__ import annotations

import contextlib
import itertools
import threading
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import msgspec

from monarch_backend import _native
from monarch_backend._actor.runtime import Runtime
from monarch_backend._rdma.control_rpc import ask
from monarch_backend._rdma.errors import RDMAError
from monarch_backend._rdma.registrations import Handle
from monarch_backend._rdma.routes.pinned_pool import PinnedLease, PinnedPool, PinnedPoolClient
from monarch_backend._rdma.routes.protocol import (
    DONE,
    FAILED,
    LOST,
    NO_STAGING,
    REFUSED,
    UNREACHABLE,
    AtomicOp,
    NicRoute,
    ReadWriteOp,
    Result,
    Route,
    Segment,
    cancel_scope,
    of_nics,
)
from monarch_backend._rdma.routes.tcp import Tcp
from monarch_backend._rdma.routes.verbs import Awaited, Verbs, VerbsInFlight
from monarch_backend._verbs import VerbsError

TOPIC = "staging"
"""Topic of the request to an owner to lend staging memory, or to take it back. It is sent once."""

LEAST_PIECE, MOST_RANGES = 512 << 10, 256
"""Bytes of the smallest piece that is worth a request, and ranges of one request (csrc/memory/wire.h)."""

ON_THE_WIRE = 2
"""Pieces on the wire at a time: the NIC has the next one when the first is done."""

STREAMS: int = _native.GpuCopies.streams

_sequence_numbers = itertools.count(1)
"""Sequence numbers of all requests of this process. The owner of a slot handles its requests in this order only."""


class Piece(NamedTuple):
    segments: Sequence[Segment]
    nbytes: int


def cut(segments: Sequence[Segment], most: int) -> Iterator[Piece]:
    """Split segments into pieces of at most ``most`` bytes and MOST_RANGES segments.

    >>> [piece.nbytes for piece in cut([(0, 0, 5), (8, 8, 4)], 4)]
    [4, 4, 1]
    """
    parts: list[Segment] = []
    size = 0
    for offset, address, nbytes in segments:
        while nbytes:
            if size == most or len(parts) == MOST_RANGES:
                yield Piece(parts, size)
                parts, size = [], 0
            step = min(nbytes, most - size)
            parts.append((offset, address, step))
            offset, address, nbytes, size = offset + step, address + step, nbytes - step, size + step
    if parts:
        yield Piece(parts, size)


def piece_size(total: int, slots: int, slot_bytes: int) -> int:
    """Return the bytes of a piece, so that all slots are used."""
    return min(slot_bytes, max(LEAST_PIECE, -(-total // slots)))


_EMPTY_PIECE = Piece(((0, 0, 0),), 0)


class _Ended(Exception):
    """The transfer stops. ``again``: it may be tried once more."""

    def __init__(self, result: Result, *, again: bool = False) -> None:
        super().__init__(result.text)
        self.result, self.again = result, again


class _Slot(NamedTuple):
    """A slot of the owner's staging memory, and its position in this process's pinned memory."""

    number: int
    position: int


class _Pipeline:
    """One transfer, run by one thread through slots that it returns at its end."""

    def __init__(
        self, part: ReadWriteOp, verbs: Verbs, lease: PinnedLease, connection: Any, memory: Any, scope: Any
    ) -> None:
        """``memory``: pinned memory of this process, with space for each slot."""
        self._part, self._verbs, self._lease, self._scope = part, verbs, lease, scope
        self._connection, self._memory = connection, memory
        self._broken = False  # the data connection has failed
        self.spoilt = False
        """A stuck NIC may still write to the pinned memory, so that no other transfer may use it."""
        self._copies: Any = _native.GpuCopies(_native.gpu_device_of(part.segments[0][1]))
        self._mine: set[int] = set()
        self._free: deque[_Slot] = deque()
        self._requested: deque[tuple[_Slot, Piece]] = deque()
        self._in_flight: deque[tuple[_Slot, Piece, Awaited]] = deque()

    def run(self, numbers: Sequence[int]) -> None:
        """Run the transfer. The transfer's memory is not touched any more when this returns.

        Raises _Ended, GpuFailure and VerbsError.
        """
        part, lease = self._part, self._lease
        total = sum(segment[2] for segment in part.segments)
        pieces = cut(part.segments, piece_size(total, lease.slots, lease.slot_bytes))
        self._mine.update(numbers)
        self._free.extend(_Slot(number, position) for position, number in enumerate(numbers))
        try:
            self._confirm_slots()
            if part.write:
                self._write(pieces)
            else:
                self._read(pieces)
        finally:
            self._finish()

    def _read(self, pieces: Iterator[Piece]) -> None:
        while True:
            while self._free and (piece := next(pieces, None)) is not None:
                self._send_request(self._free.popleft(), piece)
            if self._requested and len(self._in_flight) < ON_THE_WIRE:
                self._start_nic(*self._answered())
            elif self._in_flight:
                slot, piece = self._finish_nic()
                self._copies.begin(self._stream_of(slot), True, self._at(slot), piece.segments)
                self._done_with(slot)
            else:
                break
        for stream in range(STREAMS):
            self._copies.finish(stream)

    def _write(self, pieces: Iterator[Piece]) -> None:
        gathered: deque[tuple[_Slot, Piece]] = deque()
        while True:
            if self._free and (piece := next(pieces, None)) is not None:
                slot = self._free.popleft()
                gathered.append((slot, piece))
                self._copies.begin(self._stream_of(slot), False, self._at(slot), piece.segments)
            elif gathered and len(self._in_flight) < ON_THE_WIRE:
                self._start_nic(*gathered.popleft())
            elif self._in_flight and len(self._requested) < ON_THE_WIRE:
                self._send_request(*self._finish_nic())
            elif self._requested:
                self._done_with(self._answered()[0])
            else:
                return

    # ---- steps of reads and writes

    def _stream_of(self, slot: _Slot) -> int:
        return slot.position % STREAMS

    def _at(self, slot: _Slot) -> int:
        return int(self._memory.address) + slot.position * self._lease.slot_bytes

    def _send_request(self, slot: _Slot, piece: Piece) -> None:
        self._check_scope()
        self._requested.append((slot, piece))
        write = (
            self._part.write and piece is not _EMPTY_PIECE
        )  # an empty piece copies nothing and needs no write permission
        ticket, key, sequence = self._part.handle.ticket, self._lease.key, next(_sequence_numbers)
        self._sent(self._connection.send_request(write, ticket, piece.segments, key, slot.number, sequence))

    def _sent(self, reply: Any) -> None:
        result = Result(*reply)
        if result.outcome != DONE:
            self._broken = True
            # A write request may still take effect later, so the caller decides about a retry, as over TCP.
            again = result.outcome in (LOST, UNREACHABLE) and not self._part.write
            raise _Ended(result, again=again)

    def _receive_reply(self) -> tuple[_Slot, Piece, Result]:
        reply = Result(*self._connection.receive_reply())
        if reply.outcome != REFUSED:
            self._sent(reply)
        slot, piece = self._requested.popleft()
        return slot, piece, reply

    def _answered(self) -> tuple[_Slot, Piece]:
        slot, piece, reply = self._receive_reply()
        if reply.outcome == REFUSED:
            raise _Ended(reply, again=reply.refusal == NO_STAGING)
        return slot, piece

    def _start_nic(self, slot: _Slot, piece: Piece) -> None:
        """Have the NIC move a piece, after the GPU has finished with its slot."""
        self._check_scope()
        self._copies.finish(self._stream_of(slot))
        segment = slot.number * self._lease.slot_bytes, self._at(slot), piece.nbytes
        token, region = self._part.handle.token, self._lease.region
        awaited = self._verbs.carry(token, self._part.write, region, segment, self._memory)
        self._in_flight.append((slot, piece, awaited))

    def _finish_nic(self) -> tuple[_Slot, Piece]:
        slot, piece, awaited = self._in_flight.popleft()
        result = self._wait(awaited)
        if result.outcome != DONE:
            raise _Ended(result, again=result.outcome == LOST)
        return slot, piece

    def _wait(self, awaited: Awaited) -> Result:
        result = awaited.wait(self._scope)
        self.spoilt = self.spoilt or result.outcome == FAILED
        return result

    def _done_with(self, slot: _Slot) -> None:
        """Free the slot, or return it if another transfer waits for one and this one has more."""
        if self._lease.is_short and len(self._mine) > 1:
            self._mine.remove(slot.number)
            self._lease.give(slot.number)
        else:
            self._free.append(slot)

    def _check_scope(self) -> None:
        if over := self._scope.outcome():
            raise _Ended(Result(over, 0, 0, 0))

    # ---- begin and end

    def _confirm_slots(self) -> None:
        """Wait for a reply about each unsure slot. A late request of an abandoned transfer has no effect after that."""
        unsure = [slot for slot in self._free if slot.number in self._lease.unsure]
        for slot in unsure:
            self._free.remove(slot)
            self._send_request(slot, _EMPTY_PIECE)
        for _ in unsure:
            slot, _piece, reply = self._receive_reply()
            if reply.refusal == NO_STAGING:
                raise _Ended(reply, again=True)
            self._lease.unsure.discard(slot.number)  # also after a refusal, as for dropped memory
            self._free.append(slot)

    def _finish(self) -> None:
        for _, _, awaited in self._in_flight:
            self._wait(awaited)
        with contextlib.suppress(_Ended):
            while self._requested and not self._broken and not self._scope.outcome():
                self._receive_reply()
        for slot, _ in self._requested:
            self._lease.unsure.add(slot.number)
        for stream in range(STREAMS):
            with contextlib.suppress(_native.GpuFailure):
                self._copies.finish(stream)
        self._connection.close()
        for number in self._mine:
            self._lease.give(number)


class Staged(Route):
    """Route to GPU memory of processes whose NICs this process's NICs reach."""

    name = "verbs"

    def __init__(self, owner: Runtime, verbs: Verbs, tcp: Tcp, say: Callable[[Handle, str], None]) -> None:
        self._program, self._verbs, self._tcp, self._say = owner, verbs, tcp, say
        self._lock = threading.Lock()
        self._leases: dict[str, PinnedLease] = {}  # by the owner's token
        self._pins = PinnedPoolClient()
        self.why_here = ""
        """The reason why this process's NICs do not reach its own GPU memory, if they do not."""

    def run(self, part: ReadWriteOp | AtomicOp, scope: Any, keep: Any) -> Result:
        """See Route. Retries once after a broken connection, but not a write whose data connection broke.

        The owner refuses an atomic with a reason: neither a NIC nor a CPU can do it.
        """
        if isinstance(part, AtomicOp):
            return self._tcp.run(part, scope, keep)
        try:
            return self._move(part, scope)
        except _Ended as ended:
            if not ended.again:
                return ended.result
            if ended.result.refusal == NO_STAGING:
                self.forget(part.handle.token)
        try:
            return self._move(part, scope)
        except _Ended as ended:
            return ended.result

    def _move(self, part: ReadWriteOp, scope: Any) -> Result:
        """Move the bytes once. Raises _Ended."""
        lease = self._borrow(part.handle, scope)
        connection, result = self._tcp.staging_connection(part.handle, scope)
        if connection is None:  # TCP would fail as well
            raise _Ended(result._replace(outcome=LOST) if result.outcome == UNREACHABLE else result)
        memory = pipeline = None
        try:
            memory = self._pins.take(_native.gpu_device_of(part.segments[0][1]), lease.slots * lease.slot_bytes)
            pipeline = _Pipeline(part, self._verbs, lease, connection, memory, scope)
            numbers = lease.take(lease.slots, scope)
            if not numbers:
                raise _Ended(Result(scope.outcome(), 0, 0, 0))
            pipeline.run(numbers)
        except _native.GpuFailure as failure:
            raise _Ended(Result(FAILED, 0, 0, 0, str(failure))) from None
        # for example, the pinned memory of this process can't be registered
        except (VerbsError, ValueError, TypeError) as error:
            raise _Ended(Result(UNREACHABLE, 0, 0, 0, str(error))) from None
        finally:
            connection.close()
            if memory is not None and (pipeline is None or not pipeline.spoilt):
                self._pins.give(memory)
        return Result(DONE, 0, 0, 0)

    # ---- leases

    def _borrow(self, handle: Handle, scope: Any) -> PinnedLease:
        with self._lock:
            known = self._leases.get(handle.token)
        if known is not None:
            return known
        peer = self._program.router.peer(handle.token)
        try:
            lease = PinnedLease(ask(self._program, peer, TOPIC, _question(handle, wanted=True), scope.outcome))
        except (RDMAError, VerbsError) as error:
            outcome = scope.outcome() or (LOST if peer.gone is not None else UNREACHABLE)
            raise _Ended(Result(outcome, 0, 0, 0, str(error))) from None
        with self._lock:
            made = self._leases.setdefault(handle.token, lease)
        if made is lease:
            self._say(handle, f"verbs, staged through pinned memory of both hosts: {lease.why or self.why_here}")
        return made

    def has_lease(self, token: str) -> bool:
        with self._lock:
            return token in self._leases

    def prepare(self, handle: Handle) -> None:
        with contextlib.suppress(_Ended):
            self._borrow(handle, cancel_scope(None))

    def give_back(self, handle: Handle, scope: Any) -> None:
        """Return the lease, because no NIC of this process reaches the memory."""
        if self.forget(handle.token):
            with contextlib.suppress(RDMAError):
                peer = self._program.router.peer(handle.token)
                ask(self._program, peer, TOPIC, _question(handle, wanted=False), scope.outcome)

    def forget(self, token: str) -> bool:
        with self._lock:
            return self._leases.pop(token, None) is not None

    def close(self) -> None:
        self._pins.close()


def _question(handle: Handle, *, wanted: bool) -> bytes:
    return msgspec.msgpack.encode((int(handle.device.rpartition(":")[2]), wanted))


def answer(lender: PinnedPool, token: str, question: bytes) -> bytes:
    """Handle another process's request to borrow or return staging memory. Raises as PinnedPool.lend."""
    device, wanted = msgspec.msgpack.decode(question, type=tuple[int, bool])
    if wanted:
        return lender.lend(token, device)
    lender.forget(token)
    return b""


class GpuNics(NicRoute):
    """Route to GPU memory of processes that a NIC of this process reaches. A staged transfer needs a thread."""

    name = "verbs"

    def __init__(self, verbs: Verbs, staged: Staged) -> None:
        self._verbs, self._staged = verbs, staged

    def is_ready(self, handle: Handle) -> bool:
        return self._verbs.is_ready(handle) and (bool(handle.verbs) or self._staged.has_lease(handle.token))

    def prepare(self, handle: Handle) -> None:
        self._verbs.prepare(handle)
        if not handle.verbs:
            self._staged.prepare(handle)

    def planned(self, part: ReadWriteOp | AtomicOp, keep: Any) -> Any:
        return self._verbs.planned(part, keep) if part.handle.verbs else None

    def begin_planned(
        self, part: ReadWriteOp | AtomicOp, plan: Any, done: Callable[[Result], None]
    ) -> VerbsInFlight | None:
        return self._verbs.begin_planned(part, plan, done)

    def recover(self, part: ReadWriteOp | AtomicOp, result: Result, scope: Any, keep: Any) -> Result:
        return self._verbs.recover(part, result, scope, keep)

    def run(self, part: ReadWriteOp | AtomicOp, scope: Any, keep: Any) -> Result:
        if part.handle.verbs:
            result = self._verbs.run(part, scope, keep)
            if isinstance(part, AtomicOp) or result.outcome != UNREACHABLE or self._verbs.has_no_way(part.handle.token):
                return result
            self._staged.why_here = result.text  # this process's own memory is the unreachable one
        result = self._staged.run(part, scope, keep)
        if result.outcome == UNREACHABLE and isinstance(part, ReadWriteOp):
            self._staged.give_back(part.handle, scope)
        return result


def gathered(routed: Sequence[tuple[ReadWriteOp | AtomicOp, Route]]) -> list[tuple[ReadWriteOp | AtomicOp, Route]]:
    """Join the staged parts of the same registration and local GPU into one part each.

    Each part costs a request to its owner, and many small ones fit into a slot.
    """
    made: list[tuple[ReadWriteOp | AtomicOp, Route]] = []
    segments: dict[tuple[Any, ...], list[Segment]] = {}
    for part, route in routed:
        if not isinstance(part, ReadWriteOp) or not part.handle.staged or of_nics(route) is None:
            made.append((part, route))
            continue
        handle, gpu = part.handle, _native.gpu_device_of(part.segments[0][1])
        known = segments.setdefault((handle.token, handle.ticket, part.write, gpu), [])
        if not known:
            made.append((part._replace(segments=known), route))
        known.extend(part.segments)
    return made
