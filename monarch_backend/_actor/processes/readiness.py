"""Readiness of processes: connected, and their bootstraps have returned. Also failures until then."""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING

from monarch_backend._actor.calls.future import Future
from monarch_backend._actor.errors import MeshFailure
from monarch_backend._actor.processes.records import OwnedProcs, ProcessRecords
from monarch_backend._mesh.proc_mesh import ProcMeshState
from monarch_backend._transport.local.peer import Peer

if TYPE_CHECKING:
    from monarch_backend._actor.runtime import Runtime


class ProcessReadiness:
    def __init__(self, program: Runtime, records: ProcessRecords) -> None:
        self._program, self._records = program, records

    def ready(self, core: ProcMeshState) -> Future[None]:
        """Return a Future that is done when all processes have started. Raises RuntimeError if others own the mesh."""
        future: Future[None] = Future(self._program.wait)
        owned = core.owned
        if owned is None:
            raise RuntimeError("only the program or actor that has spawned processes can wait for their start")
        owned.ready.append(future)  # before the check, so that it gets events in between
        dead = [m for m in owned.members.values() if m.gone and not m.replaced]
        if dead:
            future._fail(self._program.death_of(core, dead[0].rank, dead[0].peer))
        elif self._is_up(owned):
            future._set(None)
        if future.ready:
            with contextlib.suppress(ValueError):
                owned.ready.remove(future)
        return future

    def met(self, peer: Peer) -> None:
        member = self._records.by_token.get(peer.token)
        if member is not None:
            owned = member.core.owned
            if self._is_up(owned):
                for future in owned.ready:
                    future._set(None)
                owned.ready.clear()

    def _is_up(self, owned: OwnedProcs) -> bool:
        if all(peer.link >= 0 for peer in owned.core.peers) and (
            not owned.has_bootstrap or all(member.is_bootstrapped for member in owned.members.values())
        ):
            owned.was_up = True
            return True
        return False

    def bootstrapped(self, peer: Peer) -> None:
        member = self._records.by_token.get(peer.token)
        if member is not None:
            member.is_bootstrapped = True
            self.met(peer)

    def bootstrap_failed(self, peer: Peer, failure: BaseException) -> None:
        """Note that the bootstrap of a process has raised. The process ends."""
        member = self._records.by_token.get(peer.token)
        if member is not None and isinstance(failure, MeshFailure):
            member.bootstrap_failure = failure

    def failed_to_start(self, peer: Peer) -> bool:
        """Return whether the process ended before its bootstrap returned, in a mesh that was never ready.

        Such a failure is raised where the program waits. It is reported to a supervisor only if the program has one.
        """
        member = self._records.by_token.get(peer.token)
        if member is None:
            return False
        owned = member.core.owned
        return owned.has_bootstrap and not owned.was_up and not member.is_bootstrapped and peer.gone is not None

    def bootstrap_error(self, peer: Peer) -> tuple[BaseException | None, str]:
        member = self._records.by_token.get(peer.token)
        failure = None if member is None else member.bootstrap_failure
        return (None, "") if failure is None else (failure.__cause__, failure.deaths[0].trace)
