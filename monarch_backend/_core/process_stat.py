"""Facts of a process in /proc/PID/stat."""

from __future__ import annotations

from typing import NamedTuple


class ProcessStat(NamedTuple):
    """Name, state (a letter such as R, T or Z) and parent of a process. Ticks are of ``SC_CLK_TCK``.

    ``start_ticks`` are since the boot, ``cpu_ticks`` are the processor time of its threads.
    """

    name: str
    state: str
    parent: int
    cpu_ticks: int
    start_ticks: int


def read(pid: int) -> ProcessStat:
    """Return the facts of a process. Raises OSError if it has ended, or if there is no /proc.

    >>> import os
    >>> read(os.getpid()).parent == os.getppid()
    True
    """
    with open(f"/proc/{pid}/stat", errors="replace") as file:
        name, _, rest = file.read().partition("(")[2].rpartition(")")
    fields = rest.split()  # from the state on, which is field 3
    try:
        return ProcessStat(name, fields[0], int(fields[1]), int(fields[11]) + int(fields[12]), int(fields[19]))
    except IndexError:
        raise ProcessLookupError(f"process {pid} has just ended") from None
