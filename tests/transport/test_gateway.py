"""Gateways and the links through them, without processes or sockets: notifications and their order."""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Callable
from typing import Any

import pytest

from monarch_backend._transport.local.frames import CARRIED, FrameError, Kind
from monarch_backend._transport.local.links import FIRST_REMOTE_LINK, LINK_PENDING
from monarch_backend._transport.network import envelope
from monarch_backend._transport.network.envelope import Envelope
from monarch_backend._transport.network.gateway import Gateway
from monarch_backend._transport.network.multicast import AGGREGATION_WINDOW_S, DEFAULT_FANOUT
from monarch_backend._transport.network.remote_links import RemoteLinks
from monarch_backend._transport.tokens import host_of


def token(host: int, process: int) -> str:
    return f"{host:08x}{process:020x}0000"


class Process:
    """A process of a host: its remote links, and the events that it has received."""

    def __init__(self, host: Host, number: int) -> None:
        self.token, self.host, self.pid = token(host.number, number), host, 100 * host.number + number
        self.mailbox, self.alive = self, True
        self.inbox: deque[tuple[Any, ...]] = deque()
        self.events: list[tuple[Any, ...]] = []
        self.links = RemoteLinks(self, self.pid, host.token, 0, self._to_gateway, self.host.world.soon.append)

    def _to_gateway(self, frame: Envelope) -> bool:
        body = frame.body if isinstance(frame.body, bytes) else b"".join(frame.body)
        self.host.inbox.append((self.host.links[self.token], *frame._replace(body=body)))
        return True

    def connect(self, _: str) -> int:
        raise AssertionError("no process of this test is on the same host")

    def read(self) -> None:
        events = [self.inbox.popleft() for _ in range(len(self.inbox))]
        self.events += self.links.translate(events)

    def meet(self, other: Process) -> int:
        link = self.links.connect(other.token)
        if link == LINK_PENDING:
            self.host.world.run()
            link = self.links.connect(other.token)
        return link

    def told(self, kind: int) -> list[tuple[Any, ...]]:
        return [event for event in self.events if event[1] == kind]

    def bodies(self) -> list[bytes]:
        return [bytes(event[8]) for event in self.events if event[1] == Kind.CALL]


class Host:
    """A gateway, and its links to the processes of its host."""

    def __init__(self, world: World, number: int) -> None:
        self.world, self.number, self.id = world, number, f"{number:08x}"
        self.mailbox = self
        self.token = token(number, 0)
        self.links: dict[str, int] = {}
        self.processes: dict[int, Process] = {}
        self.inbox: deque[tuple[Any, ...]] = deque()
        self.mine: list[Envelope] = []
        self.full = 0  # how many sends find the link full
        self.dropped: list[int] = []
        self.gateway = Gateway(
            self, self.token, number, self._to_host, self.mine.append, self._later, branches=world.branches,
            way=lambda host: world.way(number, host),
        )  # fmt: skip
        for process in range(1, 4):
            self.start(process)

    def start(self, number: int) -> Process:
        process = Process(self, number)
        link = self.links[process.token] = len(self.processes) + 1
        self.processes[link] = process
        self.inbox.append((link, int(Kind.MET), process.token, process.pid))
        return process

    def _to_host(self, host: str, frame: Envelope) -> bool:
        host = self.world.way(self.number, host)
        if host not in self.world.by_id or host in self.world.lost or frozenset((self.id, host)) in self.world.cuts:
            return False
        self.world.carried += 1
        prefix, body = envelope.pack(frame)
        self.world.wires[self.id, host].append((prefix, b"".join(body)))
        return True

    def _later(self, seconds: float, call: Callable[[], None]) -> None:
        (self.world.soon if seconds < AGGREGATION_WINDOW_S else self.world.much_later).append(call)

    def connect(self, token: str) -> int:
        return self.links.get(token, -1)

    def send(self, link: int, *frame: Any) -> bool:
        return self.multicast([(link, *frame[3:6])], *frame[:3], *frame[6:])

    def multicast(self, to: Any, kind: int, target: int, ref: int, prefix: bytes, body: Any, buffers: Any) -> bool:
        if self.full and kind < 0xF0:
            self.full -= 1
            return False
        data = body if isinstance(body, bytes) else b"".join(bytes(part) for part in body)
        own = [bytearray(buffer) for buffer in buffers] if buffers else None
        for link, seq, rank, epoch in to:
            self.processes[link].inbox.append((0, kind, target, ref, seq, rank, epoch, prefix, data, own))
        return True

    def drop(self, link: int) -> None:
        self.dropped.append(link)

    def read(self) -> None:
        self.gateway.handle([self.inbox.popleft() for _ in range(len(self.inbox))])


