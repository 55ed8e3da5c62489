"""Actors that exist once in the whole program, by name. They live in the main program's process."""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING, Any

from monarch_backend._actor import context
from monarch_backend._actor.actor import Actor, endpoint
from monarch_backend._actor.calls.future import Future
from monarch_backend._actor.current_runtime import program
from monarch_backend._actor.meshes.actor_mesh import ActorMesh, blueprint
from monarch_backend._actor.meshes.mesh_state import ActorMeshState
from monarch_backend._mesh.extent import Extent
from monarch_backend._mesh.proc_mesh import ProcMeshState
from monarch_backend._transport.local.frames import Construct

if TYPE_CHECKING:
    from monarch_backend._actor.runtime import Runtime

SERVICE_ACTOR_NUMBER = 2
"""Number of the actor that finds named actors for other processes. Other actors have odd numbers."""


class Registry:
    """Named actors of the main program. The first request for a name spawns its actor."""

    def __init__(self, program: Runtime) -> None:
        self._program = program
        self._meshes: dict[str, ActorMesh] = {}
        self._lock = threading.Lock()

    def get(self, name: str, cls: type, args: Any, kwargs: Any) -> Future[ActorMesh]:
        """Return the actor of this name, and spawn it if needed. Raises TypeError if it is of another class."""
        with self._lock:
            mesh = self._meshes.get(name)
            if mesh is None or mesh._core.failure_of(0) is not None:
                mesh = self._meshes[name] = context.this_proc().spawn(name, cls, *args, **kwargs)
        found = mesh._core.blueprint.cls
        if found.__qualname__ != cls.__qualname__:
            raise TypeError(f"the actor {name!r} is a {found.__qualname__}, not a {cls.__qualname__}: use another name")
        return Future.of(mesh)


class NamedActorService(Actor):
    """The registry for requests of other processes, in the main program."""

    @endpoint
    def find(self, name: str, cls: type, args: Any, kwargs: Any) -> Any:
        """Return the actor as `Registry.get` does. Its owner is the main program, not this actor."""
        running = context.runner.set(None)
        try:
            return program().registry.get(name, cls, args, kwargs).get()
        finally:
            context.runner.reset(running)


def plan() -> Construct:
    return Construct(SERVICE_ACTOR_NUMBER, "registrar", 0, (), (), "main")


def _ask(program: Runtime, name: str, cls: type, args: Any, kwargs: Any) -> Future[ActorMesh]:
    """Request a named actor from the main program, in another process."""
    root = program.root
    assert root is not None
    with program.naming:
        core = program.actors.get(SERVICE_ACTOR_NUMBER)
        if core is None:
            here = ProcMeshState("root", "the main program", Extent((), ()), root, [root.token], lambda *_: root)
            core = ActorMeshState(
                SERVICE_ACTOR_NUMBER, "registrar", blueprint(NamedActorService), here, Extent((), ()), (0,), root
            )
            program.actors[SERVICE_ACTOR_NUMBER] = core
    found: Future[ActorMesh] = ActorMesh(core).find.call_one(name, cls, args, kwargs)
    return found


def get_or_spawn_controller(name: str, cls: type, /, *args: Any, **kwargs: Any) -> Any:
    """Return a `Future` of the `ActorMesh` of the only actor with this name; the first call spawns it.

    It lives in the process of the main program, whichever process makes the call. Concurrent calls get the same actor.
    ``args`` and ``kwargs`` are for the constructor, and later calls ignore them.

    Raises TypeError, in the main program, if the name belongs to an actor of another class; in other processes the
    future raises `ActorError` with this cause.

    >>> from monarch_backend.actor import Actor, endpoint, get_or_spawn_controller
    >>> class Counter(Actor):
    ...     def __init__(self, start):
    ...         self.value = start
    ...     @endpoint
    ...     def add(self, n):
    ...         self.value += n
    ...         return self.value
    >>> get_or_spawn_controller("counter", Counter, 40).get().add.call_one(1).get()
    41
    >>> get_or_spawn_controller("counter", Counter, 40).get().add.call_one(1).get()
    42
    """
    here = program()
    return here.registry.get(name, cls, args, kwargs) if here.root is None else _ask(here, name, cls, args, kwargs)
