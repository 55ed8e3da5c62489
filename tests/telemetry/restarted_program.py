"""A program whose mesh restarts dead processes, for tests of what is recorded of their lives."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
from collections.abc import Iterator
from pathlib import Path

from monarch_backend._telemetry.programs import Process, Program, select
from tests.support.running_script import running_script
from tests.support.waiting import wait_until

SCRIPT = """
import sys, time
from monarch_backend.actor import Actor, Restart, endpoint, this_host


class Trainer(Actor):
    @endpoint
    def step(self):
        print("steps", flush=True)
        while True:
            time.sleep(60)


def main():
    procs = this_host().spawn_procs({"gpus": 2}, name="trainers", restart=Restart())
    trainers = procs.spawn("trainer", Trainer)
    trainers.initialized.get()
    trainers.slice(gpus=1).step.broadcast()
    sys.stdin.readline()
    procs.stop().get()
    print("stopped", flush=True)
    sys.stdin.readline()


if __name__ == "__main__":
    main()
"""


@contextlib.contextmanager
def program_with_a_killed_rank(folder: Path) -> Iterator[subprocess.Popen[str]]:
    """Run the program until its rank 1 was killed in an endpoint, and its successor is ready."""
    with running_script(folder / "restarted_program.py", SCRIPT) as process:
        assert process.stdout is not None
        assert "steps" in process.stdout.readline()
        [victim] = [each for each in program_of(process).processes if each.label.startswith("gpus 1")]
        os.kill(victim.pid, signal.SIGKILL)
        wait_until(lambda: [each for each in program_of(process).processes if _is_successor(each)])
        yield process


def program_of(process: subprocess.Popen[str]) -> Program:
    [program] = select(str(process.pid))
    return program


def _is_successor(process: Process) -> bool:
    return process.restarts == 1 and any(each["name"] == "trainer" for each in process.activities)
