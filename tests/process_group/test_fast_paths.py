"""Compiled fast paths of collectives: which calls use them, with the same results and errors as the methods."""

from __future__ import annotations

import contextlib
import functools
import gc
import inspect
import os
import signal
import sys
import sysconfig
import threading
import time
import weakref
from collections.abc import Callable
from types import FrameType, FunctionType
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch._C import _distributed_c10d as c10d

from monarch_backend import CollectiveArgumentError, CollectiveMismatchError, RankFailedError
from monarch_backend.process_group import MonarchProcessGroup, _process_group
from monarch_backend.process_group._collective_specs import with_fast_path
from monarch_backend.process_group._shm import messages, shm_backend
from tests.support.collective_references import REFERENCES, arguments, given_by, options
from tests.support.ranks import RankFailedError as DeadRank
from tests.support.ranks import run_ranks

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
    """Return the Python functions of our package that run during each call.

    Each call runs 20 times, and the run with the fewest functions counts. Other runs may wait longer for the other
    rank, and then ask for the remaining timeout.
    """
    ran: dict[str, list[str]] = {}
    for name, call in _calls(rank).items():
        call()
        ran[name] = min((_functions_of(call) for _ in range(20)), key=len)
    return ran


def _functions_of(call: Callable[[], Any]) -> list[str]:
    ours: list[str] = []

    def trace(frame: FrameType, _event: str, _arg: object) -> None:
        if frame.f_globals["__name__"].startswith("monarch_backend."):
            ours.append(frame.f_code.co_name)

    sys.settrace(trace)
    try:
        call()
    finally:
        sys.settrace(None)
    return ours


def test_common_calls_run_no_python_function() -> None:
    for ran in run_ranks(_interpreted, 2):
        assert ran == {name: [] for name in ran}
        assert len(ran) == 9


def test_table_of_collectives_has_each_fast_path() -> None:
    assert {name for name, _ in with_fast_path()} == {
        "allreduce",
        "reduce",
        "broadcast",
        "allgather",
        "_allgather_base",
        "all_gather_single",
        "_reduce_scatter_base",
        "reduce_scatter_single",
        "alltoall_base",
        "all_to_all_single",
        "barrier",
    }


def _ways(rank: int) -> list[bool]:
    """Compare results of the fast path and of the method, for calls with and without a fast path."""
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


def test_fast_path_and_python_path_give_the_same() -> None:
    for same in run_ranks(_ways, 2):
        assert len(same) == 36
        assert all(same)


class _Sub(torch.Tensor):
    """A subclass of Tensor."""


def _passed_on(rank: int) -> list[str]:
    """Calls without a fast path run the method. Return the first line of each error."""
    said = []

    def refused(call: Callable[[], Any]) -> None:
        with pytest.raises(CollectiveArgumentError) as caught:
            call()
        said.append(str(caught.value).partition("\n")[0])

    x = torch.arange(6.0).view(2, 3)
    y = x.t()
    dist.all_reduce(y)  # dense but not contiguous
    assert torch.equal(y, (2 * torch.arange(6.0)).view(2, 3).t())
    sub = torch.ones(2).as_subclass(_Sub)
    dist.all_reduce(sub)
    assert sub.tolist() == [2.0, 2.0]
    lazy = torch.tensor([1j]).conj().imag  # a lazy view: values are negated only when they are read
    assert lazy.is_neg()
    refused(lambda: dist.all_reduce(lazy))
    refused(lambda: GATHER(torch.empty(3), torch.ones(2)))
    refused(lambda: SCATTER(torch.empty(2), torch.ones(3)))
    refused(lambda: dist.all_to_all_single(torch.empty(3), torch.ones(3)))
    refused(lambda: dist.all_gather([torch.empty(2), torch.empty(3)], torch.ones(2)))
    # Rank 0 sends two elements to itself and receives one. Rank 1 sends one to itself.
    sizes = ([2, 1], [2, 0]) if rank == 0 else ([0, 1], [1, 1])
    uneven = torch.empty(sum(sizes[0]))
    dist.all_to_all_single(uneven, torch.full((2,), float(rank)), *sizes)
    assert uneven.tolist() == ([0.0, 0.0, 1.0] if rank == 0 else [1.0])
    return said


def test_unsupported_arguments_take_the_python_path() -> None:
    first, second = run_ranks(_passed_on, 2)
    assert len(first) == 5
    assert "lazy negation" in first[0]
    assert [text.partition("[")[0] for text in first[1:]] == [text.partition("[")[0] for text in second[1:]]


