"""Collectives of the controller's plain tensors: each rank of the group contributes the same values."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as funcol

from monarch_backend.dtensor import RemoteTensorError

pytestmark = pytest.mark.filterwarnings("ignore::FutureWarning")
R = dist.ReduceOp
VALUES = [3, 5, 0]
REDUCTIONS: dict[Any, Callable[[int, int], int]] = {
    R.SUM: lambda value, size: sum([value] * size),
    R.AVG: lambda value, size: sum([value] * size) // size,
    R.MIN: lambda value, _: value,
    R.MAX: lambda value, _: value,
    R.PRODUCT: lambda value, size: math.prod([value] * size),
    R.BAND: lambda value, _: value,
    R.BOR: lambda value, _: value,
    R.BXOR: lambda value, size: value if size == 3 else 0,
}
INTEGERS = [torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64, torch.uint16, torch.uint32, torch.uint64]
FLOATS = [torch.float16, torch.bfloat16, torch.float32, torch.float64, torch.complex64]


@pytest.mark.parametrize("op", REDUCTIONS, ids=lambda op: op.name)
@pytest.mark.parametrize("name", ["2", "3", "2x2"])
def test_all_reduce_of_the_controllers_tensor_gives_each_ranks_value(mesh_of: Any, name: str, op: Any) -> None:
    mesh = mesh_of(name)
    group = mesh.get_group(mesh.ndim - 1)
    size = 3 if name == "3" else 2
    expected = [REDUCTIONS[op](each, size) for each in VALUES]
    is_bitwise = op.name.startswith("B")
    for dtype in [*INTEGERS, *(() if is_bitwise else FLOATS)]:
        if dtype.is_complex and op not in (R.SUM, R.AVG):  # torch itself refuses these
            continue
        x = torch.tensor(VALUES, dtype=dtype)
        assert dist.all_reduce(x, op, group=group) is None
        assert x.dtype == dtype
        assert x.tolist() == expected
    x = torch.tensor([True, False])
    dist.all_reduce(x, op, group=group)
    assert x.tolist() == [op is not R.BXOR or size == 3, False]


def test_all_reduce_of_the_default_group_counts_all_ranks(mesh_of: Any) -> None:
    mesh_of("2")
    flag = torch.tensor(1.0)
    work = dist.all_reduce(flag, async_op=True)
    assert work.wait()
    assert flag.item() == dist.get_world_size()


def test_all_reduce_of_overlapping_views_reads_before_it_writes(mesh_of: Any) -> None:
    group = mesh_of("2").get_group()
    x, a = torch.ones(2), torch.arange(4.0)
    dist.all_reduce_coalesced([x, x], group=group)
    dist.all_reduce_coalesced([a[:3], a[1:]], group=group)
    assert x.tolist() == [2, 2]
    assert a.tolist() == [0, 2, 4, 6]


def test_gathers_of_the_controllers_tensor_have_it_from_each_rank(mesh_of: Any) -> None:
    group = mesh_of("3").get_group()
    x = torch.tensor([[1.0, 2.0]])
    lists = [torch.zeros(1, 2) for _ in range(3)]
    dist.all_gather(lists, x, group=group)
    assert [each.tolist() for each in lists] == [[[1, 2]]] * 3
    for sizes in ((3, 2), (3, 1, 2)):
        whole = torch.zeros(sizes)
        whole.view(3, 1, 2)[0] = x
        dist.all_gather_into_tensor(whole, whole.view(3, 1, 2)[0], group=group)  # the input is a part of the output
        assert whole.flatten().tolist() == [1, 2] * 3
    coalesced = [[torch.zeros(1, 2), torch.zeros(1)] for _ in range(3)]
    dist.all_gather_coalesced(coalesced, [x, torch.ones(1)], group=group)
    assert [[one.tolist() for one in each] for each in coalesced] == [[[[1, 2]], [1]]] * 3
    with pytest.raises(RemoteTensorError, match="needs 3 outputs of these sizes"):
        dist.all_gather(lists[:2], x, group=group)
    with pytest.raises(RemoteTensorError, match="or one with room for all of them"):
        dist.all_gather_into_tensor(torch.zeros(2, 2), x, group=group)


def test_functional_collectives_of_the_controllers_tensor(mesh_of: Any) -> None:
    mesh = mesh_of("2")
    x = torch.tensor([1.0, 2.0])
    assert funcol.all_reduce(x, "sum", mesh).tolist() == [2, 4]
    assert funcol.all_reduce(x, "avg", mesh).tolist() == [1, 2]
    assert funcol.all_gather_tensor(x, 0, mesh).tolist() == [1, 2, 1, 2]
    assert funcol.broadcast(x, 1, mesh).tolist() == [1, 2]
    assert [each.tolist() for each in funcol.all_reduce_coalesced([x, x + 1], "sum", mesh)] == [[2, 4], [4, 6]]
    assert x.tolist() == [1, 2]
    for call in (funcol.reduce_scatter_tensor, lambda *_: funcol.all_to_all_single(x, None, None, mesh)):
        with pytest.raises(RemoteTensorError, match="do not all get the same result"):
            call(x, "sum", 0, mesh)


def test_reduce_broadcast_and_gather_of_the_controllers_tensor(mesh_of: Any) -> None:
    mesh_of("2")
    size = dist.get_world_size()
    x = torch.tensor([1.0, 2.0])
    dist.broadcast(x, src=1)
    assert x.tolist() == [1, 2]
    dist.reduce(x, dst=1)
    assert x.tolist() == [size, 2 * size]
    found = [torch.zeros(2) for _ in range(size)]
    dist.gather(x, found, dst=0)
    assert all(torch.equal(each, x) for each in found)
    with pytest.raises(ValueError, match=rf"rank {size} of a group of {size} ranks"):
        dist.broadcast(x, src=size)


def test_objects_of_the_controller_are_each_ranks(mesh_of: Any) -> None:
    """The source may differ from the controller's own rank, where torch itself would unpickle an empty buffer."""
    group = mesh_of("2").get_group()
    found: list[Any] = [None, None]
    dist.all_gather_object(found, {"a": 1}, group=group)
    assert found == [{"a": 1}] * 2
    for source in ({}, {"src": 1}, {"group_src": 1, "group": group}):
        objects = ["x", 3]
        dist.broadcast_object_list(objects, **source)
        assert objects == ["x", 3]


