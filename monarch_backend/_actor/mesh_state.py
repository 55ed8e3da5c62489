"""What all references to one mesh of actors share in a process. No messages here."""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import partial
from typing import Any

from monarch_backend._actor.actor import ActorClassInfo
from monarch_backend._actor.codec import describe_error, read_error
from monarch_backend._actor.errors import MeshFailure
from monarch_backend._actor.unread_errors import CallSite, UnreadError
from monarch_backend._mesh.extent import Extent, ranks_in_words
from monarch_backend._mesh.proc_mesh import ProcMeshState
from monarch_backend._transport.local.frames import Frame, Status
from monarch_backend._transport.local.peer import Peer


@dataclass(eq=False)
class ActorMeshState:
    """A mesh of actors: the rank r of it lives in process ``bases[r]`` of its mesh of processes."""

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
    load: list[int] = field(default_factory=list)  # calls under way that `choose` has sent, by rank

    def __post_init__(self) -> None:
        self.load = [0] * len(self.bases)

    def peer(self, rank: int) -> Peer:
        """The process in which this rank lives now."""
        return self.procs.peer(self.bases[rank])

    def where(self, rank: int) -> str:
        """For people: "gpus 3"."""
        return ranks_in_words(self.extent, [rank])

    def error_of(self, frame: Frame, endpoint: str, base_rank: int) -> BaseException:
        """The exception in a reply that is no value."""
        return read_error(frame.prefix, frame.body, self.name, endpoint, self.where(base_rank), frame.rank)

    def unread_error(self, frame: Frame, endpoint: str, base_rank: int, site: CallSite | None) -> UnreadError | None:
        """The report of the exception in a reply; None for the failure of a mesh, which its supervisor reports."""
        if frame.prefix != Status.ERROR:
            return None
        return UnreadError(partial(describe_error, frame.body, self.name, endpoint, self.where(base_rank)), site)

    def failure_of(self, rank: int) -> MeshFailure | None:
        """Why this rank can't be called, if so."""
        return self.stopped or self.dead.get(rank)
