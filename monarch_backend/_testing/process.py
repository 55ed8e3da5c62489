"""Simulated process: a real Runtime on simulated links, time and threads.

Turns replace threads. The reading thread has a turn for each event and timer, an actor for each message. A turn that
waits runs the event queue on its own stack meanwhile.
"""

from __future__ import annotations

import contextlib
import signal as signals
import threading
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, NoReturn

import cloudpickle  # type: ignore[import-untyped]

from monarch_backend._actor import context, current_runtime
from monarch_backend._actor.errors import CancelledError, in_words
from monarch_backend._actor.execution.runner import ActorRunner
from monarch_backend._actor.meshes.actor_mesh import blueprint
from monarch_backend._actor.runtime import Runtime
from monarch_backend._hosts.attach import go_through
from monarch_backend._mesh.extent import Extent
from monarch_backend._processes.spawner import Exited, ProcessSpec, SpawnFailed, Started
from monarch_backend._testing.links import SimulatedLinks, SimulatedLocalLinks
from monarch_backend._transport.local.event_loop import Timer
from monarch_backend._transport.local.frames import Constructed
from monarch_backend._wiring import run_worker

if TYPE_CHECKING:
    from monarch_backend._actor.processes.start import Plan
    from monarch_backend._testing.simulator import Simulation
    from monarch_backend._transport.local.peer import Peer


class ProcessDied(BaseException):
    """Unwinds the stack of a simulated process that has ended while it waited."""


class SimulatedProgressLoop:
    """Simulated ProgressLoop of one process, without threads."""

    def __init__(self, process: SimulatedProcess) -> None:
        self._process = process

    @property
    def reading(self) -> bool:
        """Whether this is a turn of the reading thread, which must not wait."""
        return self._process.reading

    def start(self) -> None:
        """Do nothing: the simulation reads."""

    def close(self) -> None:
        """Do nothing: the simulation ends."""

    def wake(self) -> None:
        """Do nothing: a waiting turn checks its condition after every step."""

    def later(self, seconds: float, call: Callable[[], None]) -> Timer:
        """Schedule a call in simulated ``seconds``, unless the process has ended by then."""
        timer, process = Timer(call), self._process
        process.simulation.event_queue.add(seconds, lambda: process.run(timer._fire, reading=True))
        return timer

    def wait(self, what: Any, seconds: float | None = None, given_up: Callable[[], bool] | None = None) -> bool:
        """Run the simulation until ``what.ready``. Return False after ``seconds``, or when ``given_up()`` is True."""
        return self._process.simulation.wait(self._process, what, seconds, given_up)


class SimulatedProgram(Runtime):
    """Runtime of a simulated process: turns replace its threads, and its end does not end the test."""

    def __init__(self, process: SimulatedProcess) -> None:
        self.process = process
        self.joining: Peer | None = None  # the owner on another host, until it is connected
        super().__init__(SimulatedLocalLinks(process.links), process.progress, process.simulation.event_queue)
        self.pid = process.pid
        self.start_runner = process.start_runner
        self.owner.starter.collect_output = False
        self.owner.starter.make_spawner = process.make_spawner
        self.owner.stops.stands_still = lambda pid: False  # noqa: ARG005 (mypy wants the name)

    def run_in_thread(self, call: Callable[[], object]) -> None:
        """Schedule a call in a turn of its own, in which it may wait."""
        self.process.call_soon(call)

    def _set(self, _peer: Any, message: Any, _frame: Any) -> None:
        """Apply the setting "gateway" only: other settings are for a whole operating-system process."""
        if message.name == "gateway":
            self.run_in_thread(lambda: self._go_through(str(message.value)))

    def _go_through(self, gateway: str) -> None:
        with contextlib.suppress(RuntimeError):  # the gateway has ended, which the owner reports
            go_through(self, gateway)

    def _met(self, peer: Peer) -> None:
        if peer is self.joining:
            self.joining = None
        super()._met(peer)

    def _gone(self, peer: Peer) -> None:
        super()._gone(peer)
        if peer is self.joining:
            self.process.die(1, "the owner is gone")

    def exit_now(self, reason: str) -> NoReturn:
        self.process.die(-9, reason)
        raise ProcessDied(reason)

    def spawn_actors(self, procs: Any, name: str, cls: type, args: Any, kwargs: Any, restart: Any) -> Any:
        """As Runtime.spawn_actors. Raises TypeError for actors with ``async def`` endpoints."""
        if blueprint(cls).is_async:
            raise TypeError(
                f"{cls.__name__} has `async def` endpoints: the simulator runs actors with plain `def` only"
            )
        return super().spawn_actors(procs, name, cls, args, kwargs, restart)


