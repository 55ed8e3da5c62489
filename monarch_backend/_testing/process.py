"""A simulated process: a real Program on simulated links, time and threads, and its end.

What would be threads are turns here: the reading thread's when an event or a timer is due, an actor's when it has
something to do. A turn that waits runs the world meanwhile, on top of its own stack.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, NoReturn

from monarch_backend._actor import context, runtime
from monarch_backend._actor.actor import blueprint
from monarch_backend._actor.errors import CancelledError, in_words
from monarch_backend._actor.runner import ActorRunner
from monarch_backend._actor.runtime import Runtime
from monarch_backend._hosts.attach import go_through
from monarch_backend._mesh.extent import Extent
from monarch_backend._testing.links import SimulatedLinks, SimulatedLocalLinks
from monarch_backend._testing.spawner import SimulatedSpawner
from monarch_backend._transport.local.event_loop import Timer
from monarch_backend._transport.local.frames import Constructed

if TYPE_CHECKING:
    from monarch_backend._actor.worker_main import Plan
    from monarch_backend._testing.simulator import Simulation
    from monarch_backend._transport.local.peer import Peer


class ProcessDied(BaseException):
    """Unwinds the code of a simulated process that has died while it waited."""


class SimulatedPump:
    """Waiting and timers of one simulated process; nothing is ever read by a thread."""

    def __init__(self, process: SimulatedProcess) -> None:
        self._process = process

    @property
    def reading(self) -> bool:
        """True in what would run on the thread that reads, which must not wait."""
        return self._process.reading

    def start(self) -> None:
        """Nothing: the simulation reads."""

    def close(self) -> None:
        """Nothing: the simulation ends."""

    def wake(self) -> None:
        """Nothing: whoever waits looks after every step."""

    def later(self, seconds: float, call: Callable[[], None]) -> Timer:
        """Call it in so many simulated seconds, unless the process has died by then."""
        timer, process = Timer(call), self._process
        process.simulation.agenda.add(seconds, lambda: process.run(timer._fire, reading=True))
        return timer

    def wait(self, what: Any, seconds: float | None = None, given_up: Callable[[], bool] | None = None) -> bool:
        """Run the world until ``what.ready``; False if that took longer than so many simulated seconds, or given up."""
        return self._process.simulation.wait(self._process, what, seconds, given_up)


class SimulatedProgram(Runtime):
    """The Program of a simulated process: its threads are turns, its death is not the test's."""

    def __init__(self, process: SimulatedProcess) -> None:
        self.process = process
        self.joining: Peer | None = None  # the owner on another host, until it has been met
        super().__init__(SimulatedLocalLinks(process.links), process.pump, process.simulation.agenda)
        self.pid = process.pid
        self.run_cell = process.run_cell
        self.owner.collect_output = False
        self.owner.make_spawner = process.make_spawner
        self.owner.stands_still = lambda pid: False  # noqa: ARG005 (mypy wants the name)

    def aside(self, call: Callable[[], object]) -> None:
        """In a turn of its own, in which it may wait."""
        self.process.soon(call)

    def _set(self, _peer: Any, message: Any, _frame: Any) -> None:
        """Settings are of a whole process, such as its level of logging: there is none. But it may have a gateway."""
        if message.name == "gateway":
            self.aside(lambda: self._go_through(str(message.value)))

    def _go_through(self, gateway: str) -> None:
        with contextlib.suppress(RuntimeError):  # it has ended, and ours will hear of it from its owner
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
        """This process is gone with the next instruction."""
        self.process.die(-9, reason)
        raise ProcessDied(reason)

    def spawn_actors(self, procs: Any, name: str, cls: type, args: Any, kwargs: Any, restart: Any) -> Any:
        """As in a real program, for plain actors."""
        if blueprint(cls).is_async:
            raise TypeError(
                f"{cls.__name__} has `async def` endpoints: the simulator runs actors with plain `def` only"
            )
        return super().spawn_actors(procs, name, cls, args, kwargs, restart)


class Doorbell:
    """Stands where a waiting actor's lock would be: released, it gives the actor a turn."""

    def __init__(self, process: SimulatedProcess, cell: ActorRunner) -> None:
        self.cell = cell
        self.busy = False
        self._process = process
        self._rung = self._built = False
        cell._thread_id = threading.get_ident()  # it waits, and is cancelled, on this thread

    def locked(self) -> bool:
        """Somebody waits."""
        return True

    def release(self) -> None:
        """There is something to do."""
        if not self._rung and not self.busy:
            self._rung = True
            self._process.soon(self._turn, self.cell)

    def _turn(self) -> None:
        cell, self._rung = self.cell, False
        self.busy = True
        try:
            if not self._built:
                self._built = True
                cell.construct()
            elif cell.failure is None:
                cell.step()
        except CancelledError:
            pass  # it came a moment too late, between two messages
        finally:
            self.busy = False
        if cell.failure is None and cell._inbox:
            self.release()
        self._process.leave_if_done()


