"""What stands on c10d, over the shared-memory route (MONARCH_SHM=1): on two ranks it has the bits of "gloo".

With more ranks the order of additions differs: ours is that of the ranks, Gloo's goes round a ring.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist

from tests.ecosystem import test_ddp, test_fsdp2, test_tensor_parallel
from tests.ecosystem.support import on_both
from tests.support.ranks import run_ranks

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="memfd, futex and pidfd are Linux's")

ON = {"MONARCH_SHM": "1"}


@pytest.mark.parametrize("hook", test_ddp.HOOKS)
def test_ddp_with_comm_hooks(hook: str) -> None:
    on_both(test_ddp._hooked, 2, hook, env=ON)


@pytest.mark.parametrize("half", [False, True])
def test_ddp_with_power_sgd(half: bool) -> None:
    # its callbacks wait for operations of their own
    on_both(test_ddp._power_sgd, 2, "rank-2", half, env=ON)


@pytest.mark.parametrize("name", ["ALLREDUCE", "FP16_COMPRESS"])
def test_ddp_with_built_in_hooks(name: str) -> None:
    on_both(test_ddp._built_in, 2, name, env=ON)


def test_fully_shard() -> None:
    on_both(test_fsdp2._tuned, 2, env=ON)


def test_parallelize_module() -> None:
    on_both(test_tensor_parallel._prepared, 2, env=ON)


def _callbacks(rank: int) -> list[float]:
    """A callback that waits for another operation, three deep, while more operations come in."""

    def deeper(depth: int) -> Callable[[Any], torch.Tensor]:
        def then(future: Any) -> torch.Tensor:
            x = future.value()[0] + 1
            if depth:
                x = dist.all_reduce(x, async_op=True).get_future().then(deeper(depth - 1)).wait()
            return x

        return then

    first = dist.all_reduce(torch.ones(4), async_op=True).get_future().then(deeper(3))
    return first.wait().tolist()


def test_callbacks_may_wait_for_operations() -> None:
    assert run_ranks(_callbacks, 2, env=ON) == [[31.0] * 4] * 2
