"""Multicast tree of gateways: one copy per host, combined replies, and delivery below a lost host."""

from __future__ import annotations

from typing import Any

import pytest

from monarch_backend._transport.local.frames import CARRIED, FrameError, Kind, decode_replies
from monarch_backend._transport.network import envelope, multicast
from monarch_backend._transport.network.envelope import PASS, RelayHeader
from monarch_backend._transport.network.multicast import split
from tests.transport.test_gateway import Process, World, token

REF = 8


class Tree:
    """A process of host 1 that is connected to processes of all other hosts."""

    def __init__(self, count: int, branches: int, seed: int = 0, each: int = 1, gate: int = 0) -> None:
        self.world = World(count, seed, branches, gate)
        self.root = self.world.process(1, 1)
        self.others = [
            self.world.process(host, number) for host in range(2, count + 1) for number in range(1, each + 1)
        ]
        self.links = [self.root.meet(other) for other in self.others]
        self.sent = 0

    def multicast(self, ref: int = REF, body: bytes = b"body") -> None:
        self.sent += 1
        to = [(link, self.sent, rank, 0) for rank, link in enumerate(self.links)]
        assert self.root.links.multicast(to, Kind.CALL, 7, ref, b"prefix", [body], [bytearray(b"beside")])

    def reply(self, other: Process, status: bytes = b"", body: bytes = b"", ref: int = REF) -> None:
        link = other.links.connect(self.root.token)
        rank = self.others.index(other)
        text = body or b"%d" % rank
        assert other.links.send(link, Kind.REPLY, 0, ref, 0, rank, 0, status, text, [bytearray(text)])

    def replies(self, ref: int = REF) -> list[tuple[int, bytes, bytes]]:
        """Return rank, status and body of each reply, combined or single."""
        found: list[tuple[int, bytes, bytes]] = []
        for event in self.root.events:
            if event[3] != ref:
                continue
            if event[1] == Kind.REPLY:
                assert bytes(event[9][0]) == event[8]
                found.append((event[5], event[7], event[8]))
            elif event[1] == Kind.REPLIES:
                found += together(event)
        return found

    def frames(self) -> int:
        """Return the number of frames that gateways have sent so far."""
        return self.world.carried

    def at(self, host: int) -> list[bytes]:
        return self.world.process(host, 1).bodies()


def together(event: Any) -> list[tuple[int, bytes, bytes]]:
    replies, at, found = decode_replies(event[7]), 0, []
    for part, buffer in zip(replies.parts, event[9], strict=True):
        body = event[8][at : at + part.body]
        assert bytes(buffer) == body
        found.append((part.rank, part.status, body))
        at += part.body
    return found


@pytest.mark.parametrize(("count", "branches"), [(4, 1), (10, 2), (40, 3), (12, 8)])
def test_one_copy_for_each_host(count: int, branches: int) -> None:
    tree = Tree(count, branches, each=3)
    before = tree.frames()
    tree.multicast(ref=0)
    tree.root.host.read()
    started = [len(tree.world.wires["00000001", there]) for there in tree.world.by_id]
    assert sum(started) == branches
    tree.world.run()
    assert tree.frames() - before == 2 * (count - 1)  # one copy and one acknowledgement for each host
    for rank, other in enumerate(tree.others):
        [event] = other.told(Kind.CALL)
        assert event[2:] == (7, 0, 1, rank, 0, b"prefix", b"body", [b"beside"])
    assert all(not host.gateway._relay._multicasts for host in tree.world.by_id.values())


@pytest.mark.parametrize("seed", range(20))
def test_replies_come_together(seed: int) -> None:
    tree = Tree(20, 2, seed, each=2)
    tree.multicast()
    tree.world.run_to_rest()
    for other in tree.world.random.sample(tree.others, len(tree.others)):
        tree.reply(other)
        if tree.world.random.random() < 0.3:
            tree.world.run_to_rest()
    before = tree.frames()
    tree.world.run_to_rest()
    # no aggregation delay has ended, so each host has sent at most one frame of combined replies
    assert tree.frames() - before <= 19
    tree.world.run()
    assert sorted(tree.replies()) == [(rank, b"", b"%d" % rank) for rank in range(len(tree.others))]
    assert not [event for event in tree.root.events if event[1] == Kind.REPLY]
    assert all(not host.gateway._relay._gathers for host in tree.world.by_id.values())


