"""Edges of the wait-for graph through collectives: an actor in a collective waits for the ranks that do not come.

The edges are in the threads of shared-memory groups and in the recordings of this machine. Reading these takes
milliseconds, so it has a thread of its own. Such an edge is certain:

- The actor's own thread waits in the collective, so it does nothing else.
- A late rank waits itself, as the only actor of its process, and no thread of the process runs a user's code. So no
  other code can enter the collective for it.

An actor that is spawned in that process later could enter the collective, and the end of the group ends the wait: its
timeout, or the end of a rank. These do not count.
"""

from __future__ import annotations

import contextlib
import threading
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from monarch_backend._actor import process_groups
from monarch_backend._actor.calls.own_waits import has_no_other_thread
from monarch_backend._core.limits import ResourceLimitError, start_thread
from monarch_backend._telemetry import late_ranks

if TYPE_CHECKING:
    from monarch_backend._actor.execution.runner import ActorRunner
    from monarch_backend._actor.runtime import Runtime


MAX_LOOKS = 64
"""Looks that wait for the one that runs."""


@dataclass(frozen=True)
class EnteredCollective:
    """Collective that an actor has entered. ``late`` has the identities of the processes of late ranks."""

    group: int
    number: int
    text: str
    late: frozenset[int]


class CollectiveWaits:
    """Looks at the collectives of this process. Methods run on the reading thread, and call ``then`` there."""

    def __init__(self, runtime: Runtime) -> None:
        self._runtime = runtime
        self._is_looking = False
        self._looks: deque[tuple[Callable[[], Any], Callable[[Any], None]]] = deque(maxlen=MAX_LOOKS)

    def find(self, runner: ActorRunner, then: Callable[[EnteredCollective], None]) -> None:
        """Call ``then`` if this actor's thread waits in a collective for other ranks of this machine."""
        thread = runner.code.thread_id
        group = process_groups.waited_in(thread)
        if not group:
            return

        def found(entered: EnteredCollective | None) -> None:
            if entered is not None and process_groups.waited_in(thread) == group:
                then(entered)

        self._look(lambda: _entered(group, self._runtime.pid), found)

    def confirm_late(self, group: int, number: int, then: Callable[[], None]) -> None:
        """Call ``then`` if this process has not entered operation ``number`` of a group."""
        self._look(lambda: late_ranks.is_late(group, number), lambda late: then() if late else None)

    def only_actor(self) -> ActorRunner | None:
        """Return the actor without which this process enters no collective, None if there may be other code."""
        runtime = self._runtime
        there = [each for each in list(runtime.runners.values()) if each.failure is None]
        runners = [each for each in there if not _is_idle(each)]
        if (
            runtime.root is None
            or len(runners) != 1
            or not has_no_other_thread({each.code.thread_id for each in there})
        ):
            return None
        return runners[0]

    def _look(self, look: Callable[[], Any], then: Callable[[Any], None]) -> None:
        """Look on a thread, one look after the other. The oldest of too many is dropped: probes are repeated."""
        self._looks.append((look, then))
        if not self._is_looking:
            self._is_looking = True
            self._start_next()

    def _start_next(self) -> None:
        if not self._looks:
            self._is_looking = False
            return
        look, then = self._looks.popleft()

        def end(found: Any) -> None:
            self._start_next()
            then(found)

        def run() -> None:
            found = None
            with contextlib.suppress(Exception):  # recordings that cannot be read here, or change meanwhile
                found = look()
            self._runtime.call_soon(lambda: end(found))

        try:
            start_thread(threading.Thread(target=run, name="monarch-deadlock", daemon=True))
        except ResourceLimitError:
            self._is_looking = False


def _is_idle(runner: ActorRunner) -> bool:
    """Return whether an actor is the package's own, which enters no collective by itself."""
    return runner.blueprint is not None and runner.blueprint.cls is process_groups.World


def _entered(group: int, pid: int) -> EnteredCollective | None:
    found = late_ranks.entered_in(group, pid)
    if found is None or not found[1]:
        return None
    activity, late = found
    ranks = " and ".join(f"rank {rank}" for rank, _ in late[: late_ranks.MAX_NAMED])
    more = f" and {len(late) - late_ranks.MAX_NAMED} more" if len(late) > late_ranks.MAX_NAMED else ""
    have = "has" if len(late) == 1 else "have"
    text = f"{activity.detail} #{activity.reference} of {activity.name}, which {ranks}{more} {have} not entered"
    return EnteredCollective(group, activity.reference, text, frozenset(identity for _, identity in late))
