"""`Simulation`: simulated processes, their time, random numbers and turns."""

from __future__ import annotations

import contextlib
import itertools
import random
from collections.abc import Callable, Iterator
from types import TracebackType
from typing import TYPE_CHECKING, Any

from monarch_backend._actor import context, runtime
from monarch_backend._actor.errors import MeshFailure
from monarch_backend._core.errors import MonarchError, public
from monarch_backend._testing.event_queue import Agenda
from monarch_backend._testing.fault_model import Conditions
from monarch_backend._testing.process import ProcessDied, SimulatedProcess
from monarch_backend._testing.substitutions import logged_errors, simulated_seams
from monarch_backend._testing.trace import Trace
from monarch_backend._transport.local.peer import CreditWaiter

if TYPE_CHECKING:
    from typing_extensions import Self

    from monarch_backend._actor.actor_mesh import ActorMesh
    from monarch_backend._mesh.host_mesh import HostMesh
    from monarch_backend._mesh.proc_mesh import ProcMesh
    from monarch_backend._testing.hosts import SimulatedHost, SimulatedHosts

MAX_NESTED_WAITS = 24
"""Nested waits: each waiting turn runs others on its own stack."""


@public("monarch_backend.testing")
class SimulationError(MonarchError, RuntimeError):
    """The simulation can't continue: all processes wait, and no scheduled event could wake one of them."""


