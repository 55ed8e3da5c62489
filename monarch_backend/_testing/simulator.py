"""`Simulation`: simulated processes, their time, random numbers and turns."""

from __future__ import annotations

import contextlib
import itertools
import random
from collections import deque
from collections.abc import Callable, Iterator
from heapq import heappop, heappush
from types import TracebackType
from typing import TYPE_CHECKING, Any

import msgspec

from monarch_backend._actor import context, current_runtime
from monarch_backend._actor.errors import MeshFailure
from monarch_backend._core.errors import MonarchError, public
from monarch_backend._testing.fault_model import Conditions
from monarch_backend._testing.process import ProcessDied, SimulatedProcess
from monarch_backend._testing.substitutions import logged_errors, simulated_seams
from monarch_backend._transport.local import frames
from monarch_backend._transport.local.frames import CARRIED, TOKEN_LENGTH, FrameError, Kind
from monarch_backend._transport.local.peer import CreditWaiter
from monarch_backend._transport.network import envelope

if TYPE_CHECKING:
    from typing_extensions import Self

    from monarch_backend._actor.meshes.actor_mesh import ActorMesh
    from monarch_backend._mesh.host_mesh import HostMesh
    from monarch_backend._mesh.proc_mesh import ProcMesh
    from monarch_backend._testing.hosts import SimulatedHost, SimulatedHosts

MAX_NESTED_WAITS = 24
"""Nested waits: each waiting turn runs others on its own stack."""


class EventQueue:
    """Queue of calls, and a clock that advances from one call to the next. The clock stops while a call runs.

    Calls of the same time run in the order in which they were added, so that a run depends on its seed only.

    >>> event_queue = EventQueue()
    >>> event_queue.add(2.5, lambda: print("at", event_queue.now()))
    >>> event_queue.next(), event_queue.now()
    (2.5, 0.0)
    >>> event_queue.take()()
    at 2.5
    """

    __slots__ = ("_count", "_heap", "time")

    def __init__(self) -> None:
        self.time = 0.0
        self._heap: list[tuple[float, int, Callable[[], object]]] = []
        self._count = itertools.count()

    def now(self) -> float:
        return self.time

    def add(self, seconds: float, call: Callable[[], object]) -> None:
        heappush(self._heap, (self.time + seconds, next(self._count), call))

    def add_at(self, time: float, call: Callable[[], object]) -> None:
        heappush(self._heap, (time, next(self._count), call))

    def next(self) -> float | None:
        """Return the time of the next call; None if there is none."""
        return self._heap[0][0] if self._heap else None

    def take(self) -> Callable[[], object]:
        """Remove the next call, and advance the clock to its time."""
        time, _, call = heappop(self._heap)
        if time > self.time:
            self.time = time
        return call

    def clear(self) -> None:
        self._heap.clear()


@public("monarch_backend.testing")
class SimulationError(MonarchError, RuntimeError):
    """The simulation can't continue. Raised by calls inside it that wait.

    Each process waits and no event can end that, too many actors wait at once, or the ``with`` block has ended.
    """


