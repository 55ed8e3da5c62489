"""Record of an actor mesh that this process has spawned: the state of its ranks, and what constructs them again."""

from __future__ import annotations

import contextlib
from typing import Any

from monarch_backend._actor.calls.future import Future
from monarch_backend._actor.meshes.mesh_state import ActorMeshState
from monarch_backend._actor.restart_policy import RestartLimiter
from monarch_backend._transport.local.peer import Peer


class OwnedActors:
    """The owner's record of an actor mesh."""

    def __init__(
        self,
        core: ActorMeshState,
        owner_runner: Any,
        siblings: list[Any],
        body: bytes,
        buffers: Any,
        limiter: RestartLimiter | None,
        built: Future[None],
    ) -> None:
        self.core, self.owner_runner, self._siblings = core, owner_runner, siblings
        self.body, self.buffers = body, buffers  # the constructor's arguments
        self.limiter, self.built = limiter, built
        self.generations = [0] * len(core.bases)
        self.left = set(range(len(core.bases)))  # ranks that have not ended
        self._unbuilt = set(range(len(core.bases)))
        self.constructing: set[int] = set()
        self.homes: dict[int, Peer] = {}  # process that constructs each rank; it may be replaced meanwhile
        self.ended: Future[None] = Future(built._wait)

    def is_built(self, rank: int) -> None:
        self._unbuilt.discard(rank)
        self.constructing.discard(rank)
        if not self._unbuilt:
            self.built._set(None)
            below = self.core.procs.owned
            if self.limiter is None and (below is None or below.limiter is None):
                self.body, self.buffers = b"", None  # it is never constructed again

    def is_gone(self, rank: int) -> None:
        self.left.discard(rank)
        self.settle()

    def settle(self) -> None:
        """Finish the future of `stop` when all ranks have ended."""
        if not self.left and self.core.stopped is not None:
            self.ended._set(None)
            self.let_go()

    def let_go(self) -> None:
        """Drop the records of an ended mesh, so that only its references keep it alive."""
        self.body, self.buffers = b"", None
        below = self.core.procs.owned
        for holder in (self._siblings, below.actors if below is not None else []):
            with contextlib.suppress(ValueError):
                holder.remove(self.core)
