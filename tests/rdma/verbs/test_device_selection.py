"""Selection among several devices: those nearest to the memory, with their queue pairs in turn."""

from __future__ import annotations

import itertools
import os
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from monarch_backend._verbs import discovery, engine, open_device, work_requests
from monarch_backend._verbs.connections import queue_pair
from monarch_backend._verbs.discovery import PortFacts, node_of_memory
from monarch_backend._verbs.wire_format import ROCE_V2, Gid
from tests.rdma.verbs.fabric import Fabric, FakePair
from tests.rdma.verbs.peers import Memory
from tests.rdma.verbs.test_engine import GID, KI, Two

NODES = Path("/sys/devices/system/node")
Posted = list[tuple[str, int, int]]
Make = Callable[..., Two]


@pytest.fixture
def posted(monkeypatch: pytest.MonkeyPatch) -> Posted:
    """(device, queue pair, bytes) of all posted requests, without the empty requests that test a connection."""
    found: Posted = []
    post = FakePair.post

    def noted(pair: FakePair, works: Any) -> None:
        found.extend((pair.nic.name, pair.number, work.nbytes) for work in works if work.nbytes)
        post(pair, works)

    monkeypatch.setattr(FakePair, "post", noted)
    return found


@pytest.fixture
def on(monkeypatch: pytest.MonkeyPatch, posted: Posted) -> Iterator[Make]:
    """``on(nodes, ...)``: two connected hosts, each with one device at each of these NUMA nodes."""
    made: list[Two] = []

    def make(nodes: list[int], **settings: Any) -> Two:
        gid = Gid(1, ROCE_V2, GID)
        facts = [PortFacts(f"fake{i}", 1, "ACTIVE", True, (gid,), node) for i, node in enumerate(nodes)]
        monkeypatch.setattr(open_device.discovery, "usable", lambda _: facts)
        made.append(Two(Fabric(), **settings))
        made[-1].start([(0, 0, 1)]).wait()
        posted.clear()
        return made[-1]

    yield make
    for two in made:
        two.close()


@pytest.fixture
def set_memory_node(monkeypatch: pytest.MonkeyPatch) -> Callable[[int], None]:
    """Return a function that sets the NUMA node of all memory. Distances are larger the more node numbers differ."""
    monkeypatch.setattr(engine, "distance", lambda a, b: 10 if a == b or -1 in (a, b) else 10 + 10 * abs(a - b))
    return lambda node: monkeypatch.setattr(engine, "node_of_memory", lambda _: node)


def lower_size_limits(monkeypatch: pytest.MonkeyPatch) -> None:
    """Lower the limits for large transfers, which are hundreds of times larger otherwise."""
    monkeypatch.setattr(engine, "STRIPING_MIN_BYTES", 64 * KI)
    monkeypatch.setattr(work_requests, "LEAST_PIECE", 4 * KI)
    monkeypatch.setattr(queue_pair, "BATCH_BYTES", 4 * KI)


def used(posted: Posted) -> dict[str, int]:
    """Return the bytes that were posted to each device."""
    found: Counter[str] = Counter()
    for name, _, nbytes in posted:
        found[name] += nbytes
    return dict(found)