def test_an_error_and_a_large_reply_go_straight() -> None:
    tree = Tree(10, 2)
    tree.multicast()
    tree.world.run_to_rest()
    large = bytes(multicast.MAX_REPLY_BYTES + 1)
    tree.reply(tree.others[3], b"E")
    tree.reply(tree.others[5], b"", large)
    tree.world.run_to_rest()
    assert sorted(event[5] for event in tree.root.events if event[1] == Kind.REPLY) == [3, 5]
    for rank in set(range(9)) - {3, 5}:
        tree.reply(tree.others[rank])
    tree.world.run_to_rest()
    assert sorted(rank for rank, *_ in tree.replies()) == list(range(9))


def test_silent_host_delays_others_only_briefly() -> None:
    tree = Tree(10, 2)
    tree.multicast()
    tree.world.run_to_rest()
    for other in tree.others[:-1]:
        tree.reply(other)
    tree.world.run()
    assert sorted(rank for rank, *_ in tree.replies()) == list(range(8))
    tree.reply(tree.others[-1])
    tree.world.run()
    assert sorted(rank for rank, *_ in tree.replies()) == list(range(9))


def test_items_of_a_generator_are_not_counted() -> None:
    tree = Tree(10, 2)
    tree.multicast()
    tree.world.run_to_rest()
    for _ in range(5):
        tree.reply(tree.others[0], b"I", b"item")
    for other in tree.others:
        tree.reply(other)
    tree.world.run_to_rest()
    assert [event[8] for event in tree.root.events if event[1] == Kind.REPLY] == [b"item"] * 5
    assert len(tree.replies()) == 14


@pytest.mark.parametrize("seed", range(60))
def test_hosts_lost_during_a_multicast(seed: int) -> None:
    """Each remaining host gets each message, in any order.

    Repeats are allowed, since receivers drop repeated numbers.
    """
    tree = Tree(16, 2, seed)
    world, chance = tree.world, tree.world.random
    lost: set[int] = set()
    for _ in range(6):
        tree.multicast(ref=chance.choice((0, REF)), body=b"%d" % tree.sent)
        for _ in range(chance.randrange(60)):
            world.step()
        harm = chance.random()
        if harm < 0.4:
            host = chance.choice([host for host in range(2, 17) if host not in lost])
            lost.add(host)
            world.lose(host, "crashed")
        elif harm < 0.8:
            world.cut(*chance.sample([host for host in range(2, 17) if host not in lost], 2))
    world.run()
    for other in tree.others:
        if other.host.number not in lost:
            assert set(other.bodies()) == {b"%d" % number for number in range(6)}, other.host.number
    left = [host for host in world.by_id.values() if host.number not in lost]
    assert all(not host.gateway._relay._multicasts for host in left)


@pytest.mark.parametrize("seed", range(40))
def test_replies_arrive_despite_cuts_between_hosts(seed: int) -> None:
    """Two hosts that lose each other, while all others reach both, cost no reply."""
    tree = Tree(16, 2, seed)
    world, chance = tree.world, tree.world.random
    tree.multicast()
    world.run_to_rest()
    for other in chance.sample(tree.others, len(tree.others)):
        tree.reply(other)
        for _ in range(chance.randrange(4)):
            world.step()
        if chance.random() < 0.3:
            world.cut(*chance.sample(range(2, 17), 2))
    world.run()
    assert {rank for rank, *_ in tree.replies()} == set(range(len(tree.others)))


