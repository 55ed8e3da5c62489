"""stdout and stderr of this process, read while other processes write.

capfd's readouterr() empties its file in two steps, and loses lines written between them.
"""

from __future__ import annotations

import os
import time

import pytest

PATIENCE = 30.0
"""Timeout in seconds."""


class Terminal:
    """The output since the test began."""

    def __init__(self, capfd: pytest.CaptureFixture[str]) -> None:
        self._capfd = capfd  # while it captures, descriptors 1 and 2 are files

    @property
    def out(self) -> str:
        return _text(1)

    @property
    def err(self) -> str:
        return _text(2)

    def wait(self, *lines: str, stream: str = "out") -> None:
        """Wait until the output has these lines."""
        deadline = time.monotonic() + PATIENCE
        while not all(line in getattr(self, stream).splitlines() for line in lines):
            assert time.monotonic() < deadline, f"not all of {lines} in\n{self.out}\nand\n{self.err}"
            time.sleep(0.01)


def _text(number: int) -> str:
    return os.pread(number, os.fstat(number).st_size, 0).decode()
