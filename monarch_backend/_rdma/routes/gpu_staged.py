"""Memory of GPUs over NICs that do not reach it: through pinned memory of both hosts, in a pipeline.

To read, the owner's server copies a piece from its GPU into a slot of staging memory, the NIC of this process reads
that, and this process copies it to its own GPU; to write, the other way round. Each of the three does its part of
one piece while the others are at others. What is asked of the owner goes over a data connection, as words; the bytes
go by NICs.
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
from monarch_backend._rdma.handle import Handle
from monarch_backend._rdma.pinned_pool import PinnedLease, PinnedPool, PinnedPoolClient
from monarch_backend._rdma.routes.base import (
    DONE,
    FAILED,
    LOST,
    NO_STAGING,
    REFUSED,
    UNREACHABLE,
    ReadWriteOp,
    Result,
    Segment,
    patient,
)
from monarch_backend._rdma.routes.tcp import Tcp
from monarch_backend._rdma.routes.verbs import Awaited, Verbs
from monarch_backend._verbs import VerbsError

TOPIC = "staging"
"""What its owner is asked for, once: to lend some, or to take it back."""

LEAST_PIECE, MOST_RANGES = 512 << 10, 256
"""Bytes of a piece that is worth a round of its own, and ranges that a request may have (csrc/memory/wire.h)."""

ON_THE_WIRE = 2
"""Pieces at a time: the NIC has the next one when it is done with the first."""

LANES: int = _native.GpuCopies.lanes

_turns = itertools.count(1)
"""Of all requests of this process: a slot's owner takes those in this order only."""


class Piece(NamedTuple):
    """So many bytes as a slot takes, of one or several segments."""

    segments: Sequence[Segment]
    nbytes: int


def cut(segments: Sequence[Segment], most: int) -> Iterator[Piece]:
    """Into pieces of so many bytes, and MOST_RANGES segments, at most.

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
    """Bytes of a piece, so that all slots have something to do."""
    return min(slot_bytes, max(LEAST_PIECE, -(-total // slots)))


_FENCE = Piece(((0, 0, 0),), 0)


class _Ended(Exception):
    """A transfer does not go on. ``again``: it may be tried once more."""

    def __init__(self, result: Result, *, again: bool = False) -> None:
        super().__init__(result.text)
        self.result, self.again = result, again


class _Slot(NamedTuple):
    """Of the owner's staging memory, and the place in ours that it is paired with."""

    number: int
    place: int


