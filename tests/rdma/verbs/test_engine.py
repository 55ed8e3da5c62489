"""Verbs engine over fake devices: flow control, order of failures, reconnection, close."""

from __future__ import annotations

import errno
import gc
import re
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from monarch_backend._verbs import Engine, Region, Settings, UnreachableMemoryError, VerbsError, open_device
from monarch_backend._verbs.connections import connection
from monarch_backend._verbs.discovery import PortFacts
from monarch_backend._verbs.open_device import MAX_KEYS, MAX_TRIES, RkeyQuarantine
from monarch_backend._verbs.wire_format import ROCE_V2, Gid
from tests.rdma.verbs.fabric import Fabric, FakeNic, FakePair
from tests.rdma.verbs.peers import Memory, Outcome, until

GID = bytes(10) + b"\xff\xff" + bytes([10, 0, 0, 1])
OTHER = bytes(10) + b"\xff\xff" + bytes([10, 0, 1, 1])
KI = 1 << 10


class Two:
    """An owner and an engine that accesses its memory, in one process."""

    def __init__(self, fabric: Fabric, connects: bool = True, **settings: Any) -> None:
        self.fabric, self.connects = fabric, connects
        self.dialed = threading.Semaphore(0)
        self.owner = Engine(settings=Settings(**settings), binding=fabric)
        self.asking = Engine(self.dial, settings=Settings(**settings), binding=fabric)
        self.here, self.there = Memory(256 * KI), Memory(256 * KI)
        self.there.fill(7)
        self.region = self.expose()

    def expose(self) -> Region:
        exposed = self.owner.expose(self.there.address, self.there.nbytes, self.there.view)
        return Region.from_bytes(exposed.to_bytes())

    def dial(self, peer: Any) -> None:
        self.dialed.release()
        if self.connects:
            self.introduce()

    def introduce(self) -> None:
        self.asking.connect("owner", self.owner.accept("asking", self.asking.offer("owner")))

    def start(self, segments: list[tuple[int, int, int]], kind: Any = "read", region: Region | None = None) -> Outcome:
        done = Outcome()
        near = [(far, self.here.address + offset, nbytes) for far, offset, nbytes in segments]
        self.asking.transfer("owner", kind, region or self.region, near, self.here.view, done)
        return done

    def add(self) -> Outcome:
        done = Outcome()
        self.asking.atomic("owner", "fetch_add", self.region, 0, 1, 0, done)
        return done

    def close(self) -> None:
        self.asking.close()
        self.owner.close()
        assert not self.fabric.pairs
        assert all(nic.opened == nic.closed for nic in self.fabric.nics)


@pytest.fixture
def ports(monkeypatch: pytest.MonkeyPatch) -> list[PortFacts]:
    found = [PortFacts("fake0", 1, "ACTIVE", True, (Gid(1, ROCE_V2, GID),), -1)]
    monkeypatch.setattr(open_device.discovery, "usable", lambda settings: found)
    return found


@pytest.fixture
def two(ports: list[PortFacts]) -> Iterator[Callable[..., Two]]:
    made: list[Two] = []

    def make(fabric: Fabric | None = None, **options: Any) -> Two:
        made.append(Two(fabric or Fabric(), **options))
        return made[-1]

    yield make
    for pair in made:
        pair.close()


@pytest.mark.parametrize(("depth", "completions"), [(20, 50), (1, 1), (1024, 1 << 16)])
def test_thousands_of_segments_never_overflow_a_queue(two: Callable[..., Two], depth: int, completions: int) -> None:
    """The fake device checks the queue's limits. Each batch has one signaled request, at its end."""
    fabric = Fabric(at_once=False, depth=depth, completions=completions)
    pair = two(fabric, queue_pairs=4)
    count = 2000 if depth > 1 else 1000  # one request at a time is slow
    segments = [(i * 50, (i * 50 + 50 * 997) % (count * 50), 40) for i in range(count)]
    done = pair.start(segments)
    while not done.calls:
        fabric.run(3)
    done.wait()
    for far, near, nbytes in segments:
        assert pair.here.view[near : near + nbytes] == pair.there.view[far : far + nbytes]
    assert all(batch == [False] * (len(batch) - 1) + [True] for batch in fabric.batches)
    if depth > 128:
        assert len(fabric.batches) < count / 8


