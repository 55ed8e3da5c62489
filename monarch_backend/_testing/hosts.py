"""Simulated hosts: real daemons, agents and gateways on simulated links and a simulated network.

The code between a controller and a host is the real one. The layers below are replaced: Tcp (network.py), shared
memory (links.py), the start of processes (process.py), time and random numbers.
"""

from __future__ import annotations

import contextlib
import itertools
import os
from collections.abc import Callable, Iterator
from dataclasses import replace
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

from monarch_backend._hosts import agent as agent_module
from monarch_backend._hosts import attach as attach_module
from monarch_backend._hosts import daemon as daemon_module
from monarch_backend._hosts import protocol, remote_spawner
from monarch_backend._hosts.remote_spawner import RemoteSpawner
from monarch_backend._processes.spawner import ProcessSpec, spawn_message
from monarch_backend._testing.links import SimulatedLocalLinks
from monarch_backend._testing.network import Network, SimulatedTcp
from monarch_backend._testing.process import SimulatedProcess
from monarch_backend._testing.substitutions import replaced, seeded_secrets
from monarch_backend._transport.network.connection import Address
from monarch_backend._transport.tokens import host_of

if TYPE_CHECKING:
    from monarch_backend._mesh.host_mesh import HostMesh
    from monarch_backend._testing.simulator import Simulation

SECRET = bytes(32)
"""Secret of all hosts of a simulation."""


class SimulatedHost:
    """Simulated machine. ``daemon`` starts agents; it is None on the controller's host, which has only a gateway."""

    def __init__(self, simulation: Simulation, name: str, address: Address | None) -> None:
        self.simulation, self.name, self.address = simulation, name, address
        self.daemon: Service | None = None
        self.agents: list[Service] = []

    def __repr__(self) -> str:
        return f"<SimulatedHost {self.name}>"

    @property
    def processes(self) -> list[SimulatedProcess]:
        """Processes that were started on this host, dead or alive."""
        mine = {host_of(agent.token) for agent in self.agents}
        return [p for p in self.simulation.processes if p.program is not None and host_of(p.token) in mine]

    def kill(self) -> None:
        if self.daemon is None:
            raise ValueError("the main program runs on this host: it can be cut off, not killed")
        self.daemon.die(-9)
        self.kill_agents()
        for process in self.processes:
            process.die(-9)

    def kill_agents(self) -> None:
        for agent in self.agents:
            agent.die(-9)


class Service(SimulatedProcess):
    """Process that serves a host: its daemon or an agent. It runs no actors."""

    tcp: SimulatedTcp

    def __init__(self, simulation: Simulation, token: str, label: str, host: SimulatedHost) -> None:
        super().__init__(simulation, token, label)
        self.host = host
        self.on_event: Callable[[list[Any]], None] = lambda _: None
        simulation.processes.append(self)

    def begin(self) -> None:
        """Make the process reachable."""
        self.alive = True
        self.simulation.by_token[self.token] = self

    def handle(self, event: tuple[Any, ...]) -> None:
        self.on_event([event])

    def die(self, returncode: int, reason: str = "", *, orderly: bool = False) -> None:
        if self.alive:
            super().die(returncode, reason, orderly=orderly)
            self.tcp.died()


class SimulatedAgent(agent_module.AgentProcess):
    """Real agent without the thread of its `run`."""

    def __init__(self, process: Service, plan: agent_module.Plan) -> None:
        self._process = process
        super().__init__(plan, lambda: SECRET)
        process.on_event = self._handle

    def begin(self) -> None:
        """Do the first part of `run`."""
        self._tcp.start()
        if self._plan.home:
            self._router.link_to(self._root)
        else:
            self._progress.later(agent_module.CONTROLLER_TIMEOUT_S, self._end_if_nobody_came)

    def _finish(self, why: str) -> None:
        if not self._end.ready:
            self._end.ready = True
            self._process.call_soon(lambda: self._leave(why))

    def _leave(self, why: str) -> None:
        """Do the last part of `run`."""
        if self._spawner is not None:
            self._spawner.close()
        self._tcp.close()
        self._process.die(0, why, orderly=True)


def _bare_message(number: int, spec: ProcessSpec, method: Any) -> Any:
    """Return the spawn message without this machine's data: the size of a message may change its way."""
    return spawn_message(number, replace(spec, environment={}, path=[], argv=[], cwd=""), method)


