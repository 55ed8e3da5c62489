"""Requests, and their division into the pieces that queue pairs take."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

from monarch_backend._verbs.open_device import Device, Slot
from monarch_backend._verbs.providers.provider import COMPARE_SWAP, FETCH_ADD, READ, WRITE
from monarch_backend._verbs.registrations.cache import Allocation, Entry, allocation_of
from monarch_backend._verbs.wire_format import Region

if TYPE_CHECKING:
    from monarch_backend._verbs.connections.queue_pair import SendQueuePair

OPCODES = {"read": READ, "write": WRITE, "fetch_add": FETCH_ADD, "compare_swap": COMPARE_SWAP}

LEAST_PIECE, MOST_PIECE = 1 << 20, 2 << 20
"""Bytes of a piece.

It should be worth a work request, and a large transfer should have some for each queue pair. Between pieces other
requests have their turn.
"""

PIECES_PER_LANE = 4

LANE_SHARE, LANE_PIECES = 16 << 20, 64
"""Bytes and segments for each of a device's queue pairs; one alone saturates a link with less than twice as many."""

Done = Callable[[Any], None]

Segment = tuple[int, int, int]
"""(offset in the region, local address, bytes)."""

_ALL = (1 << 64) - 1


class Piece(NamedTuple):
    remote: int
    local: int
    nbytes: int
    part: int  # index of its allocation in the request


