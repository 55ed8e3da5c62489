"""Supervision: reports of failures to owners, and the end of the program.

Failures are detected elsewhere: by links, the spawner and actor runners.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from monarch_backend._actor import program_exit
from monarch_backend._actor.current_runtime import program
from monarch_backend._actor.errors import MeshFailure
from monarch_backend._core.extension_points import extension

if TYPE_CHECKING:
    from monarch_backend._actor.runtime import Runtime


def interactive() -> bool:
    """Return True in a REPL or a notebook. Its process must not end because of a mesh."""
    return hasattr(sys, "ps1") or "ipykernel" in sys.modules or bool(sys.flags.interactive)


def end_program(failure: MeshFailure) -> None:
    """Write the report of a failure that no actor handles to stderr, then exit with status 1.

    This is the default of ``monarch_backend.actor.unhandled_fault_hook``. A program may assign another function there.

    The processes of the program are killed, open files are flushed, and the main thread is interrupted as by Ctrl-C. So
    ``finally`` blocks and ``atexit`` hooks run, for at most 10 seconds. In a REPL or a notebook only the report is
    written. To exit at once, assign a hook that prints ``failure.report()`` and calls ``os._exit(1)``. A hook that
    raises is reported, and then this function is called.

    >>> from monarch_backend import actor
    >>> default = actor.unhandled_fault_hook
    >>> actor.unhandled_fault_hook = lambda failure: print(failure.report())
    >>> actor.unhandled_fault_hook = default
    """
    here = program()
    here.flush_logs()
    sys.stderr.write(
        f"monarch_backend: unhandled failure of mesh {failure.mesh_name!r}"
        f"{'' if interactive() else '; the program ends'}\n{failure.report()}\n"
        "To handle it: __supervise__ in the actor that spawned the mesh, restart=Restart(...) where it is spawned, or "
        "monarch_backend.actor.unhandled_fault_hook.\n"
    )
    sys.stderr.flush()
    if not interactive():
        ending = here.root is None and program_exit.end_main_thread(here)
        here.shutdown.kill_all()
        if not ending:
            program_exit.exit_now()


def _hook() -> Callable[[MeshFailure], object]:
    hook: Callable[[MeshFailure], object] = extension("actor module").unhandled_fault_hook
    return hook


class Supervision:
    """Reports failures to the owner of the mesh: an actor of this process, or the main program."""

    def __init__(self, program: Runtime) -> None:
        self._program = program
        self._failed = False  # the program has had a failure

    def failed(self, owner: Any, failure: MeshFailure) -> None:
        """Report the failure of a mesh to its owner: an actor's runner, or None for the main program.

        Called on the reading thread.
        """
        if owner is not None:
            owner.supervise(failure)
        elif not self._program.closing:
            self._reached_program(failure)

    def is_asked(self, owner: Any) -> bool:
        """Return True if failures of this owner's meshes have a handler: ``__supervise__`` or a hook."""
        if owner is None:
            return _hook() is not end_program
        return owner.blueprint is not None and hasattr(owner.blueprint.cls, "__supervise__")

    def is_final(self, owner: Any) -> bool:
        """Return True if a failure of this owner's meshes ends the program at once."""
        return owner is None and _hook() is end_program and not self._program.closing

    def _reached_program(self, failure: MeshFailure) -> None:
        hook = _hook()
        if hook is end_program and self._failed and not interactive():
            return  # the first failure is being reported, and ends the program
        self._failed = True
        if hook is end_program:
            end_program(failure)  # at once, before an `except` of the program can end it with another status
        else:
            self._program.run_in_thread(lambda: self._call(hook, failure))

    def _call(self, hook: Callable[[MeshFailure], object], failure: MeshFailure) -> None:
        try:
            hook(failure)
        except BaseException as error:
            sys.stderr.write(f"monarch_backend: unhandled_fault_hook raised {type(error).__name__}: {error}\n")
            end_program(failure)