class Simulation:
    """A program and its processes in one thread, on simulated time. The same seed gives the same run.

    Inside its ``with`` block the caller is the main program: ``this_host().spawn_procs(...)`` starts simulated
    processes, and all of monarch_backend.actor works on them. Time advances while the caller waits for a future, in
    `run` and in `step`. A simulation runs once: its ``with`` raises RuntimeError the second time. An exception that
    leaves the block has a note with the seed and the last steps.

    ``conditions`` are the delays and faults. The other parameters replace constants of the router, so that few
    processes and small messages reach full windows, deep trees and messages in pieces:

    - ``window``: credits of a sender (CREDIT_WINDOW).
    - ``fanout``, ``direct``: branches of a multicast tree, and receivers without a tree (TREE_FANOUT,
      MAX_DIRECT_RECEIVERS). ``branches``: branches of the gateways' tree.
    - ``most_in_one``, ``place``, ``large``: bytes (MOST_IN_ONE, BYTES_PER_CREDIT, SHARED_COPY_MIN_BYTES).

    ``steps`` is the number of steps that `trace` keeps.

    ``faults`` has the unhandled failures, which end a real program. ``errors`` has the errors that monarch_backend has
    logged. ``on_step`` and ``on_death`` are lists of functions: they are called after each step, and with each process
    that has ended. An exception of theirs ends the run.

    >>> from monarch_backend.actor import Actor, endpoint, this_host
    >>> from monarch_backend.testing import Simulation
    >>> class Echo(Actor):
    ...     @endpoint
    ...     def echo(self, value):
    ...         return value
    >>> with Simulation(seed=7) as simulation:
    ...     actors = this_host().spawn_procs({"gpus": 2}).spawn("actors", Echo)
    ...     future = actors.echo.call(1)
    ...     print(future.done(), list(future.get().values()), 0 < simulation.now < 1)
    False [1, 1] True
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
        self.event_queue = EventQueue()
        self.processes: list[SimulatedProcess] = []
        self.by_token: dict[str, SimulatedProcess] = {}
        self.faults: list[MeshFailure] = []
        self.errors: list[str] = []
        self.on_step: list[Callable[[], object]] = []
        self.on_death: list[Callable[[SimulatedProcess], object]] = []
        self.branches = branches
        self.hosts: SimulatedHosts | None = None  # after `attach`
        self._trace: deque[tuple[float, SimulatedProcess, Any, Any]] = deque(maxlen=steps)
        self.pids = itertools.count(100_001)
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
        self.controller = self.running = self.new_process(f"{self.random.getrandbits(128):032x}", "the main program")
        self.controller.begin()
        current_runtime._program = self.controller.program
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None) -> None:
        self._undo.close()
        self._broken = self._broken or SimulationError("the simulation is over: stay in its `with`")
        self.event_queue.clear()
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
        return self.event_queue.time

    def step(self) -> bool:
        """Run one event: a frame arrives, a timer ends, or an actor takes a message. Return False if there is none."""
        with self._kept():
            return self._step()

    def _step(self) -> bool:
        if self._broken is not None:
            raise self._broken
        if self.event_queue.next() is None:
            return False
        self._looping += 1
        try:
            self.event_queue.take()()
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
        """Run events for ``seconds`` of simulated time, until ``until()`` is true, or until there are no more events.

        Return ``until()``, True without it. Raises the exception that has ended the simulation before.
        """
        if self._broken is not None:
            raise self._broken
        end = None if seconds is None else self.now + seconds
        with self._kept():
            while until is None or not until():
                due = self.event_queue.next()
                if due is None or (end is not None and due > end):
                    break
                self._step()
        if end is not None and (until is None or not until()):
            self.event_queue.time = max(self.event_queue.time, end)
        return until is None or until()

    def later(self, seconds: float, call: Callable[[], object]) -> None:
        """Call ``call()`` in the main program after ``seconds`` of simulated time, also while it waits."""
        self.event_queue.add(seconds, lambda: self.controller.run(call))

    def processes_of(self, mesh: ProcMesh | ActorMesh) -> list[SimulatedProcess]:
        """Return the processes of a mesh or slice by rank, without those whose restart has not begun."""
        procs: Any = getattr(mesh, "proc_mesh", mesh)
        tokens = [procs._core.tokens[rank] for rank in procs._shape.ranks]
        return [self.by_token[token] for token in tokens if token in self.by_token]

    def kill(self, what: SimulatedProcess | ProcMesh | ActorMesh, signal: int = 9) -> None:
        """End a process, or the processes of a mesh or slice, at once, as by ``signal``.

        A process that has not started yet never starts. Raises ValueError for the main program.
        """
        for process in [what] if isinstance(what, SimulatedProcess) else self.processes_of(what):
            if process is self.controller:
                raise ValueError("the main program is the caller itself: leave the `with`")
            if process.alive:
                process.die(-signal)
            else:
                process.on_kill(signal)

    def attach(self, count: int, name: str = "hosts", *, heartbeat: float = 1.0, silence: float = 3.0) -> HostMesh:
        """Add ``count`` simulated hosts and attach them, as ``attach_to_workers`` does.

        ``heartbeat`` and ``silence`` are in simulated seconds, as there.
        """
        from monarch_backend._testing.hosts import SimulatedHosts  # what it brings along costs others nothing

        if self.hosts is None:
            self.hosts = SimulatedHosts(self)
            self._undo.enter_context(self.hosts.seams())
        return self.hosts.attach(count, name, heartbeat, silence)

    def kill_hosts(self, hosts: HostMesh) -> None:
        """End these hosts, with all of their processes."""
        for host in self._hosts_of(hosts):
            host.kill()

    def kill_agents(self, hosts: HostMesh) -> None:
        """End the agents of these hosts, and the processes that the agents have started."""
        for host in self._hosts_of(hosts):
            host.kill_agents()

    def cut(self, hosts: HostMesh, others: HostMesh | None = None, seconds: float | None = None) -> None:
        """Drop all data between each of these hosts and each of ``others``, by default all other hosts.

        No process is told. It lasts ``seconds`` of simulated time, by default until the end. ``this_host()`` is the
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
        """Return the last steps, one in each line."""
        return "\n".join(_line(*step) for step in self._trace)

    # ---- for processes

    def new_process(self, token: str, label: str, mesh: str = "", rank: int = 0) -> SimulatedProcess:
        """Return a new process, which starts later."""
        process = SimulatedProcess(self, token, label, mesh, rank)
        self.processes.append(process)
        self.by_token[token] = process
        return process

    def lost(self, process: SimulatedProcess, how: str) -> None:
        """Record that a process never starts, and why."""
        process.end = how
        self.note(process, how)
        for tell in self.on_death:
            tell(process)

    def note(self, process: SimulatedProcess, what: Any, event: tuple[Any, ...] | None = None) -> None:
        """Record a step for `trace`: a text, or an event and its sender."""
        self._trace.append((self.event_queue.time, process, what, event))

    def wait(
        self, process: SimulatedProcess, what: Any, seconds: float | None, given_up: Callable[[], bool] | None = None
    ) -> bool:
        """Run events until ``what.ready``, in place of a thread of ``process`` that waits. Return whether it is ready.

        ``seconds`` is the timeout in simulated time; ``given_up()`` ends the wait as well. Raises RuntimeError on the
        thread that reads, which can't wait, and the exception that has ended the simulation before.
        """
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
            due = self.event_queue.next()
            if end is not None and (due is None or due > end):
                self.event_queue.time = max(self.event_queue.time, end)
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
        runner, message = context.runner.get(), context.message.get()
        try:
            yield
        finally:
            self.running = running
            running.reading = reading
            current_runtime._program = running.program
            context.runner.set(runner)
            context.message.set(message)


