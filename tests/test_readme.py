"""The quick start of the README runs, and its files and make targets exist."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[1]
README = (ROOT / "README.md").read_text(encoding="utf-8")
TOUR = (ROOT / "docs" / "architecture.md").read_text(encoding="utf-8")


def test_quick_start(tmp_path: Path) -> None:
    found = re.search(r"cat > sum\.py <<'EOF'\n(.*?)\nEOF\n", README, re.S)
    assert found
    (tmp_path / "sum.py").write_text(found.group(1))
    env = dict(os.environ, MONARCH_DEBUG="1", OMP_NUM_THREADS="1")
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2", "sum.py"]
    out = subprocess.run(command, cwd=tmp_path, env=env, capture_output=True, text=True, timeout=120)
    assert out.returncode == 0, out.stderr
    assert out.stdout.count("tensor([3., 3., 3., 3.])") == 2
    lines = [line for line in out.stderr.splitlines() if line.startswith("[monarch rank")]
    assert sum("cpu -> shm (all ranks share memory)" in line for line in lines) == 2, out.stderr
    assert sum("all_reduce(float32, 4 elements, SUM): one shot" in line for line in lines) == 2, out.stderr


def test_sharded_tensors() -> None:
    """The example of the README prints the loss and two rows."""
    found = re.search(r"## Sharded tensors.*?```python\n(.*?)```", README, re.S)
    assert found
    env = dict(os.environ, OMP_NUM_THREADS="1")
    done = subprocess.run(
        [sys.executable, "-"], input=found.group(1), env=env, capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0, done.stderr
    assert re.match(r"[\d.]+ DTensor\(tensor\(\[\[ *-?\d\.\d+(e[+-]\d+)?,.*placements=", done.stdout, re.S), done.stdout


def test_named_files_exist() -> None:
    names = re.findall(r"\]\(([^)#]+)\)", README) + re.findall(r"^\d+\. `([^`]+)`", TOUR, re.M)
    assert len(names) > 30
    for name in names:
        assert (ROOT / name).exists(), name


def test_length() -> None:
    assert len(README.split()) <= 900


def test_named_make_targets_exist() -> None:
    makefile = (ROOT / "Makefile").read_text()
    targets = set(re.findall(r"make ([a-z]+(?:-[a-z0-9]+)*)", README + (ROOT / "CONTRIBUTING.md").read_text()))
    assert {"demo", "test"} <= targets
    for target in targets:
        assert re.search(rf"^{target}:", makefile, re.M), target
