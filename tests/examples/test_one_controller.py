"""examples/one_controller.py: one program trains on four processes, loses one of them, and ends as if nothing was."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

SCRIPT = Path(__file__).parents[2] / "examples" / "one_controller.py"
SMALL = ["--steps", "8", "--checkpoint-every", "3", "--layers", "1", "--dim", "32", "--batch", "8"]


def losses(*options: str) -> tuple[str, str]:
    """What it prints, and its last loss."""
    done = subprocess.run(
        [sys.executable, str(SCRIPT), *SMALL, *options], capture_output=True, text=True, timeout=240, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    found = re.search(r"last loss (\S+)", done.stdout)
    assert found is not None, done.stdout
    return done.stdout, found[1]


def test_a_killed_process_changes_nothing() -> None:
    said, disturbed = losses("--kill-at", "5")
    assert "killed by signal 9" in said
    assert "step 3: new processes go on from the checkpoint" in said
    assert disturbed == losses("--kill-at", "0")[1]
