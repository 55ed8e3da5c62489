"""Recording of this process, read from its own slot. No recording of another process is read."""

from __future__ import annotations

import os

from monarch_backend._telemetry import recorder
from monarch_backend._telemetry.reader import Area, RecordedProcess


def read() -> RecordedProcess | None:
    """Return what this process records now, without events. None if it records nothing.

    Raises OSError without a descriptor, or if its starter has ended.
    """
    descriptor = recorder.recording_area_of_this_process()
    if descriptor is None:
        return None
    with Area(descriptor) as area:
        return max(area.processes_of(os.getpid(), None), key=lambda each: each.started_ns, default=None)
