"""The route over RDMA NICs: verbs/ does the work, and here it gets its offers and answers to other processes.

A handle that is sent carries its memory's keys for the NICs (`Verbs.exposed`). The two processes are connected by
messages when the first transfer wants it; after that the NIC of the owner does all of its part.
"""

from __future__ import annotations

import threading
from bisect import bisect_right
from collections.abc import Sequence
from typing import Any, Literal

import msgspec

from monarch_backend.actor._program import Program
from monarch_backend.rdma import _one_engine
from monarch_backend.rdma._conversation import TICK, ask
from monarch_backend.rdma._errors import RDMAError
from monarch_backend.rdma._handle import Handle, Ticket
from monarch_backend.rdma._memory import LocalMemory
from monarch_backend.rdma._registry import Registry
from monarch_backend.rdma._route import (
    DONE,
    FAILED,
    FETCH_ADD,
    LOST,
    MISALIGNED,
    OUT_OF_RANGE,
    READ,
    READ_ONLY,
    REFUSED,
    UNREACHABLE,
    WRITE,
    Result,
    Segment,
)
from monarch_backend.rdma.verbs import Engine, Region, VerbsError, available
from monarch_backend.transport._peer import Peer

MERCY = 0.5
"""Seconds that a transfer which is not wanted any more has to end by itself; then its connection is closed."""

_NO_ACCESS = "remote access error"


class _NoWay(VerbsError):
    """There is no connection, and nothing was asked for."""