def _mixed_ways(rank: int) -> list[str]:
    """One rank uses the fast path while the other calls the method."""
    group = dist.group.WORLD
    said = []
    for turn in range(2):
        for dtype in shm_backend._DTYPES:
            for name, spec in with_fast_path():
                if name not in group._fast_paths:
                    continue
                given = [given_by(spec, each, 2) for each in range(2)]
                outputs = [tensor.to(dtype) for tensor in REFERENCES[spec.key](given, rank, 0)]
                mine = [tensor.to(dtype) for tensor in given[rank]]
                args = (*arguments(spec, mine, outputs, 0, rank, 2), options(spec))
                call = getattr(group, name) if rank == turn else getattr(type(group), name).__get__(group)
                try:
                    call(*args).wait()
                except CollectiveMismatchError as error:
                    said.append(f"{name} of {dtype}: {error}")
    return said


def test_ranks_can_take_different_paths() -> None:
    assert run_ranks(_mixed_ways, 2) == [[], []]


def _roots(_rank: int) -> None:
    for root in (-1, 2):
        with pytest.raises(CollectiveArgumentError, match=f"rank {root} is outside the group"):
            dist.broadcast(torch.ones(1), group_src=root)
        with pytest.raises(CollectiveArgumentError, match=f"rank {root} is outside the group"):
            dist.reduce(torch.ones(1), group_dst=root)


def test_root_outside_the_group_is_refused() -> None:
    run_ranks(_roots, 2)


def _works(rank: int) -> None:
    """A work that the caller keeps is not reused. A small work without references is reused without earlier
    attributes, on builds of Python with a GIL.
    """
    group, opts = dist.group.WORLD, dist.AllreduceOptions()
    opts.asyncOp = False
    x, y = torch.ones(2), torch.ones(3)
    first = group.allreduce([x], opts)
    second = group.allreduce([y], opts)
    assert first is not second
    assert first.result()[0] is x
    assert second.get_future().value()[0] is y
    assert first.wait()
    assert second.is_success()
    name = id(second)
    del second
    third = group.allreduce([x], opts)
    assert id(third) == name or sysconfig.get_config_var("Py_GIL_DISABLED")
    assert vars(third).keys() == {"_outputs"}
    large = torch.ones(1 << 20)
    group.allreduce([large], opts)
    seen = weakref.ref(large)
    del large
    assert seen() is None  # no work keeps the large tensor


def test_works_of_fast_paths_complete() -> None:
    run_ranks(_works, 2)


def _watchers(_rank: int) -> tuple[int, int]:
    group = dist.new_group([0, 1])
    counts = len(group._fast_paths)
    kept, finished, wrapped = group.allreduce, [], []
    original = group.broadcast
    group.broadcast = lambda *args: (wrapped.append(1), original(*args))[1]
    group._register_on_completion_hook(lambda info: finished.append(info.op_type))
    dist.all_reduce(torch.ones(1), group=group)
    kept([torch.ones(1)]).wait()
    dist.broadcast(torch.ones(1), 0, group=group)
    dist.destroy_process_group(group)  # waits for the completion hooks
    assert sorted(finished) == ["allreduce", "allreduce", "broadcast"]
    assert wrapped == [1]
    assert "allreduce" not in vars(group)
    with pytest.raises(RuntimeError, match="destroyed"):
        kept([torch.ones(1)])
    return counts, len(group._fast_paths)


def test_hooks_and_close_disable_fast_paths() -> None:
    for many, none in run_ranks(_watchers, 2):
        names = [*messages.KINDS, *(name for name, _ in with_fast_path())]
        assert many == sum(isinstance(getattr(MonarchProcessGroup, name, None), FunctionType) for name in names)
        assert none == 0


def _overridden(_rank: int) -> int:
    calls = []

    class Counting(MonarchProcessGroup):
        def allreduce(self, *args: Any, **named: Any) -> Any:
            calls.append(args)
            return super().allreduce(*args, **named)

    _process_group.MonarchProcessGroup = Counting  # the class that `create` instantiates
    group = dist.new_group([0, 1])
    assert "broadcast" in group._fast_paths
    dist.all_reduce(torch.ones(1), group=group)
    return len(calls)


def test_overridden_method_of_a_subclass_is_called() -> None:
    assert run_ranks(_overridden, 2) == [1, 1]


def _looks(_rank: int) -> None:
    short = dist.group.WORLD.allreduce
    assert short.__name__ == "allreduce"
    assert "Reduce in place on all ranks" in short.__doc__
    assert short.__self__ is dist.group.WORLD
    assert inspect.signature(short) == inspect.signature(short.__wrapped__)


def test_fast_path_looks_like_its_method() -> None:
    run_ranks(_looks, 1)


