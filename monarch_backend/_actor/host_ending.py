"""Notice that a host ends soon: for the actors on it, and for the program that has attached it."""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from monarch_backend._actor.runtime import Runtime

SETTING = "host_ending"
"""Name of the Setting that carries a notice to a process."""


@dataclass(frozen=True)
class HostEnding:
    """Notice that a host ends soon, such as before a preemption or at the end of a time limit.

    ``host`` is the host's name and ``reason`` what has announced the end. ``deadline`` is the time of the end, in
    seconds as of ``time.time()`` on this machine. The actor's ``__host_ending__`` receives the notice, and
    ``context().host_ending`` returns it.

    >>> import time
    >>> from monarch_backend.actor import HostEnding
    >>> notice = HostEnding("node1", "it has received SIGTERM", time.time() + 60)
    >>> 50 < notice.seconds_left <= 60
    True
    """

    host: str
    reason: str
    deadline: float

    @property
    def seconds_left(self) -> float:
        """Seconds until the host ends; 0 after its deadline."""
        return max(0.0, self.deadline - time.time())

    def __str__(self) -> str:
        return f"{self.reason}, and ends at {time.strftime('%H:%M:%S', time.localtime(self.deadline))}"


def announce(runtime: Runtime, host: str, reason: str, seconds: float) -> None:
    """Give the first notice to all actors of this process. Called on the thread that reads messages."""
    if runtime.host_ending is not None:
        return
    notice = runtime.host_ending = HostEnding(host, reason, time.time() + seconds)
    for runner in list(runtime.runners.values()):
        runner.announce(notice)
