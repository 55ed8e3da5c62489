"""examples/parameter_server.py as a user starts it."""

import re
from pathlib import Path

import pytest

from tests.examples.programs import EXAMPLES, run

SCRIPT = EXAMPLES / "parameter_server.py"


def accuracies(output: str) -> list[float]:
    return [float(number) for number in re.findall(r"test accuracy (\d\.\d+)", output)]


def test_learns_the_digits_and_draws_it(tmp_path: Path) -> None:
    picture = tmp_path / "pictures" / "accuracy.png"
    output = run(SCRIPT, f"--trainers 2 --steps 250 --out {picture}", tmp_path)
    assert accuracies(output)[0] < 0.4
    assert accuracies(output)[-1] > 0.93, output
    assert re.search(r"^500 updates in .* per second$", output, re.MULTILINE), output
    assert picture.read_bytes().startswith(b"\x89PNG\r\n\x1a\n")


@pytest.mark.parametrize("shards", [1, 3])
def test_goes_on_when_a_trainer_is_killed(tmp_path: Path, shards: int) -> None:
    output = run(SCRIPT, f"--trainers 3 --steps 200 --shards {shards} --kill", tmp_path)
    deaths = re.findall(r"^trainers (\d) died after (\d+) of 200 steps, .*$", output, re.MULTILINE)
    assert [rank for rank, _ in deaths] == ["2"], output
    # It has made at most a stream's window of steps more than the 100 after which it was killed.
    assert 100 <= int(deaths[0][1]) <= 100 + 65
    assert "killed by signal 9 (SIGKILL)" in output
    assert re.search(r"^600 updates in .* per second$", output, re.MULTILINE), output
    assert accuracies(output)[-1] > 0.93, output


def test_gradients_are_stale_only_with_several_trainers(tmp_path: Path) -> None:
    output = run(SCRIPT, "--trainers 1 --steps 40", tmp_path)
    assert "staleness 0.00 on average, 0 at most" in output, output
