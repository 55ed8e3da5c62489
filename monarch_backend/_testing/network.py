"""Simulated network between hosts, in place of Tcp, its sockets and its thread.

Frames pass through real Sessions. Connections open, break and are restored; frames on them arrive in order after
random delays. Losses are reported as in _transport/network/connection_manager.py.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from monarch_backend._transport.network.connection import ANY_RECEIVER, Address, PeerConnection, Timeouts
from monarch_backend._transport.network.connection_manager import RECONNECT_AFTER_CLOSE_S
from monarch_backend._transport.network.session import BYE, DATA, HEAD_BYTES, read_head

if TYPE_CHECKING:
    from monarch_backend._testing.hosts import Service, SimulatedHost
    from monarch_backend._testing.simulator import Simulation

CONNECT_INTERVAL_S = 0.5
"""Seconds between two connection attempts to a host that does not listen."""

MAX_RECOVERY_S = 1.0
"""Longest time until connections are restored after a network is back, in seconds: TCP retransmits lost packets."""


class Line:
    """Session between two processes, with the connecting and the accepting side, and its current connection."""

    __slots__ = ("called", "caller", "id", "last", "number", "open")

    def __init__(self, session: bytes, caller: SimulatedTcp, called: SimulatedTcp) -> None:
        self.id, self.caller, self.called = session, caller, called
        self.open = False
        self.number = 0  # of the connection: frames on earlier ones are lost
        self.last = {caller: 0.0, called: 0.0}  # when the last frame of each side arrives

    def other(self, tcp: SimulatedTcp) -> SimulatedTcp:
        return self.called if tcp is self.caller else self.caller

    def put(self, sender: SimulatedTcp, parts: Sequence[Any]) -> None:
        """Send a frame. It arrives after earlier ones, unless the connection breaks before."""
        if not self.open:
            return
        simulation, number, other = sender.process.simulation, self.number, self.other(sender)
        at = sender.spend() + simulation.conditions.remote_delay(simulation.random)
        at = self.last[sender] = max(at, self.last[sender])

        def arrives() -> None:
            if self.open and self.number == number:
                other.process.run(other.arrived, self, parts, reading=True)

        simulation.event_queue.add_at(at, lambda: other.take(arrives))


class SimulatedTcp:
    """Simulated Tcp of a process that serves a host."""

    def __init__(
        self,
        process: Service,
        network: Network,
        who: bytes,
        _secrets: Any,
        on_frame: Callable[[PeerConnection, bytes, memoryview], None],
        on_up: Callable[[PeerConnection], None],
        on_lost: Callable[[PeerConnection], None],
        *,
        bounds: Timeouts | None = None,
        **_: Any,  # as Tcp: there is no TLS and no NIC, and the hosts keep to the protocol
    ) -> None:
        self.process, self.who, self.bounds = process, who, bounds or Timeouts()
        self._network = network
        self._on_frame, self._on_up, self._on_lost = on_frame, on_up, on_lost
        self._remotes: dict[bytes, PeerConnection] = {}  # by session
        self._over: set[bytes] = set()  # sessions that have ended
        self._told: set[bytes] = set()  # sessions with a scheduled acknowledgement
        self.later = process.progress.later
        self.sent = self.received = 0  # frames, for tests
        self._free = 0.0  # when its thread will be free
        self._inbox: deque[Callable[[], None]] = deque()  # frames that wait for the thread
        process.tcp = network.by_who[who] = self

    # ---- as Tcp

    def start(self) -> None:
        """Do nothing: the simulation reads."""

    def listen(self, host: str, port: int = 0) -> Address:
        return host, port

    def call_soon(self, call: Callable[[], None]) -> None:
        self.later(0.0, call)

    def call(
        self, address: Address, secret: bytes, receiver: bytes = ANY_RECEIVER, *, patience: float | None = None
    ) -> PeerConnection:
        session = self.process.simulation.random.getrandbits(128).to_bytes(16, "little")
        remote = PeerConnection(session, address, secret, self.process.simulation.now)
        remote.wanted, remote.silence = receiver, self.bounds.patience if patience is None else patience
        self._remotes[session] = remote
        self.later(self._network.travel(), lambda: self.connect(remote))
        self.later(remote.silence, lambda: None if remote.up else self._lose_the_silent(remote))
        return remote

    def send(self, remote: PeerConnection, prefix: bytes, body: Sequence[Any], rdma_eligible: int = 0) -> None:
        if remote.lost is not None:
            return
        if remote.waiting or remote.session.full:
            remote.waiting.append((prefix, body, rdma_eligible))
            return
        self.sent += 1
        parts, line = remote.session.send(prefix, body), self._network.lines.get(remote.id)
        if line is not None:
            line.put(self, parts)

    def hang_up(self, remote: PeerConnection) -> None:
        self.call_soon(lambda: self._hang_up(remote))

    def close(self) -> None:
        for remote in list(self._remotes.values()):
            self._hang_up(remote)

    def _hang_up(self, remote: PeerConnection) -> None:
        if self._forget(remote):
            remote.lost = "this side has ended the session"
            line = self._network.lines.get(remote.id)
            if line is not None:
                line.put(self, [remote.session.bye()])

    # ---- start and end of connections

    def has(self, line: Line) -> bool:
        """Whether the session is not over on this side."""
        return self.process.alive and line.id in self._remotes

    def connect(self, remote: PeerConnection) -> None:
        """Connect to a peer, for the first time or to resume the session."""
        if self._remotes.get(remote.id) is not remote:
            return
        network, host = self._network, self._network.hosts[remote.address]
        line = network.lines.get(remote.id)
        if line is not None and line.open:
            return
        if not network.reaches(self.process.host, host):  # `heal` connects again
            if line is not None:
                self.lose_later(line, self.bounds.silence, f"nothing was heard from it for {self.bounds.silence:.1f} s")
            return
        other = network.find(host, remote.wanted)
        if host.daemon is None or not host.daemon.alive:
            if remote.up:
                self._lose(remote, "its process has closed the connection and does not listen any more")
            else:
                remote.trouble = "connection refused"
                self.later(CONNECT_INTERVAL_S, lambda: self.connect(remote))
        elif other is None or not other._accepts(remote):
            self._lose(remote, "it has given up this connection, which was broken for too long")
        else:
            line = network.lines.setdefault(remote.id, Line(remote.id, self, other))
            self._open(line, remote, other._remotes[remote.id])

    def _accepts(self, caller: PeerConnection) -> bool:
        """Accept a session that exists here, or a new one. Return False for one that is over."""
        if caller.id not in self._remotes:
            if caller.up or caller.id in self._over:
                return False
            self._remotes[caller.id] = PeerConnection(caller.id, None, caller.secret, self.process.simulation.now)
        return True

    def _open(self, line: Line, mine: PeerConnection, theirs: PeerConnection) -> None:
        line.open = True
        line.number += 1
        ends = (line.called, theirs, mine), (line.caller, mine, theirs)
        new = [(tcp, remote) for tcp, remote, _ in ends if not remote.up]
        for tcp, remote, other in ends:
            remote.up, remote.who = True, line.other(tcp).who
            remote.times += 1
            for parts in remote.session.resume(other.session.received):
                line.put(tcp, parts)
        for tcp, remote in new:
            tcp.process.run(tcp._on_up, remote, reading=True)

    def lose_later(self, line: Line, seconds: float, why: str) -> None:
        """Lose a peer after ``seconds``, unless there is a new connection by then."""
        number = line.number

        def look() -> None:
            remote = self._remotes.get(line.id)
            if remote is not None and line.number == number:
                self._lose(remote, why)

        self.later(seconds, look)

    def _lose_the_silent(self, remote: PeerConnection) -> None:
        why = f" ({remote.trouble})" if remote.trouble else ""
        self._lose(remote, f"it did not answer for {remote.silence:.1f} s{why}")

    def _lose(self, remote: PeerConnection, why: str) -> None:
        if not self._forget(remote):
            return
        remote.lost = why
        line = self._network.lines.get(remote.id)
        if line is not None:
            self._network.closed(line, self)
        self._on_lost(remote)

    def _forget(self, remote: PeerConnection) -> bool:
        """End the session on this side. Return False if it has ended before."""
        self._over.add(remote.id)
        return self._remotes.pop(remote.id, None) is not None

    def call_all_again(self, pair: frozenset[SimulatedHost]) -> None:
        """Connect again to the peers on the other host of a pair, after the network between them is back."""
        for remote in list(self._remotes.values()):
            if remote.address is not None and self._network.hosts[remote.address] in pair - {self.process.host}:
                seconds = min(MAX_RECOVERY_S, self.bounds.silence / 3) * self._network.random()
                self.later(seconds, lambda remote=remote: self.connect(remote))  # type: ignore[misc]

    def died(self) -> None:
        """Close all connections of a process that has ended, as its system does."""
        for session in self._remotes:
            line = self._network.lines.get(session)
            if line is not None:
                self._network.closed(line, self)

    # ---- the thread

    def spend(self) -> float:
        """Occupy the thread with one more frame. Return the time at which it is done."""
        event_queue = self.process.simulation.event_queue
        self._free = max(self._free, event_queue.time) + self.process.simulation.conditions.gateway
        return self._free

    def take(self, arrives: Callable[[], None]) -> None:
        """Handle a frame when the thread has handled those before it."""
        if not self.process.simulation.conditions.gateway:
            arrives()
            return
        self._inbox.append(arrives)
        if len(self._inbox) == 1:
            self._look_later()

    def _look_later(self) -> None:
        self.process.simulation.event_queue.add_at(self.spend(), self._look)

    def _look(self) -> None:
        self._inbox[0]()
        self._inbox.popleft()
        if self._inbox:
            self._look_later()

    # ---- received frames

    def arrived(self, line: Line, parts: Sequence[Any]) -> None:
        remote = self._remotes.get(line.id)
        if remote is None:
            return
        session, first = remote.session, bytes(parts[0])
        head = read_head(first[:HEAD_BYTES])
        remote.knows = True
        if head.kind != DATA:
            session.hear(head)
            self._send_waiting(line, remote)
            if head.kind == BYE:
                self._lose(remote, "it has ended the session")
            return
        taken = session.take(head)
        self._send_waiting(line, remote)
        if session.ack_is_due:
            line.put(self, [session.acknowledgement()])
        elif line.id not in self._told:
            self._told.add(line.id)
            self.later(self.bounds.heartbeat, lambda: self._tell(line, remote))
        if taken:
            scratch = bytearray(b"".join(parts[1:]))
            self.received += 1
            self._on_frame(remote, first[HEAD_BYTES:], memoryview(scratch))
            scratch[:] = bytes(len(scratch))  # shows uses of the body after the callback

    def _send_waiting(self, line: Line, remote: PeerConnection) -> None:
        while remote.waiting and not remote.session.full:
            line.put(self, remote.session.send(*remote.waiting.popleft()[:2]))

    def _tell(self, line: Line, remote: PeerConnection) -> None:
        """Acknowledge frames at the next heartbeat. Other heartbeats are left out, so that a simulation can end."""
        self._told.discard(line.id)
        line.put(self, [remote.session.acknowledgement()])


class Network:
    """Network between the hosts, its cuts, and all sessions."""

    def __init__(self, simulation: Simulation) -> None:
        self._simulation = simulation
        self.hosts: dict[Address | None, SimulatedHost] = {}
        self.by_who: dict[bytes, SimulatedTcp] = {}
        self.lines: dict[bytes, Line] = {}  # by session
        self.random = simulation.random.random
        self._cuts: dict[frozenset[SimulatedHost], int] = {}

    def travel(self) -> float:
        """Return a random time of a frame to another host, in seconds."""
        return self._simulation.conditions.remote_delay(self._simulation.random)

    def reaches(self, one: SimulatedHost, other: SimulatedHost) -> bool:
        """Whether the network between two hosts is not cut."""
        return frozenset((one, other)) not in self._cuts

    def find(self, host: SimulatedHost, wanted: bytes) -> SimulatedTcp | None:
        """Return the Tcp that accepts a connection to this host and token; None if there is none."""
        if wanted == ANY_RECEIVER:
            return None if host.daemon is None else host.daemon.tcp
        tcp = self.by_who.get(wanted)
        return tcp if tcp is not None and tcp.process.alive and tcp.process.host is host else None

    def closed(self, line: Line, by: SimulatedTcp) -> None:
        """Close a connection from one side, by the code or by the end of its process; the other side reads an end."""
        other = line.other(by)
        if not line.open:
            return
        line.open = False
        if not other.has(line):
            return
        pause = self.travel() + other.bounds.pause * (0.5 + self.random() / 2)
        if other is line.caller:
            remote = other._remotes[line.id]
            other.later(pause, lambda: other.connect(remote))
        else:
            why = "its process has closed the connection and does not connect again"
            other.lose_later(line, self.travel() + RECONNECT_AFTER_CLOSE_S, why)

    def cut(self, one: SimulatedHost, other: SimulatedHost) -> None:
        """Cut the network between two hosts. Both sides see only silence, and lose each other after the limit."""
        pair = frozenset((one, other))
        self._cuts[pair] = self._cuts.get(pair, 0) + 1
        for line in self.lines.values():
            if not line.open or {line.caller.process.host, line.called.process.host} != pair:
                continue
            line.open = False
            for tcp in (line.caller, line.called):
                bounds = tcp.bounds
                beat = bounds.heartbeat * (2 * self.random() - 1)  # position between two heartbeats and two checks
                why = f"nothing was heard from it for {bounds.silence:.1f} s"
                tcp.lose_later(line, bounds.silence + beat, why)

    def heal(self, one: SimulatedHost, other: SimulatedHost) -> None:
        """Restore the network between two hosts. Sessions resume if both sides still have them."""
        pair = frozenset((one, other))
        self._cuts[pair] -= 1
        if self._cuts[pair]:
            return
        del self._cuts[pair]
        for tcp in list(self.by_who.values()):
            if tcp.process.alive and tcp.process.host in pair:
                tcp.call_all_again(pair)
