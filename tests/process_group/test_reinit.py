"""Default groups made one after the other in one program: on one port, on one store, in torchrun's restarts.

Each rank is a process that starts the next group at once and does not wait for other ranks in between.
"""

from __future__ import annotations

import contextlib
import datetime
import errno
import os
import socket
import time
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist

from monarch_backend.process_group import _c10d_internals, _store_host
from tests.process_group.test_rendezvous import _held_port
from tests.support.ranks import run_ranks

PATIENCE = datetime.timedelta(seconds=60)
# torch's client queries the resolver for names. A lost answer must not take long.
QUICK_RESOLVER = {"RES_OPTIONS": "timeout:1 attempts:1"}


@pytest.fixture
def port() -> Iterator[int]:
    with _held_port() as port:
        yield port


def _sum(members: list[int], group: Any, turn: int) -> None:
    x = torch.full((3,), dist.get_rank() + turn)
    dist.all_reduce(x, group=group)
    assert x.tolist() == [sum(members) + turn * len(members)] * 3


def _use(rank: int, size: int, turn: int) -> None:
    """Use the group in one of four ways: not at all, for a collective, or with subgroups that exclude some ranks."""
    everyone = list(range(size))
    kind = turn % 4
    if kind == 1:
        _sum(everyone, None, turn)
    elif kind == 2:
        for members in (everyone[:-1], everyone[1:]):
            group = dist.new_group(members)
            if rank in members:
                _sum(members, group, turn)
    elif kind == 3:
        world: Any = dist.group.WORLD
        group = world.split_group(everyone[1:])
        if group is not None:
            _sum(everyone[1:], group, turn)


def _on_one_port(rank: int, address: str, size: int, port: int, turns: int) -> None:
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    for turn in range(turns):
        dist.init_process_group("monarch", timeout=PATIENCE)
        _use(rank, size, turn)
        dist.destroy_process_group()
    _store_host._at_exit()  # called here because these ranks end without exit handlers


def test_ten_groups_on_one_port(port: int) -> None:
    run_ranks(_on_one_port, 3, 3, port, 10, backend=None, env=QUICK_RESOLVER)


@pytest.mark.slow
@pytest.mark.parametrize("size", [3, *(pytest.param(size, marks=pytest.mark.nightly) for size in (2, 4))])
def test_200_groups_on_one_port(size: int, port: int) -> None:
    run_ranks(_on_one_port, size, size, port, 200, backend=None, env=QUICK_RESOLVER)


def _on_one_store(rank: int, address: str, size: int, port: int, turns: int) -> None:
    root = dist.TCPStore("127.0.0.1", port, size, is_master=rank == 0, wait_for_workers=False)
    for turn in range(turns):
        store = dist.PrefixStore("mine", root)
        dist.init_process_group("monarch", store=store, rank=rank, world_size=size, timeout=PATIENCE)
        _use(rank, size, turn)
        dist.destroy_process_group()
    root.set(f"over/{rank}", "")
    root.wait([f"over/{other}" for other in range(size)], PATIENCE)
    root.set(f"ended/{rank}", "")
    if rank == 0:
        root.wait([f"ended/{other}" for other in range(size)], PATIENCE)


def test_ten_groups_on_one_store(port: int) -> None:
    run_ranks(_on_one_store, 3, 3, port, 10, backend=None, env=QUICK_RESOLVER)


def _same_subgroup_again(rank: int) -> None:
    """A subgroup's name is the hash of its ranks, and is free again after the group is destroyed."""
    for turn in range(5):
        group = dist.new_group([1, 2], use_local_synchronization=True) if rank else None
        if group is not None:
            _sum([1, 2], group, turn)
            dist.destroy_process_group(group)


def test_subgroup_of_same_name_made_again() -> None:
    run_ranks(_same_subgroup_again, 3)


def _host_leaves_first(rank: int, address: str, port: int, destroys: bool) -> None:
    marks = dist.FileStore(address.removeprefix("file://"), 3)
    dist.init_process_group("monarch", init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=3, timeout=PATIENCE)
    if rank == 0:
        dist.new_group([1, 2])
        dist.destroy_process_group()
        marks.set("left", "")
        start = time.monotonic()
        _store_host._at_exit()
        assert marks.check(["made/1", "made/2"])
        assert time.monotonic() - start < _store_host._AT_EXIT_S  # the wait ended because the other ranks were done
        return
    marks.wait(["left"], PATIENCE)
    _sum([1, 2], dist.new_group([1, 2]), 0)
    marks.set(f"made/{rank}", "")
    if destroys:
        dist.destroy_process_group()
    else:
        _store_host._at_exit()


@pytest.mark.parametrize("destroys", [True, False])
def test_store_outlives_group_of_its_host(port: int, destroys: bool) -> None:
    run_ranks(_host_leaves_first, 3, port, destroys, backend=None, env=QUICK_RESOLVER)


def _port_is_free_again(rank: int, address: str, port: int) -> None:
    dist.init_process_group("monarch", init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=2, timeout=PATIENCE)
    dist.destroy_process_group()
    end = time.monotonic() + _store_host._LONGEST_STAY_S - 10
    while rank == 0:
        with contextlib.suppress(OSError), socket.create_server(("127.0.0.1", port)):
            return
        assert time.monotonic() < end, os.strerror(errno.EADDRINUSE)
        time.sleep(0.02)


def test_port_is_free_once_all_ranks_have_left(port: int) -> None:
    run_ranks(_port_is_free_again, 2, port, backend=None, env=QUICK_RESOLVER)


def _stuck_in_constructor(rank: int, address: str, port: int) -> None:
    """Rank 1 is late and never connects. The other ranks have one timeout for both waits."""
    marks = dist.FileStore(address.removeprefix("file://"), 3)
    url = f"tcp://127.0.0.1:{port}"
    if rank == 1:
        marks.wait(["waiting/0", "waiting/2"], PATIENCE)
        time.sleep(2.5)

        def stuck(*_: Any) -> None:
            marks.wait(["failed/0", "failed/2"], PATIENCE)
            raise RuntimeError("no connections")

        _c10d_internals._make_gloo = stuck
        with pytest.raises(RuntimeError, match="no connections"):
            dist.init_process_group("monarch", init_method=url, rank=rank, world_size=3, timeout=PATIENCE)
        return
    marks.set(f"waiting/{rank}", "")
    start = time.monotonic()
    with pytest.raises(RuntimeError):
        dist.init_process_group(
            "monarch", init_method=url, rank=rank, world_size=3, timeout=datetime.timedelta(seconds=4)
        )
    assert time.monotonic() - start < 5.5
    marks.set(f"failed/{rank}", "")


@pytest.mark.slow
def test_constructor_and_rendezvous_share_one_timeout(port: int) -> None:
    run_ranks(_stuck_in_constructor, 3, port, backend=None, env=QUICK_RESOLVER)