class Verbs:
    """To memory of processes that a NIC of ours reaches."""

    name = "verbs"

    def __init__(self, owner: Program, registry: Registry) -> None:
        self._program, self._registry = owner, registry
        self._lock = threading.Lock()
        self._engine: Engine | None = None
        self._regions: dict[Ticket, Region] = {}
        self._unusable: str | None = None
        self._looked = False
        self._met: set[str] = set()  # processes with which there is, or was, a connection

    def unusable(self) -> str | None:
        """Why verbs can't be used in this process; None if they can."""
        with self._lock:
            if not self._looked:
                self._looked, self._unusable = True, available()
            return self._unusable

    @property
    def started(self) -> bool:
        """A NIC is, or was, in use."""
        return self._engine is not None

    def _started(self) -> Engine:
        with self._lock:
            if self._engine is None:
                self._engine = _one_engine.borrow(str, self._dial)
            return self._engine

    # ---- for others

    def exposed(self, handle: Handle) -> bytes:
        """What others need to reach this memory, which their NICs can from now on. Raises VerbsError."""
        with self._lock:
            region = self._regions.get(handle.ticket)
        if region is None:
            whole = self._registry.memory(handle.ticket)
            if whole is None:
                return b""
            made = self._started().expose(whole.address, whole.nbytes, whole.keep, writable=whole.writable)
            with self._lock:
                region = self._regions.setdefault(handle.ticket, made)
            if region is not made:
                self._started().release(made)
            if self._registry.native.check(handle.ticket, 0, 0, READ):  # it was dropped meanwhile
                self.dropped(handle.ticket)
        return region.to_bytes()

    def dropped(self, ticket: Ticket) -> None:
        """No NIC reaches it any more when this returns."""
        with self._lock:
            region = self._regions.pop(ticket, None)
        if region is not None:
            self._started().release(region)

    def accept(self, peer: Peer, offer: bytes) -> bytes:
        """Of a process that wants to reach our memory. Raises VerbsError."""
        self._met.add(peer.token)
        return self._started().accept(peer.token, offer)

    # ---- to others

    def _dial(self, token: Any) -> None:
        self._program.aside(lambda: self._meet(token))

    def _meet(self, token: str) -> None:
        engine = self._started()
        self._met.add(token)
        try:
            answer = ask(self._program, self._program.router.peer(token), "verbs", engine.offer(token))
            engine.connect(token, answer)
        except (VerbsError, RDMAError) as error:
            engine.peer_gone(token, _NoWay(str(error), "", "", token))

    def is_quick(self, handle: Handle, nbytes: int, atomic: bool) -> bool:
        """See Route."""
        return False

    def move(self, handle: Handle, write: bool, segments: Sequence[Segment], patient: Any, keep: Any) -> Result:
        """See Route."""
        region = Region.from_bytes(handle.verbs)
        for offset, _, size in segments:
            if not 0 <= offset <= region.nbytes or size > region.nbytes - offset:
                return Result(REFUSED, OUT_OF_RANGE, 0, 0)
        if write and not region.writable:
            return Result(REFUSED, READ_ONLY, 0, 0)
        owners = _owners(segments, keep)
        kind: Literal["read", "write"] = "write" if write else "read"
        result = self._wait(
            handle, patient, lambda e, done: e.transfer(handle.token, kind, region, segments, owners, done)
        )
        if result.outcome == LOST:  # the same bytes may be read and written twice
            result = self._wait(
                handle, patient, lambda e, done: e.transfer(handle.token, kind, region, segments, owners, done)
            )
        return self._explained(handle, result, segments, WRITE if write else READ, patient)

    def change(self, handle: Handle, access: int, offset: int, operand: int, expected: int, patient: Any) -> Result:
        """See Route."""
        region = Region.from_bytes(handle.verbs)
        if not 0 <= offset <= region.nbytes - 8:
            return Result(REFUSED, OUT_OF_RANGE, 0, 0)
        if not region.writable:
            return Result(REFUSED, READ_ONLY, 0, 0)
        if (region.address + offset) % 8:
            return Result(REFUSED, MISALIGNED, 0, 0)
        kind: Literal["fetch_add", "compare_swap"] = "fetch_add" if access == FETCH_ADD else "compare_swap"
        result = self._wait(
            handle, patient, lambda e, done: e.atomic(handle.token, kind, region, offset, operand, expected, done)
        )
        return self._explained(handle, result, ((offset, 0, 8),), access, patient)

    def _wait(self, handle: Handle, patient: Any, begin: Any) -> Result:
        """Until the NIC has done it, or nobody wants it any more and it touches no memory."""
        ended, outcome = threading.Event(), []

        def done(what: Any) -> None:
            outcome.append(what)
            ended.set()

        engine, over = self._started(), 0
        try:
            begin(engine, done)
        except (VerbsError, ValueError, TypeError) as error:
            return Result(FAILED, 0, 0, 0, str(error))
        while not ended.wait(TICK):
            over = patient.over()
            if over:
                if not ended.wait(MERCY):
                    engine.give_up(handle.token, "another transfer with it was given up")
                    ended.wait()
                break
        if not isinstance(outcome[0], BaseException):
            return Result(DONE, 0, 0, outcome[0] or 0)
        return Result(over, 0, 0, 0) if over else _told(outcome[0])

    def _explained(
        self, handle: Handle, result: Result, segments: Sequence[Segment], access: int, patient: Any
    ) -> Result:
        """A NIC says that it may not, and not why: its owner knows."""
        if result.text is None or _NO_ACCESS not in result.text:
            return result
        try:
            question = msgspec.msgpack.encode((handle.ticket, [(s[0], s[2]) for s in segments[:1024]], access))
            refusal = int.from_bytes(
                ask(self._program, self._program.router.peer(handle.token), "refusal", question, patient.over), "big"
            )
        except RDMAError:
            return result
        return Result(REFUSED, refusal, 0, 0) if refusal else result

    def forget(self, token: str, why: str) -> None:
        """That process is gone."""
        self._met.discard(token)
        if self._engine is not None:
            self._engine.peer_gone(token, VerbsError(why, "", "", token))

    def close(self) -> None:
        """Nobody reaches this process's memory any more."""
        if self._engine is None or _one_engine.give_back(str):
            return
        for ticket in list(self._regions):  # messages of process groups still need the engine
            self.dropped(ticket)
        for token in list(self._met):
            self._engine.peer_gone(token, VerbsError("the program has ended", "", "", token))


def _told(error: Any) -> Result:
    if isinstance(error, _NoWay):
        return Result(UNREACHABLE, 0, 0, 0, str(error))
    refused = isinstance(error, VerbsError) and error.status not in ("", "transport retry counter exceeded")
    return Result(FAILED if refused or not isinstance(error, VerbsError) else LOST, 0, 0, 0, str(error))


def _owners(segments: Sequence[Segment], keep: Any) -> Any:
    """The object of each local address, among those that are kept for the transfer."""
    each_one = [memory.keep if isinstance(memory, LocalMemory) else memory for memory in keep]
    if len(each_one) == 1:
        return each_one[0]
    from monarch_backend.rdma.verbs._memory import allocation_of

    found = sorted(((allocation_of(each), each) for each in each_one), key=lambda pair: pair[0].address)
    starts = [allocation.address for allocation, _ in found]
    return [found[max(0, bisect_right(starts, address) - 1)][1] for _, address, _ in segments]


def refusal_of(registry: Registry, question: bytes) -> bytes:
    """For one whose NIC was refused: a Refusal."""
    ticket, ranges, access = msgspec.msgpack.decode(
        question, type=tuple[tuple[int, int, int], list[tuple[int, int]], int]
    )
    for offset, size in ranges:
        refusal = registry.native.check(ticket, offset, size, access)
        if refusal:
            return int(refusal).to_bytes(1, "big")
    return b"\0"
