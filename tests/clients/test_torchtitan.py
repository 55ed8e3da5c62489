"""torchtitan: parallelize_llama shards Llama 3 with FSDP2 over this package's groups."""

from __future__ import annotations

import re
import sys
from pathlib import Path

import pytest

from tests.clients.programs import PAGE, Run, needs, run

pytestmark = needs("torchtitan")
PROGRAM = "examples/frameworks/torchtitan_llama.py"


def _losses(ended: Run, rank: int) -> list[float]:
    assert ended.status == 0, f"status {ended.status}:\n{ended.out[-3000:]}\n{ended.err[-6000:]}"
    return [float(loss) for loss in re.findall(rf"rank {rank} step \d loss (\S+)", ended.out)]


def test_losses_are_those_of_one_process(tmp_path: Path) -> None:
    (command,) = re.findall(rf"^torchrun .* {PROGRAM}$", PAGE.read_text(), re.MULTILINE)
    sharded = run(command, tmp_path)
    expected = _losses(run(f"{sys.executable} {PROGRAM}", tmp_path), 0)
    assert len(expected) == 4
    for rank in range(2):
        assert _losses(sharded, rank) == pytest.approx(expected, rel=1e-4)
    assert sharded.groups["MonarchProcessGroup"] > 0  # torchtitan also makes fake ones, of one rank
