"""The profiler, dispatch modes and the debug wrapper of process groups see this backend's collectives.

An observed collective goes through torch's dispatcher. Checks and results equal those of the fast path, whose values
test_collectives.py tests.
"""

from __future__ import annotations

import functools
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as funcol
from torch._C._distributed_c10d import FakeWork
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed.tensor.debug import CommDebugMode
from torch.profiler import ProfilerActivity, profile
from torch.utils._python_dispatch import TorchDispatchMode

from monarch_backend import CollectiveArgumentError
from monarch_backend.process_group import MonarchProcessGroup
from monarch_backend.process_group._collective_specs import BY_OPERATOR
from tests.process_group import reference
from tests.support.ranks import run_ranks

GATHER = getattr(dist, "all_gather_single", dist.all_gather_into_tensor)
SCATTER = getattr(dist, "reduce_scatter_single", dist.reduce_scatter_tensor)
FUNCTIONAL_GATHER = getattr(funcol, "all_gather_single", funcol.all_gather_tensor)


def _coalesced(call: Callable[..., Any], *args: Any) -> None:
    with warnings.catch_warnings():
        # torch deprecates all_gather_coalesced and all_reduce_coalesced.
        warnings.filterwarnings("ignore", r".*_coalesced.* will be deprecated", FutureWarning)
        call(*args)


def _managed(call: Callable[..., Any], output: torch.Tensor, given: torch.Tensor) -> None:
    with dist.distributed_c10d._coalescing_manager():
        call(output, given)


def _calls(rank: int) -> dict[str, tuple[str, Callable[[], Any]]]:
    """Return c10d operator that the dispatcher must see -> (name of Gloo's profiler range, call of the collective)."""
    x, y = torch.ones(4), torch.ones(2)
    lists = [torch.empty(4), torch.empty(4)]
    return {
        "allreduce_": ("all_reduce", lambda: dist.all_reduce(x.clone())),
        "allreduce_coalesced_": ("all_reduce", lambda: _coalesced(dist.all_reduce_coalesced, [x.clone(), y.clone()])),
        "broadcast_": ("broadcast", lambda: dist.broadcast(x.clone(), 0)),
        "reduce_": ("reduce", lambda: dist.reduce(x.clone(), 0)),
        "allgather_": ("all_gather", lambda: dist.all_gather(lists, x)),
        "_allgather_base_": ("all_gather", lambda: GATHER(torch.empty(8), x)),
        "allgather_coalesced_": ("all_gather", lambda: _coalesced(dist.all_gather_coalesced, [[x], [x.clone()]], [x])),
        "allgather_into_tensor_coalesced_": ("all_gather", lambda: _managed(GATHER, torch.empty(8), x)),
        "gather_": ("gather", lambda: dist.gather(x, lists if rank == 0 else None, 0)),
        "scatter_": ("scatter", lambda: dist.scatter(torch.empty(4), [x, x] if rank == 0 else None, 0)),
        # Gloo implements reduce_scatter as an all-reduce and keeps a part of the result.
        "reduce_scatter_": ("all_reduce", lambda: dist.reduce_scatter(torch.empty(4), [x, x])),
        "_reduce_scatter_base_": ("all_reduce", lambda: SCATTER(y.clone(), x)),
        "reduce_scatter_tensor_coalesced_": ("all_reduce", lambda: _managed(SCATTER, y.clone(), x)),
        "alltoall_": ("all_to_all", lambda: dist.all_to_all(lists, [x, x])),
        "alltoall_base_": ("all_to_all", lambda: dist.all_to_all_single(torch.empty(4), x)),
        "send": ("send", lambda: dist.send(x, 1) if rank == 0 else dist.recv(lists[0], 0)),
        "recv_any_source_": ("send", lambda: dist.send(x, 1) if rank == 0 else dist.recv(lists[0])),
        "barrier": ("barrier", lambda: dist.barrier()),
    }


def _expected(rank: int, name: str) -> str:
    """Return the operator that ``rank`` runs in the call of this name. In a message one rank sends, the other
    receives.
    """
    if name == "send":
        return "send" if rank == 0 else "recv_"
    if name == "recv_any_source_":
        return "send" if rank == 0 else name
    if name == "alltoall_" and not hasattr(dist.ProcessGroup, "all_to_all_single"):
        return "alltoall_base_"  # before torch 2.13 Gloo has no all_to_all of lists
    return name


CALLS = [
    *("allreduce_", "allreduce_coalesced_", "broadcast_", "reduce_", "allgather_", "_allgather_base_"),
    *("allgather_coalesced_", "allgather_into_tensor_coalesced_", "gather_", "scatter_", "reduce_scatter_"),
    *("_reduce_scatter_base_", "reduce_scatter_tensor_coalesced_", "alltoall_", "alltoall_base_", "send"),
    *("recv_any_source_", "barrier"),
]


