"""DeepSpeed: ZeRO 1 to 3 train with this package's groups, with MONARCH_AS=gloo and by name."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from tests.clients.programs import compare, needs

pytestmark = [
    needs("deepspeed"),
    pytest.mark.skipif(shutil.which("c++") is None, reason="DeepSpeed compiles an operator for the CPU when it starts"),
]


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_losses_are_those_of_gloo(stage: int, tmp_path: Path) -> None:
    compare("DeepSpeed", tmp_path, arguments=str(stage), by_name=True)
