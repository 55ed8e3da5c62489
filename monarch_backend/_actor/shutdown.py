"""End of the program: its processes are stopped in order, and killed after a while or at a second Ctrl-C."""

from __future__ import annotations

import atexit
import sys
from typing import TYPE_CHECKING

from monarch_backend._actor import program_exit
from monarch_backend._actor.meshes.actor_mesh import blueprint

if TYPE_CHECKING:
    from monarch_backend._actor.runtime import Runtime

SHUTDOWN_NOTICE_S, SHUTDOWN_KILL_S = 1.0, 5.0
"""Seconds after which the end of the program reports processes that still run, and then kills them."""


class Shutdown:
    def __init__(self, runtime: Runtime) -> None:
        self._runtime = runtime
        self._is_registered = False

    def register(self) -> None:
        self._is_registered = True
        self.end_first()

    def end_first(self) -> None:
        """Call `run` before the exit hooks that are registered until now, which would kill processes at once."""
        if self._is_registered:
            atexit.unregister(self.run)
            atexit.register(self.run)

    def run(self) -> None:
        """Stop all processes in order; kill them at a second Ctrl-C."""
        if self._runtime.closing and not program_exit.is_ending():
            return
        try:
            if self._runtime.closing or not (
                self._runtime.owner.records.meshes or any(part.has_work for part in self._runtime.extensions)
            ):
                return
            stopping = self._runtime.stop_procs(None, "stop", "the program ends")
            if not self._runtime.wait(stopping, SHUTDOWN_NOTICE_S):
                some = self._runtime.owner.records.at_work()
                sys.stderr.write(
                    f"monarch_backend: waiting for {some} to finish, at most {SHUTDOWN_KILL_S:g} s; Ctrl-C kills them\n"
                )
            if not self._runtime.wait(stopping, SHUTDOWN_KILL_S - SHUTDOWN_NOTICE_S):
                some = self._runtime.owner.records.at_work()
                sys.stderr.write(
                    f"monarch_backend: the program has ended, and {SHUTDOWN_KILL_S:g} s later {some} had not finished "
                    "and was killed. To let actors finish, wait for their futures, or call stop().get() of their "
                    "processes, before the end.\n"
                )
        except KeyboardInterrupt:
            sys.stderr.write("monarch_backend: interrupted again: the processes are killed\n")
        finally:
            self.kill_all()
            for part in self._runtime.extensions:
                part.close()
            self._runtime.links.host.leave()  # type: ignore[attr-defined]
            self._runtime.progress.close()
            # References to classes of the main module would keep its globals from being finalized.
            blueprint.cache_clear()
            self._runtime.main_children.clear()

    def kill_all(self) -> None:
        """Kill every process that this one has started, and return when they have exited."""
        self._runtime.closing = True
        # First: the starter also ends the gateway, which would not have told other hosts that the program ends.
        try:
            for part in self._runtime.extensions:
                part.kill()
        finally:  # also at a Ctrl-C meanwhile
            self._runtime.owner.starter.close()
