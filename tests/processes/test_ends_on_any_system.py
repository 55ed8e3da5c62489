"""Ends of processes of a spawner, forked or spawned: this runs on every system, and with MONARCH_PORTABLE=1.

A pipe tells that all writers have ended, where there is no pidfd. test_fork_server.py has more for Linux.
"""

from __future__ import annotations

import os
import select
import signal
import subprocess
import sys
from collections.abc import Callable

import cloudpickle
import pytest

from monarch_backend._core import platform
from monarch_backend._processes.spawner import Exited
from tests.processes import spawning
from tests.processes.spawning import Host

cloudpickle.register_pickle_by_value(sys.modules[__name__])
cloudpickle.register_pickle_by_value(spawning)

PATIENCE = 60.0


class Output:
    """What processes write, and their common end."""

    def __init__(self) -> None:
        self.read, self.write = os.pipe()

    def __enter__(self) -> Output:
        return self

    def __exit__(self, *_: object) -> None:
        os.close(self.read)
        self.leave()

    def leave(self) -> None:
        """Close the end of this process, so that `next` sees that of the others."""
        if self.write >= 0:
            os.close(self.write)
        self.write = -1

    def next(self) -> bytes:
        """What comes next; b"" once all processes with the pipe have ended."""
        assert select.select([self.read], [], [], PATIENCE)[0], "the processes neither write nor end"
        return os.read(self.read, 100)


def _stay() -> None:
    import os
    import signal

    os.write(1, b"up")
    while True:
        signal.pause()


def _stay_busy() -> None:
    import os

    os.write(1, b"up")
    while True:
        pass


def _stay_with_a_program() -> None:
    import os
    import signal
    import subprocess

    subprocess.Popen(["sleep", "600"])
    os.write(1, b"up")
    signal.pause()


def test_start_method_is_that_of_the_system(host: Host) -> None:
    outcome = host.run(lambda: print("hello"))
    assert (outcome.out, outcome.err, outcome.exited.returncode) == ("hello\n", "", 0)
    assert (outcome.started.method, outcome.started.reason) == ("fork" if platform.HAS_SAFE_FORK else "spawn", "")


MAINS = pytest.mark.parametrize("main", [_stay, _stay_busy, _stay_with_a_program])


@MAINS
def test_killed_process_ends_with_its_descendants(main: Callable[[], None], host: Host) -> None:
    with Output() as output:
        number = host.spawn(main, stdout=output.write)
        assert output.next() == b"up"
        output.leave()
        host.spawner.kill(number)
        assert output.next() == b""
        assert host.wait(number, Exited).returncode == -signal.SIGKILL


@MAINS
@pytest.mark.parametrize("cause", ["close", "server killed"])
def test_end_of_the_server_ends_its_processes(main: Callable[[], None], cause: str, own_host: Host) -> None:
    with Output() as output:
        number = own_host.spawn(main, stdout=output.write)
        assert output.next() == b"up"
        output.leave()
        if cause == "close":
            own_host.spawner.close()
        else:
            assert own_host.spawner._process is not None
            os.kill(own_host.spawner._process.pid, signal.SIGKILL)
        assert output.next() == b""
        assert own_host.wait(number, Exited).returncode == -signal.SIGKILL


def test_exit_of_a_process_ends_its_programs(host: Host) -> None:
    def main() -> None:
        import os
        import subprocess

        subprocess.Popen(["sleep", "600"])
        os.write(1, b"up")

    with Output() as output:
        number = host.spawn(main, stdout=output.write)
        assert output.next() == b"up"
        output.leave()
        assert output.next() == b""
        assert host.wait(number, Exited).returncode == 0


PROGRAM = """
import cloudpickle, os, signal, sys
from monarch_backend._processes.spawner import ProcessSpec, Spawner, Started

def stay():
    import os, signal
    os.write(1, b"up")
    while True:
        pass

def on_event(event):
    if when == "started" and isinstance(event, Started):
        os.kill(os.getpid(), signal.SIGKILL)

when, *address = sys.argv[1:]
spawner = Spawner(on_event, *address)
main = cloudpickle.dumps(stay)
spawner.spawn([ProcessSpec("gpus 0", main, dict(os.environ), sys.path, sys.argv, os.getcwd(), stdout=1)])
if when == "at once":
    os.kill(os.getpid(), signal.SIGKILL)
signal.pause()
"""


@pytest.mark.parametrize("server", ["its own", "shared"])
@pytest.mark.parametrize("when", ["at once", "started", "busy"])
def test_killed_owner_leaves_nothing(when: str, server: str, host: Host) -> None:
    address = [host.spawner.address] if server == "shared" else []
    with subprocess.Popen([sys.executable, "-c", PROGRAM, when, *address], stdout=subprocess.PIPE) as owner:
        assert owner.stdout is not None
        if when == "busy":
            assert owner.stdout.read(2) == b"up"
            owner.kill()
        owner.stdout.read()  # to its end: that of all processes with this pipe
        assert owner.wait(PATIENCE) == -signal.SIGKILL
    assert not address or host.run(lambda: None).exited.returncode == 0
