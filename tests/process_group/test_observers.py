"""Those who watch a program's collectives see ours: the profiler, dispatch modes, the checking wrapper."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.tensor.debug import CommDebugMode
from torch.profiler import ProfilerActivity, profile
from torch.utils._python_dispatch import TorchDispatchMode

from tests.support.ranks import run_ranks

GATHER = getattr(dist, "all_gather_single", dist.all_gather_into_tensor)
SCATTER = getattr(dist, "reduce_scatter_single", dist.reduce_scatter_tensor)


def _calls(rank: int) -> dict[str, Callable[[], Any]]:
    """The c10d operator that torch's dispatcher must see -> a collective that ends there."""
    x, y = torch.ones(4), torch.ones(2)
    lists = [torch.empty(4), torch.empty(4)]
    return {
        "allreduce_": lambda: dist.all_reduce(x.clone()),
        "broadcast_": lambda: dist.broadcast(x.clone(), 0),
        "reduce_": lambda: dist.reduce(x.clone(), 0),
        "allgather_": lambda: dist.all_gather(lists, x),
        "_allgather_base_": lambda: GATHER(torch.empty(8), x),
        "gather_": lambda: dist.gather(x, lists if rank == 0 else None, 0),
        "scatter_": lambda: dist.scatter(torch.empty(4), [x, x] if rank == 0 else None, 0),
        "reduce_scatter_": lambda: dist.reduce_scatter(torch.empty(4), [x, x]),
        "_reduce_scatter_base_": lambda: SCATTER(y.clone(), x),
        "alltoall_": lambda: dist.all_to_all(lists, [x, x]),
        "alltoall_base_": lambda: dist.all_to_all_single(torch.empty(4), x),
        "send": lambda: dist.send(x, 1) if rank == 0 else dist.recv(lists[0], 0),
        "barrier": lambda: dist.barrier(),
    }


class _Watch(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.seen: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.namespace == "c10d":
            self.seen.append(func._schema.name.removeprefix("c10d::"))
        return func(*args, **(kwargs or {}))


def _modes(rank: int) -> None:
    for name, call in _calls(rank).items():
        with _Watch() as watch:
            call()
        expected = "recv_" if (name, rank) == ("send", 1) else name
        assert expected in watch.seen, f"{name}: the mode saw {watch.seen}"
        call()  # and goes on without the mode


def test_dispatch_modes_see_every_collective(pool) -> None:
    pool(2).run(_modes)


def _profiled(rank: int) -> None:
    with profile(activities=[ProfilerActivity.CPU]) as profiler:
        for call in _calls(rank).values():
            call()
    names = {event.name for event in profiler.events()}
    for name in _calls(rank):
        expected = "recv_" if (name, rank) == ("send", 1) else name
        assert f"c10d::{expected}" in names, sorted(n for n in names if "c10d" in n)
    assert any(name.startswith("gloo:") for name in names)


@pytest.mark.filterwarnings("ignore:.*")  # kineto says on stderr and by warnings that there is no GPU to watch
def test_profiler_ranges(pool) -> None:
    pool(2).run(_profiled)


def _counted(rank: int) -> int:
    with CommDebugMode() as mode:
        dist.all_reduce(torch.ones(2))
        dist.all_reduce(torch.ones(2))
    return int(mode.get_total_counts())


def test_comm_debug_mode_counts(pool) -> None:
    assert pool(2).run(_counted) == [2, 2]


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
def test_detail_names_what_ranks_disagree_about(how: str, words: str) -> None:
    texts = run_ranks(_disagree, 2, how, env={"TORCH_DISTRIBUTED_DEBUG": "DETAIL"})
    assert any(words in text for text in texts), texts
