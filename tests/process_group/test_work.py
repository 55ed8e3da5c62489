"""What a collective returns and what happens afterwards: works, futures, coalescing, functional forms, hooks."""

from __future__ import annotations

import datetime
import threading
import warnings
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as fc

from tests.support.ranks import run_ranks

GATHER = getattr(dist, "all_gather_single", dist.all_gather_into_tensor)
SCATTER = getattr(dist, "reduce_scatter_single", dist.reduce_scatter_tensor)


def _works(rank: int) -> None:
    x = torch.full((4,), float(rank + 1))
    work = dist.all_reduce(x, async_op=True)
    assert work.wait(datetime.timedelta(seconds=20))
    assert work.is_completed()
    assert work.is_success()
    assert x.tolist() == [3.0] * 4
    called = threading.Event()
    future = dist.all_reduce(x, async_op=True).get_future()
    chained = future.then(lambda f: f.value()[0] * 2).then(lambda f: (called.set(), f.value())[1])
    assert chained.wait().tolist() == [12.0] * 4
    assert called.is_set()


def test_works_and_futures(pool) -> None:
    pool(2).run(_works)


def _temporaries(rank: int) -> None:
    # The caller's tensors, and the views we make of them, may be gone before the work is done.
    kept = []
    for index in range(200):
        x = torch.full((257,), index % 100, dtype=torch.int16)
        outputs = [torch.empty_like(x) for _ in range(2)]
        kept.append((dist.all_gather(outputs, x, async_op=True), outputs, index % 100))
        del x
    for work, outputs, value in kept:
        work.wait()
        assert all(bool((t == value).all()) for t in outputs)


def test_async_works_keep_their_tensors(pool) -> None:
    pool(2).run(_temporaries)


def _coalesced(rank: int, asynchronous: bool) -> None:
    tensors = [torch.full((3,), float(rank + i)) for i in range(3)]
    with dist._coalescing_manager(async_ops=asynchronous) as manager:
        for tensor in tensors:
            dist.all_reduce(tensor)
    if asynchronous:
        manager.wait()
    assert [t[0].item() for t in tensors] == [1.0, 3.0, 5.0]
    outputs = [torch.empty(4) for _ in range(2)]
    with dist._coalescing_manager(async_ops=asynchronous) as manager:
        for index, output in enumerate(outputs):
            GATHER(output, torch.full((2,), float(rank + index)))
    if asynchronous:
        manager.wait()
    assert [o.tolist() for o in outputs] == [[0, 0, 1, 1], [1, 1, 2, 2]]
    pieces = [torch.empty(2) for _ in range(2)]
    with dist._coalescing_manager(async_ops=asynchronous) as manager:
        for index, piece in enumerate(pieces):
            SCATTER(piece, torch.arange(4.0) + index)
    if asynchronous:
        manager.wait()
    assert [p.tolist() for p in pieces] == [[4.0 * rank, 4.0 * rank + 2], [4.0 * rank + 2, 4.0 * rank + 4]]


@pytest.mark.parametrize("asynchronous", [False, True])
def test_coalescing(pool, asynchronous: bool) -> None:
    pool(2).run(_coalesced, asynchronous)


def _functional(rank: int) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)  # torch 2.13 renames these; every release has the old names
        _functional_forms(rank)


def _functional_forms(rank: int) -> None:
    group = dist.group.WORLD
    x = torch.arange(4.0) + rank
    assert fc.all_reduce(x, "sum", group).tolist() == [1.0, 3.0, 5.0, 7.0]
    assert fc.all_gather_tensor(x, 0, group).shape == (8,)
    assert fc.reduce_scatter_tensor(x, "sum", 0, group).tolist() == [[1.0, 3.0], [5.0, 7.0]][rank]
    assert fc.broadcast(x, 1, group).tolist() == [1.0, 2.0, 3.0, 4.0]
    exchanged = fc.all_to_all_single(x, [2, 2], [2, 2], group)
    assert exchanged.tolist() == [[0.0, 1.0, 1.0, 2.0], [2.0, 3.0, 3.0, 4.0]][rank]
    assert [t.tolist() for t in fc.all_reduce_coalesced([x, x * 2], "sum", group)][1] == [2.0, 6.0, 10.0, 14.0]
    assert [t.shape for t in fc.all_gather_into_tensor_coalesced([x, x], group)] == [(8,), (8,)]
    pieces = fc.reduce_scatter_tensor_coalesced([x, x], "sum", [0, 0], group)
    assert [p.tolist() for p in pieces] == [[[1.0, 3.0], [5.0, 7.0]][rank]] * 2
    y = x.clone().requires_grad_()
    fc.all_gather_tensor_autograd(y, 0, group).sum().backward()
    assert y.grad is not None
    assert y.grad.tolist() == [2.0] * 4


def test_functional_collectives(pool) -> None:
    pool(2).run(_functional)


def _hooked(rank: int) -> list[tuple[str, int]]:
    seen: list[Any] = []
    group = dist.new_group([0, 1])
    group._register_on_completion_hook(seen.append)
    x = torch.ones(2)
    dist.all_reduce(x, group=group)
    dist.broadcast(x, 0, group=group)
    group._wait_for_pending_works()
    assert group._has_hooks()
    for info in seen:
        assert info.time_started <= info.time_finished
        assert info.active_duration >= datetime.timedelta(0)
    dist.destroy_process_group(group)
    return [(info.op_type, info.seq) for info in seen]


def test_completion_hooks(pool) -> None:
    # Gloo has none; destroy_process_group waits for them only if `type(pg) is ProcessGroup`, ours waits in shutdown.
    assert pool(2).run(_hooked) == [[("allreduce", 1), ("broadcast", 2)]] * 2


def _hook_that_fails(rank: int) -> None:
    group = dist.new_group([0, 1])

    def broken(_info: object) -> None:
        raise ValueError("hook")

    group._register_on_completion_hook(broken)
    x = torch.ones(2)
    dist.all_reduce(x, group=group)
    group._wait_for_pending_works()  # counted although it raised
    assert x.tolist() == [2.0, 2.0]


def test_a_failing_hook_does_not_hang_the_group() -> None:
    run_ranks(_hook_that_fails, 2)
