"""Route over RDMA NICs: connects _verbs to the messages that carry its connection requests and replies.

A handle that is sent holds the memory's keys for NICs (`Verbs.exposed`). Messages connect the two processes at the
first transfer. After that the owner's NIC serves transfers without its CPU.
"""

from __future__ import annotations

import contextlib
import functools
import math
import threading
import time
from bisect import bisect_right
from collections.abc import Callable, Sequence
from typing import Any, Literal

import msgspec

from monarch_backend._actor.runtime import Runtime
from monarch_backend._rdma.control_rpc import CHECK_INTERVAL_S, ask
from monarch_backend._rdma.errors import RDMAError
from monarch_backend._rdma.local_memory import LocalMemory
from monarch_backend._rdma.registrations import Handle, Registry, Ticket
from monarch_backend._rdma.routes.protocol import (
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
    AtomicOp,
    NicRoute,
    ReadWriteOp,
    Result,
    Segment,
)
from monarch_backend._transport.local.peer import Peer
from monarch_backend._verbs import (
    Allocation,
    Engine,
    NoConnectionError,
    Plan,
    Region,
    UnreachableMemoryError,
    VerbsError,
    allocation_of,
    available,
    plan_atomic,
    plan_transfer,
    shared_engine,
)

_NO_ACCESS = "remote access error"
PORT_CHECK_INTERVAL_S = 60.0
"""Seconds between two checks for an active port, if there was none."""

CANCEL_GRACE_S = 0.5
"""Seconds that an abandoned transfer has to end by itself. After that its connection is closed."""

MAX_POLL_S = 5e-3
"""Seconds for which a thread that waits for several transfers polls before it sleeps."""

_WHY = "another transfer with it was given up"

_DONE = Result(DONE, 0, 0, 0)


class VerbsInFlight:
    """See InFlightTransfer. ``done`` is called with the result, and ``request`` is the engine's."""

    __slots__ = ("_done", "_engine", "_late", "_over", "_program", "_token", "request")

    def __init__(self, program: Runtime, engine: Engine, token: str, done: Callable[[Result], None]) -> None:
        self._program, self._engine, self._token = program, engine, token
        self._done: Any = done
        self._late: Any = None  # a timer
        self._over = 0  # the outcome of an abandoned transfer, else 0
        self.request: Any = None

    def landed(self, what: Any) -> None:
        done, self._done = self._done, None  # else the timer would keep the callback and its objects alive
        done(result_of(what, self._over))
        if self._late is not None:
            self._late.cancel()

    def help(self, spins: float, waits: float) -> None:
        self._engine.help(self.request, spins)

    def listen(self) -> None:
        self._engine.listen(self.request)

    def end(self, outcome: int) -> None:
        if self._over or self.request.finished:
            return
        self._over = outcome
        self._engine.stop(self._token, self.request, "it was given up")
        self._engine.listen(self.request)
        if not self.request.finished:
            self._late = self._program.progress.later(CANCEL_GRACE_S, self._end_all)
            if self.request.finished:  # finished meanwhile, and `landed` may not have seen the timer
                self._late.cancel()

    def _end_all(self) -> None:
        if not self.request.finished:
            self._engine.call_soon(lambda: self._engine.give_up(self._token, _WHY))  # it is slow

    def end_now(self) -> None:
        if not self.request.finished:
            self._engine.give_up(self._token, _WHY)


def result_of(what: Any, over: int) -> Result:
    """Convert the engine's outcome to a Result. ``over``: the outcome of an abandoned transfer, else 0."""
    if what is None:
        return _DONE
    if not isinstance(what, BaseException):
        return Result(DONE, 0, 0, what)
    if over:
        return Result(over, 0, 0, 0)
    if isinstance(what, (NoConnectionError, UnreachableMemoryError)):
        return Result(UNREACHABLE, 0, 0, 0, str(what))
    refused = isinstance(what, VerbsError) and what.status not in ("", "transport retry counter exceeded")
    return Result(FAILED if refused or not isinstance(what, VerbsError) else LOST, 0, 0, 0, str(what))


