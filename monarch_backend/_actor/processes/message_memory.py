"""Memory for large messages that processes commit ahead: how much, and for how many processes.

The first use of a page costs several times as much as a copy to it. Each process commits memory in the background
before its first large message, and gives it back if it is not used (csrc/shm/arena.h).
"""

from __future__ import annotations

import contextlib
import math
from typing import TYPE_CHECKING

from monarch_backend._core import env, platform
from monarch_backend._processes.resource_limits import System

if TYPE_CHECKING:
    from monarch_backend._actor.runtime import Runtime
    from monarch_backend._transport.local.links import Clock

MESH_SHARES = 2
"""Multiple of MONARCH_PREFAULT_BYTES that all processes of a program's meshes on one host commit together."""

MIN_PREFAULT_BYTES = 1 << 20
"""Bytes below which a process commits nothing ahead."""

MAX_PART_OF_AVAILABLE = 16
"""A process commits at most this part, a sixteenth, of the memory that the host or its control group has left."""


class PrefaultBudget:
    """Bytes that the meshes of a program may still commit ahead on a host. Memory that was given back counts again."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._granted: list[tuple[float, int]] = []  # when the bytes are given back at the latest, and their number

    def grant(self, processes: int) -> int:
        """Return the bytes for each of ``processes`` new processes of one host, perhaps 0."""
        each = int(env.get("MONARCH_PREFAULT_BYTES"))
        now = self._clock.now()
        self._granted = [(end, nbytes) for end, nbytes in self._granted if end > now]
        left = MESH_SHARES * each - sum(nbytes for _, nbytes in self._granted)
        each = min(each, left // processes)
        if each < MIN_PREFAULT_BYTES:
            return 0
        idle: float = env.get("MONARCH_IDLE_MEMORY_TIMEOUT") or math.inf
        self._granted.append((now + 2 * idle, each * processes))
        return each


def prefault(program: Runtime, nbytes: int) -> None:
    """Let this process commit up to ``nbytes`` for its messages in the background. Later calls have no effect."""
    if not nbytes or not platform.HAS_PROC:
        return
    available = min((limit.room for limit in System().memory(1)), default=0)
    nbytes = min(nbytes, available // MAX_PART_OF_AVAILABLE)
    if nbytes >= MIN_PREFAULT_BYTES:
        with contextlib.suppress(RuntimeError):  # the system allows no further thread: messages do not need it
            program.links.host.prefault(nbytes)  # type: ignore[attr-defined]
