"""The scripts of benchmarks/ run without an error. Their figures are not checked."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.actor.script_runner import WarmInterpreter

FOLDER = Path(__file__).parent.parent / "benchmarks"
SCRIPTS = sorted(path.name for path in FOLDER.glob("[!_]*.py"))
QUICK = {
    "controller.py": ["--only", "kinds", "--rounds", "1"],
    "rdma.py": ["--only", "own", "--rounds", "1", "--sizes", "8"],
}
"""Scripts that end soon, and their arguments."""
pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def interpreter() -> Iterator[WarmInterpreter]:
    with WarmInterpreter("", modules=("torch",)) as interpreter:
        yield interpreter


def said(name: str, *options: str, cwd: Path) -> str:
    command = [sys.executable, str(FOLDER / name), *options]
    done = subprocess.run(command, cwd=cwd, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr[-2000:]
    return done.stdout


@pytest.mark.parametrize("name", SCRIPTS)
def test_benchmark_prints_its_description(name: str, interpreter: WarmInterpreter) -> None:
    done = interpreter.complete(FOLDER / name, None, arguments=["--help"])
    assert done.returncode == 0, done.err
    assert "--help" in done.out


@pytest.mark.parametrize("name", QUICK)
def test_benchmark_runs(name: str, tmp_path: Path) -> None:
    options = QUICK[name] if name != "rdma.py" else [*QUICK[name], "--out", str(tmp_path)]
    assert any(character.isdigit() for character in said(name, *options, cwd=tmp_path))
