"""Reference of the command line: the help that each command prints, for docs/reference/cli.md."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import monarch_backend

COLUMNS = 92
PACKAGE = Path(monarch_backend.__file__).parent
SOURCES = [*sorted((PACKAGE / "cli").glob("*.py")), PACKAGE / "_launch" / "torchelastic_patches.py"]
"""Files with the texts of the help. The page is built again when one changes."""


def help_of(command: str) -> str:
    """Return what ``monarch-backend COMMAND --help`` prints; "" is the program itself. Raises CalledProcessError."""
    words = [sys.executable, "-m", "monarch_backend.cli", *command.split(), "--help"]
    environment = {**os.environ, "COLUMNS": str(COLUMNS), "NO_COLOR": "1", "OMP_NUM_THREADS": "1"}
    return subprocess.run(words, env=environment, check=True, capture_output=True, text=True).stdout


def commands() -> list[str]:
    """Return the names of all commands, from the program's own help."""
    return re.findall(r"^    ([a-z0-9-]+)(?: |$)", help_of(""), re.MULTILINE)


def with_help(text: str) -> str:
    """Return the page ``text`` with each line ``<!-- help: COMMAND -->`` replaced by the help of that command."""
    return re.sub(
        r"^<!-- help: ?(.*?) -->$", lambda found: f"```text\n{help_of(found[1])}```", text, flags=re.MULTILINE
    )
