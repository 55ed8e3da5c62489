"""The compiled shortcuts of collectives: which calls take them, and that nobody can tell which way a call took."""

from __future__ import annotations

import gc
import os
import signal
import sys
import weakref
from collections.abc import Callable
from types import FrameType, FunctionType
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch._C import _distributed_c10d as c10d

from monarch_backend import CollectiveArgumentError, CollectiveMismatchError, RankFailedError
from monarch_backend.process_group import MonarchProcessGroup, _shm
from tests.support.ranks import RankFailedError as DeadRank
from tests.support.ranks import run_ranks

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="the shared-memory core is Linux's")

GATHER = getattr(dist, "all_gather_single", dist.all_gather_into_tensor)
SCATTER = getattr(dist, "reduce_scatter_single", dist.reduce_scatter_tensor)


def _calls(rank: int) -> dict[str, Callable[[], Any]]:
    x, two = torch.full((2,), rank + 1.0), torch.arange(4.0) + rank
    return {
        "all_reduce": lambda: dist.all_reduce(x),
        "all_reduce max": lambda: dist.all_reduce(x, op=dist.ReduceOp.MAX),
        "broadcast": lambda: dist.broadcast(x, 1),
        "reduce": lambda: dist.reduce(x, 1),
        "all_gather": lambda: dist.all_gather([torch.empty(2), torch.empty(2)], x),
        "all_gather_single": lambda: GATHER(torch.empty(4), x),
        "reduce_scatter_single": lambda: SCATTER(torch.empty(2), two),
        "all_to_all_single": lambda: dist.all_to_all_single(torch.empty(4), two),
        "barrier": lambda: dist.barrier(),
    }


def _interpreted(rank: int) -> dict[str, list[str]]:
    """The functions of our package that each call runs in the interpreter."""
    ran: dict[str, list[str]] = {}
    for name, call in _calls(rank).items():
        call()
        ours: list[str] = []

        def trace(frame: FrameType, _event: str, _arg: object, ours: list[str] = ours) -> None:
            if frame.f_globals["__name__"].startswith("monarch_backend."):
                ours.append(frame.f_code.co_name)

        sys.settrace(trace)
        try:
            call()
        finally:
            sys.settrace(None)
        ran[name] = ours
    return ran


def test_the_calls_of_most_programs_run_no_function_of_ours() -> None:
    for ran in run_ranks(_interpreted, 2):
        assert not any(ran.values()), ran
        assert len(ran) == 9


def _ways(rank: int) -> list[bool]:
    """Results by the shortcut and by the method, for what shortcuts take and for what they don't."""
    group = dist.group.WORLD
    method = type(group).allreduce
    same = []
    for dtype in (torch.float64, torch.bfloat16, torch.float8_e4m3fn, torch.int16, torch.bool, torch.complex64):
        for op in ("SUM", "AVG", "PRODUCT", "MIN", "MAX", "BAND"):
            results = []
            for call in (group.allreduce, lambda *a: method(group, *a)):
                x = (torch.arange(1, 7) * (rank + 1)).to(torch.float32).to(dtype)
                opts = dist.AllreduceOptions()
                opts.reduceOp, opts.asyncOp = getattr(dist.ReduceOp, op), False
                try:
                    work = call([x], opts)
                    results.append(x.view(torch.uint8).tolist())
                    if work is not None:
                        work.wait()
                except CollectiveArgumentError as error:
                    results.append(str(error))
            same.append(results[0] == results[1])
    return same


def test_both_ways_give_the_same() -> None:
    for same in run_ranks(_ways, 2):
        assert len(same) == 36
        assert all(same)


class _Sub(torch.Tensor):
    """A tensor with a type of its own."""


