"""Work objects and features built on them: futures, errors, coalescing, functional collectives, completion hooks.

test_collectives.py tests the values. This module tests when and how they arrive.
"""

from __future__ import annotations

import datetime
import threading
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as funcol
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh

import monarch_backend
from monarch_backend import CollectiveArgumentError
from tests.process_group import reference
from tests.support.ranks import run_ranks

# torch 2.13 introduced these names and deprecates the old ones.
ALL_GATHER_SINGLE = getattr(dist, "all_gather_single", dist.all_gather_into_tensor)
REDUCE_SCATTER_SINGLE = getattr(dist, "reduce_scatter_single", dist.reduce_scatter_tensor)
coalescing_manager = dist.distributed_c10d._coalescing_manager


def _function(*names: str) -> Callable[..., Any]:
    """Return the first of these functional collectives that torch has. torch 2.13 renamed them."""
    return next(getattr(funcol, name) for name in names if hasattr(funcol, name))


all_gather = _function("all_gather_single", "all_gather_tensor")
all_gather_autograd = _function("all_gather_single_autograd", "all_gather_tensor_autograd")
all_gather_many = _function("all_gather_single_coalesced", "all_gather_into_tensor_coalesced")
reduce_scatter = _function("reduce_scatter_single", "reduce_scatter_tensor")
reduce_scatter_autograd = _function("reduce_scatter_single_autograd", "reduce_scatter_tensor_autograd")
reduce_scatter_many = _function("reduce_scatter_single_coalesced", "reduce_scatter_tensor_coalesced")


def _inputs(dtype: str = "float32", shape: tuple[int, ...] = (4, 2), salt: int = 0) -> list[Tensor]:
    """Return the inputs of all ranks of the default group."""
    return [reference.factors(rank, dtype, shape, salt).clone() for rank in range(dist.get_world_size())]


def _same(got: Tensor, want: Tensor) -> None:
    assert reference.same(got, want), f"got {got.tolist()}, want {want.tolist()}"


# Works ----------------------------------------------------------------------------------------------------------


def _every_collective(x: Tensor) -> dict[str, Callable[[], Any]]:
    size, rank = dist.get_world_size(), dist.get_rank()
    row = [torch.zeros_like(x) for _ in range(size)]
    large = torch.zeros(size * x.numel())
    return {
        "all_reduce": lambda: dist.all_reduce(x, async_op=True),
        "broadcast": lambda: dist.broadcast(x, 0, async_op=True),
        "reduce": lambda: dist.reduce(x, 0, async_op=True),
        "all_gather": lambda: dist.all_gather(row, x, async_op=True),
        "all_gather_single": lambda: ALL_GATHER_SINGLE(large, x, async_op=True),
        "gather": lambda: dist.gather(x, row if rank == 0 else None, async_op=True),
        "scatter": lambda: dist.scatter(x, row if rank == 0 else None, async_op=True),
        "reduce_scatter": lambda: dist.reduce_scatter(x, row, async_op=True),
        "reduce_scatter_single": lambda: REDUCE_SCATTER_SINGLE(x, large, async_op=True),
        "all_to_all": lambda: dist.all_to_all(row, [x] * size, async_op=True),
        "all_to_all_single": lambda: dist.all_to_all_single(large, large.clone(), async_op=True),
        "barrier": lambda: dist.barrier(async_op=True),
    }


COLLECTIVES = [
    *("all_reduce", "broadcast", "reduce", "all_gather", "all_gather_single", "gather", "scatter"),
    *("reduce_scatter", "reduce_scatter_single", "all_to_all", "all_to_all_single", "barrier"),
]


def _work(rank: int, name: str) -> None:
    start = _every_collective(torch.ones(6))[name]
    work = start()
    assert work.wait() is True
    assert work.is_completed()
    # A future of the work, with callbacks that run after the collective.
    ran: list[str] = []
    work = start()
    chain = work.get_future().then(lambda _: ran.append("first")).then(lambda _: ran.append("second"))
    chain.wait()
    assert ran == ["first", "second"]
    work.wait()
    assert work.is_completed()
    # A callback of the future.
    work, called = start(), threading.Event()
    work.get_future().add_done_callback(lambda _: called.set())
    assert called.wait(20)
    work.wait()


