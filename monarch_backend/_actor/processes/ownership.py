"""Ownership of processes: the parts that start, watch, restart and stop the processes of this program.

Only the process that has spawned a mesh owns it. _actor/supervision.py decides about failures.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from monarch_backend._actor.processes.exits import ProcessExits
from monarch_backend._actor.processes.readiness import ProcessReadiness
from monarch_backend._actor.processes.records import ProcessRecords
from monarch_backend._actor.processes.restarts import ProcessRestarts
from monarch_backend._actor.processes.start import ProcessStarter
from monarch_backend._actor.processes.stop import ProcessStop
from monarch_backend._actor.processes.stuck_readers import StuckReaders
from monarch_backend._transport.local.peer import Peer

if TYPE_CHECKING:
    from monarch_backend._actor.runtime import Runtime


class ProcessOwner:
    """Owner of the processes that this process has spawned, by its parts."""

    def __init__(self, program: Runtime) -> None:
        self.records = records = ProcessRecords()
        self.stuck = StuckReaders(program, records)
        self.starter = ProcessStarter(program, records, self.stuck, self._on_event, self._handle_event)
        self.readiness = ProcessReadiness(program, records)
        self.stops = ProcessStop(program, records, self.starter, self.stuck)
        self.restarts = ProcessRestarts(program, records, self.starter, self._on_lost)
        self.exits = ProcessExits(program, records, self.starter, self.readiness, self.restarts, self.stops)

    # Parts that are made before `exits` call it through these.

    def _on_event(self, event: Any) -> None:
        self.exits.on_event(event)

    def _handle_event(self, event: Any) -> None:
        self.exits.handle_event(event)

    def _on_lost(self, peer: Peer) -> None:
        self.exits.ended(peer)