@pytest.mark.parametrize("seed", range(40))
def test_lost_hosts_lose_no_replies_of_other_hosts(seed: int) -> None:
    """Every reply of a remaining process arrives, though hosts that carry replies of others are lost."""
    tree = Tree(16, 2, seed, gate=seed % 2 * 3)
    world, chance = tree.world, tree.world.random
    lost: set[int] = set()
    calls: dict[int, list[Process]] = {}
    for ref in range(1, 7):
        tree.multicast(ref=ref)
        if chance.random() < 0.5:
            world.run_to_rest()
        calls[ref] = [other for other in tree.others if other.host.number not in lost]
        for _ in range(chance.randrange(60)):
            older = chance.choice(list(calls))
            ready = [other for other in calls[older] if len(other.bodies()) >= older]
            if ready:
                other = chance.choice(ready)
                calls[older].remove(other)
                tree.reply(other, ref=older)
            world.step()
        if chance.random() < 0.5:
            lost.add(host := chance.choice([host for host in range(2, 17) if host not in {*lost, world.gate}]))
            world.lose(host, "crashed")
    world.run()
    for ref, late in calls.items():
        for other in late:
            if other.host.number not in lost:
                tree.reply(other, ref=ref)
    world.run()
    left = [tree.others.index(other) for other in tree.others if other.host.number not in lost]
    for ref in calls:
        assert {rank for rank, *_ in tree.replies(ref)} >= set(left), ref


@pytest.mark.parametrize("seed", range(20))
def test_reply_before_death_counts(seed: int) -> None:
    tree = Tree(16, 2, seed, gate=seed % 2 * 3)
    tree.multicast()
    tree.world.run_to_rest()
    for other in tree.others[:-1]:
        tree.reply(other)
        other.host.read()
        for _ in range(tree.world.random.randrange(4)):
            tree.world.step()
    victims = tree.world.random.sample(tree.others[:-1], 3)
    for victim in victims:
        tree.world.kill(victim)
    tree.world.run()
    for victim in victims:
        link = tree.links[tree.others.index(victim)]
        [end] = [at for at, event in enumerate(tree.root.events) if event[:2] == (link, Kind.GONE)]
        rank = tree.others.index(victim)
        before = [event for event in tree.root.events[:end] if event[1] == Kind.REPLIES]
        assert any(rank == part[0] for event in before for part in together(event))


def test_two_hosts_without_a_link_report_once() -> None:
    """Each of two hosts without a link may have to pass the multicast to the other. Each tries once, so frames end."""
    tree = Tree(16, 2, 182)
    world = tree.world
    for seed in range(300):
        world.random.seed(seed)
        tree.multicast(ref=0)
        for _ in range(world.random.randrange(30)):
            world.step()
        world.cuts.clear()
        for _ in range(4):
            world.cut(*world.random.sample(range(2, 17), 2))
        for _ in range(5000):
            if not world.step():
                break
        else:
            raise AssertionError("it does not come to rest")
    assert not tree.world.by_id["00000001"].gateway._relay._multicasts


def test_replies_that_have_arrived_are_not_kept() -> None:
    tree = Tree(16, 2)
    for ref in range(1, 4):
        tree.multicast(ref=ref)
        tree.world.run_to_rest()
        for other in tree.others:
            tree.reply(other, ref=ref, body=bytes(1000))
        tree.world.run_to_rest()
        gatherers = [host.gateway._relay for host in tree.world.by_id.values()]
        assert any(gatherer._kept for gatherer in gatherers)
        assert {number for gatherer in gatherers for _, number in gatherer._kept} == {ref}
    tree.multicast(ref=0)
    tree.world.run_to_rest()
    assert not any(gatherer._kept or gatherer._size for gatherer in gatherers)


