"""The seam to the room above: what host and process meshes need of the program that they belong to.

_actor/runtime.py is the one implementation; it puts itself in place here, so that mesh/ imports nothing of actor/.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

from monarch_backend._core.extension_points import extension


class MeshProgram(Protocol):
    """What meshes ask of the program of this process."""

    def spawn_procs(self, hosts: Any, extent: Any, **options: Any) -> Any:
        """Start a process for each rank of the extent; a ProcMesh, at once."""
        ...

    def spawn_actors(self, procs: Any, name: str, cls: type, args: Any, kwargs: Any, restart: Any) -> Any:
        """Build an actor in each process; an ActorMesh, at once."""
        ...

    def stop_procs(self, core: Any, how: str, reason: str, timeout: float | None = None, hosts: Any = None) -> Any:
        """End the processes; a Future."""
        ...

    def proc_core(self, data: Any) -> Any:
        """The one ProcCore of a mesh in this process, made from a travelling reference if need be."""
        ...

    def host_names(self, tokens: Any) -> tuple[tuple[str, str], ...]:
        """Numbers and names of the hosts of these processes, as far as they are known here."""
        ...

    def process_group(self, procs: Any, backend: str, timeout: float) -> Any:
        """Make the processes the ranks of a torch process group; a Future."""
        ...

    def set_log_level(self, core: Any, level: int | str) -> None:
        """What the processes' ``logging`` makes at all."""
        ...

    def ready(self, core: Any) -> Any:
        """A Future that is done when all processes of the mesh are there."""
        ...


_make: list[Callable[[], MeshProgram]] = []


def install(make: Callable[[], MeshProgram]) -> None:
    """Called once, by the room above, when it is imported."""
    _make[:] = [make]


def program() -> MeshProgram:
    """The program of this process; started if it is not there yet."""
    if not _make:
        extension("runtime")  # which calls `install`
    return _make[0]()
