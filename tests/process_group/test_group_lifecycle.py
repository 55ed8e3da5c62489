"""Lifecycle of groups: creation, names, options, timeouts, splits, close, and no leaks.

test_collectives.py tests results of collectives, test_bad_input.py wrong arguments.
"""

from __future__ import annotations

import contextlib
import datetime
import gc
import itertools
import os
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d as c10d

import monarch_backend
from monarch_backend import GroupClosedError, NoRouteError, RankFailedError
from monarch_backend._core.torch_version import torch_version
from tests.support.ranks import init, run_ranks

SECOND = datetime.timedelta(seconds=1)
# torch 2.14 made this function public.
set_timeout = getattr(dist, "set_timeout", c10d._set_pg_timeout)


def _total(group: Any = None, value: float = 1.0) -> float:
    x = torch.tensor([value])
    dist.all_reduce(x, group=group)
    return float(x.item())


# Creation of groups ---------------------------------------------------------------------------------------------


def _new_groups(rank: int) -> None:
    group = dist.new_group([2, 0], group_desc="evens")
    if rank in (0, 2):
        assert dist.get_process_group_ranks(group) == [0, 2]  # sorted, whatever order the caller passed
        assert (group.rank(), group.size()) == (rank // 2, 2)
        assert dist.get_rank(group) == rank // 2
        assert group.group_desc == "evens"
        assert _total(group, rank + 1.0) == 4.0
        dist.destroy_process_group(group)
    else:
        assert group is dist.GroupMember.NON_GROUP_MEMBER
        assert dist.get_rank(group) == -1
    assert _total() == 4.0


def test_new_group(pool) -> None:
    pool(4).run(_new_groups)


def _local_synchronization(rank: int) -> None:
    """Only the group's members call new_group. The other ranks do not take part."""
    if rank in (1, 3):
        group = dist.new_group([1, 3], use_local_synchronization=True)
        assert _total(group, float(rank)) == 4.0
        dist.destroy_process_group(group)
    dist.barrier()


def test_new_group_by_its_members_only() -> None:
    # Fresh ranks: torch names such a group by the number of earlier groups, which must be equal on all members.
    run_ranks(_local_synchronization, 4)


def _subgroups(rank: int) -> None:
    mine, everyone = dist.new_subgroups(group_size=2)
    assert len(everyone) == 2
    assert dist.get_process_group_ranks(mine) == ([0, 1] if rank < 2 else [2, 3])
    assert _total(mine, rank) == (1.0 if rank < 2 else 5.0)
    crossed, _ = dist.new_subgroups_by_enumeration([[0, 2], [1, 3]])
    assert dist.get_process_group_ranks(crossed) == ([0, 2] if rank % 2 == 0 else [1, 3])
    assert _total(crossed, rank) == (2.0 if rank % 2 == 0 else 4.0)
    for group in (mine, crossed):
        dist.destroy_process_group(group)


def test_new_subgroups(pool) -> None:
    pool(4).run(_subgroups)


def _overlapping(rank: int) -> None:
    """Groups for all subsets of four ranks exist at the same time. They run asynchronous operations in turn."""
    subsets = [list(s) for n in range(1, 5) for s in itertools.combinations(range(4), n)]
    groups = [(subset, dist.new_group(subset)) for subset in subsets]
    mine = [(subset, group) for subset, group in groups if rank in subset]
    for _ in range(3):
        tensors = [torch.tensor([float(2**rank)]) for _ in mine]
        works = [dist.all_reduce(x, group=group, async_op=True) for x, (_, group) in zip(tensors, mine, strict=True)]
        for work in reversed(works):
            work.wait()
        assert [x.item() for x in tensors] == [sum(2.0**r for r in subset) for subset, _ in mine]
    for _, group in mine:
        dist.destroy_process_group(group)


def test_overlapping_groups(pool) -> None:
    pool(4).run(_overlapping)


def _many(rank: int) -> None:
    groups = [dist.new_group([0, 1]) for _ in range(50)]
    works = []
    for number, group in enumerate(groups):
        x = torch.tensor([float(number)])
        works.append((x, number, dist.all_reduce(x, group=group, async_op=True)))
    for x, number, work in works:
        work.wait()
        assert x.item() == 2.0 * number
    assert len({group.group_name for group in groups}) == 50
    for group in groups:
        dist.destroy_process_group(group)


@pytest.mark.slow
def test_fifty_live_groups_work(pool) -> None:
    pool(2).run(_many)


# Splitting ------------------------------------------------------------------------------------------------------


def _split(rank: int) -> None:
    world = dist.group.WORLD
    half = world.split_group([0, 2] if rank % 2 == 0 else [1, 3])
    assert type(half) is type(world)
    assert (half.rank(), half.size()) == (rank // 2, 2)
    x = torch.tensor([float(rank)])
    half.allreduce([x]).wait()
    assert x.item() == (2.0 if rank % 2 == 0 else 4.0)
    assert {device: route.backend for device, route in monarch_backend.routes(half).items()}["cpu"] == "shm"
    single = half.split_group([0])
    assert (single is None) == (half.rank() == 1)
    if single is not None:
        single.allreduce([x]).wait()
        single.shutdown()
    some = world.split_group([0, 1, 3])
    assert (some is None) == (rank == 2)
    if some is not None:
        gathered = torch.zeros(3)
        some._allgather_base(gathered, torch.tensor([float(rank)])).wait()
        assert gathered.tolist() == [0.0, 1.0, 3.0]
        some.shutdown()
    half.shutdown()
    assert _total() == 4.0


def test_split_group_gives_working_groups(pool) -> None:
    pool(4).run(_split)


def _torchs_split(rank: int) -> None:
    if torch_version() < (2, 15):
        # This torch raises before it calls a backend. If this fails, an earlier release than 2.15 supports splitting.
        with pytest.raises(RuntimeError, match=r"No device associated|does not support splitting"):
            dist.split_group(split_ranks=[[0], [1]])
        return
    half = dist.split_group(split_ranks=[[0, 2], [1, 3]])
    assert type(half) is type(dist.group.WORLD)
    assert _total(half, float(rank)) == (2.0 if rank % 2 == 0 else 4.0)
    assert dist.get_process_group_ranks(half) == ([0, 2] if rank % 2 == 0 else [1, 3])
    dist.destroy_process_group(half)


@pytest.mark.skipif(torch.accelerator.is_available(), reason="torch before 2.15 refuses where there is no accelerator")
def test_torch_split_group_on_cpu_groups() -> None:
    run_ranks(_torchs_split, 4)


# Options, names, routes ---------------------------------------------------------------------------------------


def _options(rank: int) -> None:
    group = dist.new_group([0, 1], pg_options=monarch_backend.Options())
    assert _total(group) == 2.0
    dist.destroy_process_group(group)
    for wrong in (object(), 5, {"cuda": None}):
        with pytest.raises(TypeError, match=r"belongs to no route of backend 'monarch'.*Options"):
            dist.new_group([0, 1], pg_options=wrong)
    assert _total() == 2.0


def test_options_reach_the_group(pool) -> None:
    pool(2).run(_options)


def _options_at_init(rank: int, address: str) -> None:
    init(rank, 2, address, pg_options=monarch_backend.Options(by_device={}))
    assert _total() == 2.0
    dist.destroy_process_group()


def test_options_of_the_default_group() -> None:
    run_ranks(_options_at_init, 2, backend=None)


def _names(rank: int) -> None:
    world = dist.group.WORLD
    assert dist.get_backend() == "monarch"
    assert dist.get_backend_config() == "cpu:monarch,cuda:monarch"
    assert world.name() == "monarch"
    assert world.group_name == "0"
    assert world.group_desc == "default_pg"
    assert torch.device("cpu") in world._device_types
    assert world._get_backend(torch.device("cpu")).name() == "gloo"
    group = dist.new_group([0, 1])
    assert dist.get_backend(group) == "monarch"
    assert group.name() == "monarch"
    assert group.group_name != world.group_name
    found = monarch_backend.routes(group)
    assert found["cpu"].device == "cpu" and found["cpu"].backend == "shm" and found["cpu"].available
    assert str(found["cpu"]).startswith("cpu -> shm (")
    assert monarch_backend.routes() == monarch_backend.routes(world)
    dist.destroy_process_group(group)


def test_group_names_and_routes_are_reported() -> None:
    run_ranks(_names, 2)


def _sequence_numbers(rank: int) -> None:
    group = dist.new_group([0, 1])
    start = group._get_sequence_number_for_group()
    for _ in range(3):
        _total(group)
    assert group._get_sequence_number_for_group() == start + 3
    dist.barrier(group)
    assert group._get_sequence_number_for_group() == start + 4
    group._set_sequence_number_for_group()
    dist.destroy_process_group(group)


def test_sequence_numbers(pool) -> None:
    pool(2).run(_sequence_numbers)


# The backend string ---------------------------------------------------------------------------------------------


def _strings(rank: int, address: str, backend: str, config: str, routes: dict[str, str], missing: str) -> None:
    init(rank, 2, address, backend)
    world = dist.group.WORLD
    assert dist.get_backend_config() == config
    known = {device: route.backend for device, route in world._known_routes().items()}
    assert {device: known[device] for device in routes} == routes
    assert _total() == 2.0
    group = dist.new_group([0, 1])
    assert _total(group) == 2.0
    if not torch.cuda.is_available():
        with pytest.raises(NoRouteError, match=f"(?i){missing}"):
            world._get_backend(torch.device("cuda"))
    dist.destroy_process_group()


@pytest.mark.parametrize(
    ("backend", "config", "routes", "missing"),
    [
        ("monarch", "cpu:monarch,cuda:monarch", {"cpu": "shm", "cuda": "nccl"}, "GPU"),
        ("MONARCH", "cpu:monarch,cuda:monarch", {"cpu": "shm", "cuda": "nccl"}, "GPU"),
        ("cpu:monarch", "cpu:monarch", {"cpu": "shm"}, "cuda"),
        ("cpu:monarch,cuda:nccl", "cpu:monarch,cuda:nccl", {"cpu": "shm", "cuda": "nccl"}, "cuda"),
        ("cpu:gloo,cuda:monarch", "cpu:gloo,cuda:monarch", {"cpu": "gloo", "cuda": "nccl"}, "GPU"),
    ],
)
def test_backend_string(backend: str, config: str, routes: dict[str, str], missing: str) -> None:
    run_ranks(_strings, 2, backend, config, routes, missing, backend=None)


# MONARCH_DEBUG --------------------------------------------------------------------------------------------------


@contextlib.contextmanager
def _stderr() -> Iterator[Callable[[], str]]:
    """Capture what Python and C++ write to descriptor 2. The yielded function returns the text after the block."""
    with tempfile.TemporaryFile() as file, os.fdopen(os.dup(2), "w", buffering=1) as real:
        os.dup2(file.fileno(), 2)
        pytests, sys.stderr = sys.stderr, sys.__stderr__  # pytest replaces sys.stderr with its own file
        text = ""
        try:
            yield lambda: text
        finally:
            sys.stderr.flush()
            sys.stderr = pytests
            os.dup2(real.fileno(), 2)
            file.seek(0)
            text = file.read().decode()


def _says(rank: int, address: str) -> str:
    with _stderr() as read:
        init(rank, 2, address)
        for _ in range(3):
            _total()
        group = dist.new_group([0, 1])
        for _ in range(3):
            _total(group)
        dist.destroy_process_group()
    return read()


def test_debug_output_is_one_line_for_each_group_and_device() -> None:
    for rank, text in enumerate(run_ranks(_says, 2, backend=None, env={"MONARCH_DEBUG": "1"})):
        said = [line for line in text.splitlines() if "monarch rank" in line and "cpu -> shm" in line]
        assert len(said) == 2, text
        assert all(line.startswith(f"[monarch rank {rank}/2 pid ") for line in said)
        assert len({line.partition("] ")[2].split(":")[0] for line in said}) == 2  # the groups' names


@pytest.mark.parametrize("value", ["", "0"])
def test_no_debug_output_unless_asked(value: str) -> None:
    for text in run_ranks(_says, 2, backend=None, env={"MONARCH_DEBUG": value}):
        assert "monarch" not in text


# Timeouts -------------------------------------------------------------------------------------------------------


def _assert_timeout_on_rank_0(rank: int, start: Callable[[], Any]) -> None:
    """Rank 0 calls ``start`` and must get an error after about a second. The other ranks wait for that."""
    store = dist.group.WORLD.get_group_store()
    if rank == 0:
        begun = time.monotonic()
        with pytest.raises(RuntimeError, match=r"[Tt]imed? ?out|[Tt]imeout"):
            start()
        assert time.monotonic() - begun < 20
        store.set("given up", "1")
    else:
        store.wait(["given up"], datetime.timedelta(seconds=60))


def _group_timeout(rank: int) -> None:
    group = dist.new_group([0, 1], timeout=SECOND)
    _total(group)
    _assert_timeout_on_rank_0(rank, lambda: _total(group))
    assert _total() == 2.0  # the default group has its own timeout and is not affected


def test_timeout_of_one_group() -> None:
    run_ranks(_group_timeout, 2)


def _changed_timeout(rank: int) -> None:
    group = dist.new_group([0, 1])
    set_timeout(SECOND, group)
    _total(group)
    _assert_timeout_on_rank_0(rank, lambda: _total(group))


def test_timeout_set_later_applies() -> None:
    run_ranks(_changed_timeout, 2)


def _timeout_of_a_receive(rank: int) -> None:
    group = dist.new_group([0, 1], timeout=SECOND)
    _assert_timeout_on_rank_0(rank, lambda: dist.recv(torch.zeros(1), 1, group=group))


def test_receive_times_out() -> None:
    run_ranks(_timeout_of_a_receive, 2)


# Closing --------------------------------------------------------------------------------------------------------


def _closings(rank: int) -> None:
    for close, word in (
        (dist.destroy_process_group, "destroyed"),
        (lambda group: group.shutdown(), "destroyed"),
        (lambda group: group.abort(), "aborted"),
        (c10d._abort_process_group, "aborted"),
    ):
        group = dist.new_group([0, 1])
        assert _total(group) == 2.0
        close(group)
        for use in (
            lambda group=group: group.allreduce([torch.ones(1)]),
            lambda group=group: group.broadcast([torch.ones(1)], 0),
            lambda group=group: group.send([torch.ones(1)], 1 - rank, 0),
            lambda group=group: group.recv_anysource([torch.ones(1)], 0),
            lambda group=group: group.barrier(),
        ):
            with pytest.raises(GroupClosedError, match=f"{word}; make a new one.*rank {rank} of 2"):
                use()
        group.shutdown()  # a second close has no effect
        group.abort()
    assert _total() == 2.0


def test_use_after_close_raises() -> None:
    run_ranks(_closings, 2)


def _aborted_for_a_reason(rank: int) -> None:
    group: Any = dist.group.WORLD
    dist.barrier()  # the other rank may still be connecting
    if rank == 1:
        group.abort("gpus 2 was killed\nby signal 9")
    else:
        text = r"rank 1 \(host \S+, pid \d+\) aborted: gpus 2 was killed by signal 9, and closed the group without"
        with pytest.raises(RankFailedError, match=text):
            dist.barrier()


def test_reason_of_abort_is_named_at_peers() -> None:
    run_ranks(_aborted_for_a_reason, 2)


def _counts() -> tuple[int, int]:
    """Return the numbers of open descriptors and threads of this process."""
    return len(os.listdir("/proc/self/fd")), len(os.listdir("/proc/self/task"))


def _no_more_than(first: tuple[int, int]) -> None:
    """Wait until Gloo's threads and connections have ended, which happens shortly after the group is released."""
    deadline = time.monotonic() + 20
    while any(now > then for now, then in zip(_counts(), first, strict=True)):
        assert time.monotonic() < deadline, f"descriptors and threads: {first} at first, {_counts()} now"
        gc.collect()
        time.sleep(0.01)


def _again_and_again(rank: int, address: str) -> None:
    first = None
    for turn in range(10):
        init(rank, 2, f"{address}-{turn}")
        _total()
        group = dist.new_group([0, 1])
        _total(group)
        dist.barrier()
        del group
        dist.destroy_process_group()
        assert not dist.is_initialized()
        if turn == 1:  # the first group creates resources that remain open
            first = _counts()
    assert first is not None
    _no_more_than(first)
    assert threading.active_count() == 1


def test_ten_inits_and_destroys_leave_no_resources() -> None:
    run_ranks(_again_and_again, 2, backend=None)


def _group_after_group(rank: int) -> None:
    first = None
    for _ in range(10):
        group = dist.new_group([0, 1])
        _total(group)
        dist.destroy_process_group(group)
        del group
        first = first or _counts()
    assert first is not None
    _no_more_than(first)


def test_many_successive_groups_leave_no_resources() -> None:
    run_ranks(_group_after_group, 2)
