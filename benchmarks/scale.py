"""Benchmark of a controller with thousands of simulated hosts: one call or broadcast to all of them.

    python benchmarks/scale.py [--hosts N ...] [--out DIR]

Each host has one process. Routers, gateways, sessions and agents run their real code. Time is simulated. A frame takes
50 us between two hosts, and 10 us of the gateway's thread at each end. A step of shared memory or of an actor takes
5 us. The CPU time of the controller's Python code is not included. Instead the benchmark counts frames: those that the
controller and its gateway send and receive for one call.
"""

from __future__ import annotations

import argparse
import gc
import resource
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from _scale_actor import Runner, Times

from monarch_backend._actor.meshes.mesh_references import MeshReferences
from monarch_backend._hosts import attach
from monarch_backend._testing.hosts import Service, SimulatedAgent
from monarch_backend.testing import Conditions, Simulation

HOSTS = (1, 4, 16, 64, 256, 1024, 4096)
GATEWAY, FAR = 10e-6, 50e-6
QUIET = {"late": 0.0, "delay": 5e-6, "turn": 5e-6, "noticed": 5e-6, "starting": 0.0, "crossing": 0.0}


@dataclass
class Point:
    """Results for one number of hosts: simulated seconds, and frames sent and received by controller and gateway."""

    hosts: int
    call: float
    broadcast: float
    of_call: tuple[int, ...]
    of_broadcast: tuple[int, ...]
    real: float = 0.0


class OneMemory:
    """Context in which all simulated hosts share one copy of equal data. Separate copies would fill the memory."""

    def __init__(self) -> None:
        self._tokens: dict[str, tuple[str, ...]] = {}
        self._proc_core: Any = MeshReferences.proc_core
        self._tell: Any = attach.HostRegistry._tell_everybody
        self._begin: Any = SimulatedAgent.begin
        self._agents: list[SimulatedAgent] = []

    def __enter__(self) -> OneMemory:
        memory = self

        def proc_core(references: Any, data: Any) -> Any:
            tokens = memory._tokens.setdefault(data.id, data.tokens)
            return memory._proc_core(references, data._replace(tokens=tokens))

        def begin(agent: SimulatedAgent) -> None:
            memory._agents.append(agent)
            memory._begin(agent)

        def tell_everybody(registry: Any) -> None:
            known = {
                host.id: (host.address[0], host.address[1], host.token, host.name) for host in registry.hosts.values()
            }
            for agent in memory._agents:
                agent._known = known

        setattr(MeshReferences, "proc_core", proc_core)  # noqa: B010 (a method)
        setattr(SimulatedAgent, "begin", begin)  # noqa: B010
        setattr(attach.HostRegistry, "_tell_everybody", tell_everybody)  # noqa: B010
        return self

    def __exit__(self, *_: object) -> None:
        setattr(MeshReferences, "proc_core", self._proc_core)  # noqa: B010
        setattr(SimulatedAgent, "begin", self._begin)  # noqa: B010
        setattr(attach.HostRegistry, "_tell_everybody", self._tell)  # noqa: B010


def counts(simulation: Simulation) -> tuple[int, ...]:
    [gateway] = [process for process in simulation.processes if process.label == "the gateway of home"]
    assert isinstance(gateway, Service)
    links, tcp = simulation.controller.links, gateway.tcp
    return links.sent, links.received, tcp.sent, tcp.received


def measure(hosts: int) -> Point:
    began = time.perf_counter()
    gc.disable()  # each collection would traverse the objects of all hosts
    conditions = Conditions(gateway=GATEWAY, remote_latency=FAR, **QUIET)
    with OneMemory(), Simulation(1, conditions, steps=0) as simulation:
        Times.now = simulation.event_queue.now
        mesh = simulation.attach(hosts)
        runners = mesh.spawn_procs(name="procs").spawn("runners", Runner)
        runners.work.call().get()
        simulation.run()
        before, start = counts(simulation), simulation.now
        runners.work.call().get()
        call = simulation.now - start
        simulation.run()
        between, start = counts(simulation), simulation.now
        runners.work.broadcast()
        simulation.run()
        after = counts(simulation)
        assert Times.reached == 3 * hosts
        broadcast = Times.last - start
        Times.reached = 0
    of_call = tuple(b - a for a, b in zip(before, between, strict=True))
    of_broadcast = tuple(b - a for a, b in zip(between, after, strict=True))
    return Point(hosts, call, broadcast, of_call, of_broadcast, time.perf_counter() - began)


def table(points: list[Point]) -> str:
    heads = ["hosts", "call, ms", "broadcast, ms"]
    for what in ("call", "broadcast"):
        heads += [f"{what}: controller sends / gets", "its gateway sends / gets"]
    lines = [f"| {' | '.join(heads)} |", "| ---: " * len(heads) + "|"]
    for point in points:
        frames = []
        for of in (point.of_call, point.of_broadcast):
            frames += [f"{of[0]} / {of[1]}", f"{of[2]} / {of[3]}"]
        lines.append(f"| {point.hosts} | {point.call * 1e3:.3f} | {point.broadcast * 1e3:.3f} | {' | '.join(frames)} |")
    return "\n".join(lines) + "\n"


def plot(points: list[Point], file: Path) -> str | None:
    """Draw latency, and frames of controller and gateway. Return None, or the reason why there is no plot."""
    try:
        import matplotlib
    except ImportError:
        return "no plot: matplotlib is missing; pip install 'monarch_backend[bench]'"
    matplotlib.use("Agg")
    from matplotlib import pyplot

    hosts = [point.hosts for point in points]
    figure, (left, right) = pyplot.subplots(1, 2, figsize=(10, 4))
    left.plot(hosts, [point.call * 1e3 for point in points], "o-", label="call, with all replies")
    left.plot(hosts, [point.broadcast * 1e3 for point in points], "s-", label="broadcast, until the last has it")
    left.set_ylabel("simulated ms")
    names = ("controller, sent", "controller, received", "its gateway, sent", "its gateway, received")
    for index, name in enumerate(names):
        right.plot(hosts, [max(point.of_call[index], 0.5) for point in points], "o-", label=name)
    right.set_ylabel("frames for one call")
    for panel in (left, right):
        panel.set_xscale("log", base=4)
        panel.set_yscale("log")
        panel.set_xlabel("hosts, with a process each")
        panel.grid(alpha=0.3)
        panel.legend(fontsize=8)
    figure.tight_layout()
    figure.savefig(file, dpi=130)
    pyplot.close(figure)
    return None


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--hosts", type=int, nargs="+", default=list(HOSTS))
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    points = []
    for count in args.hosts:
        points.append(measure(count))
        gc.enable()
        gc.collect()
        memory = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss >> 10
        print(f"{count} hosts: {points[-1].real:.1f} s of this machine, {memory} MiB so far", file=sys.stderr)
    text = table(points)
    print(text)
    if args.out:
        args.out.mkdir(parents=True, exist_ok=True)
        (args.out / "scale.md").write_text(text)
        if why := plot(points, args.out / "scale.png"):
            print(why)


if __name__ == "__main__":
    main()
