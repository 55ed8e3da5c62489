"""Supervision: restart policy, reports of failures to owners, and the end of the program.

Failures are detected elsewhere: by links, the spawner and actor runners.
"""

from __future__ import annotations

import sys
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal

from monarch_backend._actor import program_exit
from monarch_backend._actor.current_runtime import program
from monarch_backend._actor.errors import MeshFailure
from monarch_backend._core.extension_points import extension
from monarch_backend._transport.local.links import Clock

if TYPE_CHECKING:
    from monarch_backend._actor.runtime import Runtime


@dataclass(frozen=True)
class Restart:
    """Policy for ranks that die: restart them, with back-off and a limit.

    ``strategy`` "one_for_one" restarts the dead rank, "all" restarts the whole mesh. The first restart comes after
    ``backoff`` seconds, each further one after twice the time, at most ``most_backoff`` seconds. More than
    ``max_restarts`` deaths within ``within`` seconds are a failure of the mesh, which is reported to its owner.

    Raises ValueError for another strategy, for negative ``max_restarts`` or ``backoff``, for ``within`` of 0 or less,
    and for ``most_backoff`` below ``backoff``.

    >>> Restart(max_restarts=2, within=10).delay(2)
    0.2
    """

    strategy: Literal["one_for_one", "all"] = "one_for_one"
    max_restarts: int = 3
    within: float = 60.0
    backoff: float = 0.1
    most_backoff: float = 5.0

    def __post_init__(self) -> None:
        if self.strategy not in ("one_for_one", "all"):
            raise ValueError(f"strategy={self.strategy!r}: it must be 'one_for_one' or 'all'")
        if self.max_restarts < 0 or self.within <= 0 or self.backoff < 0 or self.most_backoff < self.backoff:
            raise ValueError(
                "max_restarts and backoff must not be negative, within must be above 0, most_backoff at least backoff"
            )

    def delay(self, nth: int) -> float:
        """Return the seconds before the nth restart in a row. The first is 1."""
        return min(self.backoff * 2.0 ** (nth - 1), self.most_backoff)


def check_policy(restart: Any) -> None:
    """Raise TypeError for a value that is neither a Restart nor None."""
    if restart is not None and not isinstance(restart, Restart):
        raise TypeError(f"restart={restart!r}: give a policy, such as Restart(max_restarts=3), or nothing")


@dataclass
class RestartLimiter:
    """Times of a mesh's recent restarts."""

    policy: Restart
    clock: Clock
    _times: deque[float] = field(default_factory=deque)

    def allow(self) -> float | None:
        """Return the seconds until the restart after one more death, or None if there were too many."""
        now = self.clock.now()
        while self._times and self._times[0] <= now - self.policy.within:
            self._times.popleft()
        if len(self._times) >= self.policy.max_restarts:
            return None
        self._times.append(now)
        return self.policy.delay(len(self._times))

    def last_restart(self, delay: float) -> str:
        """Return a text for the restart that was just allowed: 'restart 2 of 3 within 60 s, in 0.2 s'."""
        policy = self.policy
        return f"restart {len(self._times)} of {policy.max_restarts} within {policy.within:g} s, in {delay:.2g} s"

    def used_up(self) -> str:
        """Return a text for a refusal of `allow`: '3 restarts were used up in 0.7 s (max_restarts=3, within=60 s)'."""
        policy, count = self.policy, len(self._times)
        limits = f"(max_restarts={policy.max_restarts}, within={policy.within:g} s)"
        if not count:
            return f"it is not restarted {limits}"
        seconds = self.clock.now() - self._times[0]
        return f"{count} restart{'s were' if count > 1 else ' was'} used up in {seconds:.1f} s {limits}"


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
    """Return the value of ``monarch_backend.actor.unhandled_fault_hook``."""
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