class Awaited:
    """A transfer in flight on a NIC, with a thread that waits for it."""

    def __init__(self, engine: Engine, token: str, plan: Plan) -> None:
        """Start the transfer. Raises VerbsError."""
        self._engine, self._token = engine, token
        self._ended = threading.Event()
        self._outcome: Any = None
        engine.start(token, plan, self._done)

    def _done(self, outcome: Any) -> None:
        self._outcome = outcome
        self._ended.set()

    def wait(self, scope: Any) -> Result:
        """Wait until the NIC has finished. An abandoned transfer has also ended when this returns."""
        over = 0
        while not self._ended.wait(CHECK_INTERVAL_S):
            over = scope.outcome()
            if over:
                if not self._ended.wait(CANCEL_GRACE_S):
                    self._engine.give_up(self._token, _WHY)
                    self._ended.wait()
                break
        return result_of(self._outcome, over)


class Verbs(NicRoute):
    """Route to memory of processes that a NIC of this process reaches."""

    name = "verbs"

    def __init__(self, owner: Runtime, registry: Registry) -> None:
        self._program, self._registry = owner, registry
        self._lock = threading.Lock()
        self._engine: Engine | None = None
        self._regions: dict[Ticket, Region] = {}
        self._unusable: dict[bool, str | None] = {}  # reason by ``up``: whether a port has to be active
        self._look_again = math.inf  # time of the next check for an active port
        self.why_staged = ""
        """The reason why NICs did not reach the GPU memory that was exposed last."""
        self._unreachable: set[Ticket] = set()  # registrations that no NIC reaches
        self._no_way: set[str] = set()  # processes whose last connection attempt failed
        self._met: set[str] = set()  # processes with a present or past connection

    def unusable(self, up: bool = True) -> str | None:
        """Return the reason why this process can't use verbs, or None.

        Without ``up``, an inactive port is no reason.
        """
        with self._lock:
            if up not in self._unusable or (up and time.monotonic() >= self._look_again):
                why = self._unusable[up] = available(up=up)
                if up:
                    waits = why is not None and available(up=False) is None
                    self._look_again = time.monotonic() + PORT_CHECK_INTERVAL_S if waits else math.inf
            return self._unusable[up]

    @property
    def started(self) -> bool:
        return self._engine is not None

    def opened(self) -> Engine:
        with self._lock:
            if self._engine is None:
                self._engine = shared_engine.borrow(str, self._dial)
            return self._engine

    # ---- serving

    def is_staged(self, handle: Handle) -> bool:
        return handle.ticket in self._unreachable

    def exposed(self, handle: Handle) -> bytes:
        """Expose memory to other processes' NICs, and return its packed Region. Empty if it `is_staged` or was dropped.

        Raises VerbsError.
        """
        if self.is_staged(handle):
            return b""
        with self._lock:
            region = self._regions.get(handle.ticket)
        if region is None:
            whole = self._registry.memory(handle.ticket)
            if whole is None:
                return b""
            try:
                made = self.opened().expose(whole.address, whole.nbytes, whole.keep, writable=whole.writable)
            except UnreachableMemoryError as error:
                self._unreachable.add(handle.ticket)
                self.why_staged = str(error)
                if self._registry.native.check(handle.ticket, 0, 0, READ):  # as below
                    self._unreachable.discard(handle.ticket)
                return b""
            with self._lock:
                region = self._regions.setdefault(handle.ticket, made)
            if region is not made:
                self.opened().release(made)
            if self._registry.native.check(handle.ticket, 0, 0, READ):  # it was dropped meanwhile
                self.dropped(handle.ticket)
        return region.to_bytes()

    def dropped(self, ticket: Ticket) -> None:
        """Release dropped memory. No NIC reaches it any more when this returns."""
        self._unreachable.discard(ticket)
        with self._lock:
            region = self._regions.pop(ticket, None)
        if region is not None:
            self.opened().release(region)

    def accept(self, peer: Peer, offer: bytes) -> bytes:
        """Accept the connection request of a process. Raises VerbsError."""
        self._met.add(peer.token)
        return self.opened().accept(peer.token, offer)

    # ---- connecting

    def _dial(self, token: Any) -> None:
        self._program.run_in_thread(lambda: self._meet(token))

    def _meet(self, token: str) -> None:
        engine, offer = self.opened(), b""
        self._met.add(token)
        try:
            offer = engine.offer(token)
            answer = ask(self._program, self._program.router.peer(token), "verbs", offer)
            self._no_way.add(token)  # before waiting transfers are woken
            engine.connect(token, answer)
        except (VerbsError, RDMAError) as error:
            self._no_way.add(token)
            if engine.no_connection(token, offer, str(error)):
                return
        self._no_way.discard(token)

    def carry(self, token: str, write: bool, region: Region, segment: Segment, memory: Any) -> Awaited:
        """Move one piece between the staging memory there and here. Raises VerbsError."""
        kind: Literal["write", "read"] = "write" if write else "read"
        return Awaited(self.opened(), token, plan_transfer(kind, region, [segment], memory))

    def is_ready(self, handle: Handle) -> bool:
        """Return whether a transfer with this memory could start without a request to the owner, as far as is known."""
        return self._engine is not None and self._engine.connected(handle.token)

    def prepare(self, handle: Handle) -> None:
        """Prepare that, on a thread that may block. Moves no data, and never raises if the owner refuses."""
        if not self.is_ready(handle):
            with contextlib.suppress(VerbsError):  # no port is active here
                self._meet(handle.token)

    def has_no_way(self, token: str) -> bool:
        return token in self._no_way

    def planned(self, part: ReadWriteOp | AtomicOp, keep: Any) -> Plan | None:
        try:
            region = _region(part.handle.verbs)
            return None if _refusal(part, region) else _plan(part, region, keep)
        except (VerbsError, ValueError, TypeError):  # `run` gets the same error and reports it
            return None

    def begin_planned(
        self, part: ReadWriteOp | AtomicOp, plan: Plan, done: Callable[[Result], None]
    ) -> VerbsInFlight | None:
        token, engine = part.handle.token, self._engine
        if engine is None:
            return None
        in_flight = VerbsInFlight(self._program, engine, token, done)
        try:
            in_flight.request = engine.start(token, plan, in_flight.landed, at_once=True)
        except VerbsError:
            return None
        return None if in_flight.request is None else in_flight

    def recover(self, part: ReadWriteOp | AtomicOp, result: Result, scope: Any, keep: Any) -> Result:
        if result.outcome == LOST and isinstance(part, ReadWriteOp):  # repeating a read or write is safe
            result = self._wait(part, keep, scope)
        return self._explained(part, result, scope)

    def run(self, part: ReadWriteOp | AtomicOp, scope: Any, keep: Any) -> Result:
        return self.recover(part, self._wait(part, keep, scope), scope, keep)

    def _wait(self, part: ReadWriteOp | AtomicOp, keep: Any, scope: Any) -> Result:
        engine = self.opened()
        try:
            region = _region(part.handle.verbs)
            if refusal := _refusal(part, region):
                return Result(REFUSED, refusal, 0, 0)
            plan = _plan(part, region, keep)
        except (VerbsError, ValueError, TypeError) as error:
            return Result(FAILED, 0, 0, 0, str(error))
        try:
            awaited = Awaited(engine, part.handle.token, plan)
        except VerbsError as error:  # no port is active here, or no memory can be locked: it has not started
            return Result(UNREACHABLE, 0, 0, 0, str(error))
        return awaited.wait(scope)

    def _explained(self, part: ReadWriteOp | AtomicOp, result: Result, scope: Any) -> Result:
        """Replace the NIC's access error by the owner's reason, because the NIC reports none."""
        if result.text is None or _NO_ACCESS not in result.text:
            return result
        if isinstance(part, ReadWriteOp):
            ranges, access = [(s[0], s[2]) for s in part.segments[:1024]], WRITE if part.write else READ
        else:
            ranges, access = [(part.offset, 8)], part.access
        try:
            question = msgspec.msgpack.encode((part.handle.ticket, ranges, access))
            owner = self._program.router.peer(part.handle.token)
            refusal = int.from_bytes(ask(self._program, owner, "refusal", question, scope.outcome), "big")
        except RDMAError:
            return result
        return Result(REFUSED, refusal, 0, 0) if refusal else result

    def forget(self, token: str, why: str) -> None:
        self._met.discard(token)
        self._no_way.discard(token)
        if self._engine is not None:
            self._engine.peer_gone(token, VerbsError(why, "", "", token))

    def close(self) -> None:
        """Stop exposing this process's memory, and close its connections."""
        if self._engine is None or shared_engine.give_back(str):
            return
        for ticket in list(self._regions):  # process groups may still use the engine for messages
            self.dropped(ticket)
        for token in list(self._met):
            self._engine.peer_gone(token, VerbsError("the program has ended", "", "", token))