class SimulatedProcess:
    """One process of a simulation: rank ``rank`` of the mesh of processes called ``mesh``.

    ``alive`` from its start to its end; then ``returncode`` says how it ended, as in subprocess (None if it was never
    started), and ``end`` says so in words. ``label`` is for people, ``pid`` belongs to nobody else in the simulation.
    """

    def __init__(self, simulation: Simulation, token: str, label: str, mesh: str = "", rank: int = 0) -> None:
        self.simulation = simulation
        self.token, self.label, self.mesh, self.rank = token, label, mesh, rank
        self.pid = simulation.next_pid()
        self.alive = False
        self.end: str | None = None
        self.returncode: int | None = None
        self.reading = False
        self.leaving: str | None = None
        self.on_exit: Callable[[int], None] = lambda _: None  # tells whoever has started it
        self.on_kill: Callable[[int], None] = lambda _: None  # before it has started: its spawner's
        self.spawners: list[SimulatedSpawner] = []
        self.doorbells: list[Doorbell] = []
        self.links = SimulatedLinks(simulation, self)
        self.pump = SimulatedPump(self)
        self.program: Any = None  # a SimulatedProgram; None before its beginning, and in what serves a host

    def __repr__(self) -> str:
        state = "running" if self.alive else self.end or "not started"
        return f"<SimulatedProcess {self.label} (pid {self.pid}): {state}>"

    # ---- its life

    def begin(self) -> None:
        """From now on it can be reached."""
        self.alive = True
        self.simulation.by_token[self.token] = self
        self.program = SimulatedProgram(self)

    def work(self, plan: Plan) -> None:
        """What monarch_backend._actor.worker_main.main does: join its mesh."""
        program = self.program
        owner = program.router.peer(plan.owner)
        if plan.gateway:
            program._go_through(plan.gateway)
        if program.router.link_to(owner) < 0 and plan.tether != plan.owner:
            program.joining = owner
        if owner.gone is not None:
            self.die(1, "the owner is gone")
            return
        program.server_address = plan.server
        program.root = program.router.peer(plan.root, owner)
        program.home_rank, program.home_extent = plan.rank, Extent(plan.labels, plan.sizes)
        program.on_exit = self.leave
        if plan.has_bootstrap:  # which is not run in a simulation
            program.router.tell(owner, Constructed(0, plan.rank))

    def make_spawner(self, on_event: Callable[[Any], None], _address: str | None) -> SimulatedSpawner:
        """Of processes that live no longer than this one."""
        spawner = SimulatedSpawner(self, on_event)
        self.spawners.append(spawner)
        return spawner

    def run_cell(self, cell: ActorRunner) -> None:
        """Give an actor its turns."""
        bell = Doorbell(self, cell)
        self.doorbells.append(bell)
        cell.gate = bell  # type: ignore[assignment] # a lock that a thread waits for, as far as the cell knows
        bell.release()

    def leave(self, how: str, reason: str) -> None:
        """End in peace, actors first, the newest first."""
        self.leaving = reason
        for cell in reversed(list(self.program.cells.values())):
            cell.end(how, reason)
        self.leave_if_done()

    def leave_if_done(self) -> None:
        """The process ends with its last actor."""
        if self.leaving is not None and self.alive:
            cells = self.program.cells.values()
            if all(cell.failure is not None for cell in cells) and not any(bell.busy for bell in self.doorbells):
                self.program.closing = True
                self.program.owner.close()
                self.die(0, self.leaving, peace=True)

    def die(self, returncode: int, reason: str = "", *, peace: bool = False) -> None:
        """It is not there any more, in the middle of whatever it did; what it has started goes with it."""
        if not self.alive:
            return
        self.alive = False
        self.returncode, self.end = returncode, in_words(returncode)
        simulation = self.simulation
        simulation.note(self, f"ends: {self.end} {reason}")
        what = "killed by signal" if returncode < 0 else "exited with status"
        self.links.sever("" if peace else f"{what} {abs(returncode)}", peace)
        for spawner in self.spawners:
            spawner.close()
        self.on_exit(returncode)
        for tell in simulation.on_death:
            tell(self)

    # ---- its turns

    def run(
        self, call: Callable[..., object], *args: Any, cell: ActorRunner | None = None, reading: bool = False
    ) -> None:
        """Now, as code of this process; nothing if it is dead."""
        if not self.alive:
            return
        simulation = self.simulation
        before, was_reading = simulation.running, self.reading
        simulation.running, self.reading = self, reading
        runtime._program = self.program
        context.cell.set(cell)
        context.message.set(None)
        try:
            call(*args)
        except ProcessDied:
            pass
        finally:
            self.reading, simulation.running = was_reading, before
            runtime._program = before.program

    def soon(self, call: Callable[[], object], cell: ActorRunner | None = None) -> None:
        """In a turn of its own, after a moment."""
        simulation = self.simulation
        simulation.agenda.add(
            simulation.conditions.pause(simulation.random), lambda: self.run(call, cell=cell, reading=False)
        )

    def receive(self, event: tuple[Any, ...], sender: SimulatedProcess) -> None:
        """An event arrives."""
        if self.alive:
            self.links.received += event[1] >= 0
            self.simulation.note(self, sender, event)
            self.run(self.handle, event, reading=True)

    def handle(self, event: tuple[Any, ...]) -> None:
        """On the thread that reads."""
        program = self.program
        program.router.handle(program.links.translate((event,)))
