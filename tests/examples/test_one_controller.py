"""examples/one_controller.py trains on four processes and loses one. Its result is that of a run without loss."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.actor.script_runner import WarmInterpreter, with_meshes

SCRIPT = Path(__file__).parents[2] / "examples" / "one_controller.py"
SMALL = ["--steps", "8", "--checkpoint-every", "3", "--layers", "1", "--dim", "32", "--batch", "8"]


@pytest.fixture(scope="module")
def interpreter() -> Iterator[WarmInterpreter]:
    with with_meshes() as interpreter:
        yield interpreter


def losses(interpreter: WarmInterpreter, *options: str) -> tuple[str, str]:
    """Return the output of the script and its last loss."""
    done = interpreter.complete(SCRIPT, None, arguments=[*SMALL, *options], patience=240)
    assert done.returncode == 0, done.out + done.err
    found = re.search(r"last loss (\S+)", done.out)
    assert found is not None, done.out
    return done.out, found[1]


@pytest.mark.slow
def test_killed_process_does_not_change_the_result(interpreter: WarmInterpreter) -> None:
    said, disturbed = losses(interpreter, "--kill-at", "5")
    assert "killed by signal 9" in said
    assert "step 3: new processes go on from the checkpoint" in said
    assert disturbed == losses(interpreter, "--kill-at", "0")[1]
