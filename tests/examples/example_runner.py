"""Runner of example programs, as a user starts them. It checks that no process is left."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
import uuid
from collections.abc import Callable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

import pytest

EXAMPLES = Path(__file__).parents[2] / "examples"
TIMEOUT = 150  # seconds; each takes 4 to 10 on two free cores
GONE_WITHIN = 5.0  # seconds
_MARK = "MONARCH_TEST_PROGRAM"


def run(script: Path | str, arguments: str, scratch: Path, stdin: str | None = None, code: int = 0) -> str:
    """Run ``python script arguments`` and return its output. It must exit with ``code`` and leave no process behind."""
    # Variables of a test runner that torchrun started, or that treats warnings as errors, must not reach the program.
    dropped = {"RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT", "PYTHONWARNINGS"}
    environment = {name: value for name, value in os.environ.items() if name not in dropped}
    mark = uuid.uuid4().hex
    # "config": matplotlib and Jupyter must not write to the home directory of the user that runs the tests.
    environment |= {
        "PYTHONFAULTHANDLER": "1",
        _MARK: mark,
        "MPLCONFIGDIR": str(scratch / "config"),
        "JUPYTER_DATA_DIR": str(scratch / "config"),
    }
    environment |= {"JUPYTER_RUNTIME_DIR": str(scratch / "config"), "IPYTHONDIR": str(scratch / "config")}
    process = subprocess.Popen(
        [sys.executable, str(script), *arguments.split()],
        stdin=subprocess.PIPE if stdin is not None else subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        cwd=scratch,
        env=environment,
    )
    try:
        output, _ = process.communicate(stdin, TIMEOUT)
    except subprocess.TimeoutExpired:
        process.send_signal(signal.SIGABRT)  # makes the program print the stacks of its threads
        output, _ = process.communicate()
        pytest.fail(f"{script} {arguments} still ran after {TIMEOUT} s:\n{output[-4000:]}")
    assert process.returncode == code, output
    assert "Warning" not in output, output
    left = _left_behind(mark)
    assert not left, f"{script} {arguments} has left processes behind: {left}\n{output}"
    return output


Outputs = dict[str, "Future[str]"]


def run_several(runs: Mapping[str, Callable[[], str]]) -> Outputs:
    """Run several calls of `run`, two at a time, and return their futures. A program has one thread while it starts."""
    with ThreadPoolExecutor(2) as pool:
        return {name: pool.submit(run) for name, run in runs.items()}


def _left_behind(mark: str) -> list[str]:
    """Return the command lines of processes with the mark, after processes that are exiting have had time to end."""
    deadline = time.monotonic() + GONE_WITHIN
    while left := _marked(mark):
        if time.monotonic() > deadline:
            break
        time.sleep(0.02)
    return left


def _marked(mark: str) -> list[str]:
    found, needle = [], f"{_MARK}={mark}".encode()
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            if needle in (folder / "environ").read_bytes():
                found.append(f"{folder.name} {(folder / 'cmdline').read_text()}".replace("\0", " "))
        except OSError:
            continue  # the process has ended, or belongs to another user
    return found
