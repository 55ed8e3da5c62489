"""torch.distributed.elastic over "monarch": a rank dies, all start again, and the losses are as if none had.

The script that runs is elastic_script.py, in processes of their own, as torchrun starts them.
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.ecosystem import elastic_script
from tests.ecosystem.support import learns
from tests.support.ranks import run_ranks

SCRIPT = Path(elastic_script.__file__)


def _undisturbed(rank: int, folder: str) -> list[float]:
    return elastic_script.train(Path(folder) / "checkpoint.pt")


def _torchrun(folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    command += ["--max-restarts=2", "--monitor-interval=0.1", f"--log-dir={folder / 'logs'}"]
    command += [str(SCRIPT), f"--out={folder}", *arguments]
    # In the test's folder: the script must find the backend by its entry point, not in the working directory.
    return subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=120, check=False)


def _reports(folder: Path) -> list[dict[str, Any]]:
    return [json.loads((folder / f"{rank}.json").read_text()) for rank in range(2)]


@pytest.mark.parametrize("die_at", [0, 3], ids=["before a checkpoint", "after checkpoints"])
def test_restart_after_a_killed_rank(die_at: int, tmp_path: Path) -> None:
    expected = run_ranks(_undisturbed, 2, str(tmp_path), backend="gloo")
    (tmp_path / "checkpoint.pt").unlink()
    assert all(learns(losses) for losses in expected)

    run = _torchrun(tmp_path, "--backend=monarch", f"--die-at={die_at}")

    assert run.returncode == 0, run.stderr
    assert "exitcode: -9" in run.stderr, "nobody died"
    for report, losses in zip(_reports(tmp_path), expected, strict=True):
        assert report["losses"] == losses
        assert (report["backend"], report["group"]) == ("monarch", "MonarchProcessGroup")
        assert report["restarts"] == 1