class Doorbell:
    """Replaces the lock on which an actor runner waits: `release` schedules a turn of the actor."""

    def __init__(self, process: SimulatedProcess, runner: ActorRunner) -> None:
        self.runner = runner
        self.busy = False
        self._process = process
        self._is_scheduled = self._built = False
        runner.code.thread_id = threading.get_ident()  # the actor waits, and is cancelled, on this thread

    def locked(self) -> bool:
        return True

    def release(self) -> None:
        if not self._is_scheduled and not self.busy:
            self._is_scheduled = True
            self._process.call_soon(self._turn, self.runner)

    def _turn(self) -> None:
        runner, self._is_scheduled = self.runner, False
        self.busy = True
        try:
            if not self._built:
                self._built = True
                runner.construct()
            elif runner.failure is None:
                runner.step()
        except CancelledError:
            pass  # the cancellation came after the message
        finally:
            self.busy = False
        if runner.failure is None and runner.inbox:
            self.release()
        self._process.leave_if_done()


class SimulatedProcess:
    """Process of a simulation.

    ``alive`` is true from its start to its end. ``returncode`` then says how it ended, as in subprocess: negative for a
    signal, None if it was never started. ``end`` says it in words. ``label`` names it in messages. ``pid`` is unique in
    the simulation. `Simulation.processes_of` returns these objects; only the simulator makes them.

    >>> from monarch_backend.actor import this_host
    >>> from monarch_backend.testing import Simulation
    >>> with Simulation(seed=7) as simulation:
    ...     procs = this_host().spawn_procs({"gpus": 2}, name="workers")
    ...     simulation.run()
    ...     first, second = simulation.processes_of(procs)
    ...     simulation.kill(first)
    ...     print(first.rank, first.alive, first.returncode, first.end, second.alive)
    True
    0 False -9 killed by signal 9 (SIGKILL) True
    """

    def __init__(self, simulation: Simulation, token: str, label: str, mesh: str = "", rank: int = 0) -> None:
        self.simulation = simulation
        self.token, self.label, self.mesh, self.rank = token, label, mesh, rank
        self.pid = next(simulation.pids)
        self.alive = False
        self.end: str | None = None
        self.returncode: int | None = None
        self.reading = False
        self.leaving: str | None = None
        self.on_exit: Callable[[int], None] = lambda _: None  # reports the end to its spawner
        self.on_kill: Callable[[int], None] = lambda _: None  # kills it before its start
        self.spawners: list[SimulatedSpawner] = []
        self.doorbells: list[Doorbell] = []
        self.links = SimulatedLinks(simulation, self)
        self.progress = SimulatedProgressLoop(self)
        self.program: Any = None  # a SimulatedProgram; None before the start, and in a `Service`

    def __repr__(self) -> str:
        state = "running" if self.alive else self.end or "not started"
        return f"<SimulatedProcess {self.label} (pid {self.pid}): {state}>"

    # ---- start and end

    def begin(self) -> None:
        """Start the process: from now on others can reach it."""
        self.alive = True
        self.simulation.by_token[self.token] = self
        self.program = SimulatedProgram(self)

    def work(self, plan: Plan) -> None:
        """Join the mesh, as ``monarch_backend._actor.worker_main.main`` does in a real process."""
        program = self.program
        owner = program.router.peer(plan.owner)
        if plan.gateway:
            program._go_through(plan.gateway)
        if program.router.link_to(owner) < 0 and plan.die_with != plan.owner:
            program.joining = owner
        if owner.gone is not None:
            self.die(1, "the owner is gone")
            return
        program.server_address = plan.server
        program.root = program.router.peer(plan.root, owner)
        program.home_rank, program.home_extent = plan.rank, Extent(plan.labels, plan.sizes)
        program.on_exit = self.leave
        if plan.has_bootstrap:  # a simulation does not run it
            program.router.tell(owner, Constructed(0, plan.rank))

    def make_spawner(self, on_event: Callable[[Any], None], _address: str | None) -> SimulatedSpawner:
        """Return a spawner, whose processes end with this process."""
        spawner = SimulatedSpawner(self, on_event)
        self.spawners.append(spawner)
        return spawner

    def start_runner(self, runner: ActorRunner) -> None:
        """Run an actor of this process: it gets a turn for each message."""
        bell = Doorbell(self, runner)
        self.doorbells.append(bell)
        runner.wait_lock = bell  # type: ignore[assignment] # in place of the lock on which a thread waits
        bell.release()

    def leave(self, how: str, reason: str) -> None:
        """End in order: actors first, the newest first. ``how`` and ``reason`` are passed to them."""
        self.leaving = reason
        for runner in reversed(list(self.program.runners.values())):
            runner.end(how, reason)
        self.leave_if_done()

    def leave_if_done(self) -> None:
        """End the process if it is leaving and its last actor has ended."""
        if self.leaving is not None and self.alive:
            runners = self.program.runners.values()
            if all(runner.failure is not None for runner in runners) and not any(bell.busy for bell in self.doorbells):
                self.program.closing = True
                self.program.owner.starter.close()
                self.die(0, self.leaving, orderly=True)

    def die(self, returncode: int, reason: str = "", *, orderly: bool = False) -> None:
        """End the process at once, and the processes that it has started.

        ``returncode`` is as in subprocess. ``orderly``: peers are told of an orderly end, not of a failure.
        """
        if not self.alive:
            return
        self.alive = False
        self.returncode, self.end = returncode, in_words(returncode)
        simulation = self.simulation
        simulation.note(self, f"ends: {self.end} {reason}")
        what = "killed by signal" if returncode < 0 else "exited with status"
        self.links.sever("" if orderly else f"{what} {abs(returncode)}", orderly)
        for spawner in self.spawners:
            spawner.close()
        self.on_exit(returncode)
        for tell in simulation.on_death:
            tell(self)

    # ---- turns

    def run(
        self, call: Callable[..., object], *args: Any, runner: ActorRunner | None = None, reading: bool = False
    ) -> None:
        """Call ``call(*args)`` now, as code of this process; do nothing if it has ended.

        ``reading``: as on its thread that reads, where waiting is not allowed.
        """
        if not self.alive:
            return
        simulation = self.simulation
        before, was_reading = simulation.running, self.reading
        simulation.running, self.reading = self, reading
        current_runtime._program = self.program
        context.runner.set(runner)
        context.message.set(None)
        try:
            call(*args)
        except ProcessDied:
            pass
        finally:
            self.reading, simulation.running = was_reading, before
            current_runtime._program = before.program

    def call_soon(self, call: Callable[[], object], runner: ActorRunner | None = None) -> None:
        """Call ``call()`` in a turn of its own, after a delay that the conditions give."""
        simulation = self.simulation
        simulation.event_queue.add(
            simulation.conditions.pause(simulation.random), lambda: self.run(call, runner=runner, reading=False)
        )

    def receive(self, event: tuple[Any, ...], sender: SimulatedProcess) -> None:
        """Receive an event from ``sender``; do nothing if the process has ended."""
        if self.alive:
            self.links.received += event[1] >= 0
            self.simulation.note(self, sender, event)
            self.run(self.handle, event, reading=True)

    def handle(self, event: tuple[Any, ...]) -> None:
        """Handle an event, as on the thread that reads."""
        program = self.program
        program.router.handle(program.links.translate((event,)))


