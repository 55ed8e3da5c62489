"""The pages of docs/ that show code: it runs as it stands there."""

from __future__ import annotations

import re
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
    # What the comments beside the prints promise is what came out.
    promised = re.findall(r"^ *print\(.*?\)\s+# (.+)$", script, re.MULTILINE)
    assert promised
    out = [line.strip() for line in done.out.splitlines()]
    for line in promised:
        assert line.strip() in out, done.out
