"""Search for running programs that record, on this machine and of this user."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from dataclasses import dataclass

from monarch_backend._core import platform
from monarch_backend._telemetry.reader import Area
from monarch_backend._telemetry.recording_area import AREA_NAME


@dataclass(frozen=True)
class Owner:
    """A process with a recording area: its pid, and the descriptor of the area there."""

    pid: int
    descriptor: int

    def open(self) -> Area:
        """Open the area. Raises OSError, also if its pids are of another pid namespace, and ValueError."""
        area = Area.of_process(self.pid, self.descriptor)
        if area.owner != self.pid:
            area.close()
            raise OSError(f"the area of process {self.pid} says that it belongs to {area.owner}")
        return area


def owners() -> list[Owner]:
    """Return the processes of this user that own a recording area. Raises NotImplementedError without /proc."""
    if not platform.HAS_MEMFD:
        raise NotImplementedError("looking at other programs needs Linux: they are found in /proc")
    return [
        Owner(pid, descriptor)
        for pid in sorted(int(name) for name in os.listdir("/proc") if name.isdecimal())
        if (descriptor := descriptor_named(pid, AREA_NAME)) is not None
    ]


def areas() -> Iterator[Area]:
    """Yield the areas that can be read, each open until the next one. Raises NotImplementedError without /proc."""
    for owner in owners():
        try:
            area = owner.open()
        except (OSError, ValueError):  # it has just ended, or is of another release
            continue
        with area:
            yield area


def descriptor_named(pid: int, name: str, file_name: re.Pattern[str] | None = None) -> int | None:
    """Return the descriptor of a process's memory file with this name, or of its file with such a name.

    Return None if there is none to see.
    """
    try:
        descriptors = os.listdir(f"/proc/{pid}/fd")
    except OSError:  # ended, or another user's
        return None
    return next((int(each) for each in descriptors if is_named(pid, each, name, file_name)), None)


def is_named(pid: int, descriptor: int | str, name: str, file_name: re.Pattern[str] | None = None) -> bool:
    """Return whether a descriptor of a process is a memory file with this name, or a file with such a name."""
    try:
        path = os.readlink(f"/proc/{pid}/fd/{descriptor}")
    except OSError:
        return False
    if path == f"/memfd:{name} (deleted)":
        return True
    return file_name is not None and file_name.fullmatch(os.path.basename(path.removesuffix(" (deleted)"))) is not None
