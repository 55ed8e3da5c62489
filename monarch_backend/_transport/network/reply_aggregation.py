"""Reply aggregation between hosts: replies to a multicast, combined on their way up a tree of gateways.

A gateway keeps the replies that it has sent to a parent other than the root, until the root has all replies to that
call. If the parent is lost, it sends them to the root again. So no reply is lost with a gateway in between.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from monarch_backend._transport.local import frames
from monarch_backend._transport.local.buffers import own, own_all
from monarch_backend._transport.local.frames import TOKEN_LENGTH, Kind, Part, Replies, Status
from monarch_backend._transport.network import envelope
from monarch_backend._transport.network.envelope import CARRIED, COMBINED, Envelope
from monarch_backend._transport.tokens import HOST_ID_LENGTH, epoch_of, host_of

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


class Gatherer:
    """Aggregates the replies at one gateway. All methods are called under its lock; arguments as for `Relay`."""

    def __init__(
        self,
        token: str,
        to_host: Callable[[str, Envelope], bool],
        answer: Callable[[str, Envelope], None],
        later: Callable[[float, Callable[[], None]], object],
    ) -> None:
        self._token, self._here = token, host_of(token)
        self._to_host, self._answer, self._later = to_host, answer, later
        self._gathers: dict[Call, _Gather] = {}  # the oldest first
        self._waiting: dict[_Gather, Call] = {}  # aggregations with replies that wait
        self._open: dict[int, Call] = {}  # by number: multicasts of this root without all replies
        self._over: dict[str, int] = {}  # by root: number from which on replies are kept
        self._kept: dict[tuple[str, int], list[tuple[str, Envelope]]] = {}  # by multicast: parent, frame
        self._size = 0  # bytes of the kept frames

    # ---- calls

    def expect(self, call: Call, root: str, number: int, parent: str | None, count: int) -> None:
        """Expect ``count`` replies to this call. The root counts one for each rank."""
        seen: set[int] | None = None
        if root == self._here:
            seen, self._open[number] = set(), call
        self._gathers[call] = _Gather(root, number, parent, count, seen)
        while len(self._gathers) > MAX_CALLS:
            oldest = next(iter(self._gathers))
            self._end(oldest, self._gathers[oldest])

    def has_parent(self, call: Call, parent: str) -> None:
        gather = self._gathers.get(call)
        if gather is not None and gather.seen is None:
            gather.parent = parent

    def fewer(self, call: Call, count: int) -> None:
        gather = self._gathers.get(call)
        if gather is not None and gather.seen is None:
            self._came(call, gather, count)

    def over(self, root: str, number: int) -> int:
        """Return the number of the root's first multicast without all replies; ``number`` is its newest one."""
        return next(iter(self._open), number) if root == self._here else self._over.get(root, 0)

    def are_over(self, root: str, number: int) -> None:
        """Release the replies to multicasts before ``number``: the root has them all."""
        if number > self._over.get(root, 0):
            self._over[root] = number
            for key in [key for key in self._kept if key[0] == root and key[1] < number]:
                self._size -= sum(_size(frame) for _, frame in self._kept.pop(key))

    def ends(self, caller: str) -> None:
        """Stop the aggregation for a caller that has ended."""
        for call in [call for call in self._gathers if call[0] == caller]:
            self._end(call, self._gathers[call])

    def _end(self, call: Call, gather: _Gather) -> None:
        del self._gathers[call]
        if gather.seen is not None:
            self._open.pop(gather.number, None)
        self._send_up(call, gather)

    # ---- replies

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

    def come_up(self, frame: Envelope) -> None:
        """Handle aggregated replies of a host below. Raises FrameError."""
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
        prefix = envelope.tokens(caller, self._token) + gather.root.encode() + replies
        frame = Envelope(COMBINED, 0, ref, 0, 0, 0, prefix, body, buffers)
        to = gather.parent
        if to != gather.root and gather.seen is None and (straight or not self._keep(gather, frame)):
            to = gather.root
        self._to_host(to, frame)

    # ---- kept replies

    def _keep(self, gather: _Gather, frame: Envelope) -> bool:
        """Keep replies until the root has all replies to this call.

        Return False if there is no space, or if the root has no record of the call.
        """
        number, size = gather.number, _size(frame)
        if not number or number < self._over.get(gather.root, 0) or self._size + size > MAX_KEPT_BYTES:
            return False
        assert gather.parent is not None
        self._kept.setdefault((gather.root, number), []).append((gather.parent, frame))
        self._size += size
        return True

    def lost_host(self, lost: str) -> None:
        """Send the replies that a lost parent may have had to their roots again."""
        for call, gather in list(self._gathers.items()):
            if gather.root == lost:
                del self._gathers[call]
                self._waiting.pop(gather, None)
            elif gather.parent == lost and gather.seen is None:
                gather.parent = gather.root
        for key in [key for key in self._kept if key[0] == lost]:
            self._size -= sum(_size(frame) for _, frame in self._kept.pop(key))
        self._over.pop(lost, None)
        for (root, number), kept in list(self._kept.items()):
            self._kept[root, number] = [entry for entry in kept if entry[0] != lost]
            for parent, frame in kept:
                if parent == lost:
                    self._size -= _size(frame)
                    self._to_host(root, frame)


def _size(frame: Envelope) -> int:
    return len(frame.prefix) + len(frame.body) + sum(map(len, frame.buffers or ()))
