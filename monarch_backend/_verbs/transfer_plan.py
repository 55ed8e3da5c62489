"""Plans of transfers and atomics: their pieces, and the allocations that hold the local memory."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal

from monarch_backend._verbs.region import Region
from monarch_backend._verbs.registrations.cache import Allocation, allocation_of
from monarch_backend._verbs.work_requests import Piece, Plan

Segment = tuple[int, int, int]
"""(offset in the region, local address, bytes)."""

_ALL = (1 << 64) - 1


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
    return Plan(kind, remote.record, pieces, allocations)


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
    return Plan(kind, remote.record, [Piece(remote.address + offset, 0, 8, 0)], (), operands)


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
