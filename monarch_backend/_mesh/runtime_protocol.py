"""Interface from meshes up to the actor runtime: the functions of the runtime that host and process meshes use.

_actor/runtime.py is the one implementation, and installs itself here. So this package imports nothing of _actor.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

from monarch_backend._core.extension_points import extension


class MeshProgram(Protocol):
    """The functions that meshes need of this process's program."""

    def spawn_procs(self, hosts: Any, extent: Any, **options: Any) -> Any:
        """Start a process for each rank of the extent. Return a ProcMesh at once."""
        ...

    def spawn_actors(self, procs: Any, name: str, cls: type, args: Any, kwargs: Any, restart: Any) -> Any:
        """Construct an actor in each process. Return an ActorMesh at once."""
        ...

    def stop_procs(self, core: Any, how: str, reason: str, timeout: float | None = None, hosts: Any = None) -> Any:
        """End the processes. Return a Future."""
        ...

    def proc_core(self, data: Any) -> Any:
        """Return the one state of a mesh in this process, made from a pickled reference if needed."""
        ...

    def host_names(self, tokens: Any) -> tuple[tuple[str, str], ...]:
        """Return numbers and names of the hosts of these processes, as far as they are known here."""
        ...

    def process_group(self, procs: Any, backend: str, timeout: float) -> Any:
        """Make the processes the ranks of a torch process group. Return a Future."""
        ...

    def set_log_level(self, core: Any, level: int | str) -> None:
        """Set the level of ``logging`` in the processes."""
        ...

    def ready(self, core: Any) -> Any:
        """Return a Future that is done when all processes of the mesh run."""
        ...


_make: list[Callable[[], MeshProgram]] = []


def install(make: Callable[[], MeshProgram]) -> None:
    """Set the program. The actor layer calls this once, when it is imported."""
    _make[:] = [make]


def program() -> MeshProgram:
    """Return the program of this process. Starts it if needed."""
    if not _make:
        extension("runtime")  # which calls `install`
    return _make[0]()
