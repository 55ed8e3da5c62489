"""Shared parts of the process tests: a spawner that records its events, and waits without fixed sleeps."""

from __future__ import annotations

import contextlib
import os
import select
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, TypeVar

import cloudpickle

from monarch_backend._processes.spawner import Event, Exited, ProcessSpec, Spawner, SpawnFailed, Started

PATIENCE = 60.0
E = TypeVar("E", bound=Event)


def spec(main: Callable[[], object], label: str = "gpus 0", **options: Any) -> ProcessSpec:
    """Return the spec of a process that is like this one, except for ``options``."""
    bootstrap = options.pop("bootstrap", None)
    values: dict[str, Any] = {
        "environment": dict(os.environ),
        "path": list(sys.path),
        "argv": list(sys.argv),
        "cwd": os.getcwd(),
        "bootstrap": None if bootstrap is None else cloudpickle.dumps(bootstrap),
    }
    return ProcessSpec(label, cloudpickle.dumps(main), **values | options)


@dataclass(frozen=True)
class Outcome:
    started: Started
    exited: Exited
    out: str
    err: str


class Host:
    """A spawner and all events that it has reported."""

    def __init__(
        self, address: str | None = None, preload: tuple[str, ...] = (), *, ignores_sigterm: bool = False
    ) -> None:
        self.events: list[Event] = []
        self._told = threading.Condition()
        self.spawner = Spawner(self._on_event, address, preload=preload, ignores_sigterm=ignores_sigterm)

    def _on_event(self, event: Event) -> None:
        with self._told:
            self.events.append(event)
            self._told.notify_all()

    def wait(self, number: int, kind: type[E], patience: float = PATIENCE) -> E:
        """Wait for the event of this kind of a process. Another final event fails the test."""

        def found() -> list[Event]:
            final = (Exited, SpawnFailed)
            return [e for e in self.events if e.id == number and isinstance(e, (kind, *final))]

        with self._told:
            assert self._told.wait_for(found, patience), f"no {kind.__name__} of {number}; there are {self.events}"
        event = found()[0]
        assert isinstance(event, kind), event
        return event

    def spawn(self, main: Callable[[], object], label: str = "gpus 0", **options: Any) -> int:
        return self.spawner.spawn([spec(main, label, **options)])[0]

    def run(self, main: Callable[[], object], label: str = "gpus 0", **options: Any) -> Outcome:
        """Run a process to its end. Return its events and its output."""
        with tempfile.TemporaryFile() as out, tempfile.TemporaryFile() as err:
            number = self.spawn(main, label, stdout=out.fileno(), stderr=err.fileno(), **options)
            exited = self.wait(number, Exited)
            texts = [os.pread(file.fileno(), 1 << 20, 0).decode() for file in (out, err)]
        return Outcome(self.wait(number, Started), exited, *texts)

    @contextlib.contextmanager
    def staying(self, **options: Any) -> Iterator[Started]:
        """Start a process, wait for its main function, and kill the process at the end of the block."""
        with Pipe() as ready:
            number = self.spawn(_stay, stdout=ready.write, **options)
            started = self.wait(number, Started)
            assert ready.line() == "up"
        try:
            yield started
        finally:
            self.spawner.kill(number)
            self.wait(number, Exited)


def _stay() -> None:
    import os
    import signal

    os.write(1, b"up\n")
    while True:
        signal.pause()


class Pipe:
    """A pipe that carries lines. ``write`` is a process's output."""

    def __enter__(self) -> Pipe:
        self.read, self.write = os.pipe()
        self._text = b""
        return self

    def __exit__(self, *_: object) -> None:
        os.close(self.read)
        os.close(self.write)

    def line(self, patience: float = PATIENCE) -> str:
        """Wait for the next line and return it."""
        deadline = time.monotonic() + patience
        while b"\n" not in self._text:
            ready, _, _ = select.select([self.read], [], [], max(0, deadline - time.monotonic()))
            assert ready, f"no line came, only {self._text!r}"
            self._text += os.read(self.read, 4096)
        line, _, self._text = self._text.partition(b"\n")
        return line.decode()


class Watch:
    """Waits for the ends of processes with any parent. Create it while they run."""

    def __init__(self, pids: Mapping[str, int]) -> None:
        self._pidfds = {name: os.pidfd_open(pid) for name, pid in pids.items()}

    def __enter__(self) -> Watch:
        return self

    def __exit__(self, *_: object) -> None:
        for pidfd in self._pidfds.values():
            os.close(pidfd)

    def left_after(self, seconds: float) -> list[str]:
        """Return the names of the processes that still run after about ``seconds``.

        The wait is a number of short waits. It excludes time in which this process is stopped, and is longer on a busy
        machine.
        """
        left, turn = dict(self._pidfds), 0.01
        for i in range(1 + round(seconds / turn)):
            if not left:
                break
            ended, _, _ = select.select(list(left.values()), [], [], turn if i else 0)
            left = {name: pidfd for name, pidfd in left.items() if pidfd not in ended}
        return list(left)


def parent_of(pid: int) -> int:
    with open(f"/proc/{pid}/stat") as stat:
        return int(stat.read().rpartition(")")[2].split()[1])
