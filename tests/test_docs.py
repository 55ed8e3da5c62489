"""The pages of docs/ that show code: it runs as it stands there."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

DOCS = Path(__file__).parent.parent / "docs"
RUN = ["actors.md", "dtensor.md", "rdma.md"]


def blocks(page: Path) -> list[str]:
    return re.findall(r"^```python\n(.*?)^```", page.read_text(), re.MULTILINE | re.DOTALL)


@pytest.mark.parametrize("name", RUN)
def test_the_code_of_a_page_runs(name: str) -> None:
    script = "\n".join(blocks(DOCS / name))
    done = subprocess.run([sys.executable, "-"], input=script, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    # What the comments beside the prints promise is what came out.
    promised = re.findall(r"^ *print\(.*?\)\s+# (.+)$", script, re.MULTILINE)
    assert promised
    out = [line.strip() for line in done.stdout.splitlines()]
    for line in promised:
        assert line.strip() in out, done.stdout
