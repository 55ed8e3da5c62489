"""Commands of the wheel tools: run one, and raise an error with the end of its output if it fails."""

from __future__ import annotations

import shlex
import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path

SHOWN = 8000
"""Characters of the output in an error."""


def run(command: Sequence[str | Path], cwd: Path | None = None, env: Mapping[str, str] | None = None) -> str:
    """Run a command and return its output, errors included. Raises RuntimeError if the exit status is not 0."""
    code, output = status_and_output(command, cwd, env)
    if code:
        raise RuntimeError(f"{shlex.join(map(str, command))} failed:\n{output[-SHOWN:]}")
    return output


def status_and_output(
    command: Sequence[str | Path], cwd: Path | None = None, env: Mapping[str, str] | None = None
) -> tuple[int, str]:
    """Run a command and return its exit status and its output, errors included."""
    words = [str(word) for word in command]
    done = subprocess.run(
        words, cwd=cwd, env=env, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, check=False
    )
    return done.returncode, done.stdout