def test_arguments_that_differ_by_rank_are_refused_without_effect(mesh_of: Any) -> None:
    group = mesh_of("2").get_group()
    x, out = torch.ones(2), torch.zeros(2)
    for call in (
        lambda: dist.send(x, 1),
        lambda: dist.recv(out, 1),
        lambda: dist.batch_isend_irecv([dist.P2POp(dist.irecv, out, 1)]),
        lambda: dist.scatter(out, [x] * dist.get_world_size()),
        lambda: dist.reduce_scatter_tensor(out, torch.ones(4), group=group),
        lambda: dist.all_to_all_single(out, x, group=group),
    ):
        with pytest.raises(RemoteTensorError, match=r"do not all get the same result.*distribute_tensor"):
            call()
    with pytest.raises(RemoteTensorError, match=r"BAND .* torch\.float32: there is no such reduction"):
        dist.all_reduce(x, R.BAND, group=group)
    assert (x.tolist(), out.tolist()) == ([1, 1], [0, 0])


def test_a_group_of_one_rank_gives_its_input_to_itself(mesh_of: Any) -> None:
    mesh_of("2")
    group = dist.new_group([0])
    x = torch.tensor([1.0, 2.0])
    outs = [torch.zeros(2) for _ in range(4)]
    dist.reduce_scatter_tensor(outs[0], x, group=group)
    dist.all_to_all_single(outs[1], x, group=group)
    dist.all_to_all([outs[2]], [x], group=group)
    dist.reduce_scatter(outs[3], [x], group=group)
    assert [each.tolist() for each in outs] == [[1, 2]] * 4
