"""examples/hosts_hello.py as a user starts it."""

import re
from pathlib import Path

import pytest

from tests.examples.example_runner import EXAMPLES, run

SCRIPT = EXAMPLES / "hosts_hello.py"


@pytest.mark.slow
def test_hello_from_two_hosts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """`run` checks that no process of a host is left."""
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    output = run(SCRIPT, "", tmp_path)
    assert re.match(r"2 hosts are up after \d+\.\d s\n", output), output
    greetings = re.findall(r"process \d+ of (workers\d)$", output, re.MULTILINE)
    assert greetings == ["workers0", "workers0", "workers1", "workers1"], output
    assert "all agree about a tensor of 4 MiB: True" in output
    assert not list((tmp_path / "state").rglob("*.json"))
