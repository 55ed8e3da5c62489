"""Runner processes that benchmarks start in hosts: start them, send requests, read answers, stop them.

The programs of the runners are in host_runners/. A host is a network namespace. torchrun and others start children in
their own sessions, so a runner is stopped by ending all processes of the namespace.
"""

from __future__ import annotations

import contextlib
import json
import os
import select
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import IO, Any

from tests.support.hosts import Hosts

RUNNERS = Path(__file__).with_name("host_runners")
PATIENCE = 120.0  # seconds; enough for a start on two busy cores
LAST = 40  # lines of the runners' log that are printed when one fails


class RunnerTimeout(Exception):
    """A runner did not answer or end in time."""


class Ended(Exception):
    """A runner process has ended without an answer."""


class Runner:
    """A process in a host that handles requests."""

    def __init__(self, where: Hosts, host: int, log: IO[str], *command: Any, **env: str) -> None:
        self.process = subprocess.Popen(
            where.command(host, *map(str, command)), env={**os.environ, **env}, start_new_session=True,
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=log,
        )  # fmt: skip
        self._received = b""

    def read_line(self, seconds: float = PATIENCE) -> str:
        """Return the next line of its output."""
        assert self.process.stdout is not None
        deadline, file = time.monotonic() + seconds, self.process.stdout.fileno()
        while b"\n" not in self._received:
            if not select.select([file], [], [], max(deadline - time.monotonic(), 0))[0]:
                raise RunnerTimeout(f"{self.process.args!r} sent nothing in {seconds:g} s")
            data = os.read(file, 1 << 16)
            if not data:
                raise Ended(f"{self.process.args!r} has ended")
            self._received += data
        line, _, self._received = self._received.partition(b"\n")
        return line.decode(errors="replace")

    def send(self, *case: Any) -> None:
        """Send a request as a line of JSON."""
        assert self.process.stdin is not None
        self.process.stdin.write(json.dumps(case).encode() + b"\n")
        self.process.stdin.flush()

    def ask(self, *case: Any) -> list[float]:
        """Send a request and return the answer: a list of times."""
        self.send(*case)
        times: list[float] = json.loads(self.read_line())
        return times

    def end(self, seconds: float) -> float:
        """Wait until the process ends and return the time of its end."""
        watch = os.pidfd_open(self.process.pid)  # wait() with a timeout would poll every 50 ms only
        try:
            if not select.select([watch], [], [], max(seconds, 0))[0]:
                raise RunnerTimeout(f"{self.process.args!r} had not ended in {seconds:g} s")
            return time.time()
        finally:
            os.close(watch)


def kill(pids: Sequence[int]) -> None:
    """Kill the processes that still exist, with SIGKILL."""
    for pid in pids:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)


def _clear(where: Hosts) -> None:
    for host in range(len(where.pids) - 1):  # the last namespace is the switch
        while found := where.processes(host):
            kill(list(found))
            time.sleep(0.01)  # killed processes take a moment to end, and may have started others


@contextlib.contextmanager
def runners(where: Hosts, **env: str) -> Iterator[Callable[..., Runner]]:
    """Yield a function that starts runners. At the end of the context all runners have ended."""
    made: list[Runner] = []
    with tempfile.TemporaryFile("w+", errors="replace") as log:

        def make(host: int, *command: Any, **more: str) -> Runner:
            made.append(Runner(where, host, log, *command, MONARCH_HOST_NAME=f"host{host}", **env, **more))
            return made[-1]

        try:
            yield make
        except (RunnerTimeout, Ended):
            log.seek(0)
            sys.stderr.writelines(log.readlines()[-LAST:])
            raise
        finally:
            # Ignore a second Ctrl-C, which would leave processes behind.
            before = {number: signal.signal(number, signal.SIG_IGN) for number in (signal.SIGINT, signal.SIGTERM)}
            for runner in made:
                runner.process.kill()  # a runner that has not entered its namespace yet
            _clear(where)
            for runner in made:
                runner.process.communicate()
            for number, handler in before.items():
                signal.signal(number, handler)


def daemon(make: Callable[..., Runner], address: str, tls: str) -> None:
    """Start `monarch-backend up` on host 1 and wait until it listens."""
    make(1, sys.executable, "-m", "monarch_backend", "up", "--address", address, MONARCH_TLS=tls).read_line()
