"""Large point-to-point messages between hosts with NICs: over fake NICs, and over two devices if they exist.

Each rank is on a separate host unless a test says otherwise. test_point_to_point.py tests small messages,
tests/rdma/verbs the engine.
"""

from __future__ import annotations

import ctypes
import datetime
import gc
import itertools
import logging
import os
import random
import signal
import subprocess
import sys
import threading
import time
import types
import weakref
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

import monarch_backend
from monarch_backend import (
    CollectiveArgumentError,
    CollectiveMismatchError,
    CollectiveTimeoutError,
    GroupClosedError,
    RankFailedError,
)
from monarch_backend._verbs import eligibility, engine, shared_engine
from monarch_backend.process_group._process_group import MonarchProcessGroup
from monarch_backend.process_group._rdma import p2p as p2p_module
from monarch_backend.process_group._rdma import p2p_protocol, peer_reads
from monarch_backend.process_group._rdma.p2p_protocol import ControlMessage, ProtocolError, SendHeader
from tests.process_group import fake_nics, reference
from tests.process_group.test_group_lifecycle import set_timeout
from tests.rdma.verbs.peers import two_devices, until
from tests.support.ranks import init, run_ranks, without_gloos_lines

KIB, MIB = 1 << 10, 1 << 20
CABLE = Path("/run/cable")
"""Program of the test guest that takes the cable down or up."""
_MMAP_THRESHOLD = -3  # value of malloc.h
LOW = {"MONARCH_RDMA_MIN_BYTES": "4096"}

Run = Callable[..., list[Any]]


@pytest.fixture(params=["pretended", pytest.param("verbs", marks=pytest.mark.verbs)])
def run(request: pytest.FixtureRequest) -> Run:
    """Return ``run(fn, hosts, *args)``: start ranks with a group, ``hosts[rank]`` on each host, and return results by
    rank.
    """
    devices = two_devices() if request.param == "verbs" else []

    def start(
        fn: Callable[..., Any],
        hosts: Sequence[int] = (0, 1),
        *args: Any,
        env: dict[str, str] | None = None,
        seconds: float = 60.0,
        without: Sequence[int] = (),
    ) -> list[Any]:
        return run_ranks(
            _rank, len(hosts), fn, hosts, args, devices, seconds, without, backend=None, env=LOW if env is None else env
        )

    return start


def _rank(
    rank: int,
    address: str,
    fn: Callable[..., Any],
    hosts: Sequence[int],
    args: tuple[Any, ...],
    devices: list[str],
    seconds: float,
    without: Sequence[int],
) -> Any:
    fake_nics.apart(hosts[rank])
    if devices:
        os.environ["MONARCH_RDMA_DEVICES"] = devices[hosts[rank] % 2] if rank not in without else "none"
    elif rank not in without:
        fake_nics.install()
    init(rank, len(hosts), address, seconds=seconds)
    dist.barrier()
    result = fn(rank, *args)
    if dist.is_initialized():
        dist.barrier()  # rank 0 hosts the store
        dist.destroy_process_group()
    return result


def _rdma_p2p() -> Any:
    return dist.group.WORLD._rdma_p2p  # type: ignore[union-attr]


def _carried() -> dict[str, int]:
    """Return the number of messages that this rank received, by route."""
    return {way: _rdma_p2p().carried[way] for way in ("verbs", "gloo")}


