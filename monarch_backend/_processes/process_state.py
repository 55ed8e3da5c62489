"""State and start time of a process: from /proc, or from ps where there is none."""

from __future__ import annotations

import calendar
import os
import subprocess

from monarch_backend._core import platform, process_stat

_MONTHS = ("Jan", "Feb", "Mar", "Apr", "May", "Jun", "Jul", "Aug", "Sep", "Oct", "Nov", "Dec")


def state_and_start(pid: int) -> tuple[str, int]:
    """Return the state of a process, a letter such as R, T or Z, and its start. Raises ProcessLookupError.

    The start is in clock ticks since the boot; without /proc in seconds since 1970.
    """
    try:
        return _from_proc(pid) if platform.HAS_PROC else _from_ps(pid)
    except (IndexError, OSError, ValueError):
        raise ProcessLookupError(f"there is no process {pid}") from None


def _from_proc(pid: int) -> tuple[str, int]:
    stat = process_stat.read(pid)
    return stat.state, stat.start_ticks


def _from_ps(pid: int) -> tuple[str, int]:
    command = ["ps", "-o", "stat=", "-o", "lstart=", "-p", str(pid)]
    environment = {**os.environ, "LC_ALL": "C", "TZ": "UTC"}
    found = subprocess.run(command, env=environment, stdin=subprocess.DEVNULL, capture_output=True, text=True)
    state, _, month, day, clock, year = found.stdout.split()
    hour, minute, second = map(int, clock.split(":"))
    moment = (int(year), _MONTHS.index(month) + 1, int(day), hour, minute, second)
    return state[0], calendar.timegm(moment)
