"""Memory for large messages that processes commit ahead: how much, and for how many processes.

The first use of a page costs several times as much as a copy to it. Each process commits memory in the background
before its first large message, and gives it back if it is not used (csrc/shm/arena.h).
"""

from __future__ import annotations

import contextlib
import math
import threading
from collections import Counter
from typing import TYPE_CHECKING, Any

from monarch_backend._core import env, platform
from monarch_backend._processes.resource_limits import System
from monarch_backend._transport.local.frames import Setting
from monarch_backend._transport.local.links import idle_memory_timeout

if TYPE_CHECKING:
    from monarch_backend._actor.runtime import Runtime
    from monarch_backend._transport.local.links import Clock
    from monarch_backend._transport.local.peer import Peer

PREFAULT = "prefault"
"""Name of the Setting that lets a process commit memory; its value is the number of bytes."""

MESH_SHARES = 2
"""Multiple of MONARCH_PREFAULT_BYTES that all processes of a program's meshes on one host commit together."""

START_DELAY_S = 0.3
"""Seconds without a start of processes after which a program commits memory.

Starts take up to 0.2 s for eight processes. Zeroing pages meanwhile makes them half as long again on few processors.
"""

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
        idle: float = idle_memory_timeout() or math.inf
        self._granted.append((now + 2 * idle, each * processes))
        return each


class Prefaulter:
    """Lets a program and its processes commit memory once no process has been started for ``START_DELAY_S``."""

    def __init__(self, program: Runtime) -> None:
        self._program, self._budget = program, PrefaultBudget(program.clock)
        self._lock = threading.Lock()
        self._timer: Any = None
        self._waiting: list[list[Peer]] = []  # processes of meshes that commit nothing yet

    def postpone(self) -> None:
        """Begin no work while processes start. Call `add` afterwards."""
        with self._lock:
            if self._timer is not None:
                self._timer.cancel()
            self._timer = self._program.progress.later(START_DELAY_S, self._begin)

    def add(self, peers: list[Peer]) -> None:
        """Include the processes of a new mesh."""
        with self._lock:
            self._waiting.append(peers)
        self.postpone()

    def _begin(self) -> None:
        with self._lock:
            starting = any(peer.link < 0 and peer.gone is None for peers in self._waiting for peer in peers)
            waiting = [] if starting else self._waiting
            if not starting:
                self._waiting, self._timer = [], None
        if starting:  # such as with a fork server that imports torch
            self.postpone()
            return
        prefault(self._program, int(env.get("MONARCH_PREFAULT_BYTES")))
        for peers in waiting:
            hosts = Counter(self._program.hosts.name_of(peer.token) for peer in peers)
            nbytes = self._budget.grant(max(hosts.values()))
            for peer in peers:
                if nbytes and peer.gone is None:
                    self._program.router.tell(peer, Setting(PREFAULT, nbytes))


def on_setting(program: Runtime, _peer: Peer, _name: str, value: Any) -> None:
    """Commit memory because the owner of this process has asked for it."""
    prefault(program, int(value))


def prefault(program: Runtime, nbytes: int) -> None:
    """Let this process commit up to ``nbytes`` for its messages in the background. Later calls have no effect."""
    if not nbytes or not platform.HAS_PROC:
        return
    available = min((limit.room for limit in System().memory(1)), default=0)
    nbytes = min(nbytes, available // MAX_PART_OF_AVAILABLE)
    if nbytes >= MIN_PREFAULT_BYTES:
        with contextlib.suppress(RuntimeError):  # the system allows no further thread: messages do not need it
            program.links.host.prefault(nbytes)  # type: ignore[attr-defined]
