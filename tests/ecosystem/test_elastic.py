"""torch.distributed.elastic over "monarch": after a rank dies all ranks restart, and the losses are unchanged.

elastic_script.py runs in separate processes, as torchrun starts them. There is no comparison with "gloo": torch 2.13
raises or hangs there, because restarted ranks read the keys of dead ranks.
"""

from __future__ import annotations

import json
import os
import signal
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
    return elastic_script.train(Path(folder) / "undisturbed.pt")


def _torchrun(folder: Path, die_at: int, restarts: int) -> tuple[int, str]:
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    command += [f"--max-restarts={restarts}", "--monitor-interval=0.1", f"--log-dir={folder / 'logs'}"]
    command += [str(SCRIPT), f"--out={folder}", "--backend=monarch", f"--die-at={die_at}"]
    # The working directory is the test's folder, so that the script must find the backend by its entry point.
    # The launcher has its own session, so that a hanging launcher can be killed with all of its ranks.
    with subprocess.Popen(
        command, cwd=folder, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, start_new_session=True
    ) as process:
        try:
            output, _ = process.communicate(timeout=120)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            raise
    return process.returncode, output


def _reports(folder: Path) -> list[dict[str, Any]]:
    return [json.loads((folder / f"{rank}.json").read_text()) for rank in range(2)]


@pytest.mark.slow
@pytest.mark.parametrize("die_at", [0, 3], ids=["before a checkpoint", "after checkpoints"])
def test_restart_after_a_killed_rank(die_at: int, tmp_path: Path) -> None:
    expected = run_ranks(_undisturbed, 2, str(tmp_path), backend="gloo")
    assert all(learns(losses) for losses in expected)

    code, output = _torchrun(tmp_path, die_at, restarts=2)

    assert code == 0, output
    assert "exitcode: -9" in output, "nobody died"
    for report, losses in zip(_reports(tmp_path), expected, strict=True):
        assert report["losses"] == losses
        assert (report["backend"], report["group"]) == ("monarch", "MonarchProcessGroup")
        assert report["restarts"] == 1


@pytest.mark.slow
def test_without_restarts_left_the_job_fails_and_names_the_signal(tmp_path: Path) -> None:
    code, output = _torchrun(tmp_path, die_at=2, restarts=0)
    assert code == 1
    assert "Signal 9 (SIGKILL)" in output
    assert not list(tmp_path.glob("*.json"))