@pytest.mark.parametrize("name", COLLECTIVES)
@pytest.mark.parametrize("world_size", [1, 2])
def test_work_completes_with_its_result(pool, world_size: int, name: str) -> None:
    pool(world_size).run(_work, name)


def _reduce_scatter_twice(rank: int) -> None:
    """Gloo writes the output in wait(). A second wait() must not write it again."""
    output = torch.zeros(1)
    work = dist.reduce_scatter(output, [torch.ones(1), torch.ones(1)], async_op=True)
    if monarch_backend.routes()["cpu"].backend == "gloo":
        assert not work.is_completed()  # in shared memory it may be completed already
    work.wait()
    output.zero_()
    work.wait()
    assert output.item() == 0.0
    assert work.get_future().value()[0] is output


@pytest.mark.parametrize("shm", ["0", "1"])
def test_second_wait_has_no_effect(shm: str) -> None:
    run_ranks(_reduce_scatter_twice, 2, env={"MONARCH_SHM": shm})


def _value_of_the_future(rank: int) -> None:
    x = torch.tensor([rank + 1.0])
    future = dist.all_reduce(x, async_op=True).get_future()
    assert future.then(lambda done: done.value()[0] / 2).wait().item() == 1.5
    assert future.done()


def test_future_has_the_outputs(pool) -> None:
    pool(2).run(_value_of_the_future)


def _many_in_flight(rank: int) -> None:
    size = dist.get_world_size()
    tensors = [torch.full((n + 1,), float(rank + n)) for n in range(60)]
    works = [dist.all_reduce(x, async_op=True) for x in tensors]
    for work in reversed(works):
        work.wait()
    for n, x in enumerate(tensors):
        assert x.tolist() == [float(sum(r + n for r in range(size)))] * (n + 1)


@pytest.mark.parametrize("world_size", [2, 4])
def test_many_in_flight_waited_in_reverse(pool, world_size: int) -> None:
    pool(world_size).run(_many_in_flight)


def _dropped(rank: int) -> None:
    """A work without references still completes, and its tensors live until then."""
    for _ in range(20):
        dist.all_reduce(torch.ones(1000), async_op=True)
    x = torch.ones(1)
    dist.all_reduce(x)
    assert x.item() == 2.0


def test_dropped_works_complete(pool) -> None:
    pool(2).run(_dropped)


def _impatient(rank: int) -> None:
    """wait(timeout) raises. The collective continues, and is correct when the other rank enters it."""
    store = dist.group.WORLD.get_group_store()
    if rank == 1:
        store.wait(["given up"], datetime.timedelta(seconds=60))
    x = torch.ones(2)
    work = dist.all_reduce(x, async_op=True)
    if rank == 0:
        assert not work.is_completed()
        with pytest.raises(RuntimeError, match=r"[Tt]imed out"):
            work.wait(datetime.timedelta(milliseconds=100))
        store.set("given up", "1")
    work.get_future().wait()
    assert x.tolist() == [2.0, 2.0]


def test_wait_with_a_timeout_raises() -> None:
    run_ranks(_impatient, 2)


def _alone(rank: int, body: Callable[[Any], None]) -> None:
    """Rank 0 runs ``body(group)``. Rank 1 makes the group, calls nothing on it, and stays until rank 0 is done."""
    store = dist.group.WORLD.get_group_store()
    group = dist.new_group([0, 1], timeout=datetime.timedelta(seconds=1))
    if rank == 0:
        body(group)
        store.set("given up", "1")
    else:
        store.wait(["given up"], datetime.timedelta(seconds=60))


def _failing(group: Any) -> None:
    work = dist.all_reduce(torch.ones(2), group=group, async_op=True)
    future = work.get_future()
    called = threading.Event()
    future.add_done_callback(lambda _: called.set())
    chained = future.then(lambda done: done.value())
    with pytest.raises(RuntimeError, match=r"[Tt]imed out"):
        work.wait()
    assert work.is_completed()
    for failed in (future, chained):
        with pytest.raises(RuntimeError, match=r"[Tt]imed out"):
            failed.wait()
    assert called.wait(20)


def test_works_and_futures_raise_errors() -> None:
    run_ranks(_alone, 2, _failing)


# Coalescing -----------------------------------------------------------------------------------------------------


