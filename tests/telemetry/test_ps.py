"""`monarch-backend ps`: names of processes, and their order."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator

import pytest

from monarch_backend import cli
from monarch_backend._core import platform
from tests.telemetry.programs import busy_program

pytestmark = pytest.mark.skipif(not platform.HAS_MEMFD, reason="programs are found in /proc")


@pytest.fixture(scope="module")
def running(tmp_path_factory: pytest.TempPathFactory) -> Iterator[subprocess.Popen[str]]:
    with busy_program(str(tmp_path_factory.mktemp("program"))) as process:
        yield process


def test_process_has_the_name_of_its_mesh(running: subprocess.Popen[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["ps", str(running.pid)]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line.partition(" (pid")[0] for line in lines if line.startswith("  gpus")] == [
        "  gpus 0 of trainers", "  gpus 1 of trainers",
    ]  # fmt: skip


@pytest.mark.parametrize(("order", "key"), [("age", "age"), ("cpu", "cpu_seconds"), ("memory", "memory")])
def test_sorted_processes_follow_the_program_highest_first(
    order: str, key: str, running: subprocess.Popen[str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(["ps", str(running.pid), "--sort", order, "--json"]) == 0
    [program] = json.loads(capsys.readouterr().out)
    first, *others = program["processes"]
    assert first["pid"] == running.pid
    assert [each[key] for each in others] == sorted((each[key] for each in others), reverse=True)
    assert len(others) == 2


OF_A_LATER_RELEASE = """
import os
from monarch_backend import cli
from monarch_backend._telemetry import recorder

recorder.area()
cell = recorder.take_cell(999, "later")
recorder.begin_activity(cell, 77, 0, 0, 0, 0, 0)
cli.main(["ps", str(os.getpid()), "--json"])
"""


def test_activity_of_a_later_release_has_a_number_as_kind() -> None:
    command = [sys.executable, "-c", OF_A_LATER_RELEASE]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    [activity] = json.loads(done.stdout)[0]["processes"][0]["activities"]
    assert (activity["kind"], activity["state"]) == ("999", "77")
