"""examples/elastic.py: training continues from memory after hosts are lost, and its result is not affected."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

EXAMPLE = Path(__file__).parents[2] / "examples" / "elastic.py"


@pytest.mark.slow
def test_hosts_that_die_do_not_change_the_loss(tmp_path: Path) -> None:
    environment = {**os.environ, "XDG_STATE_HOME": str(tmp_path)}
    done = subprocess.run(
        [sys.executable, str(EXAMPLE), "--steps", "48"], env=environment, capture_output=True, text=True, timeout=280
    )
    print(done.stdout)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "is killed" in done.stdout
    assert "hangs" in done.stdout
    went_on = re.findall(r"goes on with ranks \[(.*?)\]; detect (\S+) s, regroup (\S+) s, restore (\S+) s", done.stdout)
    assert len(went_on) >= 2
    assert re.search(r"ranks \[.*\] are back after", done.stdout)
    differs = re.search(r"largest difference on the way (\S+)", done.stdout)
    assert differs is not None
    assert float(differs[1]) < 2e-3
