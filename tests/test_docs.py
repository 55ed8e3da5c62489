"""The pages of docs/ that show code: it runs as it stands there."""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.actor.scripts import WarmInterpreter, with_meshes

DOCS = Path(__file__).parent.parent / "docs"
RUN = ["actors.md", "dtensor.md", "rdma.md"]


def blocks(page: Path) -> list[str]:
    return re.findall(r"^```python\n(.*?)^```", page.read_text(), re.MULTILINE | re.DOTALL)


@pytest.fixture(scope="module")
def interpreter() -> Iterator[WarmInterpreter]:
    with with_meshes() as interpreter:
        yield interpreter


@pytest.mark.parametrize("name", RUN)
def test_the_code_of_a_page_runs(name: str, interpreter: WarmInterpreter, tmp_path: Path) -> None:
    script = "\n".join(blocks(DOCS / name))
    done = interpreter.complete(tmp_path / "page.py", script, patience=120)
    assert done.returncode == 0, done.err
    _has_printed_what_it_promises(script, done.out)


@pytest.mark.slow
@pytest.mark.parametrize("name", RUN)
def test_a_page_imports_what_it_needs(name: str) -> None:
    script = "\n".join(blocks(DOCS / name))
    done = subprocess.run([sys.executable, "-"], input=script, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    _has_printed_what_it_promises(script, done.stdout)


def _has_printed_what_it_promises(script: str, printed: str) -> None:
    """In the comments beside the prints."""
    promised = re.findall(r"^ *print\(.*?\)\s+# (.+)$", script, re.MULTILINE)
    assert promised
    out = [line.strip() for line in printed.splitlines()]
    for line in promised:
        assert line.strip() in out, printed
