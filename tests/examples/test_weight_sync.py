"""examples/weight_sync.py as a user starts it. tests/rdma has the tests of its parts."""

import re
from pathlib import Path

import pytest

from tests.examples.example_runner import EXAMPLES, Outputs, run, run_several

SCRIPT = EXAMPLES / "weight_sync.py"
pytestmark = pytest.mark.slow
STEP = re.compile(
    r"^step +(\d+)  loss ([\d.]+)  ([\d.]+) MB in [\d.]+ ms, [\d.]+ GB/s(.*?)   \d+% of the text", re.MULTILINE
)
PLAN = re.compile(r"^generator (\d): <Plan (\d+) bytes in \d+ runs from ranks 0, 1, 2, 3>$", re.MULTILINE)


@pytest.fixture(scope="module")
def outputs(tmp_path_factory: pytest.TempPathFactory) -> Outputs:
    scratch: Path = tmp_path_factory.mktemp("weight_sync")
    return run_several(
        {
            "three": lambda: run(SCRIPT, "--steps 6 --width 96", scratch),
            "two": lambda: run(SCRIPT, "--steps 3 --generators 2 --width 64 --unchecked", scratch),
        }
    )


def test_every_step_arrives_with_the_same_bits(outputs: Outputs) -> None:
    output = outputs["three"].result()
    steps = STEP.findall(output)
    assert [int(step) for step, *_ in steps] == [1, 2, 3, 4, 5, 6], output
    assert all(rest == ", the same bits" for *_, rest in steps)
    assert float(steps[-1][1]) < float(steps[0][1])
    plans = PLAN.findall(output)
    assert len(plans) == 3, "each generator reads from all trainers"
    assert all(float(moved) == round(sum(int(nbytes) for _, nbytes in plans) / 1e6, 1) for _, _, moved, _ in steps)
    assert re.search(r"^they report: Beautiful is", output, re.MULTILINE)


def test_two_generators(outputs: Outputs) -> None:
    output = outputs["two"].result()
    assert len(STEP.findall(output)) == 3, output
    assert re.search(r"^3 syncs: [\d.]+ MB in [\d.]+ s, [\d.]+ GB/s$", output, re.MULTILINE)
