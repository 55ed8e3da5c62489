"""This process as a mesh of one, and actors that exist once in the whole program."""

from __future__ import annotations

from typing import Any

from monarch_backend._actor.current_runtime import program
from monarch_backend._mesh.extent import Extent
from monarch_backend._mesh.proc_mesh import ProcMesh, ProcMeshState
from monarch_backend._mesh.shape import Shape


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
                Extent((), ()),
                here.router.me,
                [here.router.token],
                lambda *_: here.router.me,
            )
            here.procs[core.id] = core
    return ProcMesh(core, Shape.of(core.extent))


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
    return program().named_actor(name, cls, args, kwargs)