def _coalesced(rank: int, asynchronous: bool, dtype: str) -> None:
    size = dist.get_world_size()
    several = [_inputs(dtype, (4, 2), salt) for salt in range(5)]
    tensors = [inputs[rank].clone() for inputs in several]
    with coalescing_manager(async_ops=asynchronous) as manager:
        for x in tensors:
            dist.all_reduce(x, async_op=asynchronous)
    _finish(manager, asynchronous)
    for x, inputs in zip(tensors, several, strict=True):
        _same(x, reference.reduced("SUM", inputs))

    outputs = [torch.cat(inputs).zero_() for inputs in several]
    with coalescing_manager(async_ops=asynchronous) as manager:
        for output, inputs in zip(outputs, several, strict=True):
            ALL_GATHER_SINGLE(output, inputs[rank], async_op=asynchronous)
    _finish(manager, asynchronous)
    for output, inputs in zip(outputs, several, strict=True):
        _same(output, torch.cat(inputs))

    rows = [[_inputs(dtype, (3,), salt + to) for to in range(size)] for salt in range(5)]
    outputs = [torch.zeros_like(row[0][0]) for row in rows]
    with coalescing_manager(async_ops=asynchronous) as manager:
        for output, row in zip(outputs, rows, strict=True):
            REDUCE_SCATTER_SINGLE(output, torch.cat([to[rank] for to in row]), async_op=asynchronous)
    _finish(manager, asynchronous)
    for output, row in zip(outputs, rows, strict=True):
        _same(output, reference.reduced("SUM", row[rank]))


def _finish(manager: Any, asynchronous: bool) -> None:
    if asynchronous:
        manager.wait()


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "int64", "bool", "complex64"])
@pytest.mark.parametrize("asynchronous", [False, True], ids=["sync", "async"])
@pytest.mark.parametrize("world_size", [1, 2, 4])
def test_coalescing_manager(pool, world_size: int, asynchronous: bool, dtype: str) -> None:
    pool(world_size).run(_coalesced, asynchronous, dtype)


def _coalesced_with_a_device(rank: int) -> None:
    with pytest.raises(RuntimeError, match="without a device"):
        with coalescing_manager(device=torch.device("cpu")):
            raise AssertionError("the manager must not start")
    x = torch.ones(1)
    dist.all_reduce(x)  # runs at once: the failed manager does not collect it
    assert x.item() == 2.0


def test_coalescing_on_the_cpu_is_refused_and_forgotten(pool) -> None:
    pool(2).run(_coalesced_with_a_device)


# Functional collectives -----------------------------------------------------------------------------------------


def _functional(rank: int, dtype: str) -> None:
    size, world = dist.get_world_size(), dist.group.WORLD
    inputs = _inputs(dtype)
    x, before = inputs[rank], inputs[rank].clone()
    _same(funcol.broadcast(x, size - 1, world).clone(), inputs[-1])
    _same(all_gather(x, 0, world).clone(), torch.cat(inputs))
    _same(all_gather(x, 1, world).clone(), torch.cat(inputs, 1))
    many = all_gather_many([x, x[:2]], world)
    _same(many[0].clone(), torch.cat(inputs))
    _same(many[1].clone(), torch.cat([y[:2] for y in inputs]))
    even = torch.cat([y.chunk(size)[rank] for y in inputs])
    _same(funcol.all_to_all_single(x, None, None, world).clone(), even)
    sizes = [reference.split_sizes(r, size) for r in range(size)]
    whole = [reference.values(r, dtype, (sum(sizes[r]), 2)).clone() for r in range(size)]
    sent = [list(torch.split(tensor, split)) for tensor, split in zip(whole, sizes, strict=True)]
    got = funcol.all_to_all_single(whole[rank], [row[rank] for row in sizes], sizes[rank], world)
    _same(got.clone(), torch.cat(reference.exchanged(sent, rank)))
    shifted = funcol.permute_tensor(x.view(-1), [(r + 1) % size for r in range(size)], world)
    _same(shifted.clone(), inputs[(rank - 1) % size].view(-1))
    _same(x, before)


@pytest.mark.parametrize("dtype", reference.DTYPES)
@pytest.mark.parametrize("world_size", [2, 4])
def test_functional_moves(pool, world_size: int, dtype: str) -> None:
    pool(world_size).run(_functional, dtype)


