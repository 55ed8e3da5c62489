"""Random worlds with several hosts: the same workload on processes of many machines, which die and fall silent.

The invariants are those of other worlds. A host that is cut off permanently loses its processes, since its agent gets
no messages either. Two hosts that are cut off only from each other stay, and may lose messages between them.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

from monarch_backend._mesh.host_mesh import HostMesh
from monarch_backend._transport.tokens import host_of
from monarch_backend.actor import MeshFailure, Restart, this_host
from monarch_backend.testing import SimulatedProcess, Simulation
from tests.testing import actors
from tests.testing.expected_failures import Faults
from tests.testing.invariants import BOUND, Key, Message, Sender, Watch
from tests.testing.random_world import Plan, World

HEARTBEAT, SILENCE = 1.0, 3.0
CLOSED = SILENCE + 0.5
"""Seconds until all have heard of a host whose processes have died. A connection is closed, and does not come back
within one; who talks to it for the first time tries for as long as silence may last."""

SILENT = HEARTBEAT + SILENCE + 1.0
"""Seconds until all have heard of a host of which nothing is heard."""

LONG, SHORT = 10.0, 0.8
"""Seconds of silence that every host notices, and that none does: connections take a while to come back."""

GONE = 2.0
"""Seconds after the death of the controller in which all that it has started is gone: promise 8."""


class HostsWatch(Watch):
    """Knows which hosts were lost, and which pairs of them were cut off from each other."""

    def __init__(self, simulation: Simulation) -> None:
        super().__init__(simulation)
        self.hit: dict[str, float] = {}  # hosts that were lost, and in how many seconds everybody knows
        self.lost_at: dict[str, float] = {}
        self.parted: set[frozenset[str]] = set()
        self.silence = False  # there has been some: what is under way may be late

    def bound(self, token: str) -> float:
        return SILENT if self.silence else self.hit.get(host_of(token), BOUND)

    def is_cut_off(self, sender: Sender) -> bool:
        return host_of(sender.process.token) in self.hit

    def overdue(self, message: Message) -> bool:
        here, now = host_of(message.sender.process.token), self.simulation.now
        if here in self.hit and self.lost_at[here] + SILENT > now:
            return False
        tokens = set(message.homes.values())
        if any(frozenset((here, host_of(token))) in self.parted for token in tokens):
            return False  # which is no death: it answers late, or never
        late = [self._known_at(token) <= now for token in tokens if token in self.dead or host_of(token) in self.hit]
        return bool(late) and all(late)  # who has died first may have answered before

    def _known_at(self, token: str) -> float:
        """When everybody has heard of its end."""
        ends = self.dead.get(token, 0.0), self.lost_at.get(host_of(token), 0.0)
        return max(ends) + self.bound(token)

    def apart(self, message: Message, key: Key) -> bool:
        one, other = host_of(message.sender.process.token), host_of(message.homes[key])
        return one in self.hit or other in self.hit or frozenset((one, other)) in self.parted

    def is_gone(self, token: str) -> bool:
        return token in self.dead or token not in self.simulation.by_token

    def lose(self, host: str, seconds: float) -> None:
        """This host is lost from now on."""
        self.hit[host] = max(seconds, self.hit.get(host, 0.0))
        self.lost_at.setdefault(host, self.simulation.now)
        for message in list(self.waiting.values()):
            for token in set(message.homes.values()):
                if host_of(token) == host:
                    self._hurry(message.tag, token)


class HostsFaults(Faults):
    """Processes are lost with their hosts; then nobody knows how they ended."""

    def __init__(self, watch: HostsWatch) -> None:
        super().__init__(watch)
        self.hosts = watch
        self.procs: dict[str, Any] = {}
        self._with_host: set[Key] = set()

    def process_died(self, process: SimulatedProcess) -> None:
        if host_of(process.token) in self.hosts.hit:
            self._with_host.add((process.mesh, process.rank))
        super().process_died(process)

    def asked(self, boss: Key, failure: MeshFailure, handled: bool) -> None:
        super().asked(boss, failure, handled)
        self.most[boss] = max(self.most[boss], int(not handled))  # perhaps of a process that was never there

    def lost_with_host(self, key: Key, death: Any) -> bool:
        return key in self._with_host and death.returncode is None and ("is lost" in death.what or "gone" in death.what)

    def compare(self, told: list[Any]) -> None:
        begun = {(process.mesh, process.rank) for process in self.watch.simulation.processes}
        for name, procs in self.procs.items():
            core = procs._core
            tokens = [*core.former.items(), *zip(core.tokens, range(len(core.tokens)), strict=True)]
            self._with_host |= {(name, rank) for token, rank in tokens if host_of(token) in self.hosts.hit}
        for mesh in self.meshes.values():
            if mesh.procs is None and mesh.boss is None and mesh.policy == "none" and mesh.name != "self":
                for key in {(mesh.name, rank) for rank in range(mesh.size)} - begun:  # the order never reached its host
                    self.most[key] += 1
                    self.least[key] += not mesh.stopped
        super().compare(told)


@dataclass(frozen=True)
class HostsPlan:
    """How many machines, and what is kept."""

    hosts: int
    each: int  # processes of the large mesh on each
    remote_latency: float
    branches: int
    end: bool  # by the death of the controller

    @classmethod
    def draw(cls, rng: random.Random, hosts: int | None = None) -> HostsPlan:
        hosts = hosts or rng.choices((4, 6, 8, 16, 32, 64), (8, 4, 4, 2, 1, 1))[0]
        return cls(
            hosts=hosts,
            each=rng.choice((1, 1, 2)) if hosts > 16 else rng.randrange(1, 1 + 24 // hosts),
            remote_latency=rng.choice((20e-6, 200e-6, 2e-3)),
            branches=rng.choice((2, 2, 3, 8)),
            end=rng.random() < 0.3,
        )


class HostsWorld(World):
    """One run."""

    POLICIES = (5, 3, 1, 0)  # an order that never reached its host is a death that only the controller knows of
    watch: HostsWatch
    faults: HostsFaults

    def __init__(self, simulation: Simulation, plan: Plan, more: HostsPlan) -> None:
        super().__init__(simulation, plan, HostsFaults(HostsWatch(simulation)))
        self.more = more
        self.faults.procs = self.procs
        self.hosts = simulation.attach(more.hosts, heartbeat=HEARTBEAT, silence=SILENCE)
        self.left = more.hosts // 2  # that may be lost

    # ---- what there is

    def start_procs(self, name: str, size: int, restart: Restart | None) -> Any:
        """On all hosts, on some, or here."""
        if name == "m":
            return self.hosts.spawn_procs({"gpus": self.more.each}, name=name, restart=restart).flatten("gpus")
        if size > self.more.hosts or self.rng.random() < 0.2:
            return super().start_procs(name, size, restart)
        first = self.rng.randrange(self.more.hosts - size + 1)
        some = self.hosts.slice(hosts=slice(first, first + size))
        return some.spawn_procs({"gpus": 1}, name=name, restart=restart).flatten("gpus")

    # ---- what goes wrong

    def harm(self) -> list[Callable[[], None]]:
        hosts = [
            self.lose_host,
            self.lose_agent,
            self.cut_off,
            self.lose_in_a_multicast,
            self.part,
            self.pause,
            self.pause,
        ]
        return [*super().harm(), *hosts]

    def _host(self) -> HostMesh:
        return self.hosts.slice(hosts=self.rng.randrange(self.more.hosts))

    def _doomed(self, seconds: float) -> HostMesh | None:
        """One more to lose, unless that would be too many."""
        host = self._host()
        (number,) = host.hosts or ()
        if number not in self.watch.hit:
            if not self.left:
                return None
            self.left -= 1
        self.watch.lose(number, seconds)
        return host

    def lose_host(self) -> None:
        """It is switched off."""
        host = self._doomed(CLOSED)
        if host is not None:
            self.simulation.kill_hosts(host)

    def lose_agent(self) -> None:
        host = self._doomed(CLOSED)
        if host is not None:
            self.simulation.kill_agents(host)

    def cut_off(self) -> None:
        """From everybody, or from the controller, for good or for a long time."""
        self.watch.silence = True
        host = self._doomed(SILENT)
        if host is not None:
            others = self.rng.choice((None, None, this_host()))
            self.simulation.cut(host, others, self.rng.choice((None, LONG)))

    def lose_in_a_multicast(self) -> None:
        """While the message goes out, or the replies come back."""
        mesh = self._some(self.actors["leaves"])
        self.watch.send(self.main, self.rng.choice(("call", "broadcast")), mesh, "take", self._payload())
        self.steps(self.rng.randrange(2 * len(mesh) + 4 * self.more.hosts))
        self.rng.choice((self.lose_host, self.lose_agent, self.cut_off))()

    def part(self) -> None:
        """Two hosts hear nothing of each other; the controller hears both."""
        one, other = self._host(), self._host()
        if one.hosts != other.hosts:
            self.watch.silence = True
            self.watch.parted.add(frozenset((*(one.hosts or ()), *(other.hosts or ()))))
            self.simulation.cut(one, other, self.rng.choice((None, SILENCE, LONG)))

    def pause(self) -> None:
        """So short that nobody takes it for a loss; nothing is lost."""
        self.watch.silence = True
        others = self.rng.choice((None, this_host()))
        self.simulation.cut(self._host(), others, SHORT * self.rng.random())

    # ---- the end

    def end(self) -> None:
        if self.more.end:
            self.simulation.controller.die(-9)
            self.simulation.run(GONE)
            left = [process for process in self.simulation.processes if process.alive and not _is_daemon(process)]
            assert not left, f"promise 8: {GONE} s after the controller's death there are {left}"
        else:
            super().end()


def _is_daemon(process: SimulatedProcess) -> bool:
    return process.label.startswith("the daemon of")


def run(seed: int, hosts: int | None = None) -> HostsWorld:
    """One run; an AssertionError, with the seed and the last steps in its notes, if a promise is broken."""
    rng = random.Random(seed)
    more = HostsPlan.draw(rng, hosts)
    plan = Plan.draw(rng, more.hosts * more.each)
    simulation = Simulation(
        seed,
        replace(plan.conditions, remote_latency=more.remote_latency),
        window=plan.window,
        fanout=plan.fanout,
        direct=plan.direct,
        most_in_one=plan.most_in_one,
        place=plan.place if plan.window is not None else None,
        large=plan.large,
        branches=more.branches,
    )
    with simulation:
        world = HostsWorld(simulation, plan, more)
        actors.here = actors.Here(world.watch, world.faults)
        world.play()
    return world
