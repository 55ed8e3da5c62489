"""torchtitan: left out, because torchtitan 0.3 does not train on a machine without an accelerator."""

from __future__ import annotations

import pytest


@pytest.mark.skip(
    reason="without an accelerator torchtitan 0.3 takes cuda as device type: init_distributed asks for nccl, and "
    "meshes are of cuda; its models import triton and refuse sdpa attention"
)
def test_losses_are_those_of_gloo() -> None:
    """docs/limits.md says so."""