def _functional_reductions(rank: int, dtype: str) -> None:
    size, world = dist.get_world_size(), dist.group.WORLD
    inputs = _inputs(dtype, (4, 4))
    x, before = inputs[rank], inputs[rank].clone()
    for op in reference.OPS:
        calls = {
            "all_reduce": lambda op=op: [funcol.all_reduce(x, op.lower(), world)],
            "coalesced": lambda op=op: funcol.all_reduce_coalesced([x, x[:2]], op.lower(), world),
            "reduce_scatter": lambda op=op: [
                reduce_scatter(x, op.lower(), 0, world),
                reduce_scatter(x, op.lower(), 1, world),
            ],
            "coalesced reduce_scatter": lambda op=op: reduce_scatter_many([x, x], op.lower(), [0, 1], world),
        }
        if not reference.reduces(dtype, op):
            # torch converts complex tensors to pairs of floats in reduce_scatter for every op, so no complex dtype is
            # refused there. For the other calls torch refuses complex: by name, or from 2.15 on as an unknown "op
            # value".
            unseen = "reduce_scatter" if dtype in reference.COMPLEX else ""
            for name, call in calls.items():
                if name == unseen:
                    continue
                with pytest.raises((CollectiveArgumentError, ValueError, RuntimeError), match=f"{op}|complex|op value"):
                    call()
            continue
        total = reference.reduced(op, inputs)
        pieces = [total.chunk(size)[rank], total.chunk(size, 1)[rank].contiguous()]
        wanted = {"all_reduce": [total], "coalesced": [total, total[:2]]}
        for name, call in calls.items():
            for got, want in zip(call(), wanted.get(name, pieces), strict=True):
                _same(got.clone(), want)
    _same(x, before)


@pytest.mark.parametrize("dtype", reference.DTYPES)
@pytest.mark.parametrize("world_size", [2, 4])
def test_functional_reductions(pool, world_size: int, dtype: str) -> None:
    pool(world_size).run(_functional_reductions, dtype)


def _gradients(rank: int) -> None:
    size, world = dist.get_world_size(), dist.group.WORLD
    weights = [torch.arange(4.0 * size) + 10 * r for r in range(size)]
    x = torch.ones(4, requires_grad=True)
    (all_gather_autograd(x, 0, world) * weights[rank]).sum().backward()
    _same(x.grad, sum(weights).chunk(size)[rank].contiguous())
    y = torch.ones(4 * size, requires_grad=True)
    (reduce_scatter_autograd(y, "sum", 0, world) * (rank + 1)).sum().backward()
    _same(y.grad, torch.cat([torch.full((4,), r + 1.0) for r in range(size)]))
    z = torch.ones(size, requires_grad=True)
    ones = [1] * size
    (funcol.all_to_all_single_autograd(z, ones, ones, world) * torch.tensor([10.0 * rank + 1] * size)).sum().backward()
    _same(z.grad, torch.tensor([10.0 * r + 1 for r in range(size)]))


@pytest.mark.parametrize("world_size", [2, 4])
def test_functional_gradients(pool, world_size: int) -> None:
    pool(world_size).run(_gradients)


