"""py-spy, an extra: its dump of the stacks of a process, and flame graphs. It reads a process that does not answer."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

DUMP_TIMEOUT_S = 20.0

RECORD_GRACE_S = 30.0
"""Seconds beyond the recording in which py-spy must have written its file."""


class PySpyError(Exception):
    """py-spy is missing, may not read the process, or has failed. The text says what to do."""


def find() -> str | None:
    """Return the path of py-spy, beside this interpreter or in PATH; None if it is not installed."""
    beside = os.path.join(os.path.dirname(sys.executable), "py-spy")
    return beside if os.access(beside, os.X_OK) else shutil.which("py-spy")


def dump(pid: int, *, native: bool = False) -> list[dict[str, Any]]:
    """Return the threads of a process, as py-spy's JSON has them. ``native`` adds C frames. Raises PySpyError."""
    # A stopped process can't be stopped once more: without --nonblocking py-spy fails.
    words = ["dump", "--pid", str(pid), "--json", "--native" if native else "--nonblocking"]
    threads: list[dict[str, Any]] = json.loads(_run(words, DUMP_TIMEOUT_S))
    return threads


def record(pid: int, seconds: float, path: str, rate: int = 100) -> None:
    """Write a flame graph of a process as SVG. It takes ``seconds``. Raises PySpyError."""
    words = ["record", "--pid", str(pid), "--duration", str(max(1, round(seconds))), "--rate", str(rate)]
    _run([*words, "--format", "flamegraph", "--output", path], seconds + RECORD_GRACE_S)
    if not os.path.exists(path) or not os.path.getsize(path):
        raise PySpyError("py-spy has written nothing: the process ran no Python code")


def flame_graph(pid: int, seconds: float) -> bytes:
    """Return a flame graph of a process as SVG. It takes ``seconds``. Raises PySpyError."""
    with tempfile.TemporaryDirectory(prefix="monarch-flame-") as folder:
        path = Path(folder, "flame.svg")
        record(pid, seconds, str(path))
        return path.read_bytes()


def _run(words: list[str], timeout: float) -> str:
    program = find()
    if program is None:
        raise PySpyError('py-spy is not installed: pip install "monarch_backend[stacks]"')
    try:
        done = subprocess.run([program, *words], capture_output=True, text=True, timeout=timeout)
    except subprocess.TimeoutExpired:
        raise PySpyError(f"py-spy has not answered within {timeout:g} s") from None
    except OSError as error:
        raise PySpyError(f"py-spy can't be started: {error}") from None
    if done.returncode != 0:
        lines = [line.strip() for line in done.stderr.splitlines() if line.strip()] or [f"exit code {done.returncode}"]
        why = next((line for line in lines if "ermission" in line or "EPERM" in line), None)
        if why is None:
            raise PySpyError(f"py-spy failed: {lines[0]}")
        raise PySpyError(
            f"py-spy may not read the process ({why}): in a container give it SYS_PTRACE, elsewhere run it as root "
            "or set kernel.yama.ptrace_scope to 0"
        )
    return done.stdout