def _passed_on(rank: int) -> list[str]:
    """Calls that mean more than a shortcut knows; what is wrong is said in words."""
    said = []

    def refused(call: Callable[[], Any]) -> None:
        with pytest.raises(CollectiveArgumentError) as caught:
            call()
        said.append(str(caught.value).partition("\n")[0])

    x = torch.arange(6.0).view(2, 3)
    y = x.t()
    dist.all_reduce(y)  # not contiguous, and dense
    assert torch.equal(y, (2 * torch.arange(6.0)).view(2, 3).t())
    sub = torch.ones(2).as_subclass(_Sub)
    dist.all_reduce(sub)
    assert sub.tolist() == [2.0, 2.0]
    lazy = torch.tensor([1j]).conj().imag  # negative, and only when somebody reads it
    assert lazy.is_neg()
    refused(lambda: dist.all_reduce(lazy))
    refused(lambda: GATHER(torch.empty(3), torch.ones(2)))
    refused(lambda: SCATTER(torch.empty(2), torch.ones(3)))
    refused(lambda: dist.all_to_all_single(torch.empty(3), torch.ones(3)))
    refused(lambda: dist.all_gather([torch.empty(2), torch.empty(3)], torch.ones(2)))
    # Rank 0 keeps two and gets one, rank 1 keeps one.
    sizes = ([2, 1], [2, 0]) if rank == 0 else ([0, 1], [1, 1])
    uneven = torch.empty(sum(sizes[0]))
    dist.all_to_all_single(uneven, torch.full((2,), float(rank)), *sizes)
    assert uneven.tolist() == ([0.0, 0.0, 1.0] if rank == 0 else [1.0])
    return said


def test_what_a_shortcut_does_not_know_goes_the_long_way() -> None:
    first, second = run_ranks(_passed_on, 2)
    assert len(first) == 5
    assert "lazy negation" in first[0]
    assert [text.partition("[")[0] for text in first[1:]] == [text.partition("[")[0] for text in second[1:]]


def _watchers(rank: int) -> list[int]:
    group = dist.new_group([0, 1])
    counts = [len(group._shortcuts)]
    finished = []
    group._register_on_completion_hook(lambda info: finished.append(info.op_type))
    counts.append(len(group._shortcuts))
    dist.all_reduce(torch.ones(1), group=group)
    dist.destroy_process_group(group)  # waits for the hooks
    assert finished == ["allreduce"]
    assert "allreduce" not in vars(group)
    with pytest.raises(RuntimeError, match="destroyed"):
        group.allreduce([torch.ones(1)])
    return counts


def test_hooks_and_the_end_of_a_group_end_its_shortcuts() -> None:
    for many, none in run_ranks(_watchers, 2):
        assert many == sum(
            isinstance(getattr(MonarchProcessGroup, name, None), FunctionType) for name in _shm._SHORTCUTS
        )
        assert none == 0


def _lives(_rank: int) -> bool:
    group = dist.new_group([0, 1])
    short = group.allreduce
    seen = weakref.ref(group)
    dist.destroy_process_group(group)
    del group
    gc.collect()
    assert seen() is None
    with pytest.raises(TypeError, match="is gone"):
        short([torch.ones(1)])
    return True


def test_shortcuts_do_not_keep_their_group() -> None:
    assert run_ranks(_lives, 2) == [True, True]


def _disagree(rank: int) -> None:
    with pytest.raises(CollectiveMismatchError, match="rank 1 called"):
        dist.all_reduce(torch.ones(2 + rank))
    with pytest.raises(CollectiveMismatchError, match="rank 1 called"):
        dist.barrier() if rank == 0 else dist.broadcast(torch.ones(1), 0)
    dist.barrier()


def test_mistakes_are_raised_by_shortcuts() -> None:
    run_ranks(_disagree, 2)


def _dies(rank: int) -> str:
    if rank == 1:
        dist.barrier()
        os.kill(os.getpid(), signal.SIGKILL)
    dist.barrier()
    with pytest.raises(RankFailedError) as caught:
        dist.barrier()
    with pytest.raises(RankFailedError):
        dist.all_reduce(torch.ones(1))
    return str(caught.value)


def test_deaths_are_raised_by_shortcuts() -> None:
    with pytest.raises(DeadRank, match="rank 1:\nthe rank died without an answer") as caught:
        run_ranks(_dies, 2)
    assert "--- rank 0" not in str(caught.value)


def test_torch_s_methods_take_what_shortcuts_take() -> None:
    """The options' types and fields, and the methods' names, are torch's."""
    for name, (_, _, options) in _shm._SHORTCUTS.items():
        assert hasattr(options(), "asyncOp"), name
    assert c10d.BarrierOptions().device is None
    assert c10d.BarrierOptions().device_ids == []
    assert {int(getattr(dist.ReduceOp.RedOpType, name)) for name in _shm._OPS} == set(range(8))
    known = {name for name in _shm._SHORTCUTS if hasattr(dist.ProcessGroup, name)}
    assert known >= {"allreduce", "broadcast", "reduce", "allgather", "barrier"}
