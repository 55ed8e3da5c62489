"""Paths between ports of two processes, best first."""

from __future__ import annotations

from dataclasses import dataclass

from monarch_backend._verbs.wire_format import INFINIBAND, ROCE_V1, ROCE_V2, Endpoint, Gid

_MAPPED = bytes(10) + b"\xff\xff"  # before the IPv4 address of a GID
_LINK_LOCAL = b"\xfe\x80"
NO_GID = Gid(0, INFINIBAND, bytes(16))


@dataclass(frozen=True)
class PathCandidate:
    cost: tuple[int, int]  # class of addresses, then less for more leading bytes in common, as in one subnet
    common: int  # leading bits
    ours: Gid
    theirs: Gid
    is_global: bool


def ways(ours: Endpoint, theirs: Endpoint) -> list[PathCandidate]:
    """Return the paths, best first; empty if there is none."""
    if ours.ethernet != theirs.ethernet:
        return []
    found = _roce(ours, theirs) if ours.ethernet else _infiniband(ours, theirs)
    return sorted(found, key=lambda way: (way.cost, -way.common))


def _infiniband(ours: Endpoint, theirs: Endpoint) -> list[PathCandidate]:
    if not (ours.lid and theirs.lid):
        return []
    mine, other = (next(iter(e.gids), NO_GID) for e in (ours, theirs))
    if mine.raw[:8] == other.raw[:8]:  # one subnet, whose manager has assigned both LIDs
        return [PathCandidate((0, 0), 0, mine, other, is_global=False)]
    return [_global_way(1, mine, other)]


def _roce(ours: Endpoint, theirs: Endpoint) -> list[PathCandidate]:
    return [
        _global_way(_class(mine), mine, other)
        for mine in ours.gids
        for other in theirs.gids
        if _class(mine) == _class(other)
    ]


def _global_way(cost: int, mine: Gid, other: Gid) -> PathCandidate:
    # The netmask is unknown here: /24 or nearer counts as one subnet for IPv4, /64 for IPv6.
    common = _common_bits(mine.raw, other.raw)
    return PathCandidate(
        (cost, -min(common // 8, 15 if mine.raw.startswith(_MAPPED) else 8)), common, mine, other, is_global=True
    )


def _class(gid: Gid) -> int:
    """Rank a GID: RoCEv2 over IPv4, over IPv6, over link-local addresses; RoCEv1, which is not routed, is last."""
    if gid.kind != ROCE_V2:
        return 3 if gid.kind == ROCE_V1 else 4
    if gid.raw.startswith(_MAPPED):
        return 0
    return 2 if gid.raw.startswith(_LINK_LOCAL) else 1


def _common_bits(one: bytes, other: bytes) -> int:
    difference = int.from_bytes(one, "big") ^ int.from_bytes(other, "big")
    return 8 * len(one) - difference.bit_length()