def _functional_in_place(rank: int) -> None:
    """Functional collectives that replace dist.* in a compiled program."""
    size, world = dist.get_world_size(), dist.group.WORLD
    inputs = _inputs()
    x = inputs[rank].clone()
    funcol.all_reduce_inplace(x, "sum", world)
    _same(x, reference.reduced("SUM", inputs))
    large = torch.zeros(4 * size, 2)
    funcol.all_gather_tensor_inplace(large, inputs[rank], world)
    _same(large, torch.cat(inputs))
    small = torch.zeros(4 // size, 2)
    funcol.reduce_scatter_tensor_inplace(small, inputs[rank], "sum", world)
    _same(small, reference.reduced("SUM", inputs).chunk(size)[rank])
    row = [torch.zeros(4, 2) for _ in range(size)]
    funcol.all_gather_inplace(row, inputs[rank], world)
    _same(torch.cat(row), torch.cat(inputs))
    exchanged = torch.zeros(4, 2)
    funcol.all_to_all_inplace(exchanged, inputs[rank], None, None, world)
    _same(exchanged, torch.cat([y.chunk(size)[rank] for y in inputs]))


@pytest.mark.parametrize("world_size", [2, 4])
def test_functional_in_place(pool, world_size: int) -> None:
    pool(world_size).run(_functional_in_place)


def _functional_groups(rank: int) -> None:
    """Name the ranks by a group, by a mesh and by one dimension of a mesh."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("row", "column"))
    x = torch.tensor([2.0**rank])
    assert funcol.all_reduce(x, "sum", (mesh, 0)).item() == (5.0 if rank % 2 == 0 else 10.0)
    assert funcol.all_reduce(x, "sum", mesh["column"]).item() == (3.0 if rank < 2 else 12.0)
    assert funcol.all_reduce(x, "sum", mesh["row"].get_group()).item() == (5.0 if rank % 2 == 0 else 10.0)
    with warnings.catch_warnings():
        # torch warns that lists of ranks will no longer name a group.
        warnings.filterwarnings("ignore", "The combination of ranks . tag as process group", FutureWarning)
        assert funcol.all_reduce(x, "sum", [0, 1, 2, 3]).item() == 15.0


def test_functional_groups() -> None:
    run_ranks(_functional_groups, 4)


# Completion hooks -----------------------------------------------------------------------------------------------


def _hooks(rank: int) -> None:
    group = dist.new_group([0, 1])
    assert not group._has_hooks()
    seen: list[Any] = []
    more: list[Any] = []
    group._register_on_completion_hook(seen.append)
    group._register_on_completion_hook(more.append)
    assert group._has_hooks()
    x = torch.ones(4)
    for _ in range(3):
        dist.all_reduce(x, group=group)
    dist.broadcast(x, 0, group=group, async_op=True).wait()
    dist.all_gather([torch.zeros(4), torch.zeros(4)], x, group=group)
    dist.barrier(group)
    funcol.wait_tensor(all_gather(x, 0, group))
    dist.reduce_scatter(x, [x, x], group=group)
    group._wait_for_pending_works()
    assert sorted(info.seq for info in seen) == list(range(1, 9))
    in_order = [info.op_type for info in sorted(seen, key=lambda info: info.seq)]
    assert in_order[:6] == ["allreduce"] * 3 + ["broadcast", "allgather", "barrier"]
    assert "allgather" in in_order[6]
    assert in_order[7] == "reduce_scatter"
    assert len(more) == len(seen)
    for info in seen:
        assert info.time_started <= info.time_finished
        assert info.active_duration == info.time_finished - info.time_started
    dist.all_reduce(x, group=group, async_op=True)
    REDUCE_SCATTER_SINGLE(torch.zeros(4), torch.ones(8), group=group, async_op=True)
    dist.destroy_process_group(group)  # waits for the hooks of operations in progress
    assert len(seen) == len(more) == 10
    dist.all_reduce(x)  # this group has no hooks
    assert len(seen) == 10


def test_completion_hooks_run_once_per_work(pool) -> None:
    pool(2).run(_hooks)


def _hook_of_a_failure(group: Any) -> None:
    seen: list[Any] = []
    group._register_on_completion_hook(seen.append)
    with pytest.raises(RuntimeError):
        dist.all_reduce(torch.ones(1), group=group)
    group._wait_for_pending_works()
    assert [info.op_type for info in seen] == ["allreduce"]


def test_completion_hook_runs_after_a_failure() -> None:
    run_ranks(_alone, 2, _hook_of_a_failure)


def _fails_before_it_is_copied_back(group: Any) -> None:
    """Results that are copied back from a temporary tensor: wait() must still raise the operation's error."""
    x, strided, rows = torch.ones(4), torch.zeros(8, 2)[:, 0], [torch.zeros(4, 2)[:, 0] for _ in range(2)]
    gather = getattr(dist, "all_gather_single", dist.all_gather_into_tensor)
    for call in (
        lambda: gather(strided, x, group=group),
        lambda: gather(strided, x, group=group, async_op=True).wait(),
        lambda: dist.all_gather(rows, x, group=group),
        lambda: dist.all_to_all(rows, [x, x], group=group),
        lambda: dist.all_to_all([x, x], [x, x], group=group, async_op=True).wait(),
    ):
        with pytest.raises(RuntimeError, match=r"[Tt]imed? ?out|closed|closure"):
            call()


@pytest.mark.parametrize("shm", ["0", "1"])
def test_error_is_raised_when_results_are_copied_back(shm: str) -> None:
    run_ranks(_alone, 2, _fails_before_it_is_copied_back, env={"MONARCH_SHM": shm})
