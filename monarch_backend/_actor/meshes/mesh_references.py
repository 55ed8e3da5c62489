"""Meshes that are known in this process: one state for each, and the exits of their processes."""

from __future__ import annotations

import threading
import weakref
from dataclasses import replace
from typing import TYPE_CHECKING, Any, TypeVar

from monarch_backend._actor.errors import Death, MeshFailure
from monarch_backend._actor.meshes.actor_mesh import blueprint
from monarch_backend._actor.meshes.mesh_state import ActorMeshState
from monarch_backend._mesh.extent import Extent
from monarch_backend._mesh.proc_mesh import ProcMeshState, ProcReference, label_of
from monarch_backend._transport.local.frames import Frame, Replaced
from monarch_backend._transport.local.peer import Peer
from monarch_backend._transport.tokens import epoch_of, host_of

if TYPE_CHECKING:
    from monarch_backend._actor.runtime import Runtime

T = TypeVar("T")


class MeshReferences:
    def __init__(self, runtime: Runtime) -> None:
        self._runtime = runtime
        # Weak: references and, until its end, the owner keep the state of a mesh.
        self.procs: weakref.WeakValueDictionary[str, ProcMeshState] = weakref.WeakValueDictionary()
        self.actors: weakref.WeakValueDictionary[int, ActorMeshState] = weakref.WeakValueDictionary()
        self.naming = threading.RLock()  # held to look up a state and add it

    def proc_core(self, data: ProcReference) -> ProcMeshState:
        core = self.procs.get(data.id)
        if core is not None and not _is_newer(data, core):
            return core
        self._runtime.hosts.add_names(data.host_names)
        owner = self._runtime.router.peer(data.owner)
        with self.naming:  # takes no other lock inside
            core = self.procs.get(data.id)
            if core is None:
                extent = Extent(data.labels, data.sizes)
                core = ProcMeshState(data.id, data.name, extent, owner, list(data.tokens), self._find_peer, data.server)
                self.procs[data.id] = core
            elif _is_newer(data, core):
                for rank, token in enumerate(data.tokens):
                    if epoch_of(token) > epoch_of(core.tokens[rank]):
                        core.replace(rank, token)
        for rank, token in enumerate(core.tokens):
            if token in self._runtime.router.peers:
                core.peer(rank)
        return core

    def _find_peer(self, core: ProcMeshState, rank: int) -> Peer:
        """Return the peer of a rank. Looked up when needed: most processes of a large mesh exchange no messages."""
        peer = self._runtime.router.peer(core.tokens[rank], core.owner)
        peer.label = label_of(core, rank)
        if peer.gone is not None and not peer.orderly:  # a restart may have been missed
            self._runtime.router.ask_owner(peer)
        return peer

    def on_replaced(self, peer: Peer, message: Replaced, _: Frame) -> None:
        core = self.procs.get(message.mesh)
        if core is None or core.owned is not None or core.owner is not peer:
            return
        for rank, token in zip(message.ranks, message.tokens):  # noqa: B905 (another process may send unequal lengths)
            if rank < len(core.tokens):
                core.replace(rank, token)
                if token in self._runtime.router.peers:
                    core.peer(rank)

    def find_peers_on(self, host: str) -> None:
        """Look up the peers of all known processes on a lost host, so that each of them is marked as lost."""
        for core in alive(self.procs):
            for rank, token in enumerate(core.tokens):
                if host_of(token) == host:
                    core.peer(rank)

    def actor_core(
        self, actor: int, name: str, cls: type, procs: ProcReference, labels: Any, sizes: Any, bases: Any, owner: str
    ) -> ActorMeshState:
        proc_core, owner_peer = self.proc_core(procs), self._runtime.router.peer(owner)
        with self.naming:
            core = self.actors.get(actor)
            if core is None:
                core = self.actors[actor] = ActorMeshState(
                    actor, name, blueprint(cls), proc_core, Extent(labels, sizes), tuple(bases), owner_peer
                )
            return core

    def failure_of(self, core: ActorMeshState, rank: int) -> MeshFailure:
        """Return why a rank can't be called: the failure of its process where nothing else is known."""
        return core.failure_of(rank) or self.death_of(core.procs, core.bases[rank], core.peer(rank))

    def death_of(self, core: ProcMeshState, rank: int, peer: Peer, mesh_name: str = "") -> MeshFailure:
        """Return the failure of a process that has ended, as far as its end is known here."""
        if core.stopped is not None:
            what, code = f"it was stopped: {core.stopped}", None
        else:
            what, code = self._runtime.owner.records.how_it_ended(peer)
        death = Death(rank, core.where(rank), self._runtime.hosts.name_of(peer.token), peer.pid, what, code)
        error = None
        if core.stopped is None and self._runtime.owner.readiness.failed_to_start(peer):
            error, trace = self._runtime.owner.readiness.bootstrap_error(peer)
            death = replace(death, error=error, trace=trace, at_start=True)
        failure = MeshFailure(mesh_name or core.name, [death])
        failure.__cause__ = error
        return failure

    def exit_of(self, peer: Peer) -> MeshFailure:
        """Return the failure of an exited process, for the first mesh by which it is known here."""
        for core in alive(self.procs):
            rank = core.rank_of(peer.token)
            if rank is not None:
                return self.death_of(core, rank, peer)
        return MeshFailure(
            "?", [Death(0, str(peer), self._runtime.hosts.name_of(peer.token), peer.pid, peer.gone or "it is gone")]
        )


def alive(table: weakref.WeakValueDictionary[Any, T]) -> list[T]:
    """Return the values of a table to which other threads may add, where plain iteration could fail."""
    return [value for reference in table.valuerefs() if (value := reference()) is not None]


def _is_newer(data: ProcReference, core: ProcMeshState) -> bool:
    """Return whether the reference has successors of processes that are not known here."""
    if core.owned is not None:
        return False
    return any(epoch_of(token) > epoch_of(known) for token, known in zip(data.tokens, core.tokens, strict=True))