class _Pipeline:
    """One transfer, by one thread, through slots which it gives back when it is over."""

    def __init__(
        self, part: ReadWriteOp, verbs: Verbs, borrowed: PinnedLease, line: Any, memory: Any, patient: Any
    ) -> None:
        """``memory``: of this process, pinned, with a place for each slot."""
        self._part, self._verbs, self._borrowed, self._patient = part, verbs, borrowed, patient
        self._line, self._memory = line, memory
        self._broken = False  # the line
        self.spoilt = False
        """A NIC may still write to our memory, as one that is stuck: it is not for another transfer."""
        self._copies: Any = _native.GpuCopies(_native.gpu_device_of(part.segments[0][1]))
        self._mine: set[int] = set()
        self._free: deque[_Slot] = deque()
        self._asked: deque[tuple[_Slot, Piece]] = deque()
        self._flying: deque[tuple[_Slot, Piece, Awaited]] = deque()

    def run(self, numbers: Sequence[int]) -> None:
        """Raises _Ended, GpuFailure and VerbsError. Nobody touches the transfer's memory any more when it returns."""
        part, borrowed = self._part, self._borrowed
        total = sum(segment[2] for segment in part.segments)
        pieces = cut(part.segments, piece_size(total, borrowed.slots, borrowed.slot_bytes))
        self._mine.update(numbers)
        self._free.extend(_Slot(number, place) for place, number in enumerate(numbers))
        try:
            self._fence()
            if part.write:
                self._write(pieces)
            else:
                self._read(pieces)
        finally:
            self._leave()

    def _read(self, pieces: Iterator[Piece]) -> None:
        while True:
            while self._free and (piece := next(pieces, None)) is not None:
                self._ask(self._free.popleft(), piece)
            if self._asked and len(self._flying) < ON_THE_WIRE:
                self._fly(*self._answered())
            elif self._flying:
                slot, piece = self._landed()
                self._copies.begin(self._lane(slot), True, self._at(slot), piece.segments)
                self._done_with(slot)
            else:
                break
        for lane in range(LANES):
            self._copies.finish(lane)

    def _write(self, pieces: Iterator[Piece]) -> None:
        gathered: deque[tuple[_Slot, Piece]] = deque()
        while True:
            if self._free and (piece := next(pieces, None)) is not None:
                slot = self._free.popleft()
                gathered.append((slot, piece))
                self._copies.begin(self._lane(slot), False, self._at(slot), piece.segments)
            elif gathered and len(self._flying) < ON_THE_WIRE:
                self._fly(*gathered.popleft())
            elif self._flying and len(self._asked) < ON_THE_WIRE:
                self._ask(*self._landed())
            elif self._asked:
                self._done_with(self._answered()[0])
            else:
                return

    # ---- the steps of both

    def _lane(self, slot: _Slot) -> int:
        return slot.place % LANES

    def _at(self, slot: _Slot) -> int:
        return int(self._memory.address) + slot.place * self._borrowed.slot_bytes

    def _ask(self, slot: _Slot, piece: Piece) -> None:
        """The owner, to copy it into the slot, or out of it."""
        self._go_on()
        self._asked.append((slot, piece))
        write = self._part.write and piece is not _FENCE  # which copies nothing, and needs no leave to write
        ticket, key, turn = self._part.handle.ticket, self._borrowed.key, next(_turns)
        self._sent(self._line.ask(write, ticket, piece.segments, key, slot.number, turn))

    def _sent(self, said: Any) -> None:
        result = Result(*said)
        if result.outcome != DONE:
            self._broken = True
            # What it was asked to write may be done later, so whoever writes decides himself, as over TCP.
            again = result.outcome in (LOST, UNREACHABLE) and not self._part.write
            raise _Ended(result, again=again)

    def _hear(self) -> tuple[_Slot, Piece, Result]:
        """The next answer, whatever it is."""
        said = Result(*self._line.hear())
        if said.outcome != REFUSED:
            self._sent(said)
        slot, piece = self._asked.popleft()
        return slot, piece, said

    def _answered(self) -> tuple[_Slot, Piece]:
        slot, piece, said = self._hear()
        if said.outcome == REFUSED:
            raise _Ended(said, again=said.refusal == NO_STAGING)
        return slot, piece

    def _fly(self, slot: _Slot, piece: Piece) -> None:
        """By the NIC, once the GPU is done with this place of ours."""
        self._go_on()
        self._copies.finish(self._lane(slot))
        segment = slot.number * self._borrowed.slot_bytes, self._at(slot), piece.nbytes
        token, region = self._part.handle.token, self._borrowed.region
        flight = self._verbs.carry(token, self._part.write, region, segment, self._memory)
        self._flying.append((slot, piece, flight))

    def _landed(self) -> tuple[_Slot, Piece]:
        slot, piece, flight = self._flying.popleft()
        result = self._wait(flight)
        if result.outcome != DONE:
            raise _Ended(result, again=result.outcome == LOST)
        return slot, piece

    def _wait(self, flight: Awaited) -> Result:
        result = flight.wait(self._patient)
        self.spoilt = self.spoilt or result.outcome == FAILED
        return result

    def _done_with(self, slot: _Slot) -> None:
        """One who waits for a slot gets it, if this transfer has others."""
        if self._borrowed.is_short and len(self._mine) > 1:
            self._mine.remove(slot.number)
            self._borrowed.give(slot.number)
        else:
            self._free.append(slot)

    def _go_on(self) -> None:
        if over := self._patient.over():
            raise _Ended(Result(over, 0, 0, 0))

    # ---- its beginning and its end

    def _fence(self) -> None:
        """A transfer that was given up may have asked for a slot, and its request be late: not any more after ours."""
        unsure = [slot for slot in self._free if self._borrowed.is_unsure(slot.number)]
        for slot in unsure:
            self._free.remove(slot)
            self._ask(slot, _FENCE)
        for _ in unsure:
            slot, _piece, said = self._hear()
            if said.refusal == NO_STAGING:
                raise _Ended(said, again=True)
            self._borrowed.trust(slot.number)  # also if it is refused, as what was dropped is
            self._free.append(slot)

    def _leave(self) -> None:
        for _, _, flight in self._flying:
            self._wait(flight)
        with contextlib.suppress(_Ended):
            while self._asked and not self._broken and not self._patient.over():
                self._hear()
        for slot, _ in self._asked:
            self._borrowed.doubt(slot.number)
        for lane in range(LANES):
            with contextlib.suppress(_native.GpuFailure):
                self._copies.finish(lane)
        self._line.close()
        for number in self._mine:
            self._borrowed.give(number)