def _line(time: float, process: SimulatedProcess, what: Any, event: tuple[Any, ...] | None) -> str:
    """Return the line of a step: a text, or an event and its sender."""
    who = process.label
    if event is None:
        return f"{time * 1e3:12.4f} ms  {who}: {what}"
    return f"{time * 1e3:12.4f} ms  {who} <- {what.label}: {_told(event)}"


def _told(event: tuple[Any, ...]) -> str:
    if event[1] >= CARRIED:
        return _told_far(event)
    kind = Kind(event[1])
    if kind is Kind.MET:
        return "MET"
    if kind is Kind.REFUSED:
        return "REFUSED"
    if kind is Kind.HOST_GONE:
        return f"HOST_GONE {event[2]} {event[3]}"
    if kind is Kind.GONE:
        return f"GONE {event[2] or 'in an orderly way'}"
    _, _, target, ref, seq, rank, epoch, prefix, body, _ = event
    place = f"target={target} ref={ref} seq={seq} rank={rank} epoch={epoch}"
    return f"{kind.name} {place} {_content(kind, prefix)} +{len(body)} bytes"


def _told_far(event: tuple[Any, ...]) -> str:
    """Format an event of or for a process on another host."""
    if envelope.is_word(event[1]):
        name = {envelope.CALL: "CALL", envelope.MET: "MET", envelope.REFUSED: "REFUSED"}.get(event[1], "GONE")
        return f"remote {name} {event[7].decode()}"
    rest, kind = event[7], event[1] & ~(CARRIED | envelope.MANY)
    many = 0
    if envelope.is_for_many(event[1]):
        rows, rest = envelope.unpack_receivers(rest)
        many = len(rows)
    way = f"from {rest[TOKEN_LENGTH : 2 * TOKEN_LENGTH].decode()} to {many or rest[:TOKEN_LENGTH].decode()}"
    return f"remote {way}: {_told((*event[:1], kind, *event[2:7], rest[2 * TOKEN_LENGTH :], *event[8:]))}"


def _content(kind: Kind, prefix: bytes) -> str:
    try:
        if kind is Kind.CONTROL:
            return str(frames.decode_control(prefix))
        if kind is Kind.MULTICAST:
            route = frames.decode_route(prefix)
            return f"multicast {route.multicast} of {len(route)} {'combined' if route.combine else ''}"
        if kind is Kind.REPLIES:
            return str(msgspec.msgpack.decode(prefix))
    except (FrameError, msgspec.DecodeError) as error:
        return str(error)
    return repr(prefix[:24])