class SimulatedSpawner:
    """Starts processes for one simulated process, and reports their start and end. They end with it."""

    address = "@simulated"

    def __init__(self, parent: SimulatedProcess, on_event: Callable[[Any], None]) -> None:
        self._parent, self._on_event = parent, on_event
        self._children: dict[int, SimulatedProcess] = {}
        self._asked: set[int] = set()  # not started yet
        self._dead_by = 0.0  # time at which all killed processes have ended

    def spawn(self, specs: Sequence[ProcessSpec]) -> list[int]:
        """Start processes after a random delay; return their numbers. Bootstraps are not run."""
        return [self._ask(spec) for spec in specs]

    def _ask(self, spec: ProcessSpec) -> int:
        parent, simulation = self._parent, self._parent.simulation
        rng, conditions = simulation.random, simulation.conditions
        number = len(self._children) + 1
        main = cloudpickle.loads(spec.main)
        plan = main.args[0]
        if main.func is not run_worker:  # an agent, which its host starts without faults
            return self._ask_for_agent(number, plan)
        child = self._children[number] = simulation.new_process(
            plan.token, f"{spec.label} of {plan.name}", plan.name, plan.rank
        )
        child.on_exit = lambda returncode: self._tell(Exited(number, child.pid, returncode))
        child.on_kill = lambda signal: self.kill(number, signal)
        self._asked.add(number)

        def start() -> None:
            if number not in self._asked or not parent.alive:
                return
            self._asked.discard(number)
            if rng.random() < conditions.unstartable:
                self._tell(SpawnFailed(number, "Conditions.unstartable"))
                simulation.lost(child, "could not be started")
                return
            child.begin()
            self._tell(Started(number, child.pid, "fork"))
            if rng.random() < conditions.dies_at_start:
                child.die(1, "before it has connected")
            else:
                child.run(child.work, plan)

        # A fork server works in order: earlier kills are done before this fork.
        simulation.event_queue.add_at(max(simulation.now + conditions.starting * rng.random(), self._dead_by), start)
        return number

    def _ask_for_agent(self, number: int, plan: Any) -> int:
        simulation = self._parent.simulation
        assert simulation.hosts is not None
        child = self._children[number] = simulation.hosts.agent(self._parent, plan)
        child.on_exit = lambda returncode: self._tell(Exited(number, child.pid, returncode))
        self._tell(Started(number, child.pid, "fork"))
        return number

    def kill(self, number: int, signal: int = signals.SIGKILL) -> None:
        """Kill a process by a signal. One that has not started never starts."""
        child, simulation = self._children[number], self._parent.simulation
        if child.end is not None:
            return
        if number in self._asked:
            self._asked.discard(number)
            self._tell(SpawnFailed(number, f"signal {signal} was sent to it before it was started"))
            simulation.lost(child, "was not started")
        else:
            at = simulation.now + simulation.conditions.travel(simulation.random)
            self._dead_by = max(at, self._dead_by)
            simulation.event_queue.add_at(at, lambda: child.die(-signal))

    def start(self) -> None:
        """Do nothing: there is no fork server."""

    def close(self) -> None:
        for number in self._children:
            self.kill(number)

    def _tell(self, event: Any) -> None:
        simulation = self._parent.simulation
        delay = simulation.conditions.noticed * simulation.random.random()
        simulation.event_queue.add(delay, lambda: self._parent.run(self._on_event, event))
