"""A message to many hosts, down a tree of their gateways, and the replies on their way up: one copy to each host.

The gateway of the sender is the root. It keeps the message until every branch has said that all below have it: what is
below a host that is lost gets it from the root itself, and receivers take nothing twice, since their routers number
what they get. Replies wait a moment for others that go the same way. Who is on a host is _gateway.py's.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from monarch_backend.transport import _carried, _frames
from monarch_backend.transport._bodies import own, own_all
from monarch_backend.transport._carried import ARRIVED, CARRIED, COMBINED, HOST, MANY, PASS, Carried, Passed, host_of
from monarch_backend.transport._frames import TOKEN, FrameError, Kind, Part, Replies, Status
from monarch_backend.transport._links import epoch_of

BRANCHES = 8
"""Hosts that one gateway sends a message for many to; up to so many get it straight."""

MOMENT = 0.005
"""Seconds that replies wait for others, if not all that are to come are there."""

MOST_WAITING = 4 << 20
"""Bytes of replies that wait for others."""

MOST_REPLY = 32 << 10
"""Bytes of a reply that goes with others; a larger one goes alone, straight."""

MOST_REMEMBERED = 4096
"""Messages that have arrived and calls whose replies may still come, each: whoever is not remembered is no loss."""


@dataclass(eq=False)
class _Cast:
    """A message that not all branches below this host are known to have."""

    root: str
    number: int
    sender: str
    ref: int
    frame: Carried | None  # at the root, which may have to send it again
    above: tuple[str, int] | None  # what those above call it
    parents: list[str]  # those above, who wait for this branch: several, if one of them was lost to another
    rows: dict[str, bytes]  # receivers, by host below this one
    branches: dict[str, list[str]] = field(default_factory=dict)  # by their first host: those that may lack it
    lost: list[str] = field(default_factory=list)  # that could not be reached from here, and are others' to reach

    @property
    def key(self) -> tuple[str, int]:
        """Everywhere."""
        return self.root, self.number


@dataclass(eq=False)
class _Gather:
    """Replies to one call, on their way up."""

    root: str
    parent: str | None  # None: this is the root
    left: int  # that are still to come
    parts: list[Part] = field(default_factory=list)
    bodies: list[bytes] = field(default_factory=list)
    buffers: list[bytearray] = field(default_factory=list)
    missing: int = 0  # that have gone another way
    size: int = 0
    timed: bool = False


class Relay:
    """Of one gateway, under whose lock all methods are called.

    ``to_host(host, frame)`` is False if that host is not connected. ``deliver(frame)`` hands a frame for many to those
    of its receivers who are on this host, and says how many. ``answer(token, frame)`` is for a process of this host.
    ``later(seconds, call)`` calls with the lock held. ``way(host)``: the host through which that one is reached.
    """

    def __init__(
        self,
        token: str,
        branches: int,
        to_host: Callable[[str, Carried], bool],
        deliver: Callable[[Carried], int],
        answer: Callable[[str, Carried], None],
        later: Callable[[float, Callable[[], None]], object],
        way: Callable[[str], str],
    ) -> None:
        self.branches = branches
        self._way = way
        self._token, self._here = token, host_of(token)
        self._to_host, self._deliver, self._answer, self._later = to_host, deliver, answer, later
        self._numbers = itertools.count(1)
        self._casts: dict[tuple[str, int], _Cast] = {}
        # Casts of other roots that all below have, but those that could not be reached; the oldest first.
        self._over: dict[tuple[str, int], list[str]] = {}
        self._gathers: dict[tuple[str, int], _Gather] = {}  # by caller and the number of its call, the oldest first

    # ---- down

    def send(self, frame: Carried, rows: Mapping[str, bytes], rest: bytes) -> None:
        """A frame for receivers on these hosts, of a process of this one."""
        self._begin(frame._replace(prefix=rest), rows, None, 0)

    def _begin(self, frame: Carried, rows: Mapping[str, bytes], above: tuple[str, int] | None, here: int) -> None:
        """As the root; ``above``: for another one, who can't reach these hosts, and its number of it."""
        frame = frame._replace(body=own(frame.body), buffers=own_all(frame.buffers))
        sender = str(frame.prefix[TOKEN : 2 * TOKEN], "ascii")
        parents = [above[0]] if above else []
        cast = _Cast(self._here, next(self._numbers), sender, frame.ref, frame, above, parents, dict(rows))
        self._casts[cast.key] = cast
        below = sum(map(_carried.count_of, rows.values()))
        self._expect(cast, above[0] if above else None, frame.kind, here + below)
        self._hand_out(cast, frame, list(rows), self.branches)
        self._finish_if_done(cast)

    def _pass_on(self, frame: Carried) -> None:
        passed = Passed.unpack(frame.prefix)
        (here, mine), *below = passed.hosts
        if here != self._here:
            raise FrameError(f"a frame for host {here}")
        many = frame._replace(kind=passed.kind, seq=0, prefix=_carried.for_many(mine, passed.rest))
        frame = many._replace(prefix=passed.rest)
        if passed.root == self._here:
            self._begin(frame, dict(below), (passed.parent, passed.number), self._deliver(many))
            return
        if below:
            frame = frame._replace(body=own(frame.body), buffers=own_all(frame.buffers))
        cast = self._joined(frame, many, passed)
        more = {host: rows for host, rows in below if host not in cast.rows}
        cast.rows.update(more)
        lost = self._hand_out(cast, frame, list(more), passed.branches)
        if lost:
            self._report(cast, lost)
        self._finish_if_done(cast)

    def _joined(self, frame: Carried, many: Carried, passed: Passed) -> _Cast:
        """It has come for the first time; or again, and whoever was above is lost."""
        key, parent = (passed.root, passed.number), passed.parent
        sender = str(passed.rest[TOKEN : 2 * TOKEN], "ascii")
        cast, over = self._casts.get(key), self._over.pop(key, None)
        if cast is None:
            cast = self._casts[key] = _Cast(*key, sender, frame.ref, None, key, [], {}, lost=over or [])
        cast.parents.append(parent)
        if cast.parents == [parent] and over is None:
            here = self._deliver(many) + sum(_carried.count_of(rows) for _, rows in passed.hosts[1:])
            self._expect(cast, parent, passed.kind, here)
        else:
            gather = self._gathers.get((sender, frame.ref))
            if gather is not None:
                gather.parent = parent
            if cast.lost:  # whoever was told of them may be lost, too
                self._to_host(parent, _carried.arrived(*key, self._here, False, cast.lost))
        return cast

    def _hand_out(self, cast: _Cast, frame: Carried, hosts: Sequence[str], branches: int) -> list[str]:
        """To the first one of each branch; those that can't be reached are returned."""
        near = [host for host in hosts if self._way(host) == host]
        far = [host for host in hosts if self._way(host) != host]
        lost = [] if cast.frame is not None else far  # there is a gateway before them, to which the root knows the way
        for gateway in {self._way(host): None for host in far if cast.frame is not None}:
            branch = [host for host in far if self._way(host) == gateway]
            near = [host for host in near if host != gateway]
            parts = [(host, cast.rows.get(host, b"")) for host in (gateway, *branch)]
            if self._pass(cast, frame, gateway, parts, branches):
                cast.branches.setdefault(gateway, []).extend(branch)
        for branch in split(near, branches):
            while branch:
                parts = [(host, cast.rows[host]) for host in branch]
                if self._pass(cast, frame, cast.root, parts, branches):
                    cast.branches.setdefault(branch[0], []).extend(branch)
                    break
                lost.append(branch.pop(0))
        return lost

    def _pass(self, cast: _Cast, frame: Carried, root: str, parts: list[tuple[str, bytes]], branches: int) -> bool:
        """Who is its own root keeps it, and tells us only that all of these have it."""
        passed = Passed(root, self._here, frame.kind, branches, cast.number, parts, frame.prefix)
        return self._to_host(parts[0][0], frame._replace(kind=PASS, prefix=passed.pack()))

    def _has_arrived(self, frame: Carried) -> None:
        root, who, lost = _carried.unpack_arrived(frame)
        cast = self._casts.get((root, frame.seq))
        if cast is None:
            return
        if lost:
            self._take_over(cast, [host for host in lost if host in cast.rows])
        if frame.rank:
            cast.branches.pop(who, None)
        self._finish_if_done(cast)

    def _take_over(self, cast: _Cast, hosts: list[str]) -> None:
        """These did not get it from the one above them: the root sends it straight, and others tell it so."""
        if cast.frame is None:
            self._report(cast, hosts)
        else:
            self._hand_out(cast, cast.frame, hosts[:1], 1)  # alone: it may be what is wrong
            self._hand_out(cast, cast.frame, hosts[1:], self.branches)

    def _report(self, cast: _Cast, lost: Sequence[str]) -> None:
        lost = [host for host in lost if host not in cast.lost]
        if not lost:
            return
        cast.lost += lost
        self._left(cast, -sum(_carried.count_of(cast.rows[host]) for host in lost))
        for parent in cast.parents:
            self._to_host(parent, _carried.arrived(*cast.key, self._here, False, lost))

    def _finish_if_done(self, cast: _Cast) -> None:
        if cast.branches or self._casts.pop(cast.key, None) is None:
            return
        if cast.frame is None:
            _remember(self._over, cast.key, cast.lost)
        if cast.above is not None:
            for parent in cast.parents:
                self._to_host(parent, _carried.arrived(*cast.above, self._here, True, cast.lost))

    def ends(self, sender: str) -> None:
        """This process has ended, and others are about to be told: what they may lack of it goes straight, before."""
        for cast in self._casts.values():
            if cast.sender == sender and cast.frame is not None and cast.above is None:
                for host in {host: None for branch in cast.branches.values() for host in branch}:
                    prefix = _carried.for_many(cast.rows[host], cast.frame.prefix)
                    self._to_host(host, cast.frame._replace(prefix=prefix))

    # ---- up

    def _expect(self, cast: _Cast, parent: str | None, kind: int, count: int) -> None:
        """So many replies to this call come here."""
        if kind == Kind.CALL | MANY and cast.ref:
            gather = _Gather(cast.root, parent, count)
            for key, old in _remember(self._gathers, (cast.sender, cast.ref), gather):
                self._send_up(key, old)

    def reply(self, frame: Carried) -> bool:
        """One of a process of this host; False if it is to go straight."""
        if frame.kind != Kind.REPLY | CARRIED:
            return False
        key = frame.to, frame.ref
        gather = self._gathers.get(key)
        status = frame.prefix[2 * TOKEN :]
        if gather is None or status == Status.ITEM:  # more come after it
            return False
        body = own(frame.body)
        buffers = own_all(frame.buffers) or []
        size = len(body) + sum(map(len, buffers))
        if size > MOST_REPLY or status != Status.VALUE:
            gather.missing += 1
            self._came(key, gather, 1)
            return False
        self._add(key, gather, [Part(frame.rank, status, len(body), len(buffers))], body, buffers)
        return True

    def _comes_up(self, frame: Carried) -> None:
        """Replies of a host below; or ours to give to whom they are for."""
        rest = frame.prefix[2 * TOKEN :]
        root, replies = str(rest[:HOST], "ascii", "replace"), _frames.decode_replies(rest[HOST:])
        key = frame.to, frame.ref
        gather = self._gathers.get(key)
        body, buffers = own(frame.body), own_all(frame.buffers) or []
        if gather is not None:
            gather.missing += replies.missing
            self._add(key, gather, replies.parts, body, buffers, replies.missing)
        else:
            caller = host_of(frame.to)  # at the root the call may be forgotten, or it was only one for others
            to = root if root != self._here else None if caller == self._here else caller
            alone = _Gather(root, to, 0, replies.parts, [body], buffers)
            self._send_up(key, alone)

    def _add(
        self, key: tuple[str, int], gather: _Gather, parts: list[Part], body: bytes, buffers: list[bytearray],
        missing: int = 0,
    ) -> None:  # fmt: skip
        gather.parts += parts
        gather.bodies.append(body)
        gather.buffers += buffers
        gather.size += len(body) + sum(map(len, buffers))
        self._came(key, gather, len(parts) + missing)

    def _came(self, key: tuple[str, int], gather: _Gather, count: int) -> None:
        gather.left -= count
        if gather.left <= 0:
            self._gathers.pop(key, None)
        if gather.left <= 0 or gather.size > MOST_WAITING:
            self._send_up(key, gather)
        elif (gather.parts or gather.missing) and not gather.timed:
            gather.timed = True
            self._later(MOMENT, lambda: self._moment_is_over(key, gather))

    def _moment_is_over(self, key: tuple[str, int], gather: _Gather) -> None:
        gather.timed = False
        self._send_up(key, gather)

    def _left(self, cast: _Cast, change: int) -> None:
        gather = self._gathers.get((cast.sender, cast.ref))
        if gather is not None:
            self._came((cast.sender, cast.ref), gather, -change)

    def _send_up(self, key: tuple[str, int], gather: _Gather) -> None:
        if not gather.parts and not gather.missing:
            return
        caller, ref = key
        parts, body, buffers = gather.parts, b"".join(gather.bodies), gather.buffers or None
        replies = _frames.encode(Replies(caller, parts, gather.missing))
        gather.parts, gather.bodies, gather.buffers, gather.size, gather.missing = [], [], [], 0, 0
        if gather.parent is None:
            if parts:
                self._answer(caller, Carried(Kind.REPLIES, 0, ref, 0, 0, epoch_of(caller), replies, body, buffers))
            return
        prefix = _carried.tokens(caller, self._token) + gather.root.encode() + replies
        frame = Carried(COMBINED, 0, ref, 0, 0, 0, prefix, body, buffers)
        if not self._to_host(gather.parent, frame):
            self._to_host(gather.root, frame)

    # ---- what comes, and who goes

    def handle(self, frame: Carried) -> None:
        """A frame of another gateway, of the tree. Raises FrameError."""
        {PASS: self._pass_on, ARRIVED: self._has_arrived, COMBINED: self._comes_up}[frame.kind](frame)

    def lost_host(self, lost: str, undelivered: Iterable[tuple[bytes, Any]]) -> None:
        """This host is not connected any more; ``undelivered`` was sent there, and may not have come."""
        for cast in list(self._casts.values()):
            branch = cast.branches.pop(lost, None)
            cast.parents = [cast.root if parent == lost else parent for parent in cast.parents]
            if branch and cast.frame is None:  # who is not the root has lost only its own way there
                self._report(cast, branch)
            elif branch:
                assert cast.frame is not None
                self._hand_out(cast, cast.frame, [host for host in branch if host != lost], self.branches)
            self._finish_if_done(cast)
        for gather in self._gathers.values():
            if gather.parent == lost:
                gather.parent = gather.root
        for prefix, body in undelivered:
            if prefix[:1] == bytes([COMBINED]):
                frame = _carried.unpack(prefix, memoryview(own(body)))
                root = str(frame.prefix[2 * TOKEN : 2 * TOKEN + HOST], "ascii")
                if root != lost:
                    self._to_host(root, frame)


def split(hosts: Sequence[str], branches: int) -> list[list[str]]:
    """In as many parts as there are branches, of the same length or nearly so.

    >>> split("abcdefg", 3), split("ab", 3)
    ([['a', 'b'], ['c', 'd'], ['e', 'f', 'g']], [['a'], ['b']])
    """
    count, parts = len(hosts), min(branches, len(hosts))
    return [list(hosts[count * i // parts : count * (i + 1) // parts]) for i in range(parts)]


def _remember(known: dict[Any, Any], key: Any, value: Any) -> list[tuple[Any, Any]]:
    """And forget the oldest; what was forgotten."""
    known[key] = value
    forgotten = []
    while len(known) > MOST_REMEMBERED:
        oldest = next(iter(known))
        forgotten.append((oldest, known.pop(oldest)))
    return forgotten