class Simulation:
    """A program and its processes in one thread, on simulated time. The same seed gives the same run.

    Inside its ``with`` the caller is the main program: ``this_host().spawn_procs(...)`` starts simulated processes,
    and all of monarch_backend.actor works on them. Time advances while the caller waits for a future, in `run` and in
    `step`.

    Arguments:

    - ``conditions``: probabilities and durations of faults.
    - ``window``: credits of messages between two processes. ``place``: bytes after which a message takes one more.
    - ``fanout``: fan-out of multicast trees of processes. ``direct``: receivers up to which there is no tree.
    - ``large``: bytes from which a message is sent without a tree. ``most_in_one``: bytes of a piece of a message.
    - ``branches``: fan-out of multicast trees of hosts.
    - ``steps``: number of the last steps that `trace` returns.

    With small limits a few processes and small messages test full windows, deep trees and messages in pieces.

    Attributes:

    - ``faults``: failures that no actor and no code of the program has handled. They would end a real program.
    - ``errors``: texts that monarch_backend has logged as errors.
    - ``on_step``, ``on_death``: lists of functions that are called after every step, and with every process that has
      ended. An exception of theirs ends the run.
    """

    def __init__(
        self,
        seed: int = 0,
        conditions: Conditions | None = None,
        *,
        window: int | None = None,
        fanout: int | None = None,
        direct: int | None = None,
        most_in_one: int | None = None,
        place: int | None = None,
        large: int | None = None,
        branches: int | None = None,
        steps: int = 50,
    ) -> None:
        self.seed = seed
        self.random = random.Random(seed)
        self.conditions = conditions or Conditions()
        self.agenda = Agenda()
        self.processes: list[SimulatedProcess] = []
        self.by_token: dict[str, SimulatedProcess] = {}
        self.faults: list[MeshFailure] = []
        self.errors: list[str] = []
        self.on_step: list[Callable[[], object]] = []
        self.on_death: list[Callable[[SimulatedProcess], object]] = []
        self.branches = branches
        self.hosts: SimulatedHosts | None = None  # after `attach`
        self._trace = Trace(steps)
        self._pids = itertools.count(100_001)
        self._tuning = {
            "CREDIT_WINDOW": window,
            "TREE_FANOUT": fanout,
            "MAX_DIRECT_RECEIVERS": direct,
            "MOST_IN_ONE": most_in_one,
            "BYTES_PER_CREDIT": place,
            "SHARED_COPY_MIN_BYTES": large,
        }
        self._waits: list[tuple[SimulatedProcess, Any]] = []
        self._looping = 0
        self._broken: BaseException | None = None
        self._undo = contextlib.ExitStack()
        self.controller: SimulatedProcess
        self.running: SimulatedProcess

    # ---- start and end

    def __enter__(self) -> Self:
        if self.processes:
            raise RuntimeError("a simulation runs once: make another one; the same seed gives the same run")
        self._undo.enter_context(simulated_seams(self.random, self._tuning, self.faults.append))
        self._undo.enter_context(logged_errors(self.errors))
        self.controller = self.running = self.born(f"{self.random.getrandbits(128):032x}", "the main program")
        self.controller.begin()
        runtime._program = self.controller.program
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None) -> None:
        self._undo.close()
        self._broken = self._broken or SimulationError("the simulation is over: stay in its `with`")
        self.agenda.clear()
        for process in self.processes:
            process.alive = False
        if error is not None and isinstance(error, Exception):
            told = f"seed {self.seed}, at {self.now:.6f} s; the last steps:\n{self.trace()}"
            notes = [*getattr(error, "__notes__", []), told]
            setattr(error, "__notes__", notes)  # noqa: B010 # add_note is newer than Python 3.10, and so is the name

    # ---- for users

    @property
    def now(self) -> float:
        """Simulated seconds since the start."""
        return self.agenda.time

    def step(self) -> bool:
        """Run one step: an event arrives, a timer fires, or an actor takes a message. Return False if there is none."""
        with self._kept():
            return self._step()

    def _step(self) -> bool:
        if self._broken is not None:
            raise self._broken
        if self.agenda.next() is None:
            return False
        self._looping += 1
        try:
            self.agenda.take()()
            for look in self.on_step:
                look()
        except BaseException as error:
            self._broken = self._broken or error  # an actor's turn below on the stack may swallow it
            raise
        finally:
            self._looping -= 1
        if self._broken is not None:
            raise self._broken
        return True

    def run(self, seconds: float | None = None, *, until: Callable[[], bool] | None = None) -> bool:
        """Run steps for simulated ``seconds``, until ``until()`` is True, or until there are none.

        Return the result of ``until()``; True without it.
        """
        if self._broken is not None:
            raise self._broken
        end = None if seconds is None else self.now + seconds
        with self._kept():
            while until is None or not until():
                due = self.agenda.next()
                if due is None or (end is not None and due > end):
                    break
                self._step()
        if end is not None and (until is None or not until()):
            self.agenda.time = max(self.agenda.time, end)
        return until is None or until()

    def later(self, seconds: float, call: Callable[[], object]) -> None:
        """Schedule a call of the main program in simulated ``seconds``. It runs also while the main program waits."""
        self.agenda.add(seconds, lambda: self.controller.run(call))

    def processes_of(self, mesh: ProcMesh | ActorMesh) -> list[SimulatedProcess]:
        """Return the processes of a mesh or slice, in order of rank, without those that are being restarted."""
        procs: Any = getattr(mesh, "proc_mesh", mesh)
        tokens = [procs._core.tokens[rank] for rank in procs._shape.ranks]
        return [self.by_token[token] for token in tokens if token in self.by_token]

    def kill(self, what: SimulatedProcess | ProcMesh | ActorMesh, signal: int = 9) -> None:
        """Kill a process, or the processes of a mesh or slice, by a signal. One that has not started never starts.

        Raises ValueError for the main program.
        """
        for process in [what] if isinstance(what, SimulatedProcess) else self.processes_of(what):
            if process is self.controller:
                raise ValueError("the main program is the caller itself: leave the `with`")
            if process.alive:
                process.die(-signal)
            else:
                process.on_kill(signal)

    def attach(self, count: int, name: str = "hosts", *, heartbeat: float = 1.0, silence: float = 3.0) -> HostMesh:
        """Make ``count`` simulated hosts, and attach to them as by ``attach_to_workers``.

        ``heartbeat`` and ``silence`` are in simulated seconds.
        """
        from monarch_backend._testing.hosts import SimulatedHosts  # slow to import, and needed only here

        if self.hosts is None:
            self.hosts = SimulatedHosts(self)
            self._undo.enter_context(self.hosts.seams())
        return self.hosts.attach(count, name, heartbeat, silence)

    def kill_hosts(self, hosts: HostMesh) -> None:
        """Switch these hosts off, with all processes there."""
        for host in self._hosts_of(hosts):
            host.kill()

    def kill_agents(self, hosts: HostMesh) -> None:
        """Kill the agents of these hosts, and with them the processes that they have started."""
        for host in self._hosts_of(hosts):
            host.kill_agents()

    def cut(self, hosts: HostMesh, others: HostMesh | None = None, seconds: float | None = None) -> None:
        """Cut the network between each of these hosts and each of ``others``; all other hosts by default.

        The hosts see silence, not broken connections. The cut lasts ``seconds``, or for good. ``this_host()`` is the
        controller's host.
        """
        assert self.hosts is not None, "there are no hosts yet: attach some"
        for one in self._hosts_of(hosts):
            for other in self.hosts.all if others is None else self._hosts_of(others):
                if one is not other:
                    self.hosts.cut(one, other, seconds)

    def _hosts_of(self, hosts: HostMesh) -> list[SimulatedHost]:
        assert self.hosts is not None, "there are no hosts yet: attach some"
        return self.hosts.of(hosts)

    def trace(self) -> str:
        """Return the last steps, one line each."""
        return str(self._trace)

    # ---- for processes

    def next_pid(self) -> int:
        return next(self._pids)

    def born(self, token: str, label: str, mesh: str = "", rank: int = 0) -> SimulatedProcess:
        """Make a process that starts later."""
        process = SimulatedProcess(self, token, label, mesh, rank)
        self.processes.append(process)
        self.by_token[token] = process
        return process

    def lost(self, process: SimulatedProcess, how: str) -> None:
        """Mark a process that never starts."""
        process.end = how
        self.note(process, how)
        for tell in self.on_death:
            tell(process)

    def note(self, process: SimulatedProcess, what: Any, event: tuple[Any, ...] | None = None) -> None:
        """Add a step to the trace: a text, or the sender of ``event``."""
        self._trace.add(self.agenda.time, process, what, event)

    def wait(
        self, process: SimulatedProcess, what: Any, seconds: float | None, given_up: Callable[[], bool] | None = None
    ) -> bool:
        """Run steps until ``what.ready``, in place of a thread of this process that would block."""
        if self._broken is not None:
            raise self._broken
        if process.reading:
            raise RuntimeError(
                "a callback runs on the thread that reads messages, and can't wait for one: use another thread"
            )
        if self._looping and seconds is not None and isinstance(what, CreditWaiter):
            return False  # the caller polls for space, and calls again
        end = None if seconds is None else self.now + seconds
        self._waits.append((process, what))
        try:
            with self._kept():
                return self._wait(process, what, end, given_up)
        finally:
            self._waits.pop()

    def _wait(
        self, process: SimulatedProcess, what: Any, end: float | None, given_up: Callable[[], bool] | None
    ) -> bool:
        if len(self._waits) > MAX_NESTED_WAITS:
            raise self._fatal(f"{MAX_NESTED_WAITS} actors wait at once, which is as many as one stack holds")
        while not what.ready:
            if not process.alive:
                raise ProcessDied
            if given_up is not None and given_up():
                break
            due = self.agenda.next()
            if end is not None and (due is None or due > end):
                self.agenda.time = max(self.agenda.time, end)
                return bool(what.ready)
            if due is None:
                raise self._fatal("no event is scheduled, so no wait can end")
            self._step()
        return bool(what.ready)

    def _fatal(self, why: str) -> SimulationError:
        waiting = "\n".join(f"  {process.label} waits for {what!r}" for process, what in self._waits)
        self._broken = SimulationError(
            f"{why}. These wait on one stack, so each continues only after those below it:\n{waiting}\n"
            "An actor that waits for one further up in this list never continues: use callbacks there."
        )
        return self._broken

    @contextlib.contextmanager
    def _kept(self) -> Iterator[None]:
        """Restore the running process at the end."""
        running, reading = self.running, self.running.reading
        cell, message = context.cell.get(), context.message.get()
        try:
            yield
        finally:
            self.running = running
            running.reading = reading
            runtime._program = running.program
            context.cell.set(cell)
            context.message.set(message)
