"""Parallel training over the Gloo route (MONARCH_SHM=0), which ranks on several hosts use, equals "gloo" bit by bit.

The other tests of this folder use shared memory.
"""

from __future__ import annotations

import pytest

from tests.ecosystem import test_ddp, test_fsdp2, test_tensor_parallel
from tests.ecosystem.support import on_both

OFF = {"MONARCH_SHM": "0"}


@pytest.mark.parametrize("hook", test_ddp.HOOKS)
def test_ddp_with_comm_hooks(hook: str) -> None:
    on_both(test_ddp._hooked, 2, hook, env=OFF)


@pytest.mark.parametrize("half", [False, True])
def test_ddp_with_power_sgd(half: bool) -> None:
    # The callbacks of PowerSGD wait for operations that they start.
    on_both(test_ddp._power_sgd, 2, "rank-2", half, env=OFF)


@pytest.mark.parametrize("name", ["ALLREDUCE", "FP16_COMPRESS"])
def test_ddp_with_built_in_hooks(name: str) -> None:
    on_both(test_ddp._built_in, 2, name, env=OFF)


def test_fully_shard() -> None:
    on_both(test_fsdp2._tuned, 2, env=OFF)


def test_parallelize_module() -> None:
    on_both(test_tensor_parallel._prepared, 2, env=OFF)
