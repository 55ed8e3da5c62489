"""State of one actor mesh, shared by all references to it in a process. It sends no messages."""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import partial
from typing import Any

from monarch_backend._actor.actor import ActorClassInfo
from monarch_backend._actor.calls.codec import describe_error, read_error
from monarch_backend._actor.calls.future import Future
from monarch_backend._actor.calls.unread_errors import CallSite, UnreadError
from monarch_backend._actor.errors import MeshFailure
from monarch_backend._mesh.extent import Extent
from monarch_backend._mesh.proc_mesh import ProcMeshState
from monarch_backend._mesh.rank_text import ranks_in_words
from monarch_backend._transport.local.frames import Frame, Status
from monarch_backend._transport.local.peer import Peer


@dataclass(eq=False)
class ActorMeshState:
    """State of an actor mesh. Rank r is in process ``bases[r]`` of the mesh of processes."""

    actor: int
    name: str
    blueprint: ActorClassInfo
    procs: ProcMeshState
    extent: Extent
    bases: tuple[int, ...]
    owner: Peer
    dead: dict[int, MeshFailure] = field(default_factory=dict)
    stopped: MeshFailure | None = None
    owned: Any = None
    load: list[int] = field(default_factory=list)  # pending `choose` calls, by rank

    def __post_init__(self) -> None:
        self.load = [0] * len(self.bases)

    def peer(self, rank: int) -> Peer:
        return self.procs.peer(self.bases[rank])

    def where(self, rank: int) -> str:
        """Return text for messages: "gpus 3"."""
        return ranks_in_words(self.extent, [rank])

    def set_error(
        self, future: Future[Any], frame: Frame, endpoint: str, base_rank: int, site: CallSite | None
    ) -> None:
        """Finish a future with the exception in a reply that is not a value."""

        def read() -> BaseException:
            return read_error(frame.prefix, frame.body, self.name, endpoint, self.where(base_rank), frame.rank)

        future.set_lazy_exception(read, self.unread_error(frame, endpoint, base_rank, site))

    def unread_error(self, frame: Frame, endpoint: str, base_rank: int, site: CallSite | None) -> UnreadError | None:
        """Return the report of the exception in a reply; None for a mesh's failure, which supervision reports."""
        if frame.prefix != Status.ERROR:
            return None
        return UnreadError(partial(describe_error, frame.body, self.name, endpoint, self.where(base_rank)), site)

    def failure_of(self, rank: int) -> MeshFailure | None:
        return self.stopped or self.dead.get(rank)