def test_messages_are_no_longer_than_the_port_takes(two: Callable[..., Two]) -> None:
    pair = two(Fabric(message=1000))
    pair.start([(0, 0, 256 * KI)]).wait()
    assert pair.here.view == pair.there.view


def test_empty_transfer_is_done(two: Callable[..., Two]) -> None:
    pair = two()
    assert pair.start([]).wait() is None
    assert pair.start([(5, 5, 0)]).wait() is None
    assert not pair.asking.connected("owner")


@pytest.mark.parametrize(
    ("segment", "words"),
    [
        ((-1, 0, 5), "bytes -1 to 4 of a region of 262144"),
        ((262140, 0, 5), "bytes 262140 to 262145 of a region"),
        ((0, 262140, 5), "outside the memory of their owner"),
        ((0, -1, 5), "outside the memory of their owner"),
    ],
)
def test_out_of_bounds_segments_are_refused(two: Callable[..., Two], segment: Any, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        two().start([segment])


def test_atomics_want_eight_aligned_bytes(two: Callable[..., Two]) -> None:
    pair = two()
    for offset in (-8, 4, 256 * KI - 4):
        with pytest.raises(ValueError, match="eight aligned bytes"):
            pair.asking.atomic("owner", "fetch_add", pair.region, offset, 1, 0, Outcome())


def keys_of(region: Region) -> set[int]:
    return set(region.keys)


def test_reused_key_does_not_reach_dropped_memory(two: Callable[..., Two]) -> None:
    pair = two(Fabric(stingy=True))
    stale = []
    for _ in range(6):
        stale.append(pair.region)
        pair.owner.release(pair.region)
        pair.region = pair.expose()
        assert not keys_of(pair.region) & set().union(*map(keys_of, stale))
    part = pair.owner.expose(pair.there.address + 8, 8, pair.there.view)
    assert not keys_of(part) & set().union(*map(keys_of, stale)), "a part of it is as bad"
    for region in stale:
        with pytest.raises(VerbsError, match="remote access error"):
            pair.start([(0, 0, 8)], region=region).wait()
    pair.start([(0, 0, 8)]).wait()
    pair.owner.release(part)
    assert len(pair.fabric.nics[0].registered) <= 4, "what did not fit is taken back"


def test_rkey_quarantine_forgets_the_oldest_keys() -> None:
    retired = RkeyQuarantine()
    for rkey in range(MAX_KEYS + 5):
        retired.add(rkey, 4096 * rkey, 4096)
    assert len(retired) == MAX_KEYS
    assert not retired.led_to(4, 4096 * 4, 8)
    for address, nbytes, led in (
        (4096 * 9, 1, True),
        (4096 * 9 - 8, 9, True),
        (4096 * 9 - 8, 8, False),
        (4096 * 10, 8, False),
    ):
        assert retired.led_to(9, address, nbytes) == led, address
    retired.add(9, 4096 * 11, 1)
    assert retired.led_to(9, 4096 * 9, 1) and retired.led_to(9, 4096 * 11, 1)

    class Made:
        rkey, closed = 9, 0

        def close(self) -> None:
            self.closed += 1

    made: list[Any] = []
    last = retired.fresh(lambda: made.append(Made()) or made[-1], 4096 * 9, 1, "fake0")
    assert (len(made), last.closed, sum(each.closed for each in made)) == (MAX_TRIES + 1, 0, MAX_TRIES)


def test_a_wrong_key_is_one_request_s_failure(two: Callable[..., Two]) -> None:
    fabric = Fabric(at_once=False)
    pair = two(fabric, queue_pairs=1)
    pair.start([(0, 0, 8)])
    while not pair.asking.connected("owner"):
        fabric.run()
    bad = pair.expose()
    # `pair.region` is a copy without the owner's registration, so the owner finds it by its id
    pair.owner.release(pair.region)
    before, broken, after = (pair.start([(0, 0, 8)], region=r) for r in (bad, pair.region, bad))
    added = Outcome()
    pair.asking.atomic("owner", "fetch_add", bad, 8, 5, 0, added)
    outcomes = []
    for done in (before, broken, after, added):
        while not done.calls:
            fabric.run()
        try:
            outcomes.append(done.wait())
        except VerbsError as error:
            outcomes.append(error.status)
    assert outcomes[:3] == [None, "remote access error", None]
    assert outcomes[3] == int.from_bytes(bytes(pair.here.view[8:16]), "little") or isinstance(outcomes[3], int)
    assert all(done.calls == 1 for done in (before, broken, after, added))


def test_a_broken_connection_is_made_again_once(two: Callable[..., Two]) -> None:
    fabric = Fabric(at_once=False)
    pair = two(fabric)
    first = pair.start([(0, 0, 200 * KI)])
    assert until(lambda: fabric.run() > 0)
    assert until(lambda: pair.asking.connected("owner"))
    assert until(lambda: any(p.posted for p in list(fabric.pairs.values())))
    fabric.dead = True
    fabric.run()
    assert pair.dialed.acquire(timeout=10)
    assert pair.dialed.acquire(timeout=10)
    fabric.dead = False
    while not first.calls:
        fabric.run()
    first.wait()
    assert pair.here.view[: 200 * KI] == pair.there.view[: 200 * KI]


def test_a_connection_that_breaks_again_is_reported_in_the_completion_s_words(two: Callable[..., Two]) -> None:
    fabric = Fabric()
    pair = two(fabric)
    pair.start([(0, 0, 8)]).wait()
    fabric.dead = True
    with pytest.raises(VerbsError, match=r"transport retry counter exceeded \(peer owner, device fake0\)") as caught:
        pair.start([(0, 0, 8)]).wait()
    assert caught.value.status == "transport retry counter exceeded"
    fabric.dead = False
    pair.start([(0, 0, 8)]).wait()  # the next transfer makes a new connection


def test_stuck_queue_pair_is_replaced(two: Callable[..., Two], monkeypatch: pytest.MonkeyPatch) -> None:
    """The queue pair neither runs a work request nor fails it, as in soft-RoCE after a cable was cut."""
    monkeypatch.setattr(connection, "MIN_SILENCE_S", 0.05)
    fabric = Fabric()
    pair = two(fabric, timeout=1, retries=1)
    pair.start([(0, 0, 8)]).wait()
    assert pair.dialed.acquire(timeout=10)
    mute, *_ = (each for each in fabric.pairs.values() if each.depth > 1)
    mute.silent = True
    both = [pair.start([(8 * i, 8 * i, 8)]) for i in range(2)]  # the two transfers use different queue pairs
    for done in both:
        done.wait()
    assert pair.dialed.acquire(timeout=10)
    assert pair.here.view[:16] == pair.there.view[:16]


def test_devices_that_stay_silent_are_reported(two: Callable[..., Two], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(connection, "MIN_SILENCE_S", 0.05)
    pair = two(Fabric(silent=True), timeout=1, retries=1)
    with pytest.raises(
        VerbsError, match=r"read failed: response timeout error .* neither done it nor failed"
    ) as caught:
        pair.start([(0, 0, 8)]).wait()
    assert caught.value.peer == "owner"


def test_idle_peer_is_not_taken_for_silent(two: Callable[..., Two], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(connection, "MIN_SILENCE_S", 0.02)
    pair = two(Fabric(), timeout=1, retries=1)
    pair.start([(0, 0, 8)]).wait()
    link, looks = pair.asking._links["owner"], []
    look = link._look_for_silence
    monkeypatch.setattr(link, "_look_for_silence", lambda now: (looks.append(now), look(now)))
    assert until(lambda: len(looks) > 12)
    pair.start([(0, 0, 8)]).wait()
    assert pair.dialed.acquire(timeout=10)
    assert not pair.dialed.acquire(blocking=False)


def test_an_atomic_in_doubt_is_not_repeated(two: Callable[..., Two]) -> None:
    fabric = Fabric()
    pair = two(fabric)
    pair.add().wait()
    fabric.dead = True
    with pytest.raises(VerbsError, match="once or not at all"):
        pair.add().wait()


def test_ended_peer_ends_all_transfers_at_once(two: Callable[..., Two]) -> None:
    fabric = Fabric(at_once=False)
    pair = two(fabric)
    under_way = [pair.start([(0, 0, 8)]), pair.start([(0, 0, 200 * KI)]), pair.add()]
    assert until(lambda: fabric.run() > 0)
    assert until(lambda: pair.asking.connected("owner"))
    pair.asking.peer_gone("owner", "rank 1 died")
    for done in under_way:
        with pytest.raises(VerbsError, match=r"^rank 1 died$"):
            done.wait()
    assert [done.calls for done in under_way] == [1, 1, 1]


def test_error_of_the_user_is_raised_unchanged(two: Callable[..., Two]) -> None:
    pair = two(connects=False)
    done = pair.start([(0, 0, 8)])
    pair.asking.peer_gone("owner", KeyError("mine"))
    with pytest.raises(KeyError, match="mine"):
        done.wait()


def test_unanswered_connect_request_times_out(two: Callable[..., Two], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("monarch_backend._verbs.connections.connection.CONNECT_TIMEOUT_S", 0.05)
    with pytest.raises(VerbsError, match="owner has not answered within"):
        two(connects=False).start([(0, 0, 8)]).wait()


def test_the_answer_to_an_earlier_offer_is_refused(two: Callable[..., Two]) -> None:
    pair = two(connects=False)
    answer = pair.owner.accept("asking", pair.asking.offer("owner"))
    pair.asking.offer("owner")
    with pytest.raises(VerbsError, match="not to the last offer"):
        pair.asking.connect("owner", answer)


def test_no_path_between_two_networks_is_reported_with_names(two: Callable[..., Two]) -> None:
    fabric = Fabric(unreachable={GID})
    with pytest.raises(VerbsError, match=r"no way between the ports of asking \(fake0:1\).*MONARCH_RDMA_DEVICES"):
        two(fabric).start([(0, 0, 8)]).wait()


def test_another_address_is_tried_when_one_leads_nowhere(ports: list[PortFacts], two: Callable[..., Two]) -> None:
    ports[0] = PortFacts("fake0", 1, "ACTIVE", True, (Gid(1, ROCE_V2, GID), Gid(3, ROCE_V2, OTHER)), -1)
    pair = two(Fabric(unreachable={GID}))
    pair.start([(0, 0, 8)]).wait()


def test_no_more_memory_to_lock(two: Callable[..., Two]) -> None:
    fabric = Fabric(memory=300 * KI)
    pair = two(fabric)
    second = Memory(256 * KI)
    with pytest.raises(VerbsError, match=r"cannot register 262144 bytes with fake0: Cannot allocate memory; .*limit"):
        pair.owner.expose(second.address, second.nbytes, second.view)


def test_engine_ends_with_transfers_in_flight(two: Callable[..., Two]) -> None:
    fabric = Fabric(at_once=False)
    pair = two(fabric)
    done = [pair.start([(0, 0, 200 * KI)]), pair.add()]
    assert until(lambda: fabric.run() > 0)
    pair.asking.close()
    for outcome in done:
        with pytest.raises(VerbsError, match="engine was closed"):
            outcome.wait()
    with pytest.raises(VerbsError, match="closed"):
        pair.start([(0, 0, 8)])


def test_raising_callback_harms_no_transfer(two: Callable[..., Two], caplog: pytest.LogCaptureFixture) -> None:
    pair = two()

    def bad(_: object) -> None:
        raise ZeroDivisionError

    pair.asking.transfer("owner", "read", pair.region, [(0, pair.here.address, 8)], pair.here.view, bad)
    pair.start([(0, 0, 8)]).wait()
    assert "a callback has failed" in caplog.text


def test_missing_connector_is_reported(ports: list[PortFacts], two: Callable[..., Two]) -> None:
    pair = two()
    alone = Engine(settings=Settings(), binding=pair.fabric)
    done = Outcome()
    alone.transfer("owner", "read", pair.region, [(0, pair.here.address, 8)], pair.here.view, done)
    with pytest.raises(VerbsError, match="no control plane to connect it"):
        done.wait()
    alone.close()


@pytest.fixture
def two_devices(ports: list[PortFacts], two: Callable[..., Two]) -> Two:
    ports.append(PortFacts("fake1", 1, "ACTIVE", True, (Gid(1, ROCE_V2, OTHER),), -1))
    return two()


def begin_large(pair: Two) -> tuple[Outcome, Memory]:
    mine, done = Memory(4 << 20), Outcome()
    there = Memory(4 << 20)
    region = pair.owner.expose(there.address, there.nbytes, there.view)
    pair.asking.transfer("owner", "read", region, [(0, mine.address, mine.nbytes)], mine.view, done)
    return done, mine


def test_failed_registration_on_second_device_undoes_the_first(two_devices: Two) -> None:
    first, second = two_devices.asking.devices()
    second.nic.memory = 0  # type: ignore[attr-defined]
    with pytest.raises(VerbsError, match="Cannot allocate memory"):
        begin_large(two_devices)
    assert not any(entry.users for entry in first.cache._entries.values())
    assert not two_devices.asking._completions._announced


def test_a_device_that_does_not_reach_the_memory_is_left_out(two_devices: Two, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: Any, **__: Any) -> Any:
        raise UnreachableMemoryError("not this memory")

    first, second = two_devices.asking.devices()
    monkeypatch.setattr(second.cache, "take", refuse)
    begin_large(two_devices)[0].wait()
    monkeypatch.setattr(first.cache, "take", refuse)
    with pytest.raises(UnreachableMemoryError, match="not this memory"):
        begin_large(two_devices)


def test_transfer_that_fails_to_start_leaves_no_resources(
    two: Callable[..., Two], monkeypatch: pytest.MonkeyPatch
) -> None:
    pair = two()
    [device] = pair.asking.devices()

    def refuse() -> None:
        raise OSError(5, "no more events")

    with monkeypatch.context() as patch:
        patch.setattr(pair.asking._completions, "arm", refuse)
        with pytest.raises(OSError, match="no more events"):
            pair.start([(0, 0, 8)])
    assert not any(entry.users for entry in device.cache._entries.values())
    assert not pair.asking._completions._announced
    pair.start([(0, 0, 8)]).wait()


def test_large_transfers_use_every_device(ports: list[PortFacts], two: Callable[..., Two]) -> None:
    ports.append(PortFacts("fake1", 1, "ACTIVE", True, (Gid(1, ROCE_V2, OTHER),), -1))
    fabric = Fabric(at_once=False)
    pair = two(fabric)
    pair.here, pair.there = Memory(16 << 20), Memory(16 << 20)
    pair.there.fill(3)
    pair.region = pair.expose()
    done = pair.start([(0, 0, 16 << 20)])
    while not done.calls:
        fabric.run(1)
    done.wait()
    assert pair.here.view == pair.there.view
    asked = [made for made in fabric.pairs.values() if made.most]
    assert {made.nic.name for made in asked} == {"fake0", "fake1"}
    assert len(asked) == 4


def test_a_peer_is_not_forgotten_when_others_have_taken_all_places(two: Callable[..., Two]) -> None:
    """One completion queue serves all peers. A peer that found it full continues when it has room again."""
    fabric = Fabric(at_once=False, depth=64, completions=8)
    pair = two(fabric, queue_pairs=1)
    second = Outcome()
    segments = [(i * 50, i * 50, 40) for i in range(1000)]
    first = pair.start(segments)
    pair.asking._connections._dial = lambda peer: pair.asking.connect(
        peer, pair.owner.accept(peer, pair.asking.offer(peer))
    )
    near = [(far, pair.here.address + at, nbytes) for far, at, nbytes in segments]
    pair.asking.transfer("another", "read", pair.region, near, pair.here.view, second)
    while not (first.calls and second.calls):
        fabric.run(1)
    first.wait()
    second.wait()


@pytest.mark.parametrize("under_way", ["read", "atomic"])
def test_queue_pairs_that_cannot_be_destroyed(
    two: Callable[..., Two], caplog: pytest.LogCaptureFixture, under_way: str
) -> None:
    """A device that was removed or reset has such queue pairs."""
    fabric = Fabric(at_once=False)
    pair = two(fabric, queue_pairs=1)
    first = pair.start([(0, 0, 8)])
    assert until(lambda: fabric.run() >= 0 and first.calls == 1)
    memory = weakref.ref(pair.here.map)
    failed = pair.start([(0, 0, 200 * KI)]) if under_way == "read" else pair.add()
    later = [pair.start([(0, 0, 8)]) for _ in range(3)]
    fabric.stuck = fabric.dead = True
    assert until(lambda: fabric.run() >= 0 and failed.calls == 1)
    with pytest.raises(
        VerbsError, match=r"retry counter exceeded.*cannot be destroyed \(was the device removed"
    ) as one:
        failed.wait()
    assert one.value.status == "transport retry counter exceeded"
    assert until(lambda: fabric.run() >= 0 and all(done.calls for done in later))
    for done in later:
        with pytest.raises(VerbsError):
            done.wait()
    assert pair.asking._thread.is_alive()
    said = [record.message for record in caplog.records]
    assert all(re.match(r"verbs: queue pair \d+ of fake0 cannot be destroyed", words) for words in said)
    assert 1 <= len(said) == len(set(said))
    fabric.dead = False
    again = pair.start([(0, 0, 200 * KI)])  # on new queue pairs, because the device may still use the old ones
    assert until(lambda: fabric.run() >= 0 and again.calls == 1)
    again.wait()
    pair.here = Memory(256 * KI)
    gc.collect()
    assert memory() is not None, "the device may still write to it"
    pair.asking.close()
    pair.owner.close()
    fabric.forget()


def test_result_slot_of_an_atomic_is_not_reused_early(two: Callable[..., Two]) -> None:
    fabric = Fabric(at_once=False)
    pair = two(fabric, queue_pairs=1)
    first = pair.add()
    assert until(lambda: fabric.run() >= 0 and first.calls == 1)
    [device] = pair.asking.devices()
    places = len(device._slots)
    fabric.stuck = fabric.dead = True
    lost = pair.add()
    assert until(lambda: fabric.run() >= 0 and lost.calls == 1)
    assert len(device._slots) == places - 1
    fabric.forget()
    fabric.stuck = fabric.dead = False


def test_destroy_after_device_removal_is_tolerated(two: Callable[..., Two], caplog: pytest.LogCaptureFixture) -> None:
    fabric = Fabric()
    pair = two(fabric)
    pair.start([(0, 0, 8)]).wait()
    pair.add().wait()
    owned = weakref.ref(pair.there.map)
    fabric.stuck = fabric.removed = True
    passing = Memory(4 * KI)
    pair.owner.release(pair.region)
    pair.asking.transfer("owner", "write", pair.region, [(0, passing.address, 8)], passing.view, Outcome())
    pair.there, passing = pair.here, pair.here
    gc.collect()
    assert owned() is not None, "peers may still write to it"
    pair.asking.close()
    pair.owner.close()
    for what in (r"queue pair \d+", "a registration", "a region", "what was opened"):
        assert re.search(rf"verbs: {what} of fake0 cannot be destroyed", caplog.text)
    assert "Traceback" not in caplog.text
    fabric.forget()


def test_completions_that_cannot_be_read_are_tried_again_with_the_next_transfer(
    two: Callable[..., Two], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """The engine's thread does not retry in a loop."""
    fabric = Fabric(at_once=False)
    pair = two(fabric)
    first = pair.start([(0, 0, 8)])
    assert until(lambda: fabric.run() >= 0 and first.calls == 1)
    [device] = pair.asking.devices()

    def refuse(most: int) -> Any:
        raise OSError(errno.EIO, "Input/output error")

    with monkeypatch.context() as patch:
        patch.setattr(device.nic, "poll", refuse)
        done = Outcome()
        segment = [(0, pair.here.address, 8)]
        assert pair.asking.transfer("owner", "read", pair.region, segment, pair.here.view, done, at_once=True)
        with pytest.raises(VerbsError, match="cannot be read"):
            done.wait()
        time.sleep(0.1)
        assert caplog.text.count("cannot be read") == 1


def test_a_device_is_not_closed_while_an_offer_is_accepted(
    two: Callable[..., Two], monkeypatch: pytest.MonkeyPatch
) -> None:
    """This happens when a process ends while a peer connects to it."""
    pair = two(connects=False)
    offer, owner = pair.asking.offer("owner"), pair.owner
    begun, waits, go_on = threading.Event(), threading.Event(), threading.Event()
    make, wait_for = FakeNic.queue_pair, owner._idle.wait_for

    def slow(nic: FakeNic, depth: int) -> FakePair:
        begun.set()
        assert go_on.wait(30)
        return make(nic, depth)

    monkeypatch.setattr(FakeNic, "queue_pair", slow)
    monkeypatch.setattr(owner._idle, "wait_for", lambda holds: (holds() or waits.set(), wait_for(holds))[1])
    accepting = threading.Thread(target=owner.accept, args=("asking", offer))
    closing = threading.Thread(target=owner.close)
    accepting.start()
    assert begun.wait(30)
    closing.start()
    assert until(lambda: waits.is_set() or not closing.is_alive())
    was_closed = not closing.is_alive()
    go_on.set()
    for thread in (accepting, closing):
        thread.join(30)
    assert not was_closed
