"""What a command looks at: programs of this machine, or all hosts of a job."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from monarch_backend._telemetry.subject import ThisMachine

if TYPE_CHECKING:
    from monarch_backend._telemetry.subject import Subject


def look_at(name: str | None) -> Subject:
    """Return what ``name`` stands for: a job, by its name or file, else programs as `programs.select` does.

    Use it in a ``with`` block. Raises JobError for a file that is not a job's.
    """
    path = None if name is None else job_file(name)
    if path is None:
        return ThisMachine(name)
    from monarch_backend import _wiring as _wiring  # imports torch
    from monarch_backend._job.inspection import Inspection

    return Inspection(path)


def job_file(name: str) -> Path | None:
    """Return the file of the job with this name or file, None if there is none."""
    from monarch_backend._job import state_file

    if not name or name.isdecimal():
        return None
    if name.endswith(".json") and Path(name).is_file():
        return Path(name).absolute()
    try:
        path = state_file.default_path(name)
    except ValueError:  # it cannot be a job's name
        return None
    return path if path.is_file() else None