def _numbers(nbytes: int, seed: int) -> torch.Tensor:
    """Bytes with a period of 251, so that no two blocks at powers of two are equal."""
    one = (torch.arange(251) * 7 + seed).to(torch.uint8)
    return one.repeat(nbytes // 251 + 1)[:nbytes].clone()


# Delivery --------------------------------------------------------------------------------------------------------


def _sizes(rank: int, sizes: Sequence[int]) -> dict[str, int]:
    for nbytes in sizes:
        mine, theirs = _numbers(nbytes, rank), torch.zeros(nbytes, dtype=torch.uint8)
        if rank == 0:
            dist.send(mine, 1)
            assert dist.recv(theirs, 1) == 1
        else:
            dist.recv(theirs, 0)
            dist.send(mine, 0)
        assert torch.equal(theirs, _numbers(nbytes, 1 - rank)), nbytes
    return _carried()


def test_messages_around_and_above_the_minimum_size_arrive(run: Run) -> None:
    least = eligibility.wanted_least()
    sizes = [0, 1, 256, 4096, least - 1, least, least + 1, MIB + 3, 5 * MIB, 64 * MIB]
    for carried in run(_sizes, (0, 1), sizes, env={}):
        assert carried == {"verbs": sum(size >= least for size in sizes), "gloo": 0}


def _dtypes(rank: int) -> int:
    for dtype in reference.DTYPES:
        for shape in ((4099,), (64, 67, 2)):
            got = torch.zeros(shape).to(getattr(torch, dtype))
            sent = reference.values(rank, dtype, shape, 0).clone()
            works = [dist.irecv(got, 1 - rank), dist.isend(sent, 1 - rank)]  # messages in both directions at once
            for work in works:
                assert work is not None
                work.wait()
            assert reference.same(got, reference.values(1 - rank, dtype, shape, 0)), dtype
    return _carried()["verbs"]


def test_dtypes_in_both_directions_at_once_arrive(run: Run) -> None:
    shapes = 2 * len(reference.DTYPES)
    assert run(_dtypes, env={"MONARCH_RDMA_MIN_BYTES": "1024"}) == [shapes] * 2


def _tags(rank: int) -> None:
    peer, nbytes = 1 - rank, 100 * KIB
    tags = (
        0,
        1,
        p2p_protocol.MAX_TAG - 1,
        p2p_protocol.MAX_TAG,
        p2p_protocol.OWN_TAGS - 1,
    )  # Gloo carries the last two
    works = [dist.isend(_numbers(nbytes, 10 * rank + i), peer, tag=tag) for i, tag in enumerate(tags)]
    for i in (2, 0, 4, 3, 1):  # not in the order of the sends
        got = torch.zeros(nbytes, dtype=torch.uint8)
        dist.recv(got, peer, tag=tags[i])
        assert torch.equal(got, _numbers(nbytes, 10 * peer + i))
    for work in works:
        work.wait()
    assert _carried() == {"verbs": 3, "gloo": 0}
    for tag in (p2p_protocol.OWN_TAGS, p2p_protocol.FIRST_STAGE_TAG, (1 << 31) - 1):
        with pytest.raises(CollectiveArgumentError, match=f"tag {tag}: "):
            dist.send(torch.zeros(1), peer, tag=tag)


def test_tags_keep_messages_apart(run: Run) -> None:
    run(_tags)


def _order(rank: int) -> None:
    """Send large and small messages with one tag. Messages of one size arrive in order."""
    peer, count = 1 - rank, 20
    sizes = [(8, 8 * KIB, 100 * KIB)[i % 3] for i in range(3 * count)]
    works = [dist.isend(_numbers(nbytes, i), peer) for i, nbytes in enumerate(sizes)]
    got = [torch.zeros(nbytes, dtype=torch.uint8) for nbytes in sizes]
    works += [dist.irecv(x, peer) for x in got]
    for work in works:
        work.wait()
    for i, x in enumerate(got):
        assert torch.equal(x, _numbers(x.numel(), i)), i
    assert _carried() == {"verbs": 2 * count, "gloo": 0}


def test_messages_of_one_tag_keep_their_order(run: Run) -> None:
    run(_order)


def _batch(rank: int) -> dict[str, int]:
    """Every rank sends three messages to every other rank in one batch, sends first."""
    size, nbytes = dist.get_world_size(), 64 * KIB
    slots = list(itertools.product([p for p in range(size) if p != rank], range(3)))
    sends = [dist.P2POp(dist.isend, _numbers(nbytes, 9 * rank + n), peer, tag=n) for peer, n in slots]
    receives = [dist.P2POp(dist.irecv, torch.zeros(nbytes, dtype=torch.uint8), peer, tag=n) for peer, n in slots]
    for work in dist.batch_isend_irecv(sends + receives):
        work.wait()
    for op, (peer, n) in zip(receives, slots, strict=True):
        assert torch.equal(op.tensor, _numbers(nbytes, 9 * peer + n))
    return _carried()


def test_batch_among_three_hosts_arrives(run: Run) -> None:
    assert run(_batch, (0, 1, 0)) == [{"verbs": 3, "gloo": 3}, {"verbs": 6, "gloo": 0}, {"verbs": 3, "gloo": 3}]


def test_rank_without_nics_uses_gloo(run: Run) -> None:
    found = run(_batch, (0, 1, 2, 3), without=(1,))
    assert found == [{"verbs": 6, "gloo": 3}, {"verbs": 0, "gloo": 9}, *[{"verbs": 6, "gloo": 3}] * 2]


def _batch_into_one_tensor(rank: int) -> None:
    into = torch.zeros(MIB, dtype=torch.uint8)
    receives = [dist.P2POp(dist.irecv, into, 1 - rank) for _ in range(2)]
    with pytest.raises(CollectiveArgumentError, match="operations 0 and 1 of the batch share memory"):
        dist.batch_isend_irecv(receives)


def test_batch_over_nics_that_receives_twice_into_one_tensor_is_refused(run: Run) -> None:
    run(_batch_into_one_tensor)


def _any_source(rank: int) -> dict[str, int]:
    size = dist.get_world_size()
    if rank:
        dist.send(_numbers(MIB, rank), 0, tag=7)
        return _carried()
    senders = []
    for turn in range(size - 1):
        got = torch.zeros(MIB, dtype=torch.uint8)
        if turn % 2:
            work = dist.irecv(got, tag=7)
            assert work is not None
            work.wait()
            senders.append(work._source_rank())
        else:
            senders.append(dist.recv(got, tag=7))
        assert torch.equal(got, _numbers(MIB, senders[-1]))
    assert sorted(senders) == list(range(1, size))
    return _carried()


def test_receive_from_any_source_takes_the_first_sender(run: Run) -> None:
    """One sender is on the receiver's host. The receive cannot know that in advance."""
    assert run(_any_source, (0, 0, 1, 2))[0] == {"verbs": 2, "gloo": 1}


def _parts(rank: int) -> None:
    whole = _numbers(MIB, rank)
    part = whole[12345 : 12345 + 300 * KIB]
    if rank == 0:
        dist.send(part, 1)
        dist.send(whole[:300_000], 1)
        assert len(_rdma_p2p()._nics._lent) == 1  # the storage is registered once
        with pytest.raises(CollectiveArgumentError, match="not contiguous"):
            dist.send(whole.view(KIB, KIB).T, 1)
    else:
        into = torch.zeros(2 * MIB, dtype=torch.uint8)
        dist.recv(into[777 : 777 + 300 * KIB], 0)
        dist.recv(into[MIB : MIB + 300_000], 0)
        assert torch.equal(into[777 : 777 + 300 * KIB], _numbers(MIB, 0)[12345 : 12345 + 300 * KIB])
        assert torch.equal(into[MIB : MIB + 300_000], _numbers(MIB, 0)[:300_000])
        assert not into[:777].any()
        assert not into[777 + 300 * KIB : MIB].any()


def test_parts_of_one_storage_arrive(run: Run) -> None:
    run(_parts)


def _watched(rank: int) -> None:
    """One rank's calls go through torch's dispatcher, the other's do not. Both use the same route."""
    mine, theirs = _numbers(MIB, rank), torch.zeros(MIB, dtype=torch.uint8)
    if rank == 0:
        with torch.profiler.profile() as profile:
            dist.send(mine, 1)
            dist.recv(theirs, 1)
        names = {event.name for event in profile.events() or ()}
        assert {"c10d::send", "verbs:send"} <= names
    else:
        dist.recv(theirs, 0)
        dist.send(mine, 0)
    assert torch.equal(theirs, _numbers(MIB, 1 - rank))
    assert _carried() == {"verbs": 1, "gloo": 0}


def test_profiler_sees_messages(run: Run) -> None:
    run(_watched)


def _hooked(rank: int) -> list[str]:
    if rank > 1:
        return []
    group: Any = dist.group.WORLD
    seen: list[str] = []
    group.register_pre_hook(7, lambda call: seen.append(f"before {call.name.name}"))
    group.register_post_hook(7, lambda call: seen.append(f"after {call.name.name}"))
    for nbytes in (1000, MIB):
        mine, theirs = _numbers(nbytes, rank), torch.zeros(nbytes, dtype=torch.uint8)
        dist.send(mine, 1) if rank == 0 else dist.recv(theirs, 0)
        assert rank == 0 or torch.equal(theirs, _numbers(nbytes, 0))
    work = dist.isend(mine, 1) if rank == 0 else dist.irecv(theirs)
    assert work is not None
    work.wait()
    assert _carried() == {"verbs": 2 * rank, "gloo": 0}
    return list(seen)  # the end hook has run, too


@pytest.mark.skipif(not hasattr(dist.ProcessGroup, "register_pre_hook"), reason="hooks are torch 2.14's")
@pytest.mark.parametrize("hosts", [(0, 1), (0, 1, 1)], ids=str)
def test_hooks_see_messages(run: Run, hosts: tuple[int, ...]) -> None:
    """Hooks see messages of both routes, also if no two ranks share memory."""
    for seen in run(_hooked, hosts)[:2]:
        names = [entry.split()[1] for entry in seen]
        assert [entry.split()[0] for entry in seen] == ["before", "after"] * 3
        assert names[0] == names[1] == names[2] == names[3], seen


def _objects_and_groups(rank: int) -> None:
    """Groups share the connection and the registered memory."""
    other = dist.new_group([0, 1])
    x = _numbers(MIB, 5)
    for group in (None, other):
        got = torch.zeros(MIB, dtype=torch.uint8)
        if rank == 0:
            dist.send(x, 1, group=group)
        else:
            dist.recv(got, 0, group=group)
            assert torch.equal(got, x)
    nics = _rdma_p2p()._nics
    assert nics is other._rdma_p2p._nics
    assert len(nics._lent) == (rank == 0)
    dist.barrier()
    dist.destroy_process_group(other)
    received: list[Any] = [None]
    if rank == 0:
        dist.send_object_list([x.numpy().tobytes()], 1)
    else:
        dist.recv_object_list(received, 0)
        assert received[0] == x.numpy().tobytes()


def test_groups_of_one_process_share_connections(run: Run) -> None:
    run(_objects_and_groups)


def _collectives(rank: int, count: int) -> dict[str, int]:
    """Run each collective that sends data between hosts twice. Registrations are kept after the first."""
    size = dist.get_world_size()
    own, every = [torch.arange(count, dtype=torch.float32) + 10 * r for r in range(size)], range(size)
    for _ in range(2):
        x = own[rank].clone()
        dist.all_reduce(x)
        assert torch.equal(x, sum(own, torch.zeros(count)))
        for root in every:
            x = own[rank].clone()
            dist.broadcast(x, root)
            assert torch.equal(x, own[root])
            dist.reduce(x, root, dist.ReduceOp.MAX)
            assert rank != root or torch.equal(x, own[root])
        gathered = [torch.zeros(count) for _ in every]
        dist.all_gather(gathered, own[rank])
        assert all(torch.equal(got, want) for got, want in zip(gathered, own, strict=True))
        x = torch.zeros(count)
        dist.reduce_scatter(x, [own[rank] + r for r in every])
        assert torch.equal(x, sum(own, torch.zeros(count)) + size * rank)
        dist.all_to_all(gathered, [own[rank] + r for r in every])
        assert all(torch.equal(got, want + rank) for got, want in zip(gathered, own, strict=True))
        under_way = [own[rank] + r for r in every]
        works = [dist.all_reduce(x, async_op=True) for x in under_way]
        for r, work in enumerate(works):
            assert work is not None
            work.wait()
            assert torch.equal(under_way[r], sum(own, torch.zeros(count)) + size * r)
    return _carried()


@pytest.mark.parametrize("hosts", [(0, 0, 1, 1), (0, 1, 1)], ids=str)
def test_hierarchical_collectives_use_nics(run: Run, hosts: tuple[int, ...]) -> None:
    found = run(_collectives, hosts, 50_001)
    assert sum(carried["gloo"] for carried in found) == 0
    assert sum(carried["verbs"] for carried in found) > 20


def _killed_in_a_collective(rank: int) -> None:
    dist.all_reduce(torch.ones(MIB))
    if rank == 3:
        os.kill(os.getpid(), signal.SIGKILL)
    began = time.monotonic()
    with pytest.raises(RankFailedError, match="rank 3 ") as told:
        dist.all_reduce(torch.ones(MIB))
    assert str(told.value).count("closed its connection") <= 1
    assert time.monotonic() - began < 30
    dist.destroy_process_group()


def test_killed_rank_ends_a_collective_on_its_peers(run: Run) -> None:
    with pytest.raises(AssertionError) as told:
        run(_killed_in_a_collective, (0, 0, 1, 1))
    assert str(told.value) == "--- rank 3:\nthe rank died without an answer"


def _routes(rank: int) -> str:
    return monarch_backend.routes()["cpu"].why if _rdma_p2p() is not None else "none"


def test_route_is_taken_between_hosts_with_nics_only(run: Run) -> None:
    assert all("verbs for 4096 bytes" in why for why in run(_routes))
    assert run(_routes, env={"MONARCH_RDMA_TRANSPORT": "tcp"}) == ["none"] * 2
    assert run(_routes, env={"MONARCH_SHM": "0"}) == ["none"] * 2
    assert run(_routes, (0, 0)) == ["none"] * 2  # both ranks are on one host
    assert run(_routes, (0, 1), without=(1,)) == ["none"] * 2


# Failures --------------------------------------------------------------------------------------------------------


def _exchange(rank: int) -> None:
    """Check that the group still works."""
    got = torch.zeros(MIB, dtype=torch.uint8)
    works = [dist.isend(_numbers(MIB, rank), 1 - rank), dist.irecv(got, 1 - rank)]
    for work in works:
        assert work is not None
        work.wait()
    assert torch.equal(got, _numbers(MIB, 1 - rank))
    dist.barrier()


def _mismatch(rank: int) -> None:
    for nbytes in (MIB, MIB - 5):
        into = torch.zeros(MIB, dtype=torch.uint8)
        with pytest.raises(CollectiveMismatchError, match=rf"rank 0 sent {nbytes} bytes, .*rank 1 is of {MIB - 4}"):
            dist.send(_numbers(nbytes, 0), 1, tag=3) if rank == 0 else dist.recv(into[: MIB - 4], 0, tag=3)
        assert not into.any()
    _exchange(rank)


def test_message_of_another_size_raises(run: Run) -> None:
    run(_mismatch)


def _impatient_group() -> Any:
    """Make a group with a timeout of one second for messages. Its creation has the longer default timeout."""
    group = dist.new_group([0, 1])
    set_timeout(datetime.timedelta(seconds=1), group)
    return group


def _late(rank: int, sends: bool) -> None:
    store, group = dist.group.WORLD.get_group_store(), _impatient_group()  # type: ignore[union-attr]
    if rank == 0:
        began = time.monotonic()
        x = torch.zeros(MIB, dtype=torch.uint8)
        with pytest.raises(CollectiveTimeoutError, match=r"rank 1 \(host .*pid \d+\) did not do its part .*within 1 s"):
            dist.send(x, 1, group=group) if sends else dist.recv(x, 1, group=group)
        assert 0.8 < time.monotonic() - began < 20
        store.set("over", "")
    else:
        store.wait(["over"], datetime.timedelta(seconds=60))
    dist.destroy_process_group()


def test_gloo_wait_that_ends_early_is_a_timeout(monkeypatch: pytest.MonkeyPatch) -> None:
    """Gloo rounds the timeout down to milliseconds, so its wait may end early. No connection was closed."""
    now = 100.0

    class Late:
        def wait(self, timeout: datetime.timedelta) -> None:
            nonlocal now
            now += timeout // datetime.timedelta(milliseconds=1) / 1000
            raise RuntimeError("Timed out waiting for recv operation to complete")

    monkeypatch.setattr(p2p_module, "time", types.SimpleNamespace(monotonic=lambda: now))
    rdma_p2p = types.SimpleNamespace(closed=False, _gloo=None, _rank=0, least=MIB)
    for seconds in (1.0, 0.0107, 0.0003):
        clock = p2p_module._Clock(rdma_p2p, seconds)  # type: ignore[arg-type]
        clock.begin()
        now += seconds / 7  # an earlier step used part of the timeout
        with pytest.raises(p2p_module._Failure) as caught:
            p2p_module._PeerExchange(rdma_p2p, 1, 0, clock).wait(Late())  # type: ignore[arg-type]
        assert caught.value.args[0][:2] == ("late", 1)


@pytest.mark.parametrize("sends", [True, False])
def test_receive_without_a_sender_times_out(run: Run, sends: bool) -> None:
    run(_late, (0, 1), sends)


def _early(rank: int) -> None:
    """Start messages long before the wait: longer than the group's timeout."""
    group = _impatient_group()
    x, y, z = (_numbers(MIB, rank + i) for i in range(3))
    if rank == 1:
        posted = [
            dist.irecv(x, 0, group=group),
            dist.irecv(y, group=group, tag=1),
            dist.isend(z, 0, group=group, tag=2),
        ]
    assert not until(lambda: group._rdma_p2p.closed, 1.3)  # let time pass
    if rank == 1:
        for work in posted:
            assert work is not None
            assert work.exception() is None
            work.wait()
        assert torch.equal(x, _numbers(MIB, 0))
        assert torch.equal(y, _numbers(MIB, 1))
    else:
        dist.send(x, 1, group=group)
        dist.send(y, 1, group=group, tag=1)
        dist.recv(z, 1, group=group, tag=2)
        assert torch.equal(z, _numbers(MIB, 3))


def test_early_receives_get_their_messages(run: Run) -> None:
    run(_early)


def _unwaited(rank: int) -> None:
    """A message is received before the caller waits for it, also from any source."""
    if rank == 0:
        dist.send(_numbers(MIB, 1), 1)
        dist.send(_numbers(MIB, 2), 1)
    else:
        got = [torch.zeros(MIB, dtype=torch.uint8) for _ in range(2)]
        works = [dist.irecv(got[0], 0), dist.irecv(got[1])]
        for i, work in enumerate(works):
            assert work is not None
            assert until(work.is_completed)
            assert torch.equal(got[i], _numbers(MIB, 1 + i))


def test_messages_without_a_wait_arrive(run: Run) -> None:
    run(_unwaited)


def _waited_for_late(rank: int, source: int | None, sends: bool) -> None:
    """The timeout starts at the first wait. It also applies to an operation that started earlier."""
    store, group = dist.group.WORLD.get_group_store(), _impatient_group()  # type: ignore[union-attr]
    if rank == 0:
        x = torch.zeros(MIB, dtype=torch.uint8)
        work = dist.isend(x, 1, group=group) if sends else dist.irecv(x, source, group=group)
        assert work is not None
        assert not until(work.is_completed, 1.3)
        began = time.monotonic()
        with pytest.raises(CollectiveTimeoutError, match=r"within 1 s"):
            work.wait()
        assert 0.8 < time.monotonic() - began < 20
        assert until(lambda: not group._rdma_p2p._under_way)
        store.set("over", "")
    else:
        store.wait(["over"], datetime.timedelta(seconds=60))
    dist.destroy_process_group()


@pytest.mark.slow
@pytest.mark.parametrize(("source", "sends"), [(1, False), (None, False), (1, True)])
def test_timeout_starts_with_the_wait(run: Run, source: int | None, sends: bool) -> None:
    run(_waited_for_late, (0, 1), source, sends)


def _impatient(rank: int) -> None:
    if rank == 0:
        x = torch.zeros(MIB, dtype=torch.uint8)
        work = dist.irecv(x, 1)
        assert work is not None
        assert not work.is_completed()
        with pytest.raises(CollectiveTimeoutError, match="goes on"):
            work.wait(timeout=datetime.timedelta(milliseconds=50))
        dist.send(torch.zeros(1), 1)
        work.wait()
        assert work.is_success()
        assert torch.equal(x, _numbers(MIB, 1))
        assert work.result()[0] is x
    else:
        dist.recv(torch.zeros(1), 0)
        work = dist.isend(_numbers(MIB, 1), 0)
        assert work is not None
        work.get_future().wait()
        assert work.is_completed()


def test_wait_with_its_own_timeout_raises(run: Run) -> None:
    run(_impatient)


def _killed(rank: int, sends: bool) -> None:
    x = torch.zeros(MIB, dtype=torch.uint8)
    if rank == 1:
        dist.recv(torch.zeros(1), 0)
        os.kill(os.getpid(), signal.SIGKILL)
    if sends:
        works = [dist.isend(x, 1), dist.isend(x, 1)]
    else:
        works = [dist.irecv(x, 1), dist.irecv(torch.zeros(MIB, dtype=torch.uint8), 1)]
    dist.send(torch.zeros(1), 1)
    began = time.monotonic()
    for work in works:
        assert work is not None
        with pytest.raises(RankFailedError, match="closed its connection to rank 0"):
            work.wait()
    assert time.monotonic() - began < 20
    dist.destroy_process_group()


@pytest.mark.parametrize("sends", [True, False])
def test_killed_rank_fails_messages_of_its_peer(run: Run, sends: bool) -> None:
    with pytest.raises(AssertionError) as told:
        run(_killed, (0, 1), sends)
    assert str(told.value).startswith("--- rank 1:\nthe rank died"), told.value


def _destroyed(rank: int) -> None:
    _exchange(rank)
    works = [dist.irecv(torch.zeros(MIB, dtype=torch.uint8), source) for source in (1 - rank, 1 - rank, None)]
    dist.barrier()
    rdma_p2p = _rdma_p2p()
    dist.destroy_process_group()
    assert until(lambda: not rdma_p2p._under_way)
    for work in works:
        assert work is not None
        with pytest.raises(GroupClosedError if rank == 0 else (GroupClosedError, RankFailedError)):
            work.wait()
    assert peer_reads._process is None
    assert shared_engine._engine is None
    assert "monarch-verbs" not in {thread.name for thread in threading.enumerate()}


def test_destroy_with_messages_in_flight_ends_them(run: Run) -> None:
    """All fake resources are closed. A fake device with registered memory would fail to close."""
    run(_destroyed)


def _freed(rank: int) -> None:
    """Memory is freed without the garbage collector, because there is no reference cycle."""
    gc.disable()
    nics = _rdma_p2p()._nics
    for waits in (True, False):
        x = _numbers(MIB, 1)
        storage = weakref.ref(x.untyped_storage())
        if waits:
            dist.send(x, 1) if rank == 0 else dist.recv(x, 0)
        else:
            work = dist.isend(x, 1) if rank == 0 else dist.irecv(x, 0)
            assert work is not None
            work.wait()
            del work
        assert len(nics._lent) == (rank == 0)
        del x
        assert until(lambda: not nics._lent)
        assert until(lambda: storage() is None)  # noqa: B023  # asked here
    assert not nics._engine._exposed


def test_tensor_stays_alive_while_a_peer_may_read_it(run: Run) -> None:
    run(_freed)


def _groups_in_a_row(rank: int) -> list[int]:
    gc.collect()
    gc.disable()
    found = []
    for _ in range(5):
        group = dist.new_group([0, 1])
        x = torch.zeros(MIB, dtype=torch.uint8)
        dist.send(x, 1, group=group) if rank == 0 else dist.recv(x, 0, group=group)
        dist.destroy_process_group(group)
        del group
        dist.barrier()
        found.append(len(os.listdir("/proc/self/fd")))
    # Gloo's threads close some descriptors after a delay.
    assert until(lambda: len(os.listdir("/proc/self/fd")) <= found[0]), found
    return found


def test_destroyed_groups_leave_no_descriptor_open(run: Run) -> None:
    """Descriptors are closed without the garbage collector."""
    run(_groups_in_a_row)


def _fail_to_make_a_group(rank: int) -> None:
    """Fail while the group is created, after the ranks have met."""
    nics, others = _rdma_p2p()._nics, _rdma_p2p()._others
    whole = MonarchProcessGroup._let_see

    def fails(_: Any) -> None:
        raise RuntimeError("the group can't be made")

    MonarchProcessGroup._let_see = fails  # type: ignore[method-assign]
    with pytest.raises(RuntimeError, match="the group can't be made"):
        dist.new_group([0, 1])
    MonarchProcessGroup._let_see = whole  # type: ignore[method-assign]
    assert {token: other.groups for token, other in nics._others.items()} == {other.token: 1 for other in others}


def test_failed_group_releases_its_nics(run: Run) -> None:
    run(_fail_to_make_a_group)


def _breaks_under_way(rank: int) -> None:
    """A rank whose message fails with the connection makes a new connection, even if the failure is reported late."""
    _exchange(rank)
    nics = _rdma_p2p()._nics
    (other,) = nics._others.values()
    seen = []
    nics._engine.give_up = lambda *_: seen.append(other.connected)
    nics._dial(other.peer)
    del nics._engine.give_up
    assert seen == [False]
    nics._engine.give_up(other.peer, "what was held back above")
    _exchange(rank)
    assert _carried() == {"verbs": 2, "gloo": 0}


def test_broken_connection_is_detected_before_its_messages_fail(run: Run) -> None:
    run(_breaks_under_way)


def _no_threads(rank: int) -> None:
    """A message whose thread cannot start raises that error, and its memory is not in use afterwards."""
    whole = threading.Thread.start
    if rank == 0:

        def fails(thread: threading.Thread) -> None:
            if thread.name == "monarch_callback":
                raise RuntimeError("can't start new thread")
            whole(thread)

        threading.Thread.start = fails  # type: ignore[method-assign]
        with pytest.raises(RuntimeError, match="can't start new thread"):
            dist.isend(_numbers(MIB, 0), 1, tag=9)
        threading.Thread.start = whole  # type: ignore[method-assign]
        assert not _rdma_p2p()._under_way
        assert not any(lent.users for lent in _rdma_p2p()._nics._lent.values())
    _exchange(rank)


def test_thread_that_cannot_start_is_handled(run: Run) -> None:
    run(_no_threads)


def _full(rank: int) -> None:
    kept = [_numbers(64 * KIB, i) for i in range(5)]
    for i, x in enumerate(kept):
        if rank == 0:
            dist.send(x, 1)
        else:
            got = torch.zeros_like(x)
            dist.recv(got, 0)
            assert torch.equal(got, _numbers(64 * KIB, i))
    assert len(_rdma_p2p()._nics._lent) <= 2


def test_registered_memory_stays_within_the_cache_limit(run: Run) -> None:
    run(_full, env={**LOW, "MONARCH_RDMA_MR_CACHE_ENTRIES": "2"})


def _child_after_use(rank: int) -> None:
    # malloc keeps its records of free memory on the same pages as messages, as in a long-running process.
    assert ctypes.CDLL(None).mallopt(_MMAP_THRESHOLD, 1 << 30)
    for _ in range(3):
        _exchange(rank)
        pid = os.fork()
        if pid == 0:
            os._exit(0 if peer_reads._process is None and shared_engine._engine is None else 1)
        assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
        _exchange(rank)


def test_fork_of_a_rank_does_not_disturb_messages(run: Run) -> None:
    run(_child_after_use)


def _storm(rank: int, rounds: int) -> dict[str, int]:
    """Messages of all sizes between all ranks, waited for at once or at the end, with collectives between them."""
    size, choose = dist.get_world_size(), random.Random(5)
    plan = [
        (sender, receiver, choose.choice((10, 5000, 70 * KIB, MIB)), choose.randrange(3), choose.random() < 0.5)
        for _ in range(rounds)
        for sender, receiver in itertools.permutations(range(size), 2)
    ]
    works, expected = [], []
    for number, (sender, receiver, nbytes, tag, waits) in enumerate(plan):
        if rank == sender:
            works.append(dist.isend(_numbers(nbytes, number), receiver, tag=tag))
        elif rank == receiver:
            got = torch.zeros(nbytes, dtype=torch.uint8)
            work = dist.irecv(got, sender, tag=tag)
            assert work is not None
            if waits:
                work.wait()
            else:
                works.append(work)  # a second wait for the same Gloo work would never return
            expected.append((got, number))
        if number % 20 == 19:
            x = torch.full((20_000,), float(rank))
            dist.all_reduce(x)
            assert x.eq(sum(range(size))).all()
    for work in works:
        assert work is not None
        work.wait()
    for got, number in expected:
        assert torch.equal(got, _numbers(got.numel(), number))
    return _carried()


@pytest.mark.slow
@pytest.mark.parametrize("hosts", [(0, 1, 2), (0, 0, 1, 1)], ids=str)
def test_many_messages_at_once_arrive_in_order(run: Run, hosts: tuple[int, ...]) -> None:
    found = run(_storm, hosts, 60)
    assert all(carried["verbs"] > 20 for carried in found), found
    assert sum(carried["gloo"] for carried in found) == 0 or hosts == (0, 0, 1, 1), found


# Failures of NICs: fake NICs fail on request ------------------------------------------------------------------------


class _Heard(logging.Handler):
    def __init__(self) -> None:
        super().__init__()
        self.lines: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.lines.append(record.getMessage())


def _broken_nics(rank: int, how: str) -> list[str]:
    heard = _Heard()
    logging.getLogger("monarch_backend").addHandler(heard)
    binding: Any = engine.load("")
    if how != "unreachable":
        _exchange(rank)
        assert _carried() == {"verbs": 1, "gloo": 0}
    before = _carried()["verbs"]
    if how == "unreachable":
        binding.unreachable.add(b"all")
    elif how == "dead":
        binding.dead = True
    else:  # existing connections break, and new ones can be made
        for pair in list(binding.pairs.values()):
            pair.broken = True
    for _ in range(3):
        _exchange(rank)
    carried = _carried()
    assert carried == ({"verbs": before + 3, "gloo": 0} if how == "broken" else {"verbs": before, "gloo": 3})
    return [line for line in heard.lines if "carried by gloo" in line]


@pytest.mark.parametrize("how", ["unreachable", "dead", "broken"])
def test_failing_nics_fall_back_to_gloo(how: str) -> None:
    """Gloo carries the messages, with one warning. A broken connection is made again."""
    found = run_ranks(_rank, 2, _broken_nics, (0, 1), (how,), [], 60.0, (), backend=None, env=LOW)
    for rank, lines in enumerate(found):
        assert len(lines) == (how != "broken"), lines
        assert all(f"rank {rank} and rank {1 - rank}" in line for line in lines)


def _misfit(rank: int, where: str, bad: int) -> list[str]:
    """Raise an error that the code does not expect."""
    heard = _Heard()
    logging.getLogger("monarch_backend").addHandler(heard)
    if rank == bad:

        def fails(*_: Any, **__: Any) -> Any:
            raise AttributeError("another release")

        if where == "load":
            engine.load = fails
        else:
            setattr(engine.Engine, where, fails)
    for _ in range(2):
        _exchange(rank)
    assert _carried()["gloo"] > 0
    return [line for line in heard.lines if "another release" in line]


@pytest.mark.parametrize("where", ["load", "expose", "offer", "accept", "connect", "transfer"])
def test_unexpected_error_falls_back_to_gloo_with_a_warning(where: str) -> None:
    """Gloo carries the messages, and one warning contains the error."""
    found = run_ranks(_rank, 2, _misfit, (0, 1), (where, 1), [], 60.0, (), backend=None, env=LOW)
    assert len(found[1]) == 1, found


def _little_memory(rank: int, short: int) -> None:
    if rank == short:
        binding: Any = engine.load("")
        binding.memory = 3 * MIB
    for nbytes, way in ((8 * MIB, "gloo"), (MIB, "verbs"), (8 * MIB, "gloo")):
        before = _carried()
        mine, theirs = _numbers(nbytes, rank), torch.zeros(nbytes, dtype=torch.uint8)
        dist.send(mine, 1) if rank == 0 else dist.recv(theirs, 0)
        assert rank == 0 or torch.equal(theirs, _numbers(nbytes, 0))
        assert _carried() == (before if rank == 0 else {**before, way: before[way] + 1})


@pytest.mark.parametrize("short", [0, 1])
def test_memory_that_cannot_be_registered_goes_over_gloo(short: int) -> None:
    """Gloo carries messages whose memory cannot be registered. The NICs carry the others."""
    run_ranks(_rank, 2, _little_memory, (0, 1), (short,), [], 60.0, (), backend=None, env=LOW)


def _cut(rank: int) -> float:
    _exchange(rank)
    assert _carried() == {"verbs": 1, "gloo": 0}
    if rank == 0:
        subprocess.run([CABLE, "down"], check=True)
    dist.barrier()
    began = time.monotonic()
    _exchange(rank)
    seconds = time.monotonic() - began
    _exchange(rank)
    assert _carried() == {"verbs": 1, "gloo": 2}
    return seconds


@pytest.mark.verbs
def test_messages_over_a_cut_link_end_in_time(run: Run, request: pytest.FixtureRequest) -> None:
    """The hosts still reach each other through a network that does not use the NICs."""
    if not CABLE.exists() or "pretended" in request.node.name:
        pytest.skip("only the guest has a cable that can be cut")
    try:
        assert all(seconds < 60 for seconds in run(_cut))
    finally:
        subprocess.run([CABLE, "up"], check=True)


# Layouts ---------------------------------------------------------------------------------------------------------


def test_control_messages_round_trip() -> None:
    announcement = SendHeader(7, 1 << 40, 5, b"where")
    assert SendHeader.unpack(announcement.pack()) == announcement
    assert len(announcement.pack()) == p2p_protocol.SEND_HEADER_BYTES
    assert ControlMessage.unpack(ControlMessage(p2p_protocol.DONE, 3, 0).pack()) == ControlMessage(
        p2p_protocol.DONE, 3, 0
    )
    for data in (bytes(p2p_protocol.SEND_HEADER_BYTES), b"mfa1" + b"\xff" * (p2p_protocol.SEND_HEADER_BYTES - 4)):
        with pytest.raises(ProtocolError):
            SendHeader.unpack(data)
    for data in (
        bytes(p2p_protocol.WORD),
        ControlMessage(9, 0, 0).pack(),
        ControlMessage(p2p_protocol.OFFER, 0, 1 << 30).pack(),
    ):
        with pytest.raises(ProtocolError):
            ControlMessage.unpack(data)
    assert p2p_protocol.fits(bytes(200))
    assert not p2p_protocol.fits(bytes(p2p_protocol.SEND_HEADER_BYTES))


def test_control_message_tags_do_not_collide_with_user_tags() -> None:
    """Tags differ from each other and from those of the stages of collectives, which start at 2**30."""
    told = {p2p_protocol.announced(tag) for tag in (0, 1, p2p_protocol.MAX_TAG - 1)}
    talks = {
        p2p_protocol.exchange_tag(n, *pair) for n in (0, 1, p2p_protocol.MAX_EXCHANGES - 1) for pair in ((0, 1), (1, 0))
    }
    assert len(told) == 3
    assert len(talks) == 6
    assert max(told) < min(talks)
    assert max(talks) < 1 << 30


def test_wrong_minimum_size_setting_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MONARCH_RDMA_MIN_BYTES", "many")
    with pytest.raises(ValueError, match="MONARCH_RDMA_MIN_BYTES='many'"):
        eligibility.least()


_GROUP = """
import sys
import torch.distributed as dist
from monarch_backend._verbs import eligibility
for where in sys.argv[1:]:
    eligibility.usable.cache_clear()
    eligibility.DEVICES, eligibility.PACKAGES = where.split()[0], where.split()[1:]
    dist.init_process_group("monarch", store=dist.HashStore(), rank=0, world_size=1)
    print(eligibility.least(), sorted(name for name in sys.modules if name.startswith("monarch_backend.rdma"))[:1])
    dist.destroy_process_group()
"""


def test_rdma_is_not_imported_without_nics() -> None:
    """Without NICs the first group imports no RDMA code and opens no devices."""
    wheres = ["/proc/self nobody_has_this", "/nowhere os"]  # devices without a package, a package without devices
    done = subprocess.run([sys.executable, "-c", _GROUP, *wheres], capture_output=True, text=True, check=True)
    assert without_gloos_lines(done.stdout).splitlines() == ["0 []"] * 2


def test_group_with_a_bad_route_setting_is_refused() -> None:
    done = subprocess.run(
        [sys.executable, "-c", _GROUP, "/proc/self os"],
        capture_output=True,
        text=True,
        env={**os.environ, "MONARCH_RDMA_TRANSPORT": "pigeons"},
    )
    assert done.returncode == 1
    assert "ValueError: MONARCH_RDMA_TRANSPORT='pigeons': one of 'tcp', 'verbs', or unset" in done.stderr
