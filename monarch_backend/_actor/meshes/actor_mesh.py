"""`ActorMesh`: actors of one class, one in each process of a mesh. Its attributes are their endpoints."""

from __future__ import annotations

import functools
import inspect
from typing import TYPE_CHECKING, Any

from monarch_backend._actor.actor import Actor, ActorClassInfo, EndpointMethod, EndpointSpec, specify
from monarch_backend._actor.calls.endpoint import Endpoint, NonEndpointMethod
from monarch_backend._actor.current_runtime import program
from monarch_backend._actor.meshes.mesh_state import ActorMeshState
from monarch_backend._mesh.mesh_base import MeshBase
from monarch_backend._mesh.proc_mesh import ProcMesh, whole
from monarch_backend._mesh.shape import Shape

if TYPE_CHECKING:
    from typing_extensions import Self

    from monarch_backend._actor.calls.future import Future


def _from_reference(arguments: tuple[Any, ...], shape: Shape) -> ActorMesh:
    return ActorMesh(program().actor_core(*arguments), shape)


class ActorMesh(MeshBase):
    """Actors of one class, one for each rank. ``mesh.method`` is an `Endpoint`.

    ``proc_mesh.spawn(name, Class, ...)`` makes it. A slice is an `ActorMesh` of some of the actors. A mesh can be sent
    to any actor, as an argument or a reply. An unknown method raises UnknownEndpointError.

    >>> from monarch_backend.actor import Actor, endpoint, this_proc
    >>> class Echo(Actor):
    ...     @endpoint
    ...     def say(self, text):
    ...         return text
    >>> mesh = this_proc().spawn("echo", Echo)
    >>> mesh.initialized.get()
    >>> mesh.name, mesh.say.call_one("hello").get()
    ('echo', 'hello')
    >>> mesh.stop().get()
    """

    def __init__(self, core: ActorMeshState, shape: Shape | None = None) -> None:
        self._core = core
        self._shape = shape or Shape.of(core.extent)

    def _new_with_shape(self, shape: Shape) -> Self:
        return self.__class__(self._core, shape)

    def __reduce__(self) -> Any:
        core = self._core
        extent, procs = core.extent, core.procs.reference()
        arguments = (core.actor, core.name, core.blueprint.cls, procs, extent.labels, extent.sizes, core.bases)
        return _from_reference, ((*arguments, core.owner.token), self._shape)

    def __getattr__(self, name: str) -> Endpoint[Any]:
        if name.startswith("__") or name in ("_core", "_shape"):
            raise AttributeError(name)
        spec = self._core.blueprint.endpoints.get(name)
        if spec is None and callable(getattr(self._core.blueprint.cls, name, None)):
            return NonEndpointMethod(self, name)  # type: ignore[return-value]
        found: Endpoint[Any] = Endpoint(self, self._core.blueprint.spec(name))
        self.__dict__[name] = found  # the next access does not come here
        return found

    @property
    def name(self) -> str:
        """Name that was given to ``spawn``."""
        return self._core.name

    @property
    def proc_mesh(self) -> ProcMesh:
        """Processes of these actors, as a `ProcMesh` of the same shape."""
        bases = [self._core.bases[rank] for rank in self._shape.ranks]
        return ProcMesh(self._core.procs, Shape.from_ranks(self.extent, bases))

    @property
    def initialized(self) -> Future[None]:
        """`Future` that is done when every actor of the mesh is constructed.

        It raises `MeshFailure` if a constructor has raised. Raises RuntimeError for a mesh that another process has
        spawned.
        """
        if self._core.owned is None:
            raise RuntimeError("only the program or actor that has spawned a mesh can wait for its construction")
        built: Future[None] = self._core.owned.built
        return built

    @property
    def failed_ranks(self) -> tuple[int, ...]:
        """Ranks of this mesh or slice that are known here to be dead.

        ``mesh.without(mesh.failed_ranks)`` is the mesh of the others.
        """
        core = self._core
        return tuple(i for i, r in enumerate(self._shape.ranks) if core.failure_of(r) or core.peer(r).gone is not None)

    def stop(self, reason: str = "stopped by its owner", timeout: float | None = None) -> Future[None]:
        """Stop the actors after the messages in their queues, and call their ``__cleanup__``. The processes stay.

        Return a `Future` that is done when all actors have ended. Actors that still run after ``timeout`` seconds are
        aborted: CancelledError is raised in the constructor or message that runs. If that does not end within 3
        seconds, the process is killed, and a line on its stderr shows where it was.

        Raises ValueError for a slice or an invalid timeout, and RuntimeError for a mesh that another process has
        spawned.
        """
        return program().stop_actors(whole(self, "stop"), "stop", reason, timeout)

    def abort(self, reason: str = "aborted by its owner") -> Future[None]:
        """End the actors after the constructor or message that runs; at most 10 seconds, and the time to clean up.

        Return a `Future` that is done when all actors have ended. Running code is interrupted after 5 seconds, by
        CancelledError. If it does not end within 3 more, the process is killed, and a line on its stderr shows where it
        was. That is a failure of the process mesh only if other actors lived there.

        Raises ValueError for a slice, and RuntimeError for a mesh that another process has spawned.
        """
        return program().stop_actors(whole(self, "abort"), "abort", reason)

    def __dir__(self) -> list[str]:
        return sorted({*super().__dir__(), *self._core.blueprint.endpoints})

    def __repr__(self) -> str:
        return f"ActorMesh({self._core.name!r}, {self._core.blueprint.cls.__name__}, {self.extent})"

    def _repr_html_(self) -> str:
        """Return what a notebook shows: a table of the actors' processes and of what they do."""
        from monarch_backend._telemetry.mesh_html import as_html

        core = self._core
        labels = [f"{core.procs.where(core.bases[rank])} of {core.procs.name}" for rank in self._shape.ranks]
        return as_html(repr(self), labels)


def _reserved() -> frozenset[str]:
    names = {*dir(MeshBase), *dir(ActorMesh), "_core", "_shape"}
    return frozenset(name for name in names if not name.startswith("__"))


@functools.lru_cache(maxsize=1024)
def blueprint(cls: type) -> ActorClassInfo:
    if not (isinstance(cls, type) and issubclass(cls, Actor)):
        raise TypeError(
            f"{getattr(cls, '__name__', cls)!r} is not an Actor: derive the class from monarch_backend.actor.Actor"
        )
    found: dict[str, EndpointSpec] = {}
    reserved = _reserved()
    for name in dir(cls):
        method = inspect.getattr_static(cls, name)
        if isinstance(method, EndpointMethod):
            if name in reserved:
                raise ValueError(
                    f"{cls.__name__}.{name}: every mesh has an attribute {name!r}; give the endpoint another name"
                )
            found[name] = specify(name, method.method, method.concurrent, method.explicit_port)
    kinds = {spec.is_async for spec in found.values()}
    if len(kinds) == 2:
        plain = ", ".join(sorted(name for name, spec in found.items() if not spec.is_async))
        raise ValueError(
            f"{cls.__name__} mixes `def` and `async def` endpoints: an actor has one kind. "
            f"Make these async, too: {plain}"
        )
    return ActorClassInfo(cls, found, kinds == {True})
