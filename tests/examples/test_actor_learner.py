"""examples/actor_learner.py as a user starts it."""

import re
from pathlib import Path

from tests.examples.programs import EXAMPLES, run

SCRIPT = EXAMPLES / "actor_learner.py"
LAST = re.compile(r"^reward ([\d.]+) at the start, ([\d.]+) at the end; the most lag was (\d+)$", re.MULTILINE)


def play(arguments: str, scratch: Path) -> tuple[float, float, int]:
    """Reward at the start and at the end, and the most lag."""
    output = run(SCRIPT, arguments, scratch)
    found = LAST.search(output)
    assert found, output
    return float(found[1]), float(found[2]), int(found[3])


def test_learns_to_hold_the_pole_up(tmp_path: Path) -> None:
    picture = tmp_path / "reward.png"
    start, end, lag = play(f"--generators 2 --updates 50 --out {picture}", tmp_path)
    assert start < 40
    assert end > 3 * start
    assert lag == 1  # of two generators, one plays while the learner learns from the other
    assert picture.read_bytes().startswith(b"\x89PNG\r\n\x1a\n")


def test_lag_is_bounded_and_a_run_repeats(tmp_path: Path) -> None:
    runs = [play("--generators 3 --ahead 2 --updates 12 --games 8", tmp_path) for _ in range(2)]
    assert runs[0] == runs[1]
    assert runs[0][2] == 3 * 2 - 1


def test_one_generator_without_lag(tmp_path: Path) -> None:
    assert play("--generators 1 --updates 5 --games 8", tmp_path)[2] == 0
