"""A program that a test runs to its end, with the stacks of its processes if it does not end."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

STACKS_TIMEOUT_S = 20


def run_to_end(
    command: Sequence[str],
    *,
    timeout: float,
    script: str | None = None,
    cwd: Path | None = None,
    env: Mapping[str, str] | None = None,
) -> subprocess.CompletedProcess[str]:
    """Run a command and return its output and status. ``script`` is its standard input.

    Raises AssertionError after ``timeout`` seconds, with the output so far and all Python stacks of the program.
    """
    pipe = subprocess.PIPE
    with subprocess.Popen(command, stdin=pipe, stdout=pipe, stderr=pipe, text=True, cwd=cwd, env=env) as program:
        try:
            out, err = program.communicate(script, timeout=timeout)
        except subprocess.TimeoutExpired:
            stacks = _stacks(program.pid)
            program.kill()
            out, err = program.communicate()
            raise AssertionError(f"{command} runs after {timeout} s:\n{out}\n{err}\n{stacks}") from None
        finally:
            program.kill()
    return subprocess.CompletedProcess(command, program.returncode, out, err)


def _stacks(pid: int) -> str:
    look = [sys.executable, "-m", "monarch_backend.cli", "stack", str(pid)]
    try:
        done = subprocess.run(look, capture_output=True, text=True, timeout=STACKS_TIMEOUT_S)
    except subprocess.TimeoutExpired:
        return f"no stacks within {STACKS_TIMEOUT_S} s"
    return done.stdout + done.stderr
