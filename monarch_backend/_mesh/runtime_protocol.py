"""Interface from meshes up to the actor runtime: the functions of the runtime that host and process meshes use.

_actor/runtime.py is the one implementation, found as an extension. So this package imports nothing of _actor.
"""

from __future__ import annotations

from typing import Any, Protocol

from monarch_backend._core.extension_points import extension


class MeshProgram(Protocol):
    """The functions that meshes need of this process's runtime, which documents them."""

    def spawn_procs(self, hosts: Any, extent: Any, **options: Any) -> Any: ...
    def spawn_actors(self, procs: Any, name: str, cls: type, args: Any, kwargs: Any, restart: Any) -> Any: ...
    def stop_procs(self, core: Any, how: str, reason: str, timeout: float | None = None, hosts: Any = None) -> Any:
        """End processes. Return a Future that is done when they have exited."""
        ...

    def cancel_calls(self, procs: Any, ranks: Any, reason: str) -> int:
        """Cancel the calls that wait for these processes. Return their number."""
        ...

    def proc_core(self, data: Any) -> Any: ...
    def host_names(self, tokens: Any) -> tuple[tuple[str, str], ...]: ...
    def process_group(self, procs: Any, backend: str, timeout: float) -> Any: ...
    def profile_procs(self, procs: Any, seconds: Any, steps: Any, ranks: Any) -> Any: ...
    def set_log_level(self, core: Any, level: int | str) -> None: ...

    def ready(self, core: Any) -> Any:
        """Return a Future that is done when all processes have started."""
        ...


def program() -> MeshProgram:
    """Return the program of this process. Starts it if needed."""
    runtime: MeshProgram = extension("runtime").program()
    return runtime
