"""Random worlds: which processes are spawned, which actor sends to which, which process dies when, all from one seed.

`run` runs one world from start to end under a Watch. invariants.py has the conditions that hold after each step.
expected_failures.py has the failures that must be reported.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from monarch_backend.actor import Restart, this_host
from monarch_backend.testing import Conditions, Simulation
from tests.testing import actors
from tests.testing.actors import Boss, Order, Probe, part
from tests.testing.expected_failures import TWICE, Faults, Mesh, Policy
from tests.testing.invariants import Watch

FALLS = ("raise", "exit", "stop", "abort", "kill")
POLICIES: dict[Policy, Restart | None] = {
    "none": None,
    "forever": Restart(max_restarts=10_000, within=1e9, backoff=0.01, most_backoff=0.05),
    "all": Restart("all", max_restarts=10_000, within=1e9, backoff=0.01, most_backoff=0.05),
    "twice": Restart(max_restarts=TWICE, within=1e9, backoff=0.01, most_backoff=0.05),
}
POLICY_NAMES = tuple(POLICIES)


@dataclass(frozen=True)
class Plan:
    """Parameters of a run. The other choices are drawn during the run."""

    conditions: Conditions
    size: int
    window: int | None
    fanout: int
    direct: int
    most_in_one: int | None
    actions: int
    violence: float  # share of actions that are faults
    place: int | None
    large: int | None

    @classmethod
    def draw(cls, rng: random.Random, size: int | None = None) -> Plan:
        sizes = (64, 65, 73, 80, 100, 128, 256)
        size = size or rng.choices(sizes, (40, 10, 20, 16, 8, 4, 2))[0]
        return cls(
            conditions=Conditions.draw(rng, size),
            size=size,
            window=rng.choice((None, None, 4, 16)),
            fanout=rng.choice((2, 3, 8, 8)),
            direct=rng.choice((4, 16)),
            most_in_one=rng.choice((None, None, None, 12_000)),
            actions=rng.randrange(10, 40),
            violence=rng.choice((0.05, 0.2, 0.4)),
            place=rng.choice((None, 1000)),
            large=rng.choice((None, None, 3000)),
        )


class World:
    """One random world."""

    POLICIES: tuple[int, ...] = (5, 2, 1, 2)  # weight of each restart policy for the large mesh of processes

    def __init__(self, simulation: Simulation, plan: Plan, faults: Faults | None = None) -> None:
        self.simulation, self.plan = simulation, plan
        self.rng = simulation.random
        self.faults = faults or Faults(Watch(simulation))
        self.watch = self.faults.watch
        self.main = self.watch.sender("main")
        self.tight = plan.window is not None  # with small windows, circular waits must be avoided
        self.waiting = ""  # the one reason for which actors of this world wait during a message
        self.procs: dict[str, Any] = {}
        self.actors: dict[str, Any] = {}
        self.port = self.watch.port()
        self.late = 0
        self.promises: list[tuple[str, Any]] = []  # futures that must be complete at the end

    # ---- meshes

    def spawn_procs(self, name: str, size: int, policy: Policy = "none") -> None:
        self.faults.add(Mesh(name, size, policy))
        self.procs[name] = self.start_procs(name, size, POLICIES[policy])
        self.promises.append((f"{name}.initialized", self.procs[name].initialized))

    def start_procs(self, name: str, size: int, restart: Restart | None) -> Any:
        return this_host().spawn_procs({"gpus": size}, name=name, restart=restart)

    def spawn_actors(self, name: str, procs: str, cls: type, *args: Any, policy: Policy = "none") -> None:
        home = self.faults.meshes[procs]
        self.faults.add(Mesh(name, home.size, policy, procs=home))
        self.actors[name] = self.procs[procs].spawn(name, cls, *args, restart=POLICIES[policy])
        self.promises.append((f"{name}.initialized", self.actors[name].initialized))

    def spawn_boss(self, name: str) -> None:
        crew, says, own = f"{name}-crew", self.rng.choice((True, True, False, "raise")), self.rng.randrange(4)
        self.spawn_procs(f"{name}-procs", 1)
        home = self.faults.meshes["m"]
        if own:
            home = self.faults.add(Mesh(f"{crew}-procs", own, "none", boss=(name, 0)))
        self.faults.add(Mesh(crew, home.size, "none", boss=(name, 0), procs=home))
        self.spawn_actors(name, f"{name}-procs", Boss, crew, says, None if own else self.procs["m"], own)

    def spawn(self) -> None:
        rng = self.rng
        self.spawn_procs("m", self.plan.size, rng.choices(POLICY_NAMES, self.POLICIES)[0])
        self.spawn_actors("leaves", "m", Probe, policy=rng.choices(POLICY_NAMES, (5, 2, 1, 2))[0])
        self.spawn_procs("w", rng.randrange(2, 8))
        self.spawn_actors("relays", "w", Probe)
        if rng.random() < 0.3:
            self.spawn_boss("boss")
        if rng.random() < 0.1:
            self.spawn_actors("fragile", "m", Probe, rng.randrange(self.plan.size))
        self.faults.add(Mesh("registered", 1, "none", procs=self.faults.add(Mesh("self", 1, "none"))))

    def spawn_late(self) -> None:
        """Spawn actors on some of the processes. Some of these may be dead."""
        self.late += 1
        name, home = f"late-{self.late}", self.faults.meshes["m"]
        first = self.rng.randrange(home.size)
        last = self.rng.randrange(first, min(home.size, first + 40)) + 1
        self.faults.add(Mesh(name, last - first, "none", procs=home, first=first))
        self.watch.first[name] = first
        for rank in range(first, last):
            self.faults.most[name, rank - first] += 1  # its process may be dead already
        self.actors[name] = self.procs["m"].slice(gpus=slice(first, last)).spawn(name, Probe)
        self.promises.append((f"{name}.initialized", self.actors[name].initialized))
        self.watch.send(self.main, "call", self._some(self.actors[name]), "take")

    # ---- events

    def play(self) -> None:
        """Run the world from start to end."""
        try:
            self.spawn()
            for _ in range(self.plan.actions):
                self.act()
                self.advance()
            self.simulation.run()
            self.watch.settled()
            self.epilogue()
            self.end()
        finally:
            self.watch.close_streams()

    def advance(self) -> None:
        """Advance the simulation by a random number of steps, by a random time, or not at all."""
        chance = self.rng.random()
        if chance < 0.3:
            self.steps(self.rng.randrange(self.plan.size))
        elif chance < 0.6:
            self.simulation.run(self.rng.choice((1e-5, 1e-3, 5e-3)))
        elif chance < 0.65:
            self.simulation.run(0.2)

    def steps(self, count: int) -> None:
        """Run ``count`` steps of the simulation."""
        for _ in range(count):
            if not self.simulation.step():
                return

    def act(self) -> None:
        """Do one random action."""
        calls = [self.one, self.one, self.many, self.many, self.burst, self.relay, self.relay, self.ask, self.lead]
        others = [self.give_up, self.shout, self.find, self.spawn_late]
        self.rng.choice(self.harm() if self.rng.random() < self.plan.violence else calls + others)()

    def harm(self) -> list[Callable[[], None]]:
        """Return the faults to choose from. Frequent faults are listed twice."""
        return [
            self.kill,
            self.kill,
            self.kill_in_a_multicast,
            self.kill_in_a_multicast,
            self.fell,
            self.fell,
            self.stop,
        ]

    def _mesh(self) -> Any:
        return self.actors[self.rng.choices(("leaves", "relays"), (5, 1))[0]]

    def _some(self, mesh: Any) -> Any:
        """Return a mesh or a slice of it, mostly without the ranks that are known to be dead."""
        size = len(mesh)
        if self.rng.random() < 0.3:
            first = self.rng.randrange(size)
            mesh = part(mesh, (first, self.rng.randrange(first, size) + 1))
        failed = mesh.failed_ranks
        if failed and len(failed) < len(mesh) and self.rng.random() < 0.8:
            mesh = mesh.without(failed)
        return mesh

    def _one(self, mesh: Any) -> Any:
        return part(mesh, self.rng.randrange(len(mesh)))

    def _payload(self) -> Any:
        size = self.rng.choices((0, 100, 1000, 40_000), (20, 5, 3, 1))[0]
        return memoryview(bytes(10_000)) if self.rng.random() < 0.05 else bytes(size)

    def one(self) -> None:
        verb, name = self.rng.choice(
            (("call_one", "take"), ("call_one", "fail"), ("choose", "take"), ("broadcast", "take"))
        )
        args = (self._payload(),) if name == "take" else ()
        mesh = self._mesh()
        self.watch.send(self.main, verb, self._some(mesh) if verb == "choose" else self._one(mesh), name, *args)

    def many(self) -> None:
        verb = self.rng.choice(("call", "call", "broadcast", "broadcast", "stream"))
        mesh = self._some(self._mesh())
        chance = self.rng.random()
        if verb != "broadcast" and chance < 0.1:
            self.watch.send(self.main, verb, mesh, "fail")
        elif verb == "call" and chance < 0.2:
            long = len(mesh) <= 3 and not self.tight and self._may_wait("for room in a stream")
            count = 150 if long else self.rng.randrange(1, 5)
            self.watch.send(self.main, verb, mesh, "items", count)
        else:
            self.watch.send(self.main, verb, mesh, "take", self._payload())

    def burst(self) -> None:
        mesh = self._one(self._mesh()) if self.rng.random() < 0.5 else self._some(self._mesh())
        for _ in range(self.rng.randrange(2, 12)):
            self.watch.send(self.main, self.rng.choice(("call", "broadcast")), mesh, "take")

    def _orders(self, size: int) -> list[Order]:
        orders: list[Order] = []
        for _ in range(self.rng.randrange(1, 6)):
            verb = self.rng.choice(("call_one", "broadcast", "call", "choose"))
            first = self.rng.randrange(size)
            ranks = first if verb == "call_one" else (first, self.rng.randrange(first, size) + 1)
            name = "fail" if verb in ("call", "call_one") and self.rng.random() < 0.1 else "take"
            orders.append((verb, None if verb != "call_one" and self.rng.random() < 0.1 else ranks, name, ()))
        return orders

    def relay(self) -> None:
        """An actor sends to other actors. With small windows only actors that receive no waiting calls do so."""
        leaves = self.actors["leaves"]
        via = self.actors["relays"] if self.tight or self.rng.random() < 0.5 else leaves
        verb = self.rng.choice(("call_one", "broadcast"))
        self.watch.send(self.main, verb, self._one(via), "relay", self._orders(len(leaves)), leaves)

    def ask(self) -> None:
        leaves, relays = self.actors["leaves"], self.actors["relays"]
        verb = self.rng.choice(("call", "broadcast"))
        if self._may_wait("for an answer"):
            self.watch.send(self.main, verb, self._some(relays), "ask", self.rng.randrange(len(leaves)), leaves)

    def _may_wait(self, what: str) -> bool:
        """Return whether actors may wait for ``what``.

        The simulation has one stack. A wait for a reply and a wait for stream credit on it could block each other
        without end.
        """
        self.waiting = self.waiting or what
        return self.waiting == what

    def lead(self) -> None:
        if "boss" in self.actors:
            size = self.faults.meshes["boss-crew"].size
            orders = self._orders(size)
            if self.rng.random() < 0.5:
                orders.append(("broadcast", self.rng.randrange(size), "fall", (self.rng.choice(FALLS),)))
            self.watch.send(self.main, "call_one", self.actors["boss"], "lead", orders)

    def shout(self) -> None:
        """Some actors send to a port of the program."""
        verb = self.rng.choice(("call", "broadcast"))
        self.watch.send(self.main, verb, self._some(self._mesh()), "shout", self.port, self._payload())

    def find(self) -> None:
        """Some actors look for an actor that exists once."""
        if not self.tight:
            mesh = self._mesh()
            first = self.rng.randrange(len(mesh))
            self.watch.send(self.main, "broadcast", part(mesh, (first, first + 3)), "find")

    def give_up(self) -> None:
        """Cancel a call, or let it time out."""
        mesh = self._some(self._mesh())
        if self.rng.random() < 0.5:
            message = self.watch.send(self.main, "call", mesh, "take")
            message.given_up = True
            self.advance()
            message.result.cancel()
        else:
            message = self.watch.send(self.main, "call", mesh, "take", timeout=self.rng.choice((1e-4, 1e-2)))
            message.given_up = True

    # ---- faults

    def kill(self) -> None:
        name = self.rng.choices(("m", "w", "boss-procs"), (6, 1, 1))[0]
        self.simulation.kill(self._one(self.procs.get(name, self.procs["m"])))

    def kill_in_a_multicast(self) -> None:
        """Kill a process that relays a multicast, while the message is delivered or its replies are collected."""
        mesh = self._some(self.actors["leaves"])
        self.watch.send(self.main, self.rng.choice(("call", "broadcast")), mesh, "take", self._payload())
        self.steps(self.rng.randrange(2 * self.plan.size))
        for _ in range(self.rng.choice((1, 1, 2, 5))):
            self.simulation.kill(part(mesh, self.rng.randrange(min(len(mesh), 12))))

    def fell(self) -> None:
        """Have actors end themselves."""
        mesh = self._mesh()
        for _ in range(self.rng.choice((1, 1, 4))):
            some = self._some(mesh) if len(mesh) < 5 and self.rng.random() < 0.3 else self._one(mesh)
            self.watch.send(self.main, "broadcast", some, "fall", self.rng.choice(FALLS))
            if self.rng.random() < 0.5:
                self.watch.send(self.main, "call", some, "take")

    def stop(self) -> None:
        """Stop a mesh while it is in use."""
        what = self.rng.choice((self.procs, self.actors))
        name = "w" if what is self.procs else "relays"
        if self.rng.random() < 0.2:
            how = self.rng.choice(("stop", "abort"))
            self.faults.stop(self.faults.meshes[name])
            self.promises.append((f"{name}.{how}()", getattr(what[name], how)()))

    # ---- end of the run

    def _survivors(self, mesh: Any) -> Any:
        core, watch = mesh._core, self.watch
        lost = [r for r in range(len(mesh)) if (core.name, r) in watch.excused or watch.is_gone(core.peer(r).token)]
        return mesh.without(lost) if len(lost) < len(mesh) else None

    def epilogue(self) -> None:
        """Check that the remaining actors work as before the faults."""
        for mesh in self.actors.values():
            survivors = self._survivors(mesh)
            if survivors is not None:
                self.watch.send(self.main, "broadcast", survivors, "take", must=True)
                self.watch.send(self.main, "call", survivors, "take", must=True)
        self.simulation.run()
        self.watch.settled()
        for what, future in self.promises:
            assert future.ready, f"promise 3: {what} is not done, and nothing is under way"
        self.faults.compare(self.simulation.faults)

    def end(self) -> None:
        """Stop all meshes. Check that nothing is left and that no stop is reported as a failure."""
        told = len(self.simulation.faults)
        for name in sorted(self.procs, key=lambda name: not name.startswith("boss")):
            self.faults.stop(self.faults.meshes[name])
            ended = getattr(self.procs[name], self.rng.choice(("stop", "stop", "abort", "kill")))()
            if name.startswith("boss") or self.rng.random() < 0.5:
                self.simulation.run()
            self.promises.append((f"{name}.stop()", ended))
        self.simulation.run()
        for what, future in self.promises:
            assert future.ready, f"promise 3: {what} is not done, and nothing is under way"
        alive = [process for process in self.simulation.processes if process.alive and process.program is not None]
        assert alive == [self.simulation.controller], f"still there: {alive}"
        assert len(self.simulation.faults) == told, f"promise 7: told of {self.simulation.faults[told:]} after the end"
        assert not self.simulation.errors, "\n".join(self.simulation.errors)


def run(seed: int, size: int | None = None) -> World:
    """Run one world. If an invariant fails, raise an AssertionError with the seed and the last steps in its notes."""
    plan = Plan.draw(random.Random(seed), size)
    simulation = Simulation(
        seed,
        plan.conditions,
        window=plan.window,
        fanout=plan.fanout,
        direct=plan.direct,
        most_in_one=plan.most_in_one,
        place=plan.place if plan.window is not None else None,  # it makes windows small as well
        large=plan.large,
    )
    with simulation:
        world = World(simulation, plan)
        actors.here = actors.Here(world.watch, world.faults)
        world.play()
    return world
