"""Multicast to many hosts, down a tree of their gateways: one copy to each host; and the replies on their way up.

The gateway of the sender is the root. It keeps the frame until every branch has reported that all hosts below have it.
If a host is lost, the root sends directly to the hosts below it. Receivers drop duplicates by sequence number.

Replies to a multicast are combined. A gateway keeps those that it has sent to a parent other than the root, until the
root has all replies to that call. If the parent is lost, it sends them to the root again. So no reply is lost with a
gateway in between.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from monarch_backend._transport.local import frames
from monarch_backend._transport.local.frames import (
    CARRIED,
    TOKEN_LENGTH,
    FrameError,
    Kind,
    Part,
    Replies,
    Status,
    own,
    own_all,
)
from monarch_backend._transport.network import envelope
from monarch_backend._transport.network.envelope import ARRIVED, COMBINED, MANY, PASS, Envelope, RelayHeader
from monarch_backend._transport.tokens import HOST_ID_LENGTH, epoch_of, host_of

if TYPE_CHECKING:
    from monarch_backend._transport.network.gateway import Gateway

DEFAULT_FANOUT = 8
"""Hosts to which one gateway of a tree sends a frame. A multicast to this many hosts or fewer needs no tree."""

MAX_REMEMBERED_MESSAGES = 4096
"""Multicasts that are remembered after their arrival. If one arrives again from another host, it is relayed again."""


AGGREGATION_WINDOW_S = 0.005
"""Seconds for which replies wait for the missing ones."""

MAX_WAITING_BYTES = 4 << 20
"""Bytes of replies to one call that wait for the missing ones."""

MAX_REPLY_BYTES = 32 << 10
"""Bytes up to which a reply is aggregated; a larger one is sent directly to the caller."""

MAX_KEPT_BYTES = 16 << 20
"""Bytes of replies that are kept after they were sent up. Beyond it replies are sent directly to the root."""

MAX_CALLS = 1024
"""Calls whose replies are aggregated at one time. Replies to older and to unknown calls are sent directly."""

Call = tuple[str, int]
"""Token of a caller, and its number of the call."""


@dataclass(eq=False)
class _Gather:
    root: str
    number: int  # of the multicast
    parent: str | None  # None: the caller is on this host
    left: int  # replies still to come
    seen: set[int] | None = None  # at the root: ranks whose last reply has come
    parts: list[Part] = field(default_factory=list)
    bodies: list[bytes] = field(default_factory=list)
    buffers: list[bytearray] = field(default_factory=list)
    missing: int = 0  # replies that were sent directly
    size: int = 0
    timed: bool = False  # whether the window runs


@dataclass(eq=False)
class _Multicast:
    """Multicast that has not been reported by all branches below this host."""

    root: str
    number: int
    sender: str
    ref: int
    frame: Envelope | None  # at the root, which may have to send it again
    above: tuple[str, int] | None  # root and number by which the parents know it
    parents: list[str]  # hosts that wait for this branch: several if one of them lost the connection to another
    rows: dict[str, bytes]  # receivers, by host below this one
    branches: dict[str, list[str]] = field(default_factory=dict)  # first host of a branch -> hosts that may lack it
    turns: dict[str, int] = field(default_factory=dict)  # first host of a branch -> sends without an ARRIVED yet
    lost: list[str] = field(default_factory=list)  # hosts that can't be reached from here: the root sends to them
    alone: set[str] = field(default_factory=set)  # at the root: hosts to which it has sent separately

    @property
    def key(self) -> tuple[str, int]:
        return self.root, self.number


class Relay:
    """Multicasts and replies of one gateway. All methods are called under the gateway's lock."""

    def __init__(self, gateway: Gateway, branches: int) -> None:
        self.branches = branches
        self._token, self._here = gateway.token, host_of(gateway.token)
        self._way, self._to_host, self._deliver = gateway.way, gateway.to_host, gateway.deliver_to_many
        self._answer, self._later = gateway.answer, gateway.later
        self._numbers = itertools.count(1)
        self._multicasts: dict[tuple[str, int], _Multicast] = {}
        # Completed multicasts of other roots, with the hosts that could not be reached; the oldest first.
        self._over: dict[tuple[str, int], list[str]] = {}
        self._gathers: dict[Call, _Gather] = {}  # the oldest first
        self._waiting: dict[_Gather, Call] = {}  # aggregations with replies that wait
        self._open: dict[int, Call] = {}  # by number: multicasts of this root without all replies
        self._all_replied: dict[str, int] = {}  # by root: number from which on replies are kept
        self._kept: dict[tuple[str, int], list[tuple[str, Envelope]]] = {}  # by multicast: parent, frame
        self._size = 0  # bytes of the kept frames

    # ---- down

    def send(self, frame: Envelope, rows: Mapping[str, bytes], rest: bytes) -> None:
        self._begin(frame._replace(prefix=rest), rows, None, 0)

    def _begin(self, frame: Envelope, rows: Mapping[str, bytes], above: tuple[str, int] | None, here: int) -> None:
        """Begin a multicast as its root. ``above``: the root that can't reach these hosts, and its number of it."""
        frame = frame._replace(body=own(frame.body), buffers=own_all(frame.buffers))
        sender = str(frame.prefix[TOKEN_LENGTH : 2 * TOKEN_LENGTH], "ascii")
        parents = [above[0]] if above else []
        multicast = _Multicast(self._here, next(self._numbers), sender, frame.ref, frame, above, parents, dict(rows))
        self._multicasts[multicast.key] = multicast
        below = sum(map(envelope.count_of, rows.values()))
        self._expect(multicast, frame.kind, above[0] if above else None, here + below)
        self._hand_out(multicast, frame, list(rows), self.branches)
        self._finish_if_done(multicast)

    def _pass_on(self, frame: Envelope) -> None:
        passed = RelayHeader.unpack(frame.prefix)
        (here, mine), *below = passed.hosts
        if here != self._here:
            raise FrameError(f"a frame for host {here}")
        many = frame._replace(kind=passed.kind, seq=0, prefix=envelope.for_many(mine, passed.rest))
        frame = many._replace(prefix=passed.rest)
        if passed.root == self._here:
            self._begin(frame, dict(below), (passed.parent, passed.number), self._deliver(many))
            return
        self._release_replied(passed.root, passed.over)
        if below:
            frame = frame._replace(body=own(frame.body), buffers=own_all(frame.buffers))
        multicast = self._joined(frame, many, passed)
        more = {host: rows for host, rows in below if host not in multicast.rows}
        multicast.rows.update(more)
        lost = self._hand_out(multicast, frame, list(more), passed.branches)
        if lost:
            self._report(multicast, lost)
        self._finish_if_done(multicast)

    def _joined(self, frame: Envelope, many: Envelope, passed: RelayHeader) -> _Multicast:
        """Return the state of a multicast that has arrived: first, or again because a parent was lost."""
        key, parent = (passed.root, passed.number), passed.parent
        sender = str(passed.rest[TOKEN_LENGTH : 2 * TOKEN_LENGTH], "ascii")
        multicast, over = self._multicasts.get(key), self._over.pop(key, None)
        if multicast is None:
            multicast = self._multicasts[key] = _Multicast(*key, sender, frame.ref, None, key, [], {}, lost=over or [])
        multicast.parents.append(parent)
        if multicast.parents == [parent] and over is None:
            here = self._deliver(many) + sum(envelope.count_of(rows) for _, rows in passed.hosts[1:])
            self._expect(multicast, passed.kind, parent, here)
        else:
            gather = self._gathers.get((sender, frame.ref))
            if gather is not None and gather.seen is None:
                gather.parent = parent
            if multicast.lost:  # the parent that received the report may be the lost one
                self._to_host(parent, envelope.arrived(*key, self._here, False, multicast.lost))
        return multicast

    def _hand_out(self, multicast: _Multicast, frame: Envelope, hosts: Sequence[str], branches: int) -> list[str]:
        """Send to the first host of each branch. Return the hosts that can't be reached."""
        near = [host for host in hosts if self._way(host) == host]
        indirect = [host for host in hosts if self._way(host) != host]
        lost = [] if multicast.frame is not None else indirect  # only the root knows the gateway in front of them
        for gateway in {self._way(host): None for host in indirect if multicast.frame is not None}:
            branch = [host for host in indirect if self._way(host) == gateway]
            near = [host for host in near if host != gateway]
            parts = [(host, multicast.rows.get(host, b"")) for host in (gateway, *branch)]
            if self._pass(multicast, frame, gateway, parts, branches):
                multicast.branches.setdefault(gateway, []).extend(branch)
        for branch in split(near, branches):
            while branch:
                parts = [(host, multicast.rows[host]) for host in branch]
                if self._pass(multicast, frame, multicast.root, parts, branches):
                    multicast.branches.setdefault(branch[0], []).extend(branch)
                    break
                lost.append(branch.pop(0))
        return lost

    def _pass(
        self, multicast: _Multicast, frame: Envelope, root: str, parts: list[tuple[str, bytes]], branches: int
    ) -> bool:
        """Send to the first host of ``parts``. With ``root`` equal to it, that host acts as a root for these hosts."""
        mine, replied = multicast.root == self._here, self._all_replied.get(multicast.root, 0)
        over = next(iter(self._open), multicast.number) if mine else replied  # first multicast without all replies
        passed = RelayHeader(root, self._here, frame.kind, branches, multicast.number, over, parts, frame.prefix)
        head = parts[0][0]
        if not self._to_host(head, frame._replace(kind=PASS, prefix=passed.pack())):
            return False
        multicast.turns[head] = multicast.turns.get(head, 0) + 1
        return True

    def _has_arrived(self, frame: Envelope) -> None:
        root, who, lost = envelope.unpack_arrived(frame)
        multicast = self._multicasts.get((root, frame.seq))
        if multicast is None:
            return
        if lost:
            self._take_over(multicast, [host for host in lost if host in multicast.rows])
        if frame.rank:  # one report for each send: a later send may have had more hosts
            multicast.turns[who] = multicast.turns.get(who, 0) - 1
            if multicast.turns[who] <= 0:
                multicast.branches.pop(who, None)
                del multicast.turns[who]
        self._finish_if_done(multicast)

    def _take_over(self, multicast: _Multicast, hosts: list[str]) -> None:
        """Send to hosts that their parent can't reach. Other gateways than the root report them to their parent."""
        if multicast.frame is None:
            self._report(multicast, hosts)
            return
        hosts = [
            host for host in hosts if host not in multicast.alone
        ]  # else two hosts could report each other endlessly
        multicast.alone.update(hosts[:1])
        self._hand_out(multicast, multicast.frame, hosts[:1], 1)  # separately: this host may be the reason
        self._hand_out(multicast, multicast.frame, hosts[1:], self.branches)

    def _report(self, multicast: _Multicast, lost: Sequence[str]) -> None:
        lost = [host for host in lost if host not in multicast.lost]
        if not lost:
            return
        multicast.lost += lost
        call = multicast.sender, multicast.ref
        gather = self._gathers.get(call)
        if gather is not None and gather.seen is None:
            self._came(call, gather, sum(envelope.count_of(multicast.rows[host]) for host in lost))
        for parent in multicast.parents:
            self._to_host(parent, envelope.arrived(*multicast.key, self._here, False, lost))

    def _finish_if_done(self, multicast: _Multicast) -> None:
        if multicast.branches or self._multicasts.pop(multicast.key, None) is None:
            return
        if multicast.frame is None:
            self._over[multicast.key] = multicast.lost
            if len(self._over) > MAX_REMEMBERED_MESSAGES:
                del self._over[next(iter(self._over))]
        if multicast.above is not None:
            for parent in multicast.parents:
                self._to_host(parent, envelope.arrived(*multicast.above, self._here, True, multicast.lost))

    def _expect(self, multicast: _Multicast, kind: int, parent: str | None, count: int) -> None:
        """Expect ``count`` replies to a call. The root counts one for each rank."""
        if kind != Kind.CALL | MANY or not multicast.ref:
            return
        call = multicast.sender, multicast.ref
        seen: set[int] | None = None
        if multicast.root == self._here:
            seen, self._open[multicast.number] = set(), call
        self._gathers[call] = _Gather(multicast.root, multicast.number, parent, count, seen)
        while len(self._gathers) > MAX_CALLS:
            oldest = next(iter(self._gathers))
            self._end(oldest, self._gathers[oldest])

    def ends(self, sender: str) -> None:
        """Send the unfinished multicasts of an ended process directly to all hosts, before its end is reported."""
        for call in [call for call in self._gathers if call[0] == sender]:
            self._end(call, self._gathers[call])
        self.hurry()
        for multicast in self._multicasts.values():
            if multicast.sender == sender and multicast.frame is not None and multicast.above is None:
                for host in {host: None for branch in multicast.branches.values() for host in branch}:
                    prefix = envelope.for_many(multicast.rows[host], multicast.frame.prefix)
                    self._to_host(host, multicast.frame._replace(prefix=prefix))

    # ---- frames of other gateways, and lost hosts

    def handle(self, frame: Envelope) -> None:
        {PASS: self._pass_on, ARRIVED: self._has_arrived, COMBINED: self._come_up}[frame.kind](frame)

    def lost_host(self, lost: str) -> None:
        for multicast in list(self._multicasts.values()):
            branch = multicast.branches.pop(lost, None)
            multicast.turns.pop(lost, None)
            multicast.parents = [
                parent for parent in multicast.parents if parent != lost
            ]  # the root will send it here again
            if branch and multicast.frame is None:  # the root may still reach the host
                self._report(multicast, branch)
            elif branch:
                assert multicast.frame is not None
                self._hand_out(multicast, multicast.frame, [host for host in branch if host != lost], self.branches)
            self._finish_if_done(multicast)
        self._lost_parent(lost)

    # ---- replies

    def _release_replied(self, root: str, number: int) -> None:
        """Release the replies to multicasts before ``number``: the root has them all."""
        if number > self._all_replied.get(root, 0):
            self._all_replied[root] = number
            for key in [key for key in self._kept if key[0] == root and key[1] < number]:
                self._size -= sum(_size(frame) for _, frame in self._kept.pop(key))

    def _end(self, call: Call, gather: _Gather) -> None:
        del self._gathers[call]
        if gather.seen is not None:
            self._open.pop(gather.number, None)
        self._send_up(call, gather)

    def reply(self, frame: Envelope) -> bool:
        """Add a reply of a process of this host. Return False if it is to be sent directly."""
        if frame.kind != Kind.REPLY | CARRIED:
            return False
        call = frame.to, frame.ref
        gather = self._gathers.get(call)
        status = frame.prefix[2 * TOKEN_LENGTH :]
        if gather is None or status == Status.ITEM:  # more replies of this rank follow an item
            return False
        body, buffers = own(frame.body), own_all(frame.buffers) or []
        if len(body) + sum(map(len, buffers)) > MAX_REPLY_BYTES or status != Status.VALUE:
            gather.missing += 1
            self._came(call, gather, 1)
            return False
        self._add(call, gather, Replies("", [Part(frame.rank, status, len(body), len(buffers))]), body, buffers)
        return True

    def saw(self, frame: Envelope) -> None:
        """Count a reply that has come directly, to a process of this host."""
        if frame.kind == Kind.REPLY | CARRIED and frame.prefix[2 * TOKEN_LENGTH :] != Status.ITEM:
            call = frame.to, frame.ref
            gather = self._gathers.get(call)
            if gather is not None and gather.seen is not None and frame.rank not in gather.seen:
                gather.seen.add(frame.rank)
                self._came(call, gather, 1)

    def _come_up(self, frame: Envelope) -> None:
        rest = frame.prefix[2 * TOKEN_LENGTH :]
        root, replies = str(rest[:HOST_ID_LENGTH], "ascii", "replace"), frames.decode_replies(rest[HOST_ID_LENGTH:])
        call = frame.to, frame.ref
        gather = self._gathers.get(call)
        body, buffers = own(frame.body), own_all(frame.buffers) or []
        if gather is not None:
            self._add(call, gather, replies, body, buffers)
            return
        caller = host_of(frame.to)  # the call is no longer known here, and the root may not be the caller's host
        to = None if caller == self._here else root if root != self._here else caller
        self._send_up(call, _Gather(to or root, 0, to, 0, None, replies.parts, [body], buffers))

    def _add(self, call: Call, gather: _Gather, replies: Replies, body: bytes, buffers: list[bytearray]) -> None:
        gather.parts += replies.parts
        gather.bodies.append(body)
        gather.buffers += buffers
        gather.size += len(body) + sum(map(len, buffers))
        count = len(replies.parts) + replies.missing
        if gather.seen is None:
            gather.missing += replies.missing
        else:  # direct replies are counted on arrival, and duplicates once
            before = len(gather.seen)
            gather.seen.update(part.rank for part in replies.parts)
            count = len(gather.seen) - before
        self._came(call, gather, count)

    def _came(self, call: Call, gather: _Gather, count: int) -> None:
        gather.left -= count
        if gather.left <= 0 and self._gathers.get(call) is gather:
            self._end(call, gather)
        elif gather.left <= 0 or gather.size > MAX_WAITING_BYTES:
            self._send_up(call, gather)
        elif gather.parts or gather.missing:
            self._waiting[gather] = call
            if not gather.timed:
                gather.timed = True
                self._later(AGGREGATION_WINDOW_S, lambda: self._moment_is_over(call, gather))

    def _moment_is_over(self, call: Call, gather: _Gather) -> None:
        gather.timed = False
        self._send_up(call, gather)

    def hurry(self) -> None:
        """Send all waiting and kept replies directly to their roots, before the end of a process is reported."""
        for gather, call in list(self._waiting.items()):
            self._send_up(call, gather, straight=True)
        kept, self._kept, self._size = self._kept, {}, 0
        for (root, _), sent in kept.items():
            for _, frame in sent:
                self._to_host(root, frame)

    def _send_up(self, call: Call, gather: _Gather, straight: bool = False) -> None:
        self._waiting.pop(gather, None)
        if not gather.parts and not gather.missing:
            return
        caller, ref = call
        parts, body, buffers = gather.parts, b"".join(gather.bodies), gather.buffers or None
        replies = frames.encode(Replies(caller, parts, gather.missing))
        gather.parts, gather.bodies, gather.buffers, gather.size, gather.missing = [], [], [], 0, 0
        if gather.parent is None:
            if parts:
                self._answer(caller, Envelope(Kind.REPLIES, 0, ref, 0, 0, epoch_of(caller), replies, body, buffers))
            return
        prefix = (caller + self._token + gather.root).encode() + replies
        frame = Envelope(COMBINED, 0, ref, 0, 0, 0, prefix, body, buffers)
        to = gather.parent
        if to != gather.root and gather.seen is None and (straight or not self._keep(gather, frame)):
            to = gather.root
        self._to_host(to, frame)

    def _keep(self, gather: _Gather, frame: Envelope) -> bool:
        """Keep replies until the root has all. Return False without space, or if the root does not know the call."""
        number, size = gather.number, _size(frame)
        if not number or number < self._all_replied.get(gather.root, 0) or self._size + size > MAX_KEPT_BYTES:
            return False
        assert gather.parent is not None
        self._kept.setdefault((gather.root, number), []).append((gather.parent, frame))
        self._size += size
        return True

    def _lost_parent(self, lost: str) -> None:
        """Send the replies that a lost parent may have had to their roots again."""
        for call, gather in list(self._gathers.items()):
            if gather.root == lost:
                del self._gathers[call]
                self._waiting.pop(gather, None)
            elif gather.parent == lost and gather.seen is None:
                gather.parent = gather.root
        for key in [key for key in self._kept if key[0] == lost]:
            self._size -= sum(_size(frame) for _, frame in self._kept.pop(key))
        self._all_replied.pop(lost, None)
        for (root, number), kept in list(self._kept.items()):
            self._kept[root, number] = [entry for entry in kept if entry[0] != lost]
            for parent, frame in kept:
                if parent == lost:
                    self._size -= _size(frame)
                    self._to_host(root, frame)


def _size(frame: Envelope) -> int:
    return len(frame.prefix) + len(frame.body) + sum(map(len, frame.buffers or ()))


def split(hosts: Sequence[str], branches: int) -> list[list[str]]:
    """Split hosts into at most ``branches`` parts of nearly the same length.

    >>> split("abcdefg", 3), split("ab", 3)
    ([['a', 'b'], ['c', 'd'], ['e', 'f', 'g']], [['a'], ['b']])
    """
    count, parts = len(hosts), min(branches, len(hosts))
    return [list(hosts[count * i // parts : count * (i + 1) // parts]) for i in range(parts)]
