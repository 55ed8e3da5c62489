"""Records of the processes that this process has spawned, and how each has ended.

Only the process that has spawned a mesh keeps such records.
"""

from __future__ import annotations

import re
import signal
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from monarch_backend._actor.calls.future import Future
from monarch_backend._actor.errors import MeshFailure, in_words
from monarch_backend._actor.meshes.mesh_state import ActorMeshState
from monarch_backend._actor.restart_policy import RestartLimiter
from monarch_backend._logs.mesh_log import MeshLog
from monarch_backend._mesh.proc_mesh import ProcMeshState
from monarch_backend._processes.spawner import Exited, ProcessSpec
from monarch_backend._transport.local.peer import Peer


@dataclass
class OwnedProcess:
    core: ProcMeshState
    rank: int
    peer: Peer
    number: int = -1  # in the spawner
    spawner: Any = None
    lost: str | None = None  # why its host is lost, if it is
    exited: Exited | None = None
    failed: str | None = None  # why it was never started
    gone: bool = False  # its end was reported
    replaced: bool = False  # it has a successor, or gets one
    waits_for_host: bool = False  # its restart waits for the host that takes the place of its lost one
    ended_while_waiting: bool = False  # its end is reported after that
    is_bootstrapped: bool = False
    was_ready: bool = False  # its start as a successor was recorded
    bootstrap_failure: MeshFailure | None = None
    restart: str = ""  # text: the restart, or why there is none
    constructing: str | None = None  # text: actors whose constructors ran when it ended
    stop_read: bool = False  # it has read the message to stop
    killed_at: float | None = None  # when SIGKILL was sent because it did not stop

    @property
    def is_over(self) -> bool:
        """True if its spawner will report nothing more of it."""
        return self.exited is not None or self.failed is not None or self.lost is not None


@dataclass
class OwnedProcs:
    core: ProcMeshState
    owner_runner: Any
    siblings: list[Any]
    make: Callable[[int, Peer], ProcessSpec]
    logs: MeshLog
    limiter: RestartLimiter | None
    members: dict[int, OwnedProcess] = field(default_factory=dict)  # by rank
    actors: list[ActorMeshState] = field(default_factory=list)
    ready: list[Future[None]] = field(default_factory=list)
    ended: list[Future[None]] = field(default_factory=list)
    looks: list[Any] = field(default_factory=list)  # timers of the checks after `stop`
    over: bool = False  # stopped, and all of its processes have ended
    has_bootstrap: bool = False
    was_up: bool = False  # all of its processes were ready at the same time
    says_start_failed: bool = False  # a failed start was logged


class ProcessRecords:
    """Records of all processes that this process has spawned, by their token and by their number in the spawner."""

    def __init__(self) -> None:
        self.by_number: dict[int, OwnedProcess] = {}
        self.by_token: dict[str, OwnedProcess] = {}
        self.meshes: list[OwnedProcs] = []

    def add(self, owned: OwnedProcs, member: OwnedProcess) -> None:
        owned.members[member.rank] = self.by_token[member.peer.token] = member
        if member.number >= 0:
            self.by_number[member.number] = member

    def how_it_ended(self, peer: Peer) -> tuple[str, int | None]:
        """Return the end of a process as text, and its return code if that is known."""
        member = self.by_token.get(peer.token)
        if member is not None and member.failed is not None:
            return f"it could not be started: {member.failed}", None
        if member is not None and member.lost is not None:
            return member.lost, None
        if member is not None and member.bootstrap_failure is not None:
            return member.bootstrap_failure.deaths[0].what, 1
        if member is not None and member.exited is not None:
            end = member.exited
            words = in_words(end.returncode, end.oom_killed) + (f" ({end.reason})" if end.reason else "")
            return words, end.returncode
        exit_text = peer.gone or "it is gone"
        found = re.match(r"(killed by signal|exited with status) (\d+)", exit_text)
        if found is None:
            return exit_text, None
        code = -int(found[2]) if found[1] == "killed by signal" else int(found[2])
        return in_words(code), code

    def kill(self, member: OwnedProcess) -> None:
        if member.spawner is not None and not member.is_over:
            member.spawner.kill(member.number, signal.SIGKILL)

    def at_work(self) -> str:
        return listed([str(m.peer) for owned in self.meshes for m in owned.members.values() if not m.gone])

    def remove(self, owned: OwnedProcs) -> None:
        for number, member in list(self.by_number.items()):
            if member.core is owned.core and member.is_over:
                self.by_number.pop(number, None)
        for token in (*owned.core.former, *owned.core.tokens):
            self.by_token.pop(token, None)


def in_constructors(owned: OwnedProcs, member: OwnedProcess) -> str:
    """Return text that names the actors whose constructors ran when this process ended."""
    if member.peer.link < 0 or (owned.has_bootstrap and not member.is_bootstrapped):
        return ""
    names = [
        actors.name
        for actors in owned.actors
        if any(actors.bases[rank] == member.rank for rank in list(actors.owned.constructing))
    ]
    return f" in the constructor of {listed(names)}" if names else ""


def was_to_end(owned: OwnedProcs, rank: int) -> bool:
    """Return whether all actors of this process were to end, and one did not: the process was killed for it."""
    here = [actors for actors in owned.actors if rank in actors.bases]
    return bool(here) and all(
        actors.stopped is not None and actors.bases.index(rank) in actors.owned.left for actors in here
    )


def listed(names: list[str]) -> str:
    """Return text for messages: at most eight names, and the number of others."""
    return ", ".join(names[:8]) + (f" and {len(names) - 8} more" if len(names) > 8 else "")