class World:
    """Hosts and the simulated network between them. `run` delivers all frames until none is left."""

    def __init__(self, count: int, seed: int = 0, branches: int = DEFAULT_FANOUT, gate: int = 0) -> None:
        """Connect ``count`` hosts.

        With ``gate``, hosts before and after that number reach each other only through it.
        """
        self.gate = gate
        self.random, self.branches = random.Random(seed), branches
        self.soon: deque[Callable[[], Any]] = deque()
        self.much_later: deque[Callable[[], Any]] = deque()  # run when no frame is in flight
        self.lost: set[str] = set()
        self.cuts: set[frozenset[str]] = set()
        self.carried = 0
        self.by_id: dict[str, Host] = {}
        self.wires: dict[tuple[str, str], deque[tuple[bytes, bytes]]] = {}
        for number in range(1, count + 1):
            host = Host(self, number)
            self.by_id[host.id] = host
        for here in self.by_id:
            for there in self.by_id:
                self.wires[here, there] = deque()
        self.run()

    def way(self, number: int, host: str) -> str:
        apart = (number - self.gate) * (int(host, 16) - self.gate) < 0
        return f"{self.gate:08x}" if self.gate and apart else host

    def process(self, host: int, number: int) -> Process:
        return next(p for p in self.by_id[f"{host:08x}"].processes.values() if p.token == token(host, number))

    def step(self) -> bool:
        steps: list[Callable[[], None]] = []
        for host in self.by_id.values():
            if host.inbox:
                steps.append(host.read)
            steps += [process.read for process in host.processes.values() if process.inbox]
        for (_, there), wire in self.wires.items():
            if wire:
                steps.append(lambda there=there, wire=wire: self.carry(there, wire))  # type: ignore[misc]
        if self.soon:
            steps.append(lambda: self.soon.popleft()())
        if steps:
            self.random.choice(steps)()
        return bool(steps)

    def carry(self, there: str, wire: deque[tuple[bytes, bytes]]) -> None:
        prefix, body = wire.popleft()
        scratch = bytearray(body)
        self.by_id[there].gateway.arrived(prefix, memoryview(scratch))
        scratch[:] = bytes(len(scratch))  # a view that is still used after the call shows zeros

    def run_to_rest(self) -> None:
        while self.step():
            pass

    def run(self) -> None:
        self.run_to_rest()
        while self.much_later:
            self.much_later.popleft()()
            self.run_to_rest()

    def kill(self, process: Process, how: str = "killed", orderly: bool = False) -> None:
        host = process.host
        host.inbox.append((host.links.pop(process.token), int(Kind.GONE), how, orderly))

    def lose(self, number: int, why: str) -> None:
        lost = f"{number:08x}"
        self.lost.add(lost)
        for host in self.by_id.values():
            if host.id != lost:
                self._cut(host, lost, why)

    def cut(self, one: int, other: int) -> None:
        """Cut the network between two hosts, so that each reports the other lost."""
        hosts = self.by_id[f"{one:08x}"], self.by_id[f"{other:08x}"]
        self.cuts.add(frozenset(host.id for host in hosts))
        for host, lost in (hosts, hosts[::-1]):
            self.soon.append(lambda host=host, lost=lost: self._cut(host, lost.id, "cut"))  # type: ignore[misc]

    def _cut(self, host: Host, lost: str, why: str) -> None:
        self.wires[host.id, lost].clear()
        if lost in self.lost:
            self.wires[lost, host.id].clear()
        host.gateway.lost_host(lost, why)


def say(process: Process, link: int, text: bytes, seq: int = 1) -> None:
    assert process.links.send(link, Kind.CALL, 7, 8, seq, 3, 0, b"prefix", text, None)


def test_two_processes_exchange_frames() -> None:
    world = World(2)
    one, two = world.process(1, 1), world.process(2, 1)
    link = one.meet(two)
    assert link >= FIRST_REMOTE_LINK
    assert one.told(Kind.MET) == [(link, Kind.MET, two.token, two.pid)]
    assert two.told(Kind.MET) == [(FIRST_REMOTE_LINK, Kind.MET, one.token, one.pid)]
    say(one, link, b"hello")
    say(two, two.links.connect(one.token), b"hello back")
    world.run()
    assert two.told(Kind.CALL) == [(FIRST_REMOTE_LINK, Kind.CALL, 7, 8, 1, 3, 0, b"prefix", b"hello", None)]
    assert one.bodies() == [b"hello back"]


