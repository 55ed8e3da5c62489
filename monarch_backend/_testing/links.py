"""Simulated links between processes, in place of shared memory and pidfds. Durations are random.

They have the guarantees of csrc/channel/mailbox.h:

- Frames of each pair of processes arrive in order, and the receiver owns the payload.
- Frames that a process has written before its end arrive, and then GONE.
- Sending never waits. Frames to a process that has ended are dropped.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from monarch_backend._transport.local.frames import Kind, own, own_all, size_of
from monarch_backend._transport.local.links import LINK_PENDING, Receiver
from monarch_backend._transport.tokens import host_of

if TYPE_CHECKING:
    from monarch_backend._testing.process import SimulatedProcess
    from monarch_backend._testing.simulator import Simulation


class Wire:
    """One direction of a link: an ordered queue of events to one process."""

    __slots__ = ("_event_queue", "_last", "closed", "number", "queue", "receiver", "reported", "sender")

    def __init__(self, sender: SimulatedProcess, receiver: SimulatedProcess, number: int) -> None:
        self.sender, self.receiver = sender, receiver
        self.number = number  # of the receiver's link
        self.queue: deque[tuple[Any, ...]] = deque()
        self.closed = False  # for sending
        self.reported = False  # whether GONE has arrived at the receiver
        self._event_queue = sender.simulation.event_queue
        self._last = 0.0

    def put(self, event: tuple[Any, ...], seconds: float) -> None:
        """Deliver an event after ``seconds``, or later: not before earlier events."""
        event_queue = self._event_queue
        self._last = at = max(event_queue.time + seconds, self._last)
        self.queue.append(event)
        event_queue.add_at(at, self.deliver)

    def deliver(self) -> None:
        if self.queue:
            event = self.queue.popleft()
            if event[1] == Kind.GONE:
                self.reported = True
            self.receiver.receive(event, self.sender)

    def cut(self, most: int) -> None:
        """Drop all but the first ``most`` events: a dying sender had not written the others to shared memory."""
        met = sum(1 for event in self.queue if event[1] < 0)  # sent over a socket, and not lost
        while len(self.queue) > max(most, met):
            self.queue.pop()


class SimulatedLinks:
    def __init__(self, simulation: Simulation, process: SimulatedProcess) -> None:
        self.token = process.token
        self.out: list[Wire] = []  # by number of the link
        self.sent = self.received = 0  # frames, for tests
        self._simulation, self._process = simulation, process
        self._by_token: dict[str, int] = {}
        self._called: set[str] = set()

    def connect(self, token: str) -> int:
        other = self._simulation.by_token.get(token)
        known = self._by_token.get(token)
        if other is None or not self._process.alive or self._is_elsewhere(token):
            return -1
        if known is not None and not other.links.out[self.out[known].number].reported:
            return self._cross(other, known)
        if not other.alive:
            return -1
        if token not in self._called:
            rng, conditions = self._simulation.random, self._simulation.conditions
            if other.program is None or rng.random() >= conditions.silent:  # a gateway always answers at once
                return self._join(other)
            self._called.add(token)
            self._simulation.event_queue.add(conditions.latest * rng.random(), lambda: self._answered(other))
        return LINK_PENDING

    def _is_elsewhere(self, token: str) -> bool:
        """Whether a process is on another host, and so without shared memory."""
        return bool(self._simulation.hosts) and host_of(token) != host_of(self.token)

    def _answered(self, other: SimulatedProcess) -> None:
        """Connect to a process that did not answer at first, or report that it has ended."""
        self._called.discard(other.token)
        if not self._process.alive:
            return
        if other.alive:
            self._join(other)
        else:
            self._process.receive((-1, int(Kind.REFUSED), other.token), other)

    def _join(self, other: SimulatedProcess) -> int:
        rng, conditions = self._simulation.random, self._simulation.conditions
        mine, theirs = len(self.out), len(other.links.out)
        there, back = Wire(self._process, other, theirs), Wire(other, self._process, mine)
        self.out.append(there)
        other.links.out.append(back)
        self._by_token.setdefault(other.token, mine)  # the first of two links, if both sides connect
        other.links._by_token.setdefault(self.token, theirs)
        there.put((theirs, int(Kind.MET), self.token, self._process.pid), conditions.travel(rng))
        back.put((mine, int(Kind.MET), other.token, other.pid), conditions.travel(rng))
        return mine

    def _cross(self, other: SimulatedProcess, known: int) -> int:
        """Return the link, or a second one if the other process is connecting at the same time."""
        coming = other.links.out[self.out[known].number]
        under_way = bool(coming.queue) and coming.queue[0][1] == Kind.MET
        if under_way and other.alive and len(self.out) == known + 1:
            rng = self._simulation.random
            if rng.random() < self._simulation.conditions.crossing:
                return self._join(other)
        return known

    def send(
        self,
        link: int,
        kind: int,
        target: int,
        ref: int,
        seq: int,
        rank: int,
        epoch: int,
        prefix: bytes,
        body: Any,
        buffers: Sequence[Any] | None,
    ) -> bool:
        return self.multicast([(link, seq, rank, epoch)], kind, target, ref, prefix, body, buffers)

    def multicast(
        self,
        to: list[Receiver],
        kind: int,
        target: int,
        ref: int,
        prefix: bytes,
        body: Any,
        buffers: Sequence[Any] | None,
    ) -> bool:
        if not self._process.alive:
            return True
        simulation = self._simulation
        rng, travel = simulation.random, simulation.conditions.travel
        body = own(body)
        if not self._room(len(prefix) + size_of(body, buffers)):
            return False
        for link, seq, rank, epoch in to:
            if link < 0:
                raise IndexError(f"there is no link {link}")
            wire = self.out[link]
            self.sent += 1
            if not wire.closed:
                event = (wire.number, int(kind), target, ref, seq, rank, epoch, bytes(prefix), body, own_all(buffers))
                wire.put(event, travel(rng))
        return True

    def _room(self, size: int) -> bool:
        conditions = self._simulation.conditions
        return (
            not conditions.no_room
            or size <= conditions.most_inline
            or self._simulation.random.random() >= conditions.no_room
        )

    def drop(self, link: int) -> None:
        self.out[link].closed = True

    def unread(self, link: int) -> int:
        """As Links.unread; buffers are not counted."""
        return sum(len(event[8]) for event in self.out[link].queue if event[1] >= 0)

    def sever(self, exit_text: str, orderly: bool) -> None:
        """End all links: written frames arrive, then GONE; frames to this process are dropped."""
        rng, conditions = self._simulation.random, self._simulation.conditions
        for wire in self.out:
            back = wire.receiver.links.out[wire.number]
            back.closed = True
            back.queue.clear()
            if wire.receiver.alive:
                if wire.queue and rng.random() < conditions.kept_back:
                    wire.cut(rng.randrange(len(wire.queue) + 1))
                wire.put((wire.number, int(Kind.GONE), exit_text, orderly), conditions.noticed * rng.random())


class SimulatedLocalLinks:
    """Simulated LocalLinks: the links of a process on its host, and to other hosts when there is a gateway."""

    def __init__(self, mailbox: SimulatedLinks) -> None:
        self.mailbox, self.token = mailbox, mailbox.token
        self.connect, self.send, self.multicast = mailbox.connect, mailbox.send, mailbox.multicast
        self.drop, self.unread = mailbox.drop, mailbox.unread
        self.translate: Callable[[Sequence[Any]], Sequence[Any]] = lambda events: events

    def go_through(self, remote_links: Any) -> None:
        self.connect, self.send, self.multicast = remote_links.connect, remote_links.send, remote_links.multicast
        self.drop, self.unread, self.translate = remote_links.drop, remote_links.unread, remote_links.translate
