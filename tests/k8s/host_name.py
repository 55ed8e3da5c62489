"""Actor without torch, for many pods on one machine: a process with torch takes 150 MB more."""

from __future__ import annotations

import os

from monarch_backend.actor import Actor, endpoint


class HostName(Actor):
    """Actor that returns the name of its machine."""

    @endpoint
    def read(self) -> str:
        return os.uname().nodename
