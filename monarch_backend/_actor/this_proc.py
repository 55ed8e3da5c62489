"""Where one is: this process as a mesh of one, and actors of which there is one in the whole program."""

from __future__ import annotations

from typing import Any

from monarch_backend._actor.runtime import program
from monarch_backend._mesh.extent import Extent, Shape
from monarch_backend._mesh.proc_mesh import ProcMesh, ProcMeshState


def this_proc() -> ProcMesh:
    """This process, as a mesh of one process without dimensions: actors can be spawned in it."""
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
    """The one actor of this name in the program, built by whoever asks first; a Future of its ActorMesh.

    It lives in the process of the main program, whoever asks, and however many at once.
    """
    return program().named_actor(name, cls, args, kwargs)
