"""Failures: what a supervisor is told, the policy of restarting, and what becomes of a failure that nobody handles.

Detection is elsewhere (links, spawner, cells); here is what is decided about it.
"""

from __future__ import annotations

import sys
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal

from monarch_backend._actor import program_exit
from monarch_backend._actor.errors import MeshFailure
from monarch_backend._core.extension_points import extension
from monarch_backend._transport.local.links import Clock

if TYPE_CHECKING:
    from monarch_backend._actor.runtime import Runtime


@dataclass(frozen=True)
class Restart:
    """What to do about ranks that die: start them anew, but not for ever.

    ``strategy``: "one_for_one" starts the dead ones, "all" the whole mesh. After ``backoff`` seconds, twice as long
    after each further death, at most ``most_backoff``. More than ``max_restarts`` deaths within ``within`` seconds are
    a failure of the mesh, which goes to its owner.

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
            raise ValueError(f"strategy={self.strategy!r}: it can be 'one_for_one' or 'all'")
        if self.max_restarts < 0 or self.within <= 0 or self.backoff < 0 or self.most_backoff < self.backoff:
            raise ValueError(
                "max_restarts and backoff can't be negative, within is more than 0, most_backoff at least backoff"
            )

    def delay(self, nth: int) -> float:
        """Seconds before the nth restart in a row, the first being 1."""
        return min(self.backoff * 2.0 ** (nth - 1), self.most_backoff)


def check_policy(restart: Any) -> None:
    """Raise TypeError for what is neither a Restart nor None."""
    if restart is not None and not isinstance(restart, Restart):
        raise TypeError(f"restart={restart!r}: give a policy, such as Restart(max_restarts=3), or nothing")


@dataclass
class RestartLimiter:
    """How often a mesh has been restarted lately."""

    policy: Restart
    clock: Clock
    _times: deque[float] = field(default_factory=deque)

    def allow(self) -> float | None:
        """Seconds until the restart after one more death, or None if there have been too many."""
        now = self.clock.now()
        while self._times and self._times[0] <= now - self.policy.within:
            self._times.popleft()
        if len(self._times) >= self.policy.max_restarts:
            return None
        self._times.append(now)
        return self.policy.delay(len(self._times))

    def last_restart(self, delay: float) -> str:
        """For people: the restart that was just allowed, 'restart 2 of 3 within 60 s, in 0.2 s'."""
        policy = self.policy
        return f"restart {len(self._times)} of {policy.max_restarts} within {policy.within:g} s, in {delay:.2g} s"

    def used_up(self) -> str:
        """For people: why `allow` has refused, '3 restarts were used up in 0.7 s (max_restarts=3, within=60 s)'."""
        policy, count = self.policy, len(self._times)
        limits = f"(max_restarts={policy.max_restarts}, within={policy.within:g} s)"
        if not count:
            return f"it is not restarted {limits}"
        seconds = self.clock.now() - self._times[0]
        return f"{count} restart{'s were' if count > 1 else ' was'} used up in {seconds:.1f} s {limits}"


def interactive() -> bool:
    """True in a REPL or a notebook, whose process must not end because of a mesh."""
    return hasattr(sys, "ps1") or "ipykernel" in sys.modules or bool(sys.flags.interactive)


def end_program(failure: MeshFailure) -> None:
    """The default of ``monarch_backend.actor.unhandled_fault_hook``: the report on stderr, then exit with status 1.

    The main thread is interrupted as by Ctrl-C, so that ``finally`` blocks and ``atexit`` hooks run, for at most 10
    seconds. The processes of the program are killed before that, and open files are flushed. In a REPL or a notebook
    only the report is written. To exit at once, set a hook that prints ``failure.report()`` and calls ``os._exit(1)``.
    """
    from monarch_backend._actor.runtime import program

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
        here.kill_all()
        if not ending:
            program_exit.exit_now()


def _hook() -> Callable[[MeshFailure], object]:
    """Return what the program has put into ``monarch_backend.actor.unhandled_fault_hook``."""
    hook: Callable[[MeshFailure], object] = extension("actor module").unhandled_fault_hook
    return hook


class Supervision:
    """Passes each failure to whoever owns the mesh: an actor of this process or, at last, the program."""

    def __init__(self, program: Runtime) -> None:
        self._program = program
        self._failed = False  # the program has been told

    def failed(self, owner: Any, failure: MeshFailure) -> None:
        """A mesh that ``owner`` (a Cell, or None for the main program) has spawned has failed. On the reading
        thread.
        """
        if owner is not None:
            owner.supervise(failure)
        elif not self._program.closing:
            self._reached_program(failure)

    def is_asked(self, owner: Any) -> bool:
        """True if the program handles failures of what this owner has spawned: by ``__supervise__`` or a hook."""
        if owner is None:
            return _hook() is not end_program
        return owner.blueprint is not None and hasattr(owner.blueprint.cls, "__supervise__")

    def is_final(self, owner: Any) -> bool:
        """True if a failure of what this owner has spawned ends the program at once."""
        return owner is None and _hook() is end_program and not self._program.closing

    def _reached_program(self, failure: MeshFailure) -> None:
        hook = _hook()
        if hook is end_program and self._failed and not interactive():
            return  # the first one is being told, and ends the program
        self._failed = True
        if hook is end_program:
            end_program(failure)  # here and now, before anybody's `except` can end the program with another status
        else:
            self._program.aside(lambda: self._call(hook, failure))

    def _call(self, hook: Callable[[MeshFailure], object], failure: MeshFailure) -> None:
        try:
            hook(failure)
        except BaseException as error:
            sys.stderr.write(f"monarch_backend: unhandled_fault_hook raised {type(error).__name__}: {error}\n")
            end_program(failure)
