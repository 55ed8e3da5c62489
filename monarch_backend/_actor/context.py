"""Which actor runs here, and which message it has: `context()`, `current_rank()` and the like."""

from __future__ import annotations

from contextvars import ContextVar
from typing import TYPE_CHECKING, Any

from monarch_backend._mesh.extent import Extent, Point

if TYPE_CHECKING:
    from monarch_backend._actor.runner import ActorRunner

cell: ContextVar[Any] = ContextVar("monarch_actor", default=None)
message: ContextVar[tuple[int, Extent] | None] = ContextVar("monarch_message", default=None)

_ALONE = Extent((), ())


class ActorInstance:
    """The actor that runs: who it is, and how it ends itself."""

    __slots__ = ("_cell",)

    def __init__(self, running: ActorRunner | None) -> None:
        self._cell = running

    def __reduce__(self) -> Any:
        raise TypeError("context().actor_instance is the actor that asks, and stays with it: send its name and rank")

    @property
    def name(self) -> str:
        """As given to ``spawn``; "main" for the program itself."""
        return "main" if self._cell is None else self._cell.name

    @property
    def rank(self) -> Point:
        """Its place in the whole mesh that it was spawned on."""
        return Point(0, _ALONE) if self._cell is None else self._cell.point

    @property
    def proc_mesh(self) -> Any:
        """The mesh of processes that it was spawned on; None for the main program."""
        return None if self._cell is None else self._cell.mesh

    @property
    def proc(self) -> Any:
        """The one process of it that this actor is in."""
        from monarch_backend._actor.this_proc import this_proc

        return this_proc()

    @property
    def creator(self) -> str:
        """The name of what spawned it."""
        return "" if self._cell is None else self._cell.creator

    @property
    def cancelled(self) -> bool:
        """True when the caller of the running message has given it up: a long computation may ask."""
        return False if self._cell is None else self._cell.is_cancelled()

    def stop(self, reason: str = "stopped by itself") -> None:
        """End after the messages that are here already."""
        self._end("stop", reason)

    def abort(self, reason: str = "aborted by itself") -> None:
        """Fail after the running message: the owner is told."""
        self._end("abort", reason)

    def kill(self, reason: str = "killed by itself") -> None:
        """End the whole process at once."""
        self._end("kill", reason)

    def _end(self, how: str, reason: str) -> None:
        if self._cell is None:
            raise RuntimeError("the main program is not stopped like an actor: return from it, or sys.exit()")
        self._cell.end(how, reason)


class Context:
    """What runs here and now."""

    __slots__ = ("actor_instance", "message_rank")

    def __init__(self, actor_instance: ActorInstance, message_rank: Point) -> None:
        self.actor_instance = actor_instance
        self.message_rank = message_rank


def context() -> Context:
    """Of the running endpoint; outside of actors, of the main program.

    >>> from monarch_backend.actor import context
    >>> context().actor_instance.name
    'main'
    """
    return Context(ActorInstance(cell.get()), current_rank())


def current_rank() -> Point:
    """This actor's place in the mesh or slice that the running message was sent to."""
    sent = message.get()
    if sent is not None:
        return Point(*sent)
    running = cell.get()
    return Point(0, _ALONE) if running is None else running.point


def current_size() -> dict[str, int]:
    """The sizes of the mesh or slice that the running message was sent to."""
    extent = current_rank().extent
    return dict(zip(extent.labels, extent.sizes, strict=True))


def current_actor_name() -> str:
    """The name given to ``spawn``; "main" outside of actors."""
    running = cell.get()
    return "main" if running is None else str(running.name)
