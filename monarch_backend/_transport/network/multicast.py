"""Multicast to many hosts, down a tree of their gateways: one copy to each host.

The gateway of the sender is the root. It keeps the frame until every branch has reported that all hosts below have it.
If a host is lost, the root sends directly to the hosts below it. Receivers drop duplicates by sequence number.
reply_aggregation.py aggregates the replies.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from monarch_backend._transport.local.buffers import own, own_all
from monarch_backend._transport.local.frames import TOKEN_LENGTH, FrameError, Kind
from monarch_backend._transport.network import envelope
from monarch_backend._transport.network.envelope import ARRIVED, COMBINED, MANY, PASS, Envelope, RelayHeader
from monarch_backend._transport.network.reply_aggregation import Gatherer
from monarch_backend._transport.tokens import host_of

DEFAULT_FANOUT = 8
"""Hosts to which one gateway of a tree sends a frame. A multicast to this many hosts or fewer needs no tree."""

MAX_REMEMBERED_MESSAGES = 4096
"""Multicasts that are remembered after their arrival. If one arrives again from another host, it is relayed again."""


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
        """Identifies the multicast on all hosts."""
        return self.root, self.number


class Relay:
    """Multicasts of one gateway. All methods are called under the gateway's lock.

    - ``to_host(host, frame)`` returns False if that host is not connected.
    - ``deliver(frame)`` delivers a frame for many to its receivers on this host, and returns their number.
    - ``answer(token, frame)`` sends to a process of this host.
    - ``later(seconds, call)`` schedules a call under the lock.
    - ``way(host)``: the next host on the way to that one.
    """

    def __init__(
        self,
        token: str,
        branches: int,
        to_host: Callable[[str, Envelope], bool],
        deliver: Callable[[Envelope], int],
        answer: Callable[[str, Envelope], None],
        later: Callable[[float, Callable[[], None]], object],
        way: Callable[[str], str],
    ) -> None:
        self.branches = branches
        self._way = way
        self._here = host_of(token)
        self._to_host, self._deliver = to_host, deliver
        self.replies = Gatherer(token, to_host, answer, later)
        self._numbers = itertools.count(1)
        self._multicasts: dict[tuple[str, int], _Multicast] = {}
        # Completed multicasts of other roots, with the hosts that could not be reached; the oldest first.
        self._over: dict[tuple[str, int], list[str]] = {}

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
        self.replies.are_over(passed.root, passed.over)
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
            self.replies.has_parent((sender, frame.ref), parent)
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
        over = self.replies.over(multicast.root, multicast.number)
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
        self.replies.fewer(
            (multicast.sender, multicast.ref), sum(envelope.count_of(multicast.rows[host]) for host in lost)
        )
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
        if kind == Kind.CALL | MANY and multicast.ref:
            self.replies.expect((multicast.sender, multicast.ref), multicast.root, multicast.number, parent, count)

    def ends(self, sender: str) -> None:
        """Send the unfinished multicasts of an ended process directly to all hosts, before its end is reported."""
        self.replies.ends(sender)
        self.replies.hurry()
        for multicast in self._multicasts.values():
            if multicast.sender == sender and multicast.frame is not None and multicast.above is None:
                for host in {host: None for branch in multicast.branches.values() for host in branch}:
                    prefix = envelope.for_many(multicast.rows[host], multicast.frame.prefix)
                    self._to_host(host, multicast.frame._replace(prefix=prefix))

    # ---- frames of other gateways, and lost hosts

    def handle(self, frame: Envelope) -> None:
        """Handle a PASS, ARRIVED or COMBINED frame. Raises FrameError."""
        {PASS: self._pass_on, ARRIVED: self._has_arrived, COMBINED: self.replies.come_up}[frame.kind](frame)

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
        self.replies.lost_host(lost)


def split(hosts: Sequence[str], branches: int) -> list[list[str]]:
    """Split hosts into at most ``branches`` parts of nearly the same length.

    >>> split("abcdefg", 3), split("ab", 3)
    ([['a', 'b'], ['c', 'd'], ['e', 'f', 'g']], [['a'], ['b']])
    """
    count, parts = len(hosts), min(branches, len(hosts))
    return [list(hosts[count * i // parts : count * (i + 1) // parts]) for i in range(parts)]