def _wait_looks(rank: int) -> None:
    sent, received = torch.ones(4), torch.zeros(4)
    works = [dist.all_reduce(torch.ones(4), async_op=True), dist.broadcast(torch.ones(4), 0, async_op=True)]
    works += [dist.isend(sent, 1 - rank), dist.irecv(received, 1 - rank)]
    for work in works:
        assert work.wait.__name__ == "wait"
        assert work.wait.__qualname__.endswith("Work.wait")
        assert list(inspect.signature(work.wait).parameters) == ["timeout"]
        assert functools.update_wrapper(functools.partial(work.wait), work.wait)()


def test_wait_of_a_fast_path_looks_like_a_method() -> None:
    """DeepSpeed wraps it in a function with its name."""
    run_ranks(_wait_looks, 2)


def _interrupted(rank: int, kind: str) -> list[float]:
    """A signal handler, for example, raises while a rank waits. The operation keeps its memory until it ends."""
    store, n, raised = dist.group.WORLD.get_group_store(), 3000, []

    def late(original: Callable[..., Any]) -> Callable[..., Any]:
        def ask(*args: Any) -> Any:
            if rank == 0 and not raised:  # the operation is in progress, and the other rank enters it only now
                raised.append(True)
                store.set("under way", "")
                raise InterruptedError
            return original(*args)

        return ask

    shm_backend.SharedMemory._seconds = late(shm_backend.SharedMemory._seconds)
    group = dist.new_group([0, 1])
    group._shm._timeout = late(group._shm._timeout)
    if rank == 1:
        store.wait(["under way"])
    x = torch.full((n,), 1.0)
    address = x.data_ptr()
    with contextlib.suppress(InterruptedError):
        if kind == "message":
            dist.recv(x, 1, group) if rank == 0 else dist.send(x, 0, group)
        else:
            dist.all_reduce(x if kind == "short" else x.view(-1, 2).t(), group=group)
    del x
    others = [torch.full((n,), 7.0) for _ in range(20)]
    y = torch.full((n,), 10.0)
    dist.all_reduce(y, group=group)
    assert y.tolist() == [20.0] * n
    assert len(raised) == 1 - rank
    return [t[0].item() for t in others if t.data_ptr() == address and not torch.equal(t, torch.full((n,), 7.0))]


@pytest.mark.parametrize("kind", ["short", "long", "message"])
def test_interrupt_of_a_fast_path_leaves_no_pending_operation(kind: str) -> None:
    assert run_ranks(_interrupted, 2, kind) == [[], []]


def _emptied(rank: int) -> list[bool]:
    """Another thread empties the list of tensors while the operation runs."""
    group, opts, store = dist.group.WORLD, c10d.AllgatherOptions(), dist.group.WORLD.get_group_store()
    opts.asyncOp = False
    outputs = [torch.zeros(1 << 16) for _ in range(2)]
    before = group._shm.sequence

    def empty() -> None:
        while group._shm.sequence == before:
            time.sleep(0)
        outputs.clear()
        store.set("empty", "")  # the other rank enters now, so the operation could not end earlier

    thread = threading.Thread(target=empty)
    if rank == 0:
        thread.start()
    else:
        store.wait(["empty"])
    work = group.allgather([outputs], [torch.full((1 << 16,), rank + 1.0)], opts)
    if rank == 0:
        thread.join()
    return [bool((tensor == r + 1.0).all()) for r, tensor in enumerate(work.result())]


def test_lists_changed_during_an_operation_do_not_affect_it() -> None:
    assert run_ranks(_emptied, 2) == [[True, True]] * 2


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


def test_fast_paths_do_not_keep_their_group_alive() -> None:
    assert run_ranks(_lives, 2) == [True, True]


def _disagree(rank: int) -> None:
    with pytest.raises(CollectiveMismatchError, match="rank 1 called"):
        dist.all_reduce(torch.ones(2 + rank))
    with pytest.raises(CollectiveMismatchError, match="rank 1 called"):
        dist.barrier() if rank == 0 else dist.broadcast(torch.ones(1), 0)
    dist.barrier()


def test_fast_path_raises_argument_errors() -> None:
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


def test_fast_path_raises_rank_failures() -> None:
    with pytest.raises(DeadRank, match="rank 1:\nthe rank died without an answer") as caught:
        run_ranks(_dies, 2)
    assert "--- rank 0" not in str(caught.value)


def test_torch_has_the_methods_and_options_of_fast_paths() -> None:
    """torch has the option types, fields and method names that fast paths use."""
    for name, spec in with_fast_path():
        assert hasattr(spec.options(), "asyncOp"), name
    assert c10d.BarrierOptions().device is None
    assert c10d.BarrierOptions().device_ids == []
    assert {int(getattr(dist.ReduceOp.RedOpType, name)) for name in shm_backend._OPS} == set(range(8))
    known = {name for name, _ in with_fast_path() if hasattr(dist.ProcessGroup, name)}
    assert known >= {"allreduce", "broadcast", "reduce", "allgather", "barrier"}
