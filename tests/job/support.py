"""Programs that use jobs, run as forked ranks, and traces of a job on this machine."""

from __future__ import annotations

import contextlib
import os
import time
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from monarch_backend._mesh.runtime_protocol import program
from monarch_backend.actor import Actor, HostEnding, context, endpoint
from tests.support.ranks import run_ranks
from tests.support.waiting import wait_until

MARK = "MONARCH_TEST_JOB"


class Where(Actor):
    """Actor that reports where it runs."""

    @endpoint
    def host(self) -> str | None:
        return os.environ.get("MONARCH_HOST_NAME")

    @endpoint
    def next_name(self, other: Any) -> str:
        return str(other.machine.call_one().get(30))

    @endpoint
    def machine(self) -> str:
        return os.uname().nodename

    @endpoint
    def sleep(self, seconds: float) -> None:
        time.sleep(seconds)

    @endpoint
    def echo(self, value: str) -> str:
        return value

    @endpoint
    def variable(self, name: str) -> str | None:
        return os.environ.get(name)


class Saver(Actor):
    """Actor that sends the notice of its host's end to a port."""

    def __init__(self, port: Any) -> None:
        self.port = port

    @endpoint
    def work(self) -> float:
        wait_until(lambda: context().host_ending is not None)
        notice = context().host_ending
        assert notice is not None
        return notice.seconds_left

    @endpoint
    def sleep(self, seconds: float) -> None:
        time.sleep(seconds)

    def __host_ending__(self, notice: HostEnding) -> None:
        self.port.send((type(self).__name__, notice.host, notice.reason, notice.seconds_left))
        raise RuntimeError("an error in the method ends no actor")


def in_program(fn: Callable[..., Any], *args: Any, timeout: float = 60) -> Any:
    """Return the result of ``fn(*args)`` in a program of its own, which then ends in the normal way."""

    def run(_rank: int, _address: str) -> Any:
        try:
            return fn(*args)
        finally:
            program().shutdown.run()  # type: ignore[attr-defined]
            program().shutdown.kill_all()  # type: ignore[attr-defined]

    return run_ranks(run, 1, backend=None, timeout=timeout)[0]


def marked(mark: str) -> list[str]:
    """Return pids and command lines of the processes with this mark in their environment."""
    found, needle = [], f"{MARK}={mark}".encode()
    for folder in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            if needle in (folder / "environ").read_bytes().split(b"\0"):
                found.append(f"{folder.name} {(folder / 'cmdline').read_text()}".replace("\0", " "))
    return found


def gone(mark: str, within: float = 10.0) -> bool:
    """Wait until no process has the mark. Return whether this happened in time."""
    end = time.monotonic() + within
    while marked(mark):
        if time.monotonic() > end:
            return False
        time.sleep(0.02)
    return True


@contextlib.contextmanager
def new_mark() -> Iterator[str]:
    """Yield a mark for the environment of hosts. No process may have it after the block."""
    mark = uuid.uuid4().hex
    yield mark
    assert gone(mark), marked(mark)


def seen_by_ps(secret: str) -> list[str]:
    """Return the pids of processes with the secret on their command line or in their environment."""
    found = []
    for folder in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            if secret.encode() in (folder / "environ").read_bytes() + (folder / "cmdline").read_bytes():
                found.append(folder.name)
    return found
