"""Start of one host by a command, on this machine or through ssh. The command reads the secret and prints the address.

The host ends with the command until it receives `stay`. A program that fails or is killed before it has noted the host
leaves nothing behind.
"""

from __future__ import annotations

import contextlib
import os
import re
import select
import subprocess
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

from monarch_backend._hosts.process_identity import Identity
from monarch_backend._hosts.startup_handshake import PROCESS, READY, STAY
from monarch_backend._job.errors import JobError

REACHED = "monarch_backend: reached at "
ARGUMENTS = ("up", "--secret-from-stdin", "--exit-with-stdin")
KILL_TIMEOUT_S = 10.0
"""Seconds for a host to end after `give_up`."""
CHECK_INTERVAL_S = 0.25


class Up(NamedTuple):
    """A host that listens. ``process`` and ``log`` of a detached one; ``reached``: the address that ssh has reached."""

    address: str
    reached: str
    process: Identity | None
    log: str


class Launch:
    """A host that is being started. ``label`` names it in messages. No command line or environment has the secret."""

    def __init__(
        self, label: str, command: Sequence[str], secret: bytes, environment: Mapping[str, str] | None = None
    ) -> None:
        self.label = label
        self._detached = any("--detach" in word for word in command)
        self._errors = tempfile.TemporaryFile()  # noqa: SIM115
        self._said = b""
        try:
            self._process = subprocess.Popen(
                command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=self._errors, env=environment,
                start_new_session=True, bufsize=0,
            )  # fmt: skip
        except OSError as error:
            self._errors.close()
            raise JobError(f"{label} can't be started: {error}") from None
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._in, self._out = self._process.stdin, self._process.stdout
        with contextlib.suppress(BrokenPipeError):
            self._in.write(secret.hex().encode() + b"\n")

    def ready(self, until: float, check: Callable[[], None] = lambda: None) -> Up:
        """Return the host once it listens. Raises JobError if it ends, or at the monotonic time ``until``.

        ``check`` is called several times a second. It may raise an error to stop the wait.
        """
        says = select.poll()  # select() is limited to 1024 descriptors
        says.register(self._out, select.POLLIN)
        while (up := self._parse()) is None:
            left = until - time.monotonic()
            if left <= 0:
                raise JobError(f"{self.label} did not report in time that it listens{self._why()}")
            check()
            if not says.poll(1000 * min(left, CHECK_INTERVAL_S)):
                continue
            data = os.read(self._out.fileno(), 4096)
            if not data:
                code = self._process.wait()
                raise JobError(f"{self.label} has ended before it listened (exit {code}){self._why()}")
            self._said += data
        return up

    def _parse(self) -> Up | None:
        address = reached = log = ""
        process = None
        for line in self._said.decode("utf-8", "replace").splitlines(True):
            if not line.endswith("\n"):
                break
            if line.startswith(READY):
                address = line.removeprefix(READY).strip()
            elif line.startswith(REACHED):
                reached = line.removeprefix(REACHED).strip()
            elif found := re.fullmatch(re.escape(PROCESS) + r"(\d+) (\d+) ([\w-]+) (.*)\n", line):
                process, log = Identity(int(found[1]), int(found[2]), found[3]), found[4]
        return Up(address, reached, process, log) if address and (process or not self._detached) else None

    def _why(self) -> str:
        size = os.fstat(self._errors.fileno()).st_size
        text = os.pread(self._errors.fileno(), 2000, max(0, size - 2000)).decode("utf-8", "replace").strip()
        return f": {text}" if text else ""

    def stay(self) -> None:
        """Tell the host, which has been noted, to run independently. Raises JobError if it has ended meanwhile."""
        with contextlib.suppress(BrokenPipeError):
            self._in.write(STAY + b"\n")
        try:
            code = self._process.wait(KILL_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            code = None
        if code != 0:
            raise JobError(f"{self.label} ended while it was noted{self._why()}")
        self.close()

    def wait(self) -> int:
        """Return the exit code when the host has ended."""
        return self._process.wait()

    def let_go(self) -> None:
        """Close the host's standard input. The host ends unless it was told to stay."""
        self._in.close()

    def give_up(self) -> None:
        """Close the host's standard input, and return when the host has ended."""
        self.let_go()
        try:
            self._process.wait(KILL_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        self.close()

    def close(self) -> None:
        for file in (self._in, self._out, self._errors):
            file.close()
