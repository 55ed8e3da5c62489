"""Queue pairs of accepted peers, by which the peers access this process's memory."""

from __future__ import annotations

import secrets
from collections.abc import Hashable, Sequence
from dataclasses import dataclass

from monarch_backend import _native
from monarch_backend._verbs import wire_format
from monarch_backend._verbs.config import Settings
from monarch_backend._verbs.errors import VerbsError
from monarch_backend._verbs.open_device import Device
from monarch_backend._verbs.providers.provider import REMOTE_ATOMIC, REMOTE_READ, REMOTE_WRITE, Path, QueuePair, destroy
from monarch_backend._verbs.wire_format import (
    INFINIBAND,
    ROCE_V1,
    ROCE_V2,
    ConnectReply,
    ConnectRequest,
    Endpoint,
    Gid,
    Pairing,
)

_MAPPED = bytes(10) + b"\xff\xff"  # before the IPv4 address of a GID
_LINK_LOCAL = b"\xfe\x80"
NO_GID = Gid(0, INFINIBAND, bytes(16))


class AcceptedPeers:
    """Queue pairs of the peers whose connect requests this process has accepted."""

    def __init__(self, settings: Settings) -> None:
        self._settings = settings
        self._pairs: dict[Hashable, list[tuple[QueuePair, str]]] = {}  # with the devices' names

    def pair(
        self, peer: Hashable, wanted: ConnectRequest, devices: Sequence[Device]
    ) -> tuple[list[tuple[QueuePair, str]], bytes]:
        """Return queue pairs for a connect request, and the reply. Raises VerbsError."""
        made: list[tuple[QueuePair, str]] = []
        pairings: list[Pairing] = []
        problems: list[str] = []
        used: dict[tuple[int, int], int] = {}
        for place, end in enumerate(wanted.ends):
            if end.endpoint >= len(wanted.endpoints):
                raise VerbsError(f"the offer of {peer} names port {end.endpoint} of {len(wanted.endpoints)}")
            theirs = wanted.endpoints[end.endpoint]
            for device, endpoint, way in _candidates(devices, theirs, used):
                try:
                    pair, pairing = self._answer(device, endpoint, way, theirs, place, end)
                except OSError as error:
                    problems.append(f"{device.name} to {theirs.device}: {error}")
                    continue
                made.append((pair, device.name))
                pairings.append(pairing)
                used[device.index, endpoint.port] = used.get((device.index, endpoint.port), 0) + 1
                break
        if not pairings:
            raise VerbsError(_no_way(peer, wanted.endpoints, devices, problems), "", "", str(peer))
        return made, wire_format.pack(ConnectReply(wanted.nonce, pairings))

    def _answer(
        self,
        device: Device,
        endpoint: Endpoint,
        way: PathCandidate,
        theirs: Endpoint,
        place: int,
        end: wire_format.QpEndpoint,
    ) -> tuple[QueuePair, Pairing]:
        mtu = min(endpoint.mtu, theirs.mtu)
        reads = min(theirs.reads_out, endpoint.reads_in)
        psn = secrets.randbits(24)
        pair = device.nic.queue_pair(1)
        try:
            pair.initialize(endpoint.port, REMOTE_READ | REMOTE_WRITE | REMOTE_ATOMIC)
            pair.connect(
                Path(
                    endpoint.port,
                    end.number,
                    psn,
                    end.psn,
                    mtu,
                    way.ours.index,
                    way.theirs.raw,
                    theirs.lid,
                    way.is_global,
                    reads,
                    1,
                    self._settings,
                )
            )
        except BaseException:
            destroy(pair, f"queue pair {pair.number}", device.name)
            raise
        return pair, Pairing(
            place,
            device.index,
            pair.number,
            psn,
            mtu,
            reads,
            way.theirs.index,
            way.ours.raw,
            endpoint.lid,
            way.is_global,
        )

    def replace(self, peer: Hashable, made: list[tuple[QueuePair, str]]) -> None:
        self.hang_up(peer)
        self._pairs[peer] = made

    def hang_up(self, peer: Hashable) -> None:
        for pair, device in self._pairs.pop(peer, []):
            destroy(pair, f"queue pair {pair.number}", device)

    def close(self) -> None:
        for peer in list(self._pairs):
            self.hang_up(peer)

    def detach_after_fork(self) -> None:
        _native.keep_for_ever(self._pairs)
        self._pairs = {}


def _candidates(
    devices: Sequence[Device], theirs: Endpoint, used: dict[tuple[int, int], int]
) -> list[tuple[Device, Endpoint, PathCandidate]]:
    """Return paths to a port of the peer, best first; among equals the least used port."""
    found = [
        (device, endpoint, way) for device in devices for endpoint in device.endpoints for way in ways(endpoint, theirs)
    ]
    return sorted(found, key=lambda f: (f[2].cost, used.get((f[0].index, f[1].port), 0), -f[2].common))


def _no_way(peer: Hashable, theirs: Sequence[Endpoint], devices: Sequence[Device], problems: Sequence[str]) -> str:
    there = ", ".join(f"{e.device}:{e.port}" for e in theirs)
    here = ", ".join(f"{e.device}:{e.port}" for d in devices for e in d.endpoints)
    tried = f" ({'; '.join(problems[:4])})" if problems else ": other kinds of network, or no address in common"
    return (
        f"no way between the ports of {peer} ({there}) and those here ({here}){tried}; name the ones to be used in "
        "MONARCH_RDMA_DEVICES, and compare `monarch-backend doctor` on both hosts"
    )


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
    difference = int.from_bytes(mine.raw, "big") ^ int.from_bytes(other.raw, "big")
    common = 8 * len(mine.raw) - difference.bit_length()
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
