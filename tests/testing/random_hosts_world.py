"""Random worlds with several hosts: the usual workload, while some hosts die or become unreachable.

The invariants are those of other worlds. A host that is cut off permanently loses its processes, since its agent gets
no messages either. Two hosts that are cut off only from each other continue, and may lose messages between them.
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
"""Seconds until every process has noticed the loss of a host whose processes have died.

Its connections are closed, and are not replaced within `SILENCE`. A first connection to it is tried for as long.
"""

SILENT = HEARTBEAT + SILENCE + 1.0
"""Seconds until every process has noticed the loss of a host that is silent."""

LONG, SHORT = 10.0, 0.8
"""Seconds of silence that lose a host, and seconds that never do. Reconnecting takes a while."""

GONE = 2.0
"""Seconds after the controller's death within which all that it started ends (promise 8 of docs/architecture.md)."""


class HostsWatch(Watch):
    """Watch that knows which hosts were lost, and which pairs of hosts were cut off from each other."""

    def __init__(self, simulation: Simulation) -> None:
        super().__init__(simulation)
        self.hit: dict[str, float] = {}  # lost hosts, and the seconds until every process knows
        self.lost_at: dict[str, float] = {}
        self.parted: set[frozenset[str]] = set()
        self.silence = False  # whether there was any: messages in flight may be late

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
            return False  # a cut is no death: the reply may come late or never
        late = [self._known_at(token) <= now for token in tokens if token in self.dead or host_of(token) in self.hit]
        return bool(late) and all(late)  # the receiver that died first may have replied before

    def _known_at(self, token: str) -> float:
        """Return the time at which every process knows of the end of this process."""
        ends = self.dead.get(token, 0.0), self.lost_at.get(host_of(token), 0.0)
        return max(ends) + self.bound(token)

    def apart(self, message: Message, key: Key) -> bool:
        one, other = host_of(message.sender.process.token), host_of(message.homes[key])
        return one in self.hit or other in self.hit or frozenset((one, other)) in self.parted

    def is_gone(self, token: str) -> bool:
        return token in self.dead or token not in self.simulation.by_token

    def lose(self, host: str, seconds: float) -> None:
        """Record that this host is lost from now on."""
        self.hit[host] = max(seconds, self.hit.get(host, 0.0))
        self.lost_at.setdefault(host, self.simulation.now)
        for message in list(self.waiting.values()):
            for token in set(message.homes.values()):
                if host_of(token) == host:
                    self._hurry(message.tag, token)


class HostsFaults(Faults):
    """Expected failures with lost hosts: the exit codes of their processes remain unknown."""

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
        # the failure may be that of a process that never started
        self.most[boss] = max(self.most[boss], int(not handled))

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
                # the command to start it never reached its host
                for key in {(mesh.name, rank) for rank in range(mesh.size)} - begun:
                    self.most[key] += 1
                    self.least[key] += not mesh.stopped
        super().compare(told)


@dataclass(frozen=True)
class HostsPlan:
    """Random choices of a world: number of hosts and their network."""

    hosts: int
    each: int  # processes of the large mesh on each host
    remote_latency: float
    branches: int
    end: bool  # whether the run ends with the controller's death

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
    """One random world with several hosts."""

    # no limited restarts: only the controller counts a death whose start command never reached its host
    POLICIES = (5, 3, 1, 0)
    watch: HostsWatch
    faults: HostsFaults

    def __init__(self, simulation: Simulation, plan: Plan, more: HostsPlan) -> None:
        super().__init__(simulation, plan, HostsFaults(HostsWatch(simulation)))
        self.more = more
        self.faults.procs = self.procs
        self.hosts = simulation.attach(more.hosts, heartbeat=HEARTBEAT, silence=SILENCE)
        self.left = more.hosts // 2  # hosts that may still be lost

    # ---- meshes

    def start_procs(self, name: str, size: int, restart: Restart | None) -> Any:
        """Spawn the mesh on all hosts, on some hosts, or on the controller's host."""
        if name == "m":
            return self.hosts.spawn_procs({"gpus": self.more.each}, name=name, restart=restart).flatten("gpus")
        if size > self.more.hosts or self.rng.random() < 0.2:
            return super().start_procs(name, size, restart)
        first = self.rng.randrange(self.more.hosts - size + 1)
        some = self.hosts.slice(hosts=slice(first, first + size))
        return some.spawn_procs({"gpus": 1}, name=name, restart=restart).flatten("gpus")

    # ---- faults

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
        """Return a host that is lost now, or None if too many would be lost."""
        host = self._host()
        (number,) = host.hosts or ()
        if number not in self.watch.hit:
            if not self.left:
                return None
            self.left -= 1
        self.watch.lose(number, seconds)
        return host

    def lose_host(self) -> None:
        """Kill all processes of a host, as a power failure does."""
        host = self._doomed(CLOSED)
        if host is not None:
            self.simulation.kill_hosts(host)

    def lose_agent(self) -> None:
        host = self._doomed(CLOSED)
        if host is not None:
            self.simulation.kill_agents(host)

    def cut_off(self) -> None:
        """Cut a host off from all others or only from the controller, permanently or for a long time."""
        self.watch.silence = True
        host = self._doomed(SILENT)
        if host is not None:
            others = self.rng.choice((None, None, this_host()))
            self.simulation.cut(host, others, self.rng.choice((None, LONG)))

    def lose_in_a_multicast(self) -> None:
        """Lose a host while a multicast is delivered or its replies are collected."""
        mesh = self._some(self.actors["leaves"])
        self.watch.send(self.main, self.rng.choice(("call", "broadcast")), mesh, "take", self._payload())
        self.steps(self.rng.randrange(2 * len(mesh) + 4 * self.more.hosts))
        self.rng.choice((self.lose_host, self.lose_agent, self.cut_off))()

    def part(self) -> None:
        """Cut the network between two hosts. The controller still reaches both."""
        one, other = self._host(), self._host()
        if one.hosts != other.hosts:
            self.watch.silence = True
            self.watch.parted.add(frozenset((*(one.hosts or ()), *(other.hosts or ()))))
            self.simulation.cut(one, other, self.rng.choice((None, SILENCE, LONG)))

    def pause(self) -> None:
        """Cut a host off for a time that is too short to lose it. No message is lost."""
        self.watch.silence = True
        others = self.rng.choice((None, this_host()))
        self.simulation.cut(self._host(), others, SHORT * self.rng.random())

    # ---- end of the run

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
    """Run one world. If an invariant fails, raise an AssertionError with the seed and the last steps in its notes."""
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
