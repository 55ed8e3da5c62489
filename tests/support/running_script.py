"""A script that runs as a program of its own beside a test."""

from __future__ import annotations

import contextlib
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path


@contextlib.contextmanager
def running_script(path: Path, source: str, *, stderr: int | None = None) -> Iterator[subprocess.Popen[str]]:
    """Write the script and run it, with pipes as its stdin and stdout. It is killed at the end of the block."""
    path.write_text(source)
    command = [sys.executable, str(path)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=stderr, text=True) as process:
        try:
            yield process
        finally:
            process.kill()
