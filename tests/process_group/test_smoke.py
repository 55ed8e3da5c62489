"""Smoke test: start ranks, make one group, compute one sum."""

import torch
import torch.distributed as dist

from tests.support.ranks import run_ranks


def _sum(rank: int) -> float:
    x = torch.full((3,), float(rank + 1))
    dist.all_reduce(x)
    return float(x[0])


def test_all_reduce_on_two_ranks() -> None:
    assert run_ranks(_sum, 2) == [3.0, 3.0]


def test_pool_runs_functions_on_its_ranks(pool) -> None:
    assert pool(2).run(_sum) == [3.0, 3.0]
    assert pool(4).run(_sum) == [10.0] * 4
