"""Shared parts of the actor tests: failures that reach the program, and gates that block an actor.

Worker processes import this module, so it does not import pytest.
"""

from __future__ import annotations

import os
import queue
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from monarch_backend.actor import Channel, MeshFailure

PATIENCE = 30.0
"""Seconds after which a wait fails the test."""


class Faults:
    """Replacement of ``unhandled_fault_hook`` that keeps the failures."""

    def __init__(self) -> None:
        self._told: queue.SimpleQueue[MeshFailure] = queue.SimpleQueue()

    def __call__(self, failure: MeshFailure) -> None:
        self._told.put(failure)

    def next(self) -> MeshFailure:
        """Wait for the next failure and return it."""
        return self._told.get(timeout=PATIENCE)

    def none(self) -> None:
        """Assert that no failure is left that the test has not taken."""
        left = []
        while not self._told.empty():
            left.append(self._told.get())
        assert not left, "failures that were not expected: " + "\n".join(failure.report() for failure in left)


@contextmanager
def gate(folder: Path) -> Iterator[tuple[str, Callable[[], None]]]:
    """Yield a name and a function: `pass_gate` of the name waits until the function is called or the block ends."""
    path = folder / f"gate{len(list(folder.iterdir()))}"
    os.mkfifo(path)
    ends: list[int] = []

    def open_gate() -> None:
        if not ends:
            ends.append(os.open(path, os.O_RDWR))
            os.write(ends[0], b"x" * 4096)  # one byte for each call of `pass_gate`

    try:
        yield str(path), open_gate
    finally:
        open_gate()
        os.close(ends[0])


def pass_gate(name: str) -> None:
    """Wait in one system call, as code does that an interruption cannot end."""
    with open(name, "rb", buffering=0) as file:
        file.read(1)


def begun(call: Callable[..., Any], *args: Any) -> Any:
    """Make a call whose first argument is a port, and wait until its endpoint runs."""
    port, receiver = Channel.open(once=True)
    future = call(port, *args)
    receiver.recv().get(PATIENCE)
    return future
