"""Tensors of one call that share memory: each call gives what Gloo gives, or raises before any data are moved.

One test is one world size; its cells (collective x layout of the tensors in memory x size x sync or async) run in one
call of the pool. The expected values come from a Gloo group of the same ranks.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist


def _alias(rank: int) -> dict[str, list[float]]:
    once = torch.tensor([float(rank)])
    line = torch.arange(4.0) + rank
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)
        dist.all_reduce_coalesced([once, once])
        dist.all_reduce_coalesced([line[:3], line[1:]])
    return {"twice": once.tolist(), "shifted": line.tolist()}


def test_all_reduce_coalesced_of_overlapping_tensors_reduces_each_element_once(pool: Callable[[int], Any]) -> None:
    for result in pool(4).run(_alias):
        assert result == {"twice": [6.0], "shifted": [6.0, 10.0, 14.0, 18.0]}