def test_replies_beyond_the_limit_are_sent_directly(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(multicast, "MAX_KEPT_BYTES", 0)
    tree = Tree(16, 2)
    tree.multicast()
    tree.world.run_to_rest()
    for other in tree.others:
        tree.reply(other)
    tree.world.run()
    assert sorted(rank for rank, *_ in tree.replies()) == list(range(15))


@pytest.mark.parametrize("seed", range(20))
def test_report_of_an_end_follows_frames_in_flight(seed: int) -> None:
    tree = Tree(12, 2, seed)
    for number in range(3):
        tree.multicast(ref=0, body=b"%d" % number)
    while tree.root.host.inbox:
        tree.root.host.read()
    tree.world.kill(tree.root)
    tree.world.run()
    for other in tree.others:
        assert set(other.bodies()) == {b"0", b"1", b"2"}
        assert other.events[-1][1] == Kind.GONE


@pytest.mark.parametrize(("count", "gate"), [(6, 2), (40, 2), (40, 5), (12, 12)])
def test_hosts_behind_another_one(count: int, gate: int) -> None:
    """A host behind a gate gets the multicast from the gate, which gets one copy."""
    tree = Tree(count, 3, gate=gate)
    before = tree.frames()
    tree.multicast()
    while tree.root.host.inbox:
        tree.root.host.read()
    assert len(tree.world.wires["00000001", f"{gate:08x}"]) == (gate < count)
    tree.world.run_to_rest()
    assert tree.frames() - before == 2 * (count - 1)
    for rank, other in enumerate(tree.others):
        [event] = other.told(Kind.CALL)
        assert event[5] == rank
        tree.reply(other)
    tree.world.run_to_rest()
    assert sorted(tree.replies()) == [(rank, b"", b"%d" % rank) for rank in range(len(tree.others))]
    assert tree.frames() - before == 3 * (count - 1)


@pytest.mark.parametrize("seed", range(40))
def test_hosts_behind_another_one_are_lost(seed: int) -> None:
    tree = Tree(16, 2, seed, gate=seed % 4 + 2)
    world, chance = tree.world, tree.world.random
    gate, lost = world.gate, set()
    for _ in range(6):
        tree.multicast(ref=0, body=b"%d" % tree.sent)
        for _ in range(chance.randrange(60)):
            world.step()
        if chance.random() < 0.5:
            lost.add(host := chance.choice([host for host in range(2, 17) if host not in {*lost, gate}]))
            world.lose(host, "crashed")
        else:
            world.cut(*chance.sample([host for host in range(gate + 1, 17) if host not in lost], 2))
    world.run()
    for other in tree.others:
        if other.host.number not in lost:
            assert set(other.bodies()) == {b"%d" % number for number in range(6)}, other.host.number


@pytest.mark.slow
@pytest.mark.nightly
def test_many_seeds() -> None:
    for seed in range(1000, 1500):
        test_hosts_behind_another_one_are_lost(seed)
        test_hosts_lost_during_a_multicast(seed)
        test_replies_arrive_despite_cuts_between_hosts(seed)
        test_lost_hosts_lose_no_replies_of_other_hosts(seed)


def test_unanswered_calls_are_forgotten(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(multicast, "MAX_CALLS", 10)
    tree = Tree(5, 2)
    for ref in range(1, 50):
        tree.multicast(ref=ref)
        tree.world.run()
    assert all(len(host.gateway._relay._gathers) <= 10 for host in tree.world.by_id.values())
    for other in tree.others:
        tree.reply(other, ref=1)
    tree.world.run()
    assert len(tree.replies(1)) == 4


@pytest.mark.parametrize("what", ["short", "nobody", "of another host", "no branches", "not for many"])
def test_invalid_tree_frames_are_refused(what: str) -> None:
    world = World(2)
    row = envelope.pack_rows([(token(1, 1), 1, 0, 0)])
    hosts = [] if what == "nobody" else [("00000002" if what == "of another host" else "00000001", row)]
    kind = Kind.CALL | (CARRIED if what == "not for many" else envelope.MANY)
    passed = RelayHeader("00000002", "00000002", kind, 0 if what == "no branches" else 2, 1, 0, hosts, b"")
    prefix = passed.pack()
    frame = envelope.Envelope(PASS, 0, 0, 0, 0, 0, prefix[:-9] if what == "short" else prefix, b"", None)
    with pytest.raises(FrameError):
        world.by_id["00000001"].gateway.arrived(envelope.pack(frame)[0], memoryview(b""))


@pytest.mark.parametrize("text", ["", "00000001", "00000001" * 2 + "0"])
def test_invalid_tree_reports_are_refused(text: str) -> None:
    frame = envelope.Envelope(envelope.ARRIVED, 0, 0, 1, 1, 0, text.encode(), b"", None)
    with pytest.raises(FrameError):
        World(2).by_id["00000001"].gateway.arrived(envelope.pack(frame)[0], memoryview(b""))


def test_parts_of_nearly_the_same_length() -> None:
    parts = split([f"{i}" for i in range(100)], 8)
    assert sorted(map(len, parts)) == [12] * 4 + [13] * 4
    assert [host for part in parts for host in part] == [f"{i}" for i in range(100)]
    assert split([], 3) == []