class SimulatedHosts:
    """All hosts of a simulation; the first one is the controller's."""

    def __init__(self, simulation: Simulation) -> None:
        self._simulation = simulation
        self.network = Network(simulation)
        self.all = [SimulatedHost(simulation, "home", None)]

    @contextlib.contextmanager
    def seams(self) -> Iterator[None]:
        """Run monarch_backend.hosts on the simulation within this context."""
        simulation = self._simulation
        rng, secrets = simulation.random, seeded_secrets(simulation.random)
        # An agent's pipes do not exist: simulated processes write nothing, and a secret comes from the simulation.
        system = SimpleNamespace(
            **{
                **vars(os),
                "getpid": lambda: simulation.running.pid,
                "urandom": rng.randbytes,
                "pipe": lambda: (-1, -1),
                "write": lambda _, data: len(data),
                "close": lambda _: None,
            }
        )

        def spawner(on_event: Callable[[Any], None], server: str | None = None, **_: Any) -> Any:
            return simulation.running.make_spawner(on_event, server)

        def tcp(*args: Any, **options: Any) -> SimulatedTcp:
            service = simulation.running
            assert isinstance(service, Service)
            return SimulatedTcp(service, self.network, *args, **options)

        def host_name() -> str:
            service = simulation.running
            assert isinstance(service, Service)
            return service.host.name

        changes: list[tuple[Any, str, Any]] = [
            (agent_module, "LocalLinks", lambda *_, **__: SimulatedLocalLinks(simulation.running.links)),
            (agent_module, "ProgressLoop", lambda *_: simulation.running.progress),
            (agent_module, "OutputReader", lambda _: SimpleNamespace(add=lambda *_: None, end=lambda _: None)),
            (agent_module, "system_calls", SimpleNamespace(stands_still=lambda _: False)),
            (agent_module, "time", SimpleNamespace(monotonic=simulation.event_queue.now)),
            (protocol, "host_name", host_name),
            (remote_spawner, "spawn_message", _bare_message),
            (RemoteSpawner, "_hosts", itertools.count(1)),
            *((module, "os", system) for module in (agent_module, attach_module, daemon_module)),
            *((module, "secrets", secrets) for module in (attach_module, daemon_module)),
            *((module, "tls_for", lambda: None) for module in (agent_module, attach_module, daemon_module)),
            *((module, "Spawner", spawner) for module in (agent_module, attach_module, daemon_module)),
            *((module, "Tcp", tcp) for module in (agent_module, daemon_module)),
        ]
        if simulation.branches is not None:
            changes.append((agent_module, "DEFAULT_FANOUT", simulation.branches))
        with replaced(changes):
            yield

    # ---- hosts and agents

    def attach(self, count: int, name: str, heartbeat: float, silence: float) -> HostMesh:
        made = [self._make() for _ in range(count)]
        addresses = [f"tcp://{host.address[0]}:{host.address[1]}" for host in made if host.address is not None]
        return attach_module.attach_to_workers(addresses, name, secret=SECRET, heartbeat=heartbeat, silence=silence)

    def _make(self) -> SimulatedHost:
        number, simulation = len(self.all), self._simulation
        host = SimulatedHost(simulation, f"host{number}", (f"10.0.{number >> 8}.{number & 255}", 26600))
        token = f"{simulation.random.getrandbits(128):032x}"
        host.daemon = daemon = Service(simulation, token, f"the daemon of {host.name}", host)
        assert host.address is not None
        self.all.append(host)
        self.network.hosts[host.address] = host
        daemon.begin()
        address = host.address
        daemon.run(lambda: daemon_module.Daemon(SECRET).start(*address))
        return host

    def agent(self, parent: SimulatedProcess, plan: agent_module.Plan) -> Service:
        host = parent.host if isinstance(parent, Service) else self.all[0]
        what = "the gateway" if plan.home else "the agent"
        service = Service(self._simulation, plan.token, f"{what} of {host.name}", host)
        host.agents.append(service)
        service.begin()
        service.run(lambda: SimulatedAgent(service, plan).begin())
        return service

    def of(self, mesh: HostMesh) -> list[SimulatedHost]:
        """Return the hosts of a mesh or slice; the controller's host for ``this_host()``."""
        if mesh.hosts is None:
            return [self.all[0]]
        by_id = {host_of(agent.token): host for host in self.all for agent in host.agents}
        return [by_id[number] for number in mesh.hosts]

    # ---- faults

    def cut(self, one: SimulatedHost, other: SimulatedHost, seconds: float | None) -> None:
        """Cut the network between two hosts, for ``seconds`` or for good."""
        self.network.cut(one, other)
        if seconds is not None:
            self._simulation.event_queue.add(seconds, lambda: self.network.heal(one, other))