class Staged:
    """To memory of GPUs of processes whose NICs ours reach."""

    name = "verbs"

    def __init__(self, owner: Runtime, verbs: Verbs, tcp: Tcp, say: Callable[[Handle, str], None]) -> None:
        self._program, self._verbs, self._tcp, self._say = owner, verbs, tcp, say
        self._lock = threading.Lock()
        self._borrowed: dict[str, PinnedLease] = {}  # by the owner's token
        self._pins = PinnedPoolClient()
        self.why_here = ""
        """Why our NICs did not reach our own memory, where they did not."""

    def completes_inline(self, handle: Handle, nbytes: int, atomic: bool) -> bool:
        """See Route."""
        return False

    def move(self, handle: Handle, write: bool, segments: Sequence[Segment], patient: Any, keep: Any) -> Result:
        """See Route. Once more where a connection has broken, but not to write where it is that of the words."""
        part = ReadWriteOp(handle, write, segments)
        try:
            return self._move(part, patient)
        except _Ended as ended:
            if not ended.again:
                return ended.result
            if ended.result.refusal == NO_STAGING:
                self.forget(handle.token)
        try:
            return self._move(part, patient)
        except _Ended as ended:
            return ended.result

    def change(self, handle: Handle, access: int, offset: int, operand: int, expected: int, patient: Any) -> Result:
        """See Route. Its owner says why not: no NIC reaches that memory, and no processor does."""
        return self._tcp.change(handle, access, offset, operand, expected, patient)

    def _move(self, part: ReadWriteOp, patient: Any) -> Result:
        """Raises _Ended."""
        borrowed = self._borrow(part.handle, patient)
        line, result = self._tcp.line(part.handle, patient)
        if line is None:  # nor would TCP be any better
            raise _Ended(result._replace(outcome=LOST) if result.outcome == UNREACHABLE else result)
        memory = pipeline = None
        try:
            memory = self._pins.take(_number(part), borrowed.slots * borrowed.slot_bytes)
            pipeline = _Pipeline(part, self._verbs, borrowed, line, memory, patient)
            numbers = borrowed.take(borrowed.slots, patient)
            if not numbers:
                raise _Ended(Result(patient.over(), 0, 0, 0))
            pipeline.run(numbers)
        except _native.GpuFailure as failure:
            raise _Ended(Result(FAILED, 0, 0, 0, str(failure))) from None
        except (VerbsError, ValueError, TypeError) as error:  # ours can't be registered, for example
            raise _Ended(Result(UNREACHABLE, 0, 0, 0, str(error))) from None
        finally:
            line.close()
            if memory is not None and (pipeline is None or not pipeline.spoilt):
                self._pins.give(memory)
        return Result(DONE, 0, 0, 0)

    # ---- what owners lend

    def _borrow(self, handle: Handle, patient: Any) -> PinnedLease:
        with self._lock:
            known = self._borrowed.get(handle.token)
        if known is not None:
            return known
        peer = self._program.router.peer(handle.token)
        try:
            borrowed = PinnedLease(ask(self._program, peer, TOPIC, _question(handle, wanted=True), patient.over))
        except (RDMAError, VerbsError) as error:
            outcome = patient.over() or (LOST if peer.gone is not None else UNREACHABLE)
            raise _Ended(Result(outcome, 0, 0, 0, str(error))) from None
        with self._lock:
            made = self._borrowed.setdefault(handle.token, borrowed)
        if made is borrowed:
            self._say(handle, f"verbs, staged through pinned memory of both hosts: {borrowed.why or self.why_here}")
        return made

    def has_borrowed(self, token: str) -> bool:
        """That process has lent something."""
        with self._lock:
            return token in self._borrowed

    def prepare(self, handle: Handle) -> None:
        """See NicRoute."""
        with contextlib.suppress(_Ended):
            self._borrow(handle, patient(None))

    def give_back(self, handle: Handle, patient: Any) -> None:
        """No NIC of ours reaches it, as was seen."""
        if self.forget(handle.token):
            with contextlib.suppress(RDMAError):
                peer = self._program.router.peer(handle.token)
                ask(self._program, peer, TOPIC, _question(handle, wanted=False), patient.over)

    def forget(self, token: str) -> bool:
        """That process is gone, or has lent nothing (any more). False if that was so."""
        with self._lock:
            return self._borrowed.pop(token, None) is not None

    def close(self) -> None:
        """When the program ends."""
        self._pins.close()


def _number(part: ReadWriteOp) -> int:
    """Of the GPU that has this process's side."""
    return _native.gpu_device_of(part.segments[0][1])


def _question(handle: Handle, *, wanted: bool) -> bytes:
    return msgspec.msgpack.encode((int(handle.device.rpartition(":")[2]), wanted))


def answer(lender: PinnedPool, token: str, question: bytes) -> bytes:
    """For another process, that wants staging memory, or wants it no more. Raises as PinnedPool.lend."""
    device, wanted = msgspec.msgpack.decode(question, type=tuple[int, bool])
    if wanted:
        return lender.lend(token, device)
    lender.forget(token)
    return b""
