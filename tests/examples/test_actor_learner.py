"""examples/actor_learner.py as a user starts it."""

import re
from pathlib import Path

import pytest

from tests.examples.example_runner import EXAMPLES, Outputs, run, run_several

SCRIPT = EXAMPLES / "actor_learner.py"
pytestmark = pytest.mark.slow
LAST = re.compile(r"^reward ([\d.]+) at the start, ([\d.]+) at the end; the most lag was (\d+)$", re.MULTILINE)


@pytest.fixture(scope="module")
def scratch(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("actor_learner")


@pytest.fixture(scope="module")
def outputs(scratch: Path) -> Outputs:
    ahead = "--generators 3 --ahead 2 --updates 12 --games 8"
    return run_several(
        {
            "long": lambda: run(SCRIPT, f"--generators 2 --updates 50 --out {scratch / 'reward.png'}", scratch),
            "ahead": lambda: run(SCRIPT, ahead, scratch),
            "again": lambda: run(SCRIPT, ahead, scratch),
            "one": lambda: run(SCRIPT, "--generators 1 --updates 5 --games 8", scratch),
        }
    )


def rewards(output: str) -> tuple[float, float, int]:
    """Return the reward at the start, the reward at the end, and the largest lag."""
    found = LAST.search(output)
    assert found, output
    return float(found[1]), float(found[2]), int(found[3])


def test_learns_to_hold_the_pole_up(outputs: Outputs, scratch: Path) -> None:
    start, end, lag = rewards(outputs["long"].result())
    assert start < 40
    assert end > 3 * start
    assert lag == 1  # of two generators, one plays while the learner uses the other's data
    assert (scratch / "reward.png").read_bytes().startswith(b"\x89PNG\r\n\x1a\n")


def test_lag_is_bounded_and_a_run_repeats(outputs: Outputs) -> None:
    runs = [rewards(outputs[name].result()) for name in ("ahead", "again")]
    assert runs[0] == runs[1]
    assert runs[0][2] == 3 * 2 - 1


def test_one_generator_without_lag(outputs: Outputs) -> None:
    assert rewards(outputs["one"].result())[2] == 0