def test_early_frames_wait_for_the_connected_event() -> None:
    """A multicast frame travels through other hosts and can arrive before the direct MET event."""
    world = World(2)
    one, two = world.process(1, 1), world.process(2, 1)
    assert one.links.connect(two.token) == LINK_PENDING
    prefix = (one.token + two.token).encode() + b"prefix"
    one.inbox.append((0, int(Kind.CALL) | CARRIED, 7, 8, 1, 3, 0, prefix, b"early", None))
    one.read()
    assert one.events == []
    world.run()
    assert [event[1] for event in one.events] == [Kind.MET, Kind.CALL]
    assert one.bodies() == [b"early"]


def test_connect_to_a_missing_process_is_refused() -> None:
    world = World(2)
    one = world.process(1, 1)
    assert one.links.connect(token(2, 99)) == LINK_PENDING
    assert one.links.connect(token(3, 1)) == LINK_PENDING  # this host does not exist either
    world.run()
    assert sorted(event[2] for event in one.told(Kind.REFUSED)) == [token(2, 99), token(3, 1)]
    assert one.links.connect(token(2, 99)) == LINK_PENDING  # a refused process can be looked up again


@pytest.mark.parametrize("seed", range(30))
def test_exit_is_reported_once_after_frames_in_order(seed: int) -> None:
    """Frames between two processes keep their order. The report of an end arrives after all of them, exactly once."""
    world = World(3, seed)
    processes = [world.process(host, number) for host in (1, 2, 3) for number in (1, 2)]
    dying, others = processes[0], processes[1:]
    far = [other for other in others if other.host is not dying.host]
    met = world.random.sample(far, 3)
    links = {other.token: dying.meet(other) for other in met}
    sent: dict[str, list[bytes]] = {other.token: [] for other in met}
    for number in range(60):
        other = world.random.choice(met)
        sent[other.token].append(b"%d" % number)
        say(dying, links[other.token], b"%d" % number)
        other.host.full = world.random.choice((0, 0, 0, 2))
        for _ in range(world.random.randrange(4)):
            world.step()
    while dying.host.inbox:
        dying.host.read()
    world.kill(dying, "killed by signal 9")
    world.run()
    for other in far:
        gone = other.told(Kind.GONE)
        if other in met:
            assert other.bodies() == sent[other.token]
            assert [event[2:] for event in gone] == [("killed by signal 9", False)]
            assert other.events[-1] == gone[0]
        else:
            assert gone == []


def test_multicast_is_sent_once_to_each_host() -> None:
    world = World(3)
    one = world.process(1, 1)
    others = [world.process(host, number) for host in (2, 3) for number in (1, 2, 3)]
    to = [(one.meet(other), seq, 10 + seq, 0) for seq, other in enumerate(others, 1)]
    assert one.links.multicast(to, Kind.CALL, 7, 8, b"prefix", [b"bo", b"dy"], None)
    while one.host.inbox:
        one.host.read()
    assert [len(world.wires["00000001", there]) for there in ("00000002", "00000003")] == [1, 1]
    world.by_id["00000003"].full = 1  # then each host sends when its link has room
    world.run()
    for seq, other in enumerate(others, 1):
        assert other.told(Kind.CALL) == [
            (FIRST_REMOTE_LINK, Kind.CALL, 7, 8, seq, 10 + seq, 0, b"prefix", b"body", None)
        ]


def test_lost_host_is_reported_to_all_connected_processes() -> None:
    world = World(3)
    one, two, three = world.process(1, 1), world.process(2, 1), world.process(3, 1)
    one.meet(two)
    three.meet(one)
    assert one.links.connect(token(2, 2)) == LINK_PENDING
    one.host.read()  # the lookup is in flight
    world.lose(2, "host beta is lost")
    world.run()
    assert [event[2] for event in one.told(Kind.GONE)] == ["host beta is lost"]
    assert [event[2:] for event in one.told(Kind.REFUSED)] == [(token(2, 2), "host beta is lost")]
    assert three.told(Kind.GONE) == []
    assert one.meet(three) >= FIRST_REMOTE_LINK


