"""Shared parts of the host tests: daemons, and controllers, in namespaces or on the loopback interface.

Controllers and their processes import this module, so it does not import pytest.
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from tests.actor.script_runner import Run, WarmInterpreter
from tests.support import leaks
from tests.support.hosts import Hosts, address6

PATIENCE = 30.0
STARTING = 90.0
"""Timeout in seconds of a daemon's start. It imports torch twice, on a busy machine."""

NAMES = ("alpha", "beta", "gamma", "delta", "epsilon", "zeta", "eta", "theta", "iota")
"""Names of hosts 0, 1, ...; controllers run on host 0."""

UP = "import sys; from monarch_backend.cli import main; sys.exit(main())"
"""Source that runs `monarch-backend` without its installed script."""
_SERVER = """
import sys
from monarch_backend._processes.spawner import Spawner
spawner = Spawner(print)
spawner.start()
print(spawner.address, flush=True)
sys.stdin.readline()
"""


class World:
    """Hosts in namespaces, or this machine in their place. All daemons and controllers end with the block."""

    def __init__(self, where: Hosts | None, folder: Path) -> None:
        self.where, self.folder = where, folder
        self.secret = folder / "secret"
        with open(os.open(self.secret, os.O_CREAT | os.O_WRONLY, 0o600), "w") as file:
            file.write(os.urandom(32).hex())
        self._stack = contextlib.ExitStack()
        self._server = ""
        self._controllers: list[WarmInterpreter] = []

    def __enter__(self) -> World:
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()

    def command(self, index: int, *words: str) -> list[str]:
        """Return the command line that runs a program on a host."""
        return self.where.command(index, *words) if self.where is not None else list(words)

    def environment(self, index: int) -> dict[str, str]:
        """Return the environment of programs on a host."""
        added = {"MONARCH_HOST_NAME": NAMES[index], "MONARCH_SECRET_FILE": str(self.secret)}
        return {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path), **added}

    def address(self, index: int) -> str:
        """Return the `--address` of a daemon, with any free port."""
        return f"{self.where.address(index) if self.where is not None else '127.0.0.1'}:0"

    def daemon(self, index: int, *words: str, **options: Any) -> Daemon:
        """Start a daemon that runs until the world ends, unless it ends earlier.

        ``words`` are arguments of its command.
        """
        return self._stack.enter_context(Daemon(self, index, *words, **options))

    def controller(self, number: int = 0) -> WarmInterpreter:
        """Return an interpreter on host 0. Several may run scripts at the same time."""
        if not self._server:
            command = self.command(0, sys.executable, "-c", _SERVER)
            process = subprocess.Popen(
                command, env=self.environment(0), stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
            )
            assert process.stdin is not None
            assert process.stdout is not None
            self._stack.callback(process.wait)
            self._stack.enter_context(process.stdout)
            self._stack.enter_context(process.stdin)
            # A line tells the server to end. Ranks forked meanwhile hold this pipe open, so closing it would not.
            self._stack.callback(process.stdin.write, "end\n")
            self._server = process.stdout.readline().strip()
        while len(self._controllers) <= number:
            one = WarmInterpreter(self._server, self.command(0), self.environment(0))
            self._controllers.append(self._stack.enter_context(one))
        return self._controllers[number]

    def start(
        self, program: str, *arguments: Any, number: int = 0, env: Mapping[str, str] | None = None,
        module: str = "controller_programs",
    ) -> Run:  # fmt: skip
        """Start ``program`` of controller_programs.py, or of another ``module`` here, with these arguments."""
        source = f"import json\nfrom tests.hosts.{module} import {program}\n"
        source += f"{program}(*json.loads({json.dumps(arguments)!r}))\n"
        return self.controller(number).start(self.folder / f"script{number}.py", source, env=env)

    def run(
        self, program: str, *arguments: Any, env: Mapping[str, str] | None = None, module: str = "controller_programs"
    ) -> Run:
        """Run a program to its end, and check that it exits with 0."""
        self.start(program, *arguments, env=env, module=module)
        try:
            run = self.controller().finish()
            print(run.out)
            assert run.returncode == 0, f"{run.returncode}\n{run.out}\n{run.err}"
            return run
        finally:
            self.controller().drop()


class Daemon:
    """`monarch-backend up` on a host."""

    def __init__(
        self, world: World, index: int, *words: str, address: str = "", env: Mapping[str, str] | None = None,
        source: str = UP,
    ) -> None:  # fmt: skip
        self._log = world.folder / f"up{len(list(world.folder.iterdir()))}"
        with open(self._log, "wb") as log:
            self.process = subprocess.Popen(
                world.command(
                    index, sys.executable, "-c", source, "up", "--address", address or world.address(index), *words
                ),
                env={**world.environment(index), **(env or {})},
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                preexec_fn=_end_with_us,
            )
        self.pid = self.process.pid
        self._address = ""

    @property
    def address(self) -> str:
        """The address where the daemon listens. Waits until it does."""
        deadline = time.monotonic() + STARTING
        while not self._address:
            said = self.output
            if "is up: " in said and said.endswith("\n"):
                self._address = said.split("is up: ")[1].split()[0]
            else:
                assert self.process.poll() is None and time.monotonic() < deadline, f"the daemon is not up: {said}"
                time.sleep(0.01)
        return self._address

    def wait_for_server(self) -> None:
        """Wait until the fork server's process exists.

        The daemon does not wait for it. A later start would look like a leaked process of some test.
        """
        deadline = time.monotonic() + STARTING
        while not leaks.children_of(self.pid):
            assert self.process.poll() is None and time.monotonic() < deadline, f"no fork server: {self.output}"
            time.sleep(0.01)

    @property
    def output(self) -> str:
        """The daemon's output so far."""
        return self._log.read_text()

    def __enter__(self) -> Daemon:
        return self

    def __exit__(self, *_: object) -> None:
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGTERM)
        self.process.wait(PATIENCE)


def _end_with_us() -> None:
    """Have the kernel kill this process if pytest is killed."""
    ctypes.CDLL(None).prctl(1, signal.SIGKILL)


def children(pid: int) -> list[int]:
    """Return the pids of a process's children."""
    found: list[int] = []
    with contextlib.suppress(OSError):
        for task in os.listdir(f"/proc/{pid}/task"):
            found += map(int, Path(f"/proc/{pid}/task/{task}/children").read_text().split())
    return found


def descendants(pid: int) -> list[int]:
    """Return the pids of a process's children, their children, and so on."""
    found = []
    for child in children(pid):
        found += [child, *descendants(child)]
    return found


def any_address6(index: int) -> str:
    """Return the IPv6 `--address` of a host, with any free port."""
    return f"[{address6(index)}]:0"


@contextlib.contextmanager
def ended_within(seconds: float, what: str) -> Iterator[None]:
    """Check that the block takes less than ``seconds``."""
    began = time.monotonic()
    yield
    took = time.monotonic() - began
    assert took < seconds, f"{what} took {took:.2f} s, more than {seconds}"


def until_gone(pids: Sequence[int], seconds: float) -> float:
    """Wait until no process of ``pids`` runs. Return the seconds that it took."""
    began = time.monotonic()
    while left := [pid for pid in pids if runs(pid)]:
        assert time.monotonic() - began < seconds, f"after {seconds} s still there: {left}"
        time.sleep(0.002)
    return time.monotonic() - began


def runs(pid: int) -> bool:
    """Return whether the process exists and is not a zombie."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] not in "ZX"
    except OSError:
        return False
