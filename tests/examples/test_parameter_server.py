"""examples/parameter_server.py as a user starts it."""

import re
from pathlib import Path

import pytest

from tests.examples.example_runner import EXAMPLES, Outputs, run, run_several

SCRIPT = EXAMPLES / "parameter_server.py"
PICTURE = Path("pictures") / "accuracy.png"

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def scratch(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("parameter_server")


@pytest.fixture(scope="module")
def outputs(scratch: Path) -> Outputs:
    kill = "--trainers 3 --steps 200 --kill --shards"
    return run_several(
        {
            "drawn": lambda: run(SCRIPT, f"--trainers 2 --steps 250 --out {scratch / PICTURE}", scratch),
            "1": lambda: run(SCRIPT, f"{kill} 1", scratch),
            "3": lambda: run(SCRIPT, f"{kill} 3", scratch),
            "one trainer": lambda: run(SCRIPT, "--trainers 1 --steps 40", scratch),
        }
    )


def accuracies(output: str) -> list[float]:
    return [float(number) for number in re.findall(r"test accuracy (\d\.\d+)", output)]


def test_learns_the_digits_and_draws_it(outputs: Outputs, scratch: Path) -> None:
    output = outputs["drawn"].result()
    assert accuracies(output)[0] < 0.4
    assert accuracies(output)[-1] > 0.93, output
    assert re.search(r"^500 updates in .* per second$", output, re.MULTILINE), output
    assert (scratch / PICTURE).read_bytes().startswith(b"\x89PNG\r\n\x1a\n")


@pytest.mark.parametrize("shards", [1, 3])
def test_goes_on_when_a_trainer_is_killed(outputs: Outputs, shards: int) -> None:
    output = outputs[str(shards)].result()
    deaths = re.findall(r"^trainers (\d) died after (\d+) of 200 steps, .*$", output, re.MULTILINE)
    assert [rank for rank, _ in deaths] == ["2"], output
    # It was killed after 100 steps, and may have made as many more as a stream's window allows.
    assert 100 <= int(deaths[0][1]) <= 100 + 65
    assert "killed by signal 9 (SIGKILL)" in output
    assert re.search(r"^600 updates in .* per second$", output, re.MULTILINE), output
    assert accuracies(output)[-1] > 0.93, output


def test_gradients_are_stale_only_with_several_trainers(outputs: Outputs) -> None:
    output = outputs["one trainer"].result()
    assert "staleness 0.00 on average, 0 at most" in output, output
