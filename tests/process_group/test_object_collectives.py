"""Object collectives: pickles of any size and type, in the default group and in sub-groups.

They use torch's collectives of bytes and sizes, which test_collectives.py tests.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import pytest
import torch
import torch.distributed as dist


@dataclass(frozen=True)
class Thing:
    """A class that pickle stores by reference to this module."""

    rank: int
    text: str


def _objects(rank: int) -> list[Any]:
    """Return objects that differ between ranks, with very different sizes."""
    return [None, {"rank": rank, "list": [1, (2.5, "three")]}, Thing(rank, "x" * 1000 * rank), b"\0" * (rank * 70_000)]


@contextlib.contextmanager
def _group_of(inside: list[int]) -> Iterator[Any]:
    """Make a group of these ranks, and destroy it at the end. Yield None on the other ranks."""
    group = dist.new_group(inside)
    if dist.get_rank() not in inside:
        yield None
        return
    yield group
    dist.destroy_process_group(group)


def _gathers(rank: int, inside: list[int]) -> None:
    with _group_of(inside) as group:
        for index, mine in enumerate(_objects(rank) if group else []):
            everybody: list[Any] = [None] * len(inside)
            dist.all_gather_object(everybody, mine, group=group)
            assert everybody == [_objects(r)[index] for r in inside]
            root = inside[index % len(inside)]
            at_root: list[Any] = [None] * len(inside)
            dist.gather_object(mine, at_root if rank == root else None, dst=root, group=group)
            assert at_root == (everybody if rank == root else [None] * len(inside))


def _spreads(rank: int, inside: list[int]) -> None:
    with _group_of(inside) as group:
        for root in inside if group else []:
            received = _objects(root) if rank == root else [None] * 4
            dist.broadcast_object_list(received, src=root, group=group)
            assert received == _objects(root)
            rows = [(root, to, Thing(to, "y" * 300 * to)) for to in inside]
            mine: list[Any] = [None]
            dist.scatter_object_list(mine, rows if rank == root else None, src=root, group=group)
            assert mine == [rows[inside.index(rank)]]


def _in_the_default_group(rank: int) -> None:
    everybody: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(everybody, Thing(rank, "here"))
    assert everybody == [Thing(r, "here") for r in range(dist.get_world_size())]


@pytest.mark.parametrize("world_size", [1, 2, 4])
def test_default_group(pool, world_size: int) -> None:
    pool(world_size).run(_in_the_default_group)


GROUPS = [(1, [0]), (2, [0, 1]), (2, [1]), (4, [0, 1, 2, 3]), (4, [1, 2, 3])]


@pytest.mark.parametrize(("world_size", "inside"), GROUPS)
def test_gathered_objects_arrive(pool, world_size: int, inside: list[int]) -> None:
    pool(world_size).run(_gathers, inside)


@pytest.mark.parametrize(("world_size", "inside"), GROUPS)
def test_broadcast_and_scattered_objects_arrive(pool, world_size: int, inside: list[int]) -> None:
    pool(world_size).run(_spreads, inside)


def _sends(rank: int) -> None:
    if rank == 1:
        dist.send_object_list(_objects(1), dst=2)
        dist.send_object_list([Thing(1, "by rank in the group")], group_dst=2)
    if rank == 2:
        received: list[Any] = [None] * 4
        assert dist.recv_object_list(received, src=1) == 1
        assert received == _objects(1)
        one: list[Any] = [None]
        assert dist.recv_object_list(one, group_src=1) == 1
        assert one == [Thing(1, "by rank in the group")]


def test_sent_objects_arrive(pool) -> None:
    pool(4).run(_sends)


def _tensors(rank: int) -> None:
    mine = {"weights": torch.full((3,), float(rank)), "steps": torch.tensor(rank, dtype=torch.int16)}
    everybody: list[Any] = [None, None]
    dist.all_gather_object(everybody, mine)
    assert [row["weights"].tolist() for row in everybody] == [[0.0] * 3, [1.0] * 3]
    assert [row["steps"].item() for row in everybody] == [0, 1]
    assert everybody[0]["steps"].dtype is torch.int16


def test_tensors_inside_objects_arrive(pool) -> None:
    pool(2).run(_tensors)


def _with_device(rank: int) -> None:
    received: list[Any] = [{"a": 1}] if rank == 0 else [None]
    dist.broadcast_object_list(received, src=0, device=torch.device("cpu"))
    assert received == [{"a": 1}]


def test_device_argument(pool) -> None:
    pool(2).run(_with_device)
