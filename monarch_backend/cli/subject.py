"""What a command looks at: programs of this machine, or all hosts of a job."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from monarch_backend._telemetry import gpu_memory, late_ranks, program_recording
from monarch_backend._telemetry.program_recording import Recording, Unread
from monarch_backend._telemetry.programs import Program, select
from monarch_backend._telemetry.reader import ALL_EVENTS, EventFilter
from monarch_backend._telemetry.stacks import Stacks, read_all

if TYPE_CHECKING:
    from monarch_backend._job.inspection import Inspection


class ThisMachine:
    """The programs of this machine that a name stands for, with the methods of `Inspection`."""

    def __init__(self, name: str | None) -> None:
        self._name = name

    def __enter__(self) -> ThisMachine:
        return self

    def __exit__(self, *_: object) -> None:
        pass

    def programs(self) -> tuple[list[Program], list[Unread]]:
        """Return the programs. Raises LookupError if there is no such program, NotImplementedError without /proc."""
        chosen = select(self._name)
        late_ranks.add_to(chosen)
        gpu_memory.add_to(chosen)
        return chosen, []

    def recording(self, wanted: EventFilter = ALL_EVENTS) -> Recording:
        """Return what the programs have recorded. Raises as `programs` does."""
        return program_recording.read(self._name, wanted)

    def stacks(self, _host: str, pids: Sequence[int], native: bool = False) -> list[Stacks]:
        """Return the stacks of processes."""
        return read_all(pids, native=native)


def look_at(name: str | None) -> Inspection | ThisMachine:
    """Return what ``name`` stands for: a job, by its name or file, else programs as `programs.select` does.

    Use it in a ``with`` block. Raises JobError for a file that is not a job's.
    """
    path = None if not name or name.isdecimal() else _job_file(name)
    if path is None:
        return ThisMachine(name)
    from monarch_backend import _wiring as _wiring  # imports torch
    from monarch_backend._job.inspection import Inspection

    return Inspection(path)


def _job_file(name: str) -> Path | None:
    from monarch_backend._job import state_file

    if name.endswith(".json") and Path(name).is_file():
        return Path(name).absolute()
    try:
        path = state_file.default_path(name)
    except ValueError:  # it cannot be a job's name
        return None
    return path if path.is_file() else None
