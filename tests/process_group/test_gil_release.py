"""A collective through torch's dispatcher releases the GIL, which Gloo's threads need.

Without the release, torch's own test suite deadlocks in about one of three runs. Each case here provokes the
deadlock: before the fix, all hung within seconds.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed import _functional_collectives as functional

from tests.support.ranks import run_ranks

TIMES = 100


class Subclass(torch.Tensor):
    """A subclass of Tensor. Our group sends such tensors through the dispatcher."""

    __torch_function__ = torch._C._disabled_torch_function_impl


def _ones(n: int) -> torch.Tensor:
    return torch.ones(n)


def _subclass() -> torch.Tensor:
    return torch.ones(4).as_subclass(Subclass)


def _in_order(first: Callable[[], Any], second: Callable[[], Any]) -> None:
    for step in (first, second) if dist.get_rank() == 0 else (second, first):
        step()


# The collectives for which torch has a trampoline.
CASES: dict[str, Callable[[], Any]] = {
    "broadcast": lambda: dist.broadcast(_ones(4), 0),
    "all_reduce": lambda: dist.all_reduce(_ones(4)),
    "all_gather": lambda: dist.all_gather([_ones(4), _ones(4)], _ones(4)),
    "reduce_scatter": lambda: dist.reduce_scatter(_ones(4), [_ones(4), _ones(4)]),
    "all_to_all_single": lambda: dist.all_to_all_single(_ones(4), _ones(4)),
    "barrier": lambda: dist.barrier(),
    "send and recv": lambda: _in_order(
        lambda: dist.send(_ones(4), 1 - dist.get_rank()), lambda: dist.recv(_ones(4), 1 - dist.get_rank())
    ),
    "subclass": lambda: dist.all_reduce(_subclass()),
    "all_gather coalesced": lambda: functional.all_gather_into_tensor_coalesced([_ones(2), _ones(2)], dist.group.WORLD),
    "reduce_scatter coalesced": lambda: functional.reduce_scatter_tensor_coalesced(
        [_ones(4), _ones(4)], "sum", [0, 0], dist.group.WORLD
    ),
    "all_reduce coalesced": lambda: functional.all_reduce_coalesced([_ones(4), _ones(4)], "sum", dist.group.WORLD),
}


def _many(rank: int, name: str, profiled: bool) -> None:
    warnings.simplefilter("ignore")  # torch 2.13 itself calls functions that it deprecates
    for _ in range(TIMES):
        with torch.autograd.profiler.profile() if profiled else nullcontext():
            result = CASES[name]()
            for tensor in result if isinstance(result, list) else []:
                functional.wait_tensor(tensor)


@pytest.mark.slow
@pytest.mark.parametrize("name", CASES)
def test_collective_under_the_profiler_does_not_deadlock(name: str) -> None:
    run_ranks(_many, 2, name, True)


@pytest.mark.parametrize("name", ["subclass", "all_gather coalesced"])
def test_collective_through_the_dispatcher_does_not_deadlock(name: str) -> None:
    run_ranks(_many, 2, name, False)