class Kept(list[Any]):
    """The memory of a transfer of many parts, sorted once for all parts."""

    _places: tuple[list[int], list[tuple[Allocation, Any]]] | None = None

    def places(self) -> tuple[list[int], list[tuple[Allocation, Any]]]:
        """Return the sorted addresses, and the allocation and object at each."""
        if self._places is None:
            each_one = [memory.keep if isinstance(memory, LocalMemory) else memory for memory in self]
            found = sorted(((allocation_of(each), each) for each in each_one), key=lambda pair: pair[0][:2])
            self._places = [allocation.address for allocation, _ in found], found
        return self._places


@functools.lru_cache(4096)
def _region(packed: bytes) -> Region:
    return Region.from_bytes(packed)


def _refusal(part: ReadWriteOp | AtomicOp, region: Region) -> int:
    """Return the Refusal that the NIC would answer without a reason, or 0 if none is visible here."""
    if isinstance(part, ReadWriteOp):
        for offset, _, size in part.segments:
            if not 0 <= offset <= region.nbytes or size > region.nbytes - offset:
                return OUT_OF_RANGE
        return READ_ONLY if part.write and not region.writable else 0
    if not 0 <= part.offset <= region.nbytes - 8:
        return OUT_OF_RANGE
    if not region.writable:
        return READ_ONLY
    return MISALIGNED if (region.address + part.offset) % 8 else 0


