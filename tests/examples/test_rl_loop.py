"""examples/rl_loop.py as a user starts it; tests/test_docs.py runs it without --overlap."""

import re
from pathlib import Path

import pytest

from tests.examples.example_runner import EXAMPLES, run

pytestmark = pytest.mark.slow


def test_overlapped_loop_learns_and_draws_it(tmp_path: Path) -> None:
    output = run(EXAMPLES / "rl_loop.py", "--overlap --generators 3 --steps 40 --out reward.png", tmp_path)
    rewards = re.search(r"^reward ([\d.]+) in the first step, ([\d.]+) in the last; 40 steps", output, re.MULTILINE)
    assert rewards, output
    assert float(rewards[1]) < 0.2 < 0.9 < float(rewards[2])
    assert (tmp_path / "reward.png").read_bytes().startswith(b"\x89PNG\r\n\x1a\n")