def test_abandoned_process_gets_a_report_when_it_connects() -> None:
    world = World(2)
    one, two = world.process(1, 1), world.process(2, 1)
    assert one.links.connect(two.token) == LINK_PENDING
    one.host.read()
    world.lose(2, "host beta is lost")
    world.run()
    world.lost.clear()  # the host still runs and was unreachable only from the other host
    assert two.links.connect(one.token) == LINK_PENDING
    world.run()
    [(_, _, whom, why)] = two.told(Kind.REFUSED)
    assert whom == one.token
    assert "given up" in why


def test_end_of_the_gateway_closes_all_remote_links() -> None:
    world = World(2)
    one, two = world.process(1, 1), world.process(2, 1)
    link = one.meet(two)
    one.inbox.append((0, int(Kind.GONE), "killed", False))
    one.read()
    assert [event[:2] for event in one.told(Kind.GONE)] == [(link, Kind.GONE), (0, Kind.GONE)]


def test_frames_with_a_forged_sender_are_dropped() -> None:
    world = World(2)
    host = world.by_id["00000001"]
    link = host.links[token(1, 1)]
    # an envelope with the token of another process as sender
    word = envelope.word(envelope.CALL, token(2, 1), token(1, 2))
    host.inbox.append((link, *word))
    host.inbox.append((link, *envelope.word(envelope.MET, token(2, 1), token(1, 1))))
    host.read()
    assert host.dropped == [link, link]


@pytest.mark.parametrize(
    "prefix",
    [
        b"",
        b"x",
        bytes(40),
        bytes(200),
        envelope.pack(envelope.word(0x41, token(1, 1), token(2, 1)))[0][:-10],
        b"\xff" * 100,
    ],
)
def test_bytes_of_another_host_that_are_no_frame(prefix: bytes) -> None:
    world = World(1)
    with pytest.raises(FrameError):
        world.by_id["00000001"].gateway.arrived(prefix, memoryview(b""))


def test_tokens_know_their_host() -> None:
    assert host_of(token(0xABC, 1)) == "00000abc"


def test_process_that_dies_while_it_connects_is_reported() -> None:
    world = World(2)
    one, two = world.process(1, 1), world.process(2, 1)
    assert one.links.connect(two.token) == LINK_PENDING
    one.host.read()
    while world.wires["00000001", "00000002"]:
        world.carry("00000002", world.wires["00000001", "00000002"])
    world.kill(one, "killed by signal 9")
    one.host.read()
    world.run()
    assert [event[2] for event in two.told(Kind.GONE)] == ["killed by signal 9"]


def test_remote_processes_are_unreachable_without_the_gateway() -> None:
    world = World(2)
    one = world.process(1, 1)
    one.inbox.append((0, int(Kind.GONE), "killed", False))
    one.read()
    assert one.links.connect(token(2, 1)) == -1


def test_processes_connect_through_a_third_host() -> None:
    world = World(3, gate=2)
    one, two = world.process(1, 1), world.process(3, 1)
    link = one.meet(two)
    say(one, link, b"hello")
    say(two, two.links.connect(one.token), b"hello back")
    world.run()
    assert (one.bodies(), two.bodies()) == ([b"hello back"], [b"hello"])
    assert one.links.connect(token(3, 99)) == LINK_PENDING
    assert one.links.connect(token(9, 1)) == LINK_PENDING  # a host that the host between does not know
    world.run()
    assert sorted(event[2] for event in one.told(Kind.REFUSED)) == [token(3, 99), token(9, 1)]
    world.kill(two)
    world.run()
    assert [event[2] for event in one.told(Kind.GONE)] == ["killed"]


def test_misaddressed_frame_is_dropped_alone() -> None:
    world = World(2)
    one, two = world.process(1, 1), world.process(2, 1)
    link = one.meet(two)
    stranger = (one.token + token(2, 9)).encode()
    say(two, two.links.connect(one.token), b"before")
    world.by_id["00000002"].read()
    world.run()
    one.inbox.append((0, Kind.CALL | CARRIED, 1, 1, 1, 0, 0, stranger, b"", None))
    say(two, two.links.connect(one.token), b"after", 2)
    world.run()
    assert one.bodies() == [b"before", b"after"]
    assert one.links.connect(two.token) == link


def test_two_links_between_a_process_and_its_gateway() -> None:
    """A process and its gateway have connected to each other at the same time."""
    world = World(2)
    one, two = world.process(1, 1), world.process(2, 1)
    host = one.host
    host.processes[99] = one
    host.inbox.append((99, int(Kind.MET), one.token, one.pid))
    one.inbox.append((7, int(Kind.MET), host.token, 1))
    world.run()
    link = two.meet(one)
    say(two, link, b"hello")
    world.run()
    assert one.bodies() == [b"hello"]
