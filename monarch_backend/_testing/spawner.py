"""Simulated spawner, in place of Spawner and its fork server."""

from __future__ import annotations

import signal as signals
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import cloudpickle  # type: ignore[import-untyped]

from monarch_backend._processes.spawner import Exited, ProcessSpec, SpawnFailed, Started
from monarch_backend._wiring import run_worker

if TYPE_CHECKING:
    from monarch_backend._testing.process import SimulatedProcess


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
        """Kill all processes of this spawner."""
        for number in self._children:
            self.kill(number)

    def _tell(self, event: Any) -> None:
        simulation = self._parent.simulation
        delay = simulation.conditions.noticed * simulation.random.random()
        simulation.event_queue.add(delay, lambda: self._parent.run(self._on_event, event))
