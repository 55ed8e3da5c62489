"""Processes of a test that are killed at its end."""

from __future__ import annotations

import contextlib
import subprocess
from collections.abc import Iterator, Sequence


@contextlib.contextmanager
def killed_at_end(jobs: Sequence[subprocess.Popen[str]]) -> Iterator[None]:
    """Kill the processes that still run when the block ends, and wait for them."""
    try:
        yield
    finally:
        for job in jobs:
            job.kill()
            job.wait()