@pytest.mark.parametrize(
    ("node", "near"),
    [
        (0, {"fake1"}),
        (2, {"fake0", "fake3"}),
        (1, {"fake0", "fake1", "fake3"}),
        (-1, {"fake0", "fake1", "fake2", "fake3"}),
    ],
)
def test_large_transfers_share_the_nearest_devices(
    on: Make,
    set_memory_node: Callable[[int], None],
    posted: Posted,
    monkeypatch: pytest.MonkeyPatch,
    node: int,
    near: set[str],
) -> None:
    """The device at node 5 is never the nearest. If the memory's node is unknown, all devices are equally near."""
    lower_size_limits(monkeypatch)
    two = on([2, 0, 5, 2])
    set_memory_node(node)
    for kind in ("read", "write"):
        two.start([(0, 0, 192 * KI)], kind).wait()
        assert used(posted) == dict.fromkeys(near, 192 * KI // len(near))
        posted.clear()
    assert two.here.view[: 192 * KI] == two.there.view[: 192 * KI]


@pytest.mark.parametrize(("node", "near"), [(0, {"fake1"}), (2, {"fake0", "fake3"})])
def test_a_small_one_takes_one_of_the_nearest(
    on: Make, set_memory_node: Callable[[int], None], posted: Posted, node: int, near: set[str]
) -> None:
    """Transfers of one memory always use the same device, and the memory is registered with this device only."""
    two = on([2, 0, 5, 2])
    set_memory_node(node)
    for _ in range(8):
        two.start([(0, 0, 4 * KI)]).wait()
    [taken] = used(posted)
    assert taken in near
    assert len({number for _, number, _ in posted}) == 2, "by both of its queue pairs"


def test_small_transfers_rotate_over_queue_pairs_of_the_near_device(
    on: Make, set_memory_node: Callable[[int], None], posted: Posted
) -> None:
    """Queue pairs of both devices alternate in the engine's list, and only those of the near device are used."""
    two = on([0, 1], queue_pairs=3)
    set_memory_node(1)
    for _ in range(12):
        two.start([(0, 0, 8)]).wait()
    numbers = [number for name, number, _ in posted if name == "fake1"]
    assert len(numbers) == 12
    assert set(Counter(numbers).values()) == {4}
    runs = [len(list(run)) for _, run in itertools.groupby(numbers)]
    assert max(runs) <= 2


def test_very_large_transfers_use_all_queue_pairs_of_near_devices(
    on: Make, set_memory_node: Callable[[int], None], posted: Posted, monkeypatch: pytest.MonkeyPatch
) -> None:
    lower_size_limits(monkeypatch)
    monkeypatch.setattr(work_requests, "LANE_SHARE", 32 * KI)
    two = on([1, 0, 1], queue_pairs=2)
    set_memory_node(1)
    two.start([(0, 0, 256 * KI)]).wait()
    shares: Counter[tuple[str, int]] = Counter()
    for name, number, nbytes in posted:
        shares[name, number] += nbytes
    assert sorted(name for name, _ in shares) == ["fake0", "fake0", "fake2", "fake2"]
    assert set(shares.values()) == {64 * KI}
    assert two.here.view == two.there.view


def processors() -> dict[int, set[int]]:
    """Return the processors of each node that this process may use."""
    mine, found = os.sched_getaffinity(0), {}
    for folder in NODES.glob("node[0-9]*"):
        parts = [part.split("-") for part in (folder / "cpulist").read_text().strip().split(",") if part]
        all_of_it = {number for part in parts for number in range(int(part[0]), int(part[-1]) + 1)}
        if all_of_it & mine:
            found[int(folder.name[4:])] = all_of_it & mine
    return found


@pytest.mark.parametrize("order", [[0, 1], [1, 0]], ids=["near first", "near last"])
def test_a_process_that_is_bound_to_a_node_takes_the_device_there(
    on: Make, posted: Posted, monkeypatch: pytest.MonkeyPatch, order: list[int]
) -> None:
    """The kernel reports the node of the process's memory. If the machine has one node, a second one is simulated."""
    lower_size_limits(monkeypatch)  # large enough for both devices, if both were near
    bound_to, before = processors(), os.sched_getaffinity(0)
    touched = Memory(1)
    touched.fill(1)
    if not bound_to or node_of_memory(touched.address) < 0:
        pytest.skip("the kernel does not say where memory lies")
    for node, allowed in bound_to.items():
        elsewhere = next((other for other in bound_to if other != node), node + 1)
        assert discovery.distance(node, elsewhere) > discovery.distance(node, node)
        two = on([[node, elsewhere][i] for i in order])
        os.sched_setaffinity(0, allowed)
        try:
            two.here = Memory(256 * KI)
            two.here.fill(1)  # the first write to a page places it on the processor's node
            if node_of_memory(two.here.address) != node:
                pytest.skip("a policy for memory is in the way")
        finally:
            os.sched_setaffinity(0, before)
        for kind in ("read", "write"):
            two.start([(0, 0, 128 * KI)], kind).wait()
        assert used(posted) == {f"fake{order.index(0)}": 256 * KI}