def piece_size(total: int, lanes: int, max_message: int) -> int:
    """Return the bytes of a transfer's pieces, so that all queue pairs have work.

    >>> piece_size(1 << 30, 2, 1 << 30) == MOST_PIECE, piece_size(4096, 2, 1 << 30) == LEAST_PIECE
    (True, True)
    """
    size = total // (lanes * PIECES_PER_LANE)
    size = -(-min(max(size, LEAST_PIECE), MOST_PIECE) // 4096) * 4096
    return max(1, min(size, max_message))


def cut(pieces: Sequence[Piece], size: int) -> Iterator[Piece]:
    """Join neighbours, then cut them into pieces of at most ``size`` bytes."""
    for remote, local, nbytes, part in _joined(pieces):
        for start in range(0, nbytes, size):
            yield Piece(remote + start, local + start, min(size, nbytes - start), part)


def _joined(pieces: Sequence[Piece]) -> Iterator[Piece]:
    last: Piece | None = None
    for piece in pieces:
        if not piece.nbytes:
            continue
        if last is None:
            last = piece
        elif (
            last.part == piece.part
            and last.remote + last.nbytes == piece.remote
            and last.local + last.nbytes == piece.local
        ):
            last = last._replace(nbytes=last.nbytes + piece.nbytes)
        else:
            yield last
            last = piece
    if last is not None:
        yield last


def _done_already(_: Any) -> None:
    raise AssertionError("a request has ended twice")


class Plan:
    """Parameters of a request, which may be started many times."""

    __slots__ = ("allocations", "is_one_piece", "kind", "nbytes", "opcode", "operands", "pieces", "record")

    def __init__(
        self,
        kind: str,
        record: Region,
        pieces: Sequence[Piece],
        allocations: Sequence[Allocation],
        operands: tuple[int, int] = (0, 0),
    ) -> None:
        self.kind, self.opcode, self.record, self.operands = kind, OPCODES[kind], record, operands
        self.pieces, self.allocations = pieces, allocations
        self.nbytes = pieces[0].nbytes if len(pieces) == 1 else sum(piece.nbytes for piece in pieces)
        # One work request, on devices whose messages may be as long.
        self.is_one_piece = len(pieces) == 1 and self.nbytes <= LEAST_PIECE

    def over(self, allocations: Sequence[Allocation]) -> Plan:
        """Return the same plan with other allocations: of the same memory, or none so that it is not kept alive."""
        made = Plan.__new__(Plan)
        made.kind, made.opcode, made.record, made.operands = self.kind, self.opcode, self.record, self.operands
        made.pieces, made.allocations = self.pieces, allocations
        made.nbytes, made.is_one_piece = self.nbytes, self.is_one_piece
        return made


class Request:
    """A request in progress. `done` is called once, with None, an atomic's old value, or the error.

    Its fields change under the engine's lock only.
    """

    under_way = 0  # posted pieces
    breaks = 0  # connections that broke with posted pieces of this request
    broken_in = -1  # number of the last such connection
    error: BaseException | None = None
    unwanted: BaseException | None = None  # why it was cancelled: no piece is posted again
    finished = False
    quiet = False  # no event is requested for its end, see Completions
    _most_lanes = 1  # of a device
    _slot: tuple[Device, Slot] | None = None
    _cut: Iterator[Piece] | None = None  # None: there is only the next piece
    _next: Piece | None = None
    _again: deque[Piece] | None = None  # pieces that must be posted again
    _began = False

    def __init__(self, plan: Plan, done: Done) -> None:
        # It keeps the local memory alive while the devices may access it; None afterwards.
        self.plan: Plan | None = plan
        self.done = done
        self.kind, self.opcode, self.record, self.operands = plan.kind, plan.opcode, plan.record, plan.operands
        self.nbytes = plan.nbytes
        self._lanes: set[SendQueuePair] = set()  # queue pairs that have had pieces of it
        self._entries: dict[int, list[Entry]] = {}  # by device
        self._devices: dict[int, Device] = {}

    def __repr__(self) -> str:
        return f"<{self.kind} of {self.nbytes} bytes, {'finished' if self.finished else 'under way'}>"

    @property
    def is_atomic(self) -> bool:
        """True if it must be done exactly once."""
        return self.opcode in (FETCH_ADD, COMPARE_SWAP)

    @property
    def _planned(self) -> Plan:
        assert self.plan is not None
        return self.plan

    def register(self, device: Device) -> None:
        """Register the memory with this device. Raises VerbsError."""
        if device.index in self._devices:
            return
        if self.is_atomic:
            if self._slot is None:
                self._slot = (device, device.take_slot())
                self._devices[device.index] = device
            return
        taken: list[Entry] = []
        try:
            for allocation in self._planned.allocations:
                taken.append(device.cache.take(allocation, writable=self.opcode == READ))
        except BaseException:
            for entry in taken:
                device.cache.give(entry)
            raise
        self._entries[device.index], self._devices[device.index] = taken, device

    def register_known(self, devices: Sequence[Device]) -> bool:
        """Use existing registrations with all of these devices; False if one is missing, and none is used."""
        writable, allocations = self.opcode == READ, self._planned.allocations
        for device in devices:
            entries = self._entries[device.index] = []
            self._devices[device.index] = device
            for allocation in allocations:
                entry = device.cache.known(allocation, writable=writable)
                if entry is None:
                    self._give_back()
                    return False
                entries.append(entry)
        return True

    def _give_back(self) -> None:
        for index, entries in self._entries.items():
            for entry in entries:
                self._devices[index].cache.give(entry)
        self._entries, self._devices = {}, {}

    def is_for(self, device: Device) -> bool:
        return device.index in self._devices

    def anywhere(self) -> set[int]:
        return set(self._devices)

    def begin(self, lanes: Sequence[SendQueuePair]) -> None:
        self._lanes = set()  # it may have begun on others, which are gone
        if not self._began:
            self._began = True
            devices, pieces = len({lane.device.index for lane in lanes}), self._planned.pieces
            self._most_lanes = max(1, self.nbytes // devices // LANE_SHARE, len(pieces) // devices // LANE_PIECES)
            most = min(len(lanes), self._most_lanes * devices)
            longest = min(lane.device.max_message for lane in lanes)
            self._cut = cut(pieces, 8 if self.is_atomic else piece_size(self.nbytes, most, longest))

    def begin_on(self, lane: SendQueuePair) -> bool:
        """Start on one queue pair if the request is a single work request for it; else return False."""
        plan = self._planned
        if self._began or not plan.is_one_piece or self.nbytes > lane.device.max_message:
            return False
        self._began, self._next = True, plan.pieces[0]
        return True

    def may_use(self, lane: SendQueuePair) -> bool:
        """Whether this queue pair may take pieces. A small request stays on one, since several would only alternate."""
        if lane.device.index not in self._devices:
            return False
        if lane in self._lanes:
            return True
        return sum(each.device is lane.device for each in self._lanes) < self._most_lanes

    @property
    def has_more(self) -> bool:
        if self.error is not None:
            return False
        if self._again:
            return True
        if self._next is None and self._cut is not None:
            self._next = next(self._cut, None)
        return self._next is not None

    def take(self, lane: SendQueuePair) -> Piece:
        """Return the next piece; `has_more` must be True."""
        self.under_way += 1
        self._lanes.add(lane)
        if self._again:
            return self._again.popleft()
        piece, self._next = self._next, None
        assert piece is not None
        return piece

    def put_back(self, piece: Piece) -> None:
        self.under_way -= 1
        if self._again is None:
            self._again = deque()
        self._again.append(piece)

    def where(self, piece: Piece, device: Device) -> tuple[int, int]:
        if self._slot is not None:
            return self._slot[1].address, self._slot[1].lkey
        return piece.local, self._entries[device.index][piece.part].lkey

    @property
    def is_over(self) -> bool:
        return not self.under_way and not self.has_more

    def close(self) -> Any:
        """Release the memory after the devices; return the argument of `done`."""
        self.finished = True
        outcome: Any = self.error
        if self._slot is not None:
            device, slot = self._slot
            outcome = slot.value if outcome is None else outcome
            device.give_slot(slot)
        self._give_back()
        self._slot, self.plan, self._lanes = None, None, set()
        self.done = _done_already  # else it would be in a cycle with what it calls
        return outcome


def plan_transfer(kind: Literal["read", "write"], remote: Region, segments: Sequence[Segment], owners: Any) -> Plan:
    """Return the plan of a transfer; see Engine.transfer.

    Raises ValueError, and TypeError for owners without memory.
    """
    if kind not in ("read", "write"):
        raise ValueError(f"{kind!r}: a transfer is a read or a write")
    if kind == "write" and not remote.writable:
        raise ValueError("the region is read-only: its owner has exposed it without writable=True")
    each = list(owners) if isinstance(owners, (list, tuple)) else [owners] * len(segments)
    if len(each) != len(segments):
        raise ValueError(f"{len(each)} owners for {len(segments)} segments")
    allocations, pieces = _pieces(remote, segments, each)
    return Plan(kind, remote, pieces, allocations)


def plan_atomic(
    kind: Literal["fetch_add", "compare_swap"], remote: Region, offset: int, operand: int, expected: int
) -> Plan:
    """Return the plan of an atomic; see Engine.atomic. Raises ValueError."""
    if kind not in ("fetch_add", "compare_swap"):
        raise ValueError(f"{kind!r}: an atomic is fetch_add or compare_swap")
    if not remote.writable:
        raise ValueError("the region is read-only: its owner has exposed it without writable=True")
    if not 0 <= offset <= remote.nbytes - 8 or (remote.address + offset) % 8:
        raise ValueError(f"offset {offset} of a region of {remote.nbytes} bytes: eight aligned bytes are needed")
    operands = (operand & _ALL, 0) if kind == "fetch_add" else (expected & _ALL, operand & _ALL)
    return Plan(kind, remote, [Piece(remote.address + offset, 0, 8, 0)], (), operands)


def _pieces(remote: Region, segments: Sequence[Segment], owners: Sequence[Any]) -> tuple[list[Allocation], list[Piece]]:
    allocations: list[Allocation] = []
    places: dict[int, int] = {}  # index of an owner's allocation, by the owner's id
    pieces = []
    for (offset, address, nbytes), owner in zip(segments, owners, strict=True):
        if id(owner) not in places:
            places[id(owner)] = len(allocations)
            allocations.append(allocation_of(owner))
        part = places[id(owner)]
        whole = allocations[part]
        if nbytes < 0 or offset < 0 or offset + nbytes > remote.nbytes:
            raise ValueError(f"bytes {offset} to {offset + nbytes} of a region of {remote.nbytes}")
        if not whole.address <= address <= address + nbytes <= whole.address + whole.nbytes:
            raise ValueError(f"{nbytes} bytes at {address:#x}, outside the memory of their owner")
        if nbytes:
            pieces.append(Piece(remote.address + offset, address, nbytes, part))
    return allocations, pieces
