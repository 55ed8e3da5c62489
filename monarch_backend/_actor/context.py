"""The running actor and its message, and this process as a mesh: `context()`, `current_rank()`, `this_proc()`."""

from __future__ import annotations

from contextvars import ContextVar
from typing import TYPE_CHECKING, Any

from monarch_backend._actor.current_runtime import program
from monarch_backend._mesh.extent import Extent, Point
from monarch_backend._mesh.proc_mesh import ProcMesh, ProcMeshState

if TYPE_CHECKING:
    from monarch_backend._actor.execution.runner import ActorRunner
    from monarch_backend._actor.host_ending import HostEnding

runner: ContextVar[Any] = ContextVar("monarch_actor", default=None)
message: ContextVar[tuple[int, Extent] | None] = ContextVar("monarch_message", default=None)

_ALONE = Extent((), ())


class ActorInstance:
    """The running actor: its name and rank, and ways to end it. Pickling it raises TypeError."""

    __slots__ = ("_runner",)

    def __init__(self, running: ActorRunner | None) -> None:
        self._runner = running

    def __reduce__(self) -> Any:
        raise TypeError("context().actor_instance cannot be sent: send its name and rank")

    @property
    def name(self) -> str:
        """Name that was given to ``spawn``; "main" for the main program."""
        return "main" if self._runner is None else self._runner.name

    @property
    def rank(self) -> Point:
        """Point of the actor in the whole mesh that it was spawned on."""
        return Point(0, _ALONE) if self._runner is None else self._runner.point

    @property
    def proc_mesh(self) -> Any:
        """Mesh of processes that the actor was spawned on; None for the main program."""
        return None if self._runner is None else self._runner.mesh

    @property
    def proc(self) -> Any:
        """This process, as a mesh of one process."""
        return this_proc()

    @property
    def creator(self) -> str:
        """Name of the actor that spawned this one, "main" if the main program did; "" in the main program."""
        return "" if self._runner is None else self._runner.creator

    @property
    def cancelled(self) -> bool:
        """True if the caller has cancelled the running message. A long computation may check it."""
        return False if self._runner is None else self._runner.code.is_cancelled

    def stop(self, reason: str = "stopped by itself") -> None:
        """Stop this actor after the messages in its queue. Raises RuntimeError in the main program."""
        self._end("stop", reason)

    def abort(self, reason: str = "aborted by itself") -> None:
        """Fail after the running message; the owner is informed. Raises RuntimeError in the main program."""
        self._end("abort", reason)

    def kill(self, reason: str = "killed by itself") -> None:
        """Kill this process at once. Raises RuntimeError in the main program."""
        self._end("kill", reason)

    def _end(self, how: str, reason: str) -> None:
        if self._runner is None:
            raise RuntimeError(
                "the main program is not an actor and cannot be stopped so: return from it, or call sys.exit()"
            )
        self._runner.end(how, reason)


class Context:
    """The running actor, ``actor_instance``, and ``message_rank``, its `Point` in the mesh or slice of the message.

    >>> from monarch_backend.actor import context
    >>> context().message_rank.rank
    0
    """

    __slots__ = ("actor_instance", "message_rank")

    def __init__(self, actor_instance: ActorInstance, message_rank: Point) -> None:
        self.actor_instance = actor_instance
        self.message_rank = message_rank

    @property
    def host_ending(self) -> HostEnding | None:
        """`HostEnding` of this process's host, if its end was announced. A long endpoint may check it."""
        return program().host_ending


def context() -> Context:
    """Return the `Context` of the running endpoint; outside of actors, of the main program.

    >>> from monarch_backend.actor import context
    >>> context().actor_instance.name
    'main'
    """
    return Context(ActorInstance(runner.get()), current_rank())


def current_rank() -> Point:
    """Return the `Point` of this actor in the mesh or slice that the running message was sent to.

    Outside of messages it is the point in the whole mesh of the actor; outside of actors, rank 0 of a mesh of one.

    >>> from monarch_backend.actor import current_rank
    >>> current_rank().rank
    0
    """
    sent = message.get()
    if sent is not None:
        return Point(*sent)
    running = runner.get()
    return Point(0, _ALONE) if running is None else running.point


def current_size() -> dict[str, int]:
    """Return the size of each dimension of the mesh or slice that the running message was sent to.

    >>> from monarch_backend.actor import Actor, current_size, endpoint, this_proc
    >>> class Sizes(Actor):
    ...     @endpoint
    ...     def get(self):
    ...         return current_size()
    >>> this_proc().spawn("sizes", Sizes).get.call_one().get()
    {}
    """
    extent = current_rank().extent
    return dict(zip(extent.labels, extent.sizes, strict=True))


def current_actor_name() -> str:
    """Return the running actor's name, as given to ``spawn``; "main" outside of actors.

    >>> from monarch_backend.actor import current_actor_name
    >>> current_actor_name()
    'main'
    """
    running = runner.get()
    return "main" if running is None else str(running.name)


def this_proc() -> ProcMesh:
    """Return this process as a mesh of one process, without dimensions. Actors can be spawned in it.

    >>> from monarch_backend.actor import this_proc
    >>> len(this_proc())
    1
    """
    here = program()
    with here.naming:
        core = here.this_proc
        if core is None:
            core = here.this_proc = ProcMeshState(
                f"self-{here.router.token}",
                "this process",
                _ALONE,
                here.router.me,
                [here.router.token],
                lambda *_: here.router.me,
            )
            here.procs[core.id] = core
    return ProcMesh(core)
