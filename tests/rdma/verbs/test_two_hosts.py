"""READ, WRITE and atomics between processes on two devices, as between two hosts."""

from __future__ import annotations

import random
from typing import Any

import pytest

from monarch_backend._verbs import Region
from tests.rdma.verbs import peers
from tests.rdma.verbs.conftest import Start
from tests.rdma.verbs.peers import Host, Outcome, Peer

pytestmark = pytest.mark.verbs

MI = 1 << 20


def test_reads_and_writes_move_the_right_bytes(owner: Peer, asking: Peer) -> None:
    peers.introduce(asking, owner)
    for nbytes in (1, 7, 8, 4095, 4096, 65537, MI, 8 * MI + 3, 256 * MI):
        region = owner(peers.expose, "there", nbytes, 3)
        asking(peers.allocate, "here", nbytes)
        asking(peers.move, "owner", "read", region, [(0, 0, nbytes)], "here")
        assert asking(peers.digest, "here") == owner(peers.digest, "there"), nbytes
        asking(peers.fill, "here", 99)
        asking(peers.move, "owner", "write", region, [(0, 0, nbytes)], "here")
        assert asking(peers.digest, "here") == owner(peers.digest, "there"), nbytes
        owner(peers.release, "there")


def test_scattered_segments_change_only_their_bytes(owner: Peer, asking: Peer) -> None:
    """Thousands of small segments, far more than a queue pair holds at once. Some are empty."""
    nbytes, count = 4 * MI, 5000
    seed = random.Random(11)
    starts = sorted(seed.sample(range(nbytes // 512), count))
    places = seed.sample(range(nbytes // 512), count)
    segments = [(far * 512 + 3, near * 512 + 1, seed.randint(0, 509)) for far, near in zip(starts, places, strict=True)]
    region = owner(peers.expose, "there", nbytes, 5)
    there = owner(peers.content, "there", 0, nbytes)
    asking(peers.allocate, "here", nbytes)
    peers.introduce(asking, owner)
    asking(peers.move, "owner", "read", region, segments, "here")
    expected = bytearray(nbytes)
    for far, near, size in segments:
        expected[near : near + size] = there[far : far + size]
    assert asking(peers.content, "here", 0, nbytes) == expected

    asking(peers.fill, "here", 77)
    here = asking(peers.content, "here", 0, nbytes)
    asking(peers.move, "owner", "write", region, segments, "here")
    changed = bytearray(there)
    for far, near, size in segments:
        changed[far : far + size] = here[near : near + size]
    assert owner(peers.content, "there", 0, nbytes) == changed


def _add(host: Host, region: bytes, times: int) -> list[int]:
    outcomes = [Outcome() for _ in range(times)]
    for done in outcomes:
        host.engine.atomic("owner", "fetch_add", Region.from_bytes(region), 8, 3, 0, done)
    return [done.wait() for done in outcomes]


def test_atomics_of_several_hosts_add_up(start: Start, devices: list[str]) -> None:
    owner = start("owner", devices[1])
    askers = [start(f"asking {i}", devices[0]) for i in range(3)]
    region = owner(peers.expose, "there", 64)
    for asker in askers:
        peers.introduce(asker, owner)
        asker.begin(_add, region, 700)  # more than there are slots for results
    seen = sorted(value for asker in askers for value in asker.end())
    assert seen == [3 * i for i in range(2100)]
    assert int.from_bytes(owner(peers.content, "there", 8, 16), "little") == 6300
    assert owner(peers.content, "there", 0, 8) == owner(peers.content, "there", 16, 24) == bytes(8)


def _swap(host: Host, region: bytes, operand: int, expected: int) -> int:
    done = Outcome()
    host.engine.atomic("owner", "compare_swap", Region.from_bytes(region), 0, operand, expected, done)
    return int(done.wait())


def test_compare_and_swap_changes_only_the_expected_value(owner: Peer, asking: Peer) -> None:
    region = owner(peers.expose, "there", 8)
    peers.introduce(asking, owner)
    most = (1 << 64) - 1
    assert asking(_swap, region, most, 0) == 0
    assert asking(_swap, region, 5, 1) == most
    assert asking(_swap, region, 5, most) == most
    assert owner(peers.content, "there", 0, 8) == (5).to_bytes(8, "little")


def _begin(host: Host, region: bytes, nbytes: int) -> bool:
    nothing_open = not host.engine._opened
    memory = host.memory["here"] = peers.Memory(nbytes)
    done = host.running["read"] = Outcome()
    host.engine.transfer("owner", "read", Region.from_bytes(region), [(0, memory.address, nbytes)], memory.view, done)
    return nothing_open


def _wait(host: Host, patience: float = peers.PATIENCE) -> Any:
    return host.running["read"].wait(patience)


def test_devices_are_opened_at_first_use(owner: Peer, asking: Peer) -> None:
    region = owner(peers.expose, "there", 5000, 1)
    assert asking(_begin, region, 5000)
    assert asking.wants() == "owner"
    peers.introduce(asking, owner)
    assert asking(_wait) is None
    assert asking(peers.digest, "here") == owner(peers.digest, "there")


def _counted(host: Host) -> None:
    """Count the bytes that are posted to each lane from now on."""
    host.posted = {}
    for lane in host.engine._links["owner"].lanes:
        post = lane.pair.post

        def counting(works: Any, name: str = f"{lane.device.name} {lane.number}", post: Any = post) -> None:
            host.posted[name] = host.posted.get(name, 0) + sum(w.nbytes for w in works)
            post(works)

        lane.pair.post = counting  # type: ignore[method-assign]


def _counts(host: Host) -> dict[str, int]:
    return host.posted


def test_a_large_transfer_uses_all_queue_pairs_of_all_devices(start: Start, devices: list[str]) -> None:
    both = ",".join(devices)
    owner, asking = start("owner", both), start("asking", both, queue_pairs=3)
    nbytes = 128 * MI
    region = owner(peers.expose, "there", nbytes, 9)
    asking(peers.allocate, "here", nbytes)
    peers.introduce(asking, owner)
    asking(peers.move, "owner", "read", region, [(0, 0, 1)], "here")  # after this, all lanes are tested soon
    asking(_counted)
    asking(peers.move, "owner", "read", region, [(0, 0, nbytes)], "here")
    assert asking(peers.digest, "here") == owner(peers.digest, "there")
    counts = asking(_counts)
    assert sum(counts.values()) == nbytes
    assert len(counts) == 3 * len(devices)
    assert {name.split()[0] for name in counts} == set(devices)


def _read_often(host: Host, region: bytes, nbytes: int, times: int) -> str:
    for _ in range(times):
        host.transfer("owner", "read", region, [(0, host.memory["here"].address, nbytes)], "here")
    return peers.digest(host, "here")


@pytest.mark.slow
def test_sixteen_pairs_at_once(start: Start, devices: list[str]) -> None:
    nbytes, pairs = 4 * MI, []
    for i in range(16):
        owner, asking = start("owner", devices[i % 2]), start(f"asking {i}", devices[1 - i % 2])
        region = owner(peers.expose, "there", nbytes, i)
        asking(peers.allocate, "here", nbytes)
        peers.introduce(asking, owner)
        pairs.append((owner, asking, region))
    for _, asking, region in pairs:
        asking.begin(_read_often, region, nbytes, 4)
    for owner, asking, _ in pairs:
        assert asking.end() == owner(peers.digest, "there")


def test_two_hosts_ask_each_other_at_the_same_time(owner: Peer, asking: Peer) -> None:
    nbytes = 8 * MI
    regions = {peer: peer(peers.expose, "there", nbytes, seed) for seed, peer in enumerate((owner, asking))}
    for peer, other in ((owner, asking), (asking, owner)):
        peer(peers.allocate, "here", nbytes)
        peers.introduce(peer, other)
    owner.begin(peers.move, "asking", "read", regions[asking], [(0, 0, nbytes)], "here")
    asking.begin(peers.move, "owner", "read", regions[owner], [(0, 0, nbytes)], "here")
    owner.end()
    asking.end()
    assert owner(peers.digest, "here") == asking(peers.digest, "there")
    assert asking(peers.digest, "here") == owner(peers.digest, "there")


@pytest.mark.parametrize("prefix", ["0000:0000:0000:0000:0000:ffff", "fd77", "fe80"])
def test_every_gid_type_connects(start: Start, devices: list[str], prefix: str) -> None:
    """RoCEv2 over IPv4, IPv6 and link-local addresses."""
    from monarch_backend._verbs.discovery import survey

    index = {}
    for port in survey():
        found = [gid.index for gid in port.gids if gid.raw.hex(":", 2).startswith(prefix)]
        if not found:
            pytest.skip(f"{port.device} has no such address")
        index[port.device] = found[0]
    owner = start("owner", devices[1], gid_index=index[devices[1]])
    asking = start("asking", devices[0], gid_index=index[devices[0]])
    region = owner(peers.expose, "there", 3 * MI, 1)
    asking(peers.allocate, "here", 3 * MI)
    peers.introduce(asking, owner)
    asking(peers.move, "owner", "read", region, [(0, 0, 3 * MI)], "here")
    assert asking(peers.digest, "here") == owner(peers.digest, "there")


def _torch_and_numpy(host: Host, region: bytes) -> list[bool]:
    import numpy as np
    import torch

    remote = Region.from_bytes(region)
    tensor = torch.zeros(1000, dtype=torch.int32)
    array = np.zeros(1000, dtype=np.int32)
    first, second = Outcome(), Outcome()
    row, part = tensor[100:200], array[100:200]
    host.engine.transfer("owner", "read", remote, [(0, row.data_ptr(), 400)], row, first)
    host.engine.transfer("owner", "read", remote, [(0, part.ctypes.data, 400)], part, second)
    first.wait(), second.wait()
    [device] = host.engine._opened
    kept = len(device.cache)
    del tensor, row, array, part
    return [kept == 2, peers.until(lambda: len(device.cache) == 0)]


def test_tensors_and_arrays_stay_registered_while_alive(owner: Peer, asking: Peer) -> None:
    region = owner(peers.expose, "there", 4096, 1)
    peers.introduce(asking, owner)
    assert asking(_torch_and_numpy, region) == [True, True]