def _plan(part: ReadWriteOp | AtomicOp, region: Region, keep: Any) -> Plan:
    if isinstance(part, ReadWriteOp):
        return plan_transfer("write" if part.write else "read", region, part.segments, _owners(part.segments, keep))
    kind: Literal["fetch_add", "compare_swap"] = "fetch_add" if part.access == FETCH_ADD else "compare_swap"
    return plan_atomic(kind, region, part.offset, part.operand, part.expected)


def _owners(segments: Sequence[Segment], keep: Any) -> Any:
    """Return, for each local address, the object among ``keep`` that has its memory."""
    if len(keep) == 1:
        (memory,) = keep
        return memory.keep if isinstance(memory, LocalMemory) else memory
    starts, found = keep.places() if isinstance(keep, Kept) else Kept(keep).places()

    def owner(address: int, nbytes: int) -> Any:
        """Return the nearest object that contains the range, because objects may contain each other."""
        last = bisect_right(starts, address)
        for allocation, each in reversed(found[:last]):
            if address + nbytes <= allocation.address + allocation.nbytes:
                return each
        return found[max(0, last - 1)][1]

    return [owner(address, nbytes) for _, address, nbytes in segments]


def refusal_of(registry: Registry, question: bytes) -> bytes:
    """Answer a process whose NIC was refused, with the Refusal."""
    ticket, ranges, access = msgspec.msgpack.decode(
        question, type=tuple[tuple[int, int, int], list[tuple[int, int]], int]
    )
    for offset, size in ranges:
        refusal = registry.native.check(ticket, offset, size, access)
        if refusal:
            return int(refusal).to_bytes(1, "big")
    return b"\0"