class _Watch(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.seen: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.namespace == "c10d":
            self.seen.append(func._schema.name.removeprefix("c10d::"))
        return func(*args, **(kwargs or {}))


# Dispatch modes -------------------------------------------------------------------------------------------------


def _mode(rank: int, name: str) -> None:
    call = _calls(rank)[name][1]
    with _Watch() as watch:
        call()
    assert watch.seen == [_expected(rank, name)]
    call()  # the call also works without the mode
    assert len(watch.seen) == 1


@pytest.mark.parametrize("name", CALLS)
def test_dispatch_mode_sees_the_collective_once(pool, name: str) -> None:
    pool(2).run(_mode, name)


def test_every_collective_is_tested_under_a_mode() -> None:
    assert list(_calls(0)) == CALLS


def _no_recursion(rank: int, name: str) -> None:
    """`super()` calls the inner group: no method of our group is entered again while it runs."""
    world, running, entered = dist.group.WORLD, [], []

    def guard(method: str) -> Callable[..., Any]:
        original = getattr(world, method)

        @functools.wraps(original)
        def guarded(*args: Any, **kwargs: Any) -> Any:
            assert method not in running, f"{method} came back to itself through {running}"
            entered.append(method)
            running.append(method)
            try:
                return original(*args, **kwargs)
            finally:
                running.remove(method)

        return guarded

    ours = MonarchProcessGroup.__mro__[: MonarchProcessGroup.__mro__.index(dist.ProcessGroup)]
    public = [m for cls in ours for m in vars(cls) if callable(getattr(world, m)) and hasattr(dist.ProcessGroup, m)]
    collectives = [m for m in public if not m.startswith("__")]
    for method in collectives:
        setattr(world, method, guard(method))
    try:
        with _Watch():
            _calls(rank)[name][1]()
    finally:
        for method in collectives:
            delattr(world, method)
    assert len(entered) >= 1


@pytest.mark.parametrize("name", CALLS)
def test_method_under_a_mode_does_not_recurse(pool, name: str) -> None:
    pool(2).run(_no_recursion, name)


class _Instead(TorchDispatchMode):
    """Replaces collectives by another operation, as LocalTensorMode does for simulated ranks."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.namespace != "c10d":
            return func(*args, **(kwargs or {}))
        work = FakeWork().boxed()
        if func is torch.ops.c10d.barrier.default:
            return work
        args[0][0].fill_(7.0)
        return args[0], work


def _instead(rank: int) -> None:
    if rank == 0:  # on one rank: real communication would wait for the other rank
        with _Instead():
            for call in (dist.all_reduce, lambda x: dist.broadcast(x, 0)):
                x = torch.ones(3)
                call(x)
                assert x.tolist() == [7.0] * 3
            dist.barrier()
    x = torch.ones(3)
    dist.all_reduce(x)
    assert x.tolist() == [2.0] * 3


def test_mode_can_replace_the_collective(pool) -> None:
    pool(2).run(_instead)


def _fake(rank: int) -> None:
    if rank == 0:  # on one rank, for the same reason
        with FakeTensorMode():
            x, large = torch.ones(4), torch.ones(8)
            dist.all_reduce(x)
            dist.broadcast(x, 1)
            GATHER(large, x)
            SCATTER(x, large)
            dist.all_to_all_single(large, large.clone())
            dist.all_gather([torch.ones(4), torch.ones(4)], x)
            work = dist.all_reduce(x, async_op=True)
            work.wait()
        assert x.shape == (4,)
    dist.barrier()


def test_fake_tensors_are_not_communicated(pool) -> None:
    pool(2).run(_fake)


def _counted(rank: int) -> None:
    with CommDebugMode() as mode:
        for name in ("allreduce_", "allreduce_", "_allgather_base_", "_reduce_scatter_base_", "broadcast_"):
            _calls(rank)[name][1]()
        FUNCTIONAL_GATHER(torch.ones(2), 0, dist.group.WORLD)
    counts = {str(op).removeprefix("c10d."): n for op, n in mode.get_comm_counts().items()}
    assert counts["allreduce_"] == 2
    assert counts["_allgather_base_"] == counts["_reduce_scatter_base_"] == counts["broadcast_"] == 1
    assert mode.get_total_counts() >= 6


def test_comm_debug_mode_counts_collectives(pool) -> None:
    pool(2).run(_counted)


def _watched_dtype(rank: int, dtype: str) -> None:
    """A dispatch mode does not change which calls work and which are refused."""
    size = dist.get_world_size()
    inputs = [reference.values(r, dtype, (4,)) for r in range(size)]
    with _Watch():
        large = torch.cat(inputs).clone().zero_()
        GATHER(large, inputs[rank].clone())
        assert reference.same(large, torch.cat(inputs))
        stacked = torch.stack(inputs).zero_()
        GATHER(stacked, inputs[rank].clone())
        assert reference.same(stacked, torch.stack(inputs))
        x = inputs[rank].clone()
        dist.broadcast(x, 1)
        assert reference.same(x, inputs[1])
        exchanged = torch.zeros(4).to(x.dtype)
        dist.all_to_all_single(exchanged, inputs[rank].clone())
        want = torch.cat([y.view(2, 2)[rank] for y in inputs])
        assert reference.same(exchanged, want)
        if reference.reduces(dtype, "SUM"):
            one = torch.zeros(()).to(x.dtype)
            SCATTER(one, inputs[rank][:2].clone())
            assert reference.same(one, reference.reduced("SUM", [y[rank] for y in inputs]))
        else:
            for call in (dist.all_reduce, lambda t: SCATTER(t[:2].clone(), t)):
                with pytest.raises(CollectiveArgumentError, match=dtype):
                    call(inputs[rank].clone())


@pytest.mark.parametrize("dtype", reference.DTYPES)
def test_observed_collectives_give_the_same_results(pool, dtype: str) -> None:
    pool(2).run(_watched_dtype, dtype)


# The profiler ---------------------------------------------------------------------------------------------------


def _profiled(rank: int) -> None:
    dist.barrier()
    for name, (gloo, call) in _calls(rank).items():
        with profile(activities=[ProfilerActivity.CPU]) as profiler:
            call()
        names = {event.name for event in profiler.events()}
        assert f"c10d::{_expected(rank, name)}" in names, f"{name}: {sorted(n for n in names if 'c10d' in n)}"
        if name in ("send", "recv_any_source_"):
            gloo = {"send": "send", "recv_": "recv", "recv_any_source_": "recvAnySource"}[_expected(rank, name)]
        ranges = {n for n in names if n.startswith(("gloo:", "shm:"))}
        ours = {f"gloo:{gloo}"} if reference.on_gloo() else {f"shm:{BY_OPERATOR[_expected(rank, name)].profiler_name}"}
        assert ranges == ours, f"{name}: {sorted(ranges)}"


@pytest.mark.parametrize("shared", ["0", "1"])
def test_profiler_has_the_operator_and_the_range_of_the_route(shared: str) -> None:
    run_ranks(_profiled, 2, env={"MONARCH_SHM": shared})


# TORCH_DISTRIBUTED_DEBUG=DETAIL ---------------------------------------------------------------------------------


def _other_call(x: torch.Tensor, group: Any) -> None:
    dist.broadcast(x, 0, group=group)


def _disagree(rank: int, how: str) -> str:
    dist.set_debug_level_from_env()
    group = dist.new_group([0, 1])
    x = torch.ones(2 + rank if how == "shape" else 2)
    with pytest.raises(RuntimeError) as caught:
        _other_call(x, group) if how == "collective" and rank == 1 else dist.all_reduce(x, group=group)
    return str(caught.value)


@pytest.mark.parametrize(("how", "words"), [("shape", "TensorShape"), ("collective", "BROADCAST")])
def test_debug_detail_names_the_difference_between_ranks(how: str, words: str) -> None:
    texts = run_ranks(_disagree, 2, how, env={"TORCH_DISTRIBUTED_DEBUG": "DETAIL"})
    assert any(words in text for text in texts), texts


def _agree(rank: int) -> None:
    dist.set_debug_level_from_env()
    group = dist.new_group([0, 1])
    assert dist.get_debug_level() == dist.DebugLevel.DETAIL
    for dtype in ("float32", "bool", "float8_e4m3fn"):
        inputs = [reference.values(r, dtype, (3,)) for r in range(2)]
        large = torch.cat(inputs).clone().zero_()
        GATHER(large, inputs[rank].clone(), group=group)
        assert reference.same(large, torch.cat(inputs))
        x = inputs[rank].clone()
        dist.broadcast(x, 1, group=group)
        assert reference.same(x, inputs[1])
    work = dist.all_reduce(torch.ones(2), group=group, async_op=True)
    work.wait()
    dist.barrier(group)
    dist.monitored_barrier(group)
    assert group._get_sequence_number_for_group() > 0
    dist.destroy_process_group(group)


def test_debug_detail_lets_equal_calls_pass() -> None:
    run_ranks(_agree, 2, env={"TORCH_DISTRIBUTED_DEBUG": "DETAIL"})
