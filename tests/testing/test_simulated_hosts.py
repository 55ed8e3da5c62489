"""Hosts in the simulator: the invariants hold, broken code violates them, and single faults have the right effect."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable
from typing import Any

import pytest

from monarch_backend._hosts import agent
from monarch_backend._testing.hosts import SECRET
from monarch_backend._transport.network import envelope
from monarch_backend._transport.network.gateway import Gateway
from monarch_backend._transport.network.remote_links import RemoteLinks
from monarch_backend._transport.network.session import Session, SessionError
from monarch_backend._transport.tokens import host_of
from monarch_backend.actor import Actor, Channel, Restart, SupervisionError, current_rank, endpoint, this_host
from monarch_backend.hosts import attach
from monarch_backend.testing import Conditions, Simulation, SimulationError
from tests.testing import random_hosts_world
from tests.testing.run_digest import digest_of
from tests.testing.seed_runner import run_in_interpreters

SEEDS = 24
MANY_SEEDS, BIG_CHUNK = 800, 200
SIZES = ("hosts:any", "hosts:4", "hosts:6", "hosts:16")
QUIET = Conditions(late=0.0, kept_back=0.0, crossing=0.0)


class Counter(Actor):
    """Actor that counts its messages."""

    def __init__(self) -> None:
        self.count = 0

    @endpoint
    def add(self) -> tuple[int, int]:
        self.count += 1
        return current_rank().rank, self.count

    @endpoint
    def ask(self, others: Any) -> Any:
        return others.add.call().get()

    @endpoint
    def wait(self, seconds: float) -> None:
        with contextlib.suppress(TimeoutError):
            Channel.open()[1].recv().get(timeout=seconds)

    @endpoint
    def spawn_on(self, mesh: Any) -> None:
        """Spawn an actor of its own in each process of ``mesh``."""
        self.crew = mesh.spawn("crew", Counter)

    @endpoint
    def failed_when_lost(self, mesh: Any, other: Any) -> Any:
        assert isinstance(other.wait.call_one(60.0).exception(), SupervisionError)
        return mesh.failed_ranks


def _mesh(simulation: Simulation, hosts: int, each: int = 1, **options: Any) -> tuple[Any, Any, Any]:
    machines = simulation.attach(hosts)
    procs = machines.spawn_procs({"gpus": each}, name="procs", **options)
    counters = procs.spawn("counters", Counter)
    counters.initialized.get()
    return machines, procs, counters


# ---- the promises of docs/architecture.md


def test_invariants_hold_in_random_host_worlds() -> None:
    run_in_interpreters(range(SEEDS), "hosts:any", "hosts:4")


@pytest.mark.slow
@pytest.mark.nightly
@pytest.mark.parametrize("first", range(SEEDS, SEEDS + MANY_SEEDS, BIG_CHUNK))
def test_invariants_hold_in_host_worlds_of_many_seeds(first: int) -> None:
    run_in_interpreters(range(first, first + BIG_CHUNK), *SIZES)


def test_64_hosts() -> None:
    ran = random_hosts_world.run(1001, 64)
    assert ran.watch.executed > 200
    assert ran.simulation.hosts is not None
    assert len(ran.simulation.hosts.all) == 64 + 1


def test_the_same_seed_is_the_same_run() -> None:
    assert digest_of(random_hosts_world, 3, 6) == digest_of(random_hosts_world, 3, 6)
    assert digest_of(random_hosts_world, 3, 6) != digest_of(random_hosts_world, 4, 6)


# ---- each of these breaks the code in one place, and a check must fail


def _forgets_the_last(gateway: Gateway, frame: Any) -> int:
    rows, rest = envelope.unpack_receivers(frame.prefix)
    return _FOR_MANY(gateway, frame._replace(prefix=envelope.for_many(envelope.pack_rows(rows[:-1] or rows), rest)))


def _gives_up(gateway: Gateway, link: int, frame: Any) -> None:
    """Drop frames that find the link full."""
    gateway._links.send(link, *frame._replace(body=[frame.body]))


def _nothing(*_: Any, **__: Any) -> None:
    return None


def _nothing_again(_: Session, __: int) -> Any:
    return iter(())


_FOR_MANY = Gateway.deliver_to_many
WAITS = "promise 3|no event is scheduled, so no wait can end"

BREAKS: dict[str, tuple[Any, str, Callable[..., Any], str]] = {
    "a receiver of many is left out": (Gateway, "deliver_to_many", _forgets_the_last, WAITS),
    "ends are not told": (Gateway, "_has_ended", _nothing, WAITS),
    "the loss of a host is not told": (Gateway, "lost_host", _nothing, WAITS),
    "frames for a full link are lost": (Gateway, "_put", _gives_up, f"{WAITS}|although all its receivers live"),
    "a break loses what was under way": (Session, "resume", _nothing_again, "comes after frame"),
    "a process hears of no end": (RemoteLinks, "_lose", _nothing, WAITS),
    "agents do not mind silence": (agent.AgentProcess, "_lost", _nothing, "promise"),
}


@pytest.mark.parametrize("what", BREAKS)
def test_injected_fault_breaks_an_invariant(what: str, monkeypatch: pytest.MonkeyPatch) -> None:
    where, name, broken, promise = BREAKS[what]
    monkeypatch.setattr(where, name, broken)
    error = _first_failure(range(60), 6)
    assert any(word in str(error) for word in promise.split("|")), error


def _first_failure(seeds: range, hosts: int) -> Exception:
    for seed in seeds:
        try:
            random_hosts_world.run(seed, hosts)
        except (AssertionError, SimulationError, SessionError) as error:
            return error
    raise AssertionError(f"none of {len(seeds)} seeds has noticed it")


# ---- single faults


def _services(simulation: Simulation) -> list[Any]:
    return [process for process in simulation.processes if process.program is None and process.alive]


def test_the_real_protocol_without_a_thread() -> None:
    before = threading.active_count()
    with Simulation(1, QUIET) as simulation:
        machines, _, counters = _mesh(simulation, 8, 2)
        assert counters.sizes == {"hosts": 8, "gpus": 2}
        assert list(counters.add.call().get().values()) == [(rank, 1) for rank in range(16)]
        hosts = {host_of(process.token) for process in simulation.processes_of(counters)}
        assert hosts == set(machines.hosts)
        assert len(_services(simulation)) == 8 * 2 + 1
        assert threading.active_count() == before
        simulation.run()
    assert simulation.errors == []


def test_a_process_of_a_host_dies() -> None:
    with Simulation(1, QUIET) as simulation:
        _, _, counters = _mesh(simulation, 3, 2)
        call, died = counters.add.call(), simulation.now
        simulation.kill(counters.slice(hosts=1, gpus=0))
        error = call.exception()
        assert isinstance(error, SupervisionError)
        assert simulation.now - died < 0.1
        assert "host2" in str(error)
        assert "SIGKILL" in str(error)


def test_a_host_is_switched_off() -> None:
    with Simulation(1, QUIET) as simulation:
        machines, _, counters = _mesh(simulation, 3)
        call, died = counters.add.call(), simulation.now
        simulation.kill_hosts(machines.slice(hosts=1))
        assert isinstance(call.exception(), SupervisionError)
        assert simulation.now - died < 1.2
        assert "does not listen any more" in str(call.exception())
        assert len(counters.without([1]).add.call().get()) == 2


@pytest.mark.parametrize("gpus", [2, 4])
@pytest.mark.parametrize("harm", ["kill_hosts", "kill_agents", "cut"])
def test_failed_ranks_when_error_of_lost_host_arrives_is_complete(harm: str, gpus: int) -> None:
    with Simulation(1, QUIET) as simulation:
        machines, _, counters = _mesh(simulation, 3, gpus)
        lost = tuple(range(gpus, 2 * gpus))
        seen: list[tuple[int, ...]] = []
        calls = [counters.slice(hosts=1, gpus=gpu).ask.call_one(counters.slice(hosts=0)) for gpu in range(gpus)]
        for call in calls:
            call.add_done_callback(lambda _: seen.append(counters.failed_ranks))
        getattr(simulation, harm)(machines.slice(hosts=1))
        assert all(isinstance(call.exception(), SupervisionError) for call in calls)
        assert seen == [lost] * gpus
        assert len(counters.without(counters.failed_ranks).add.call().get()) == 2 * gpus


def test_failed_ranks_include_all_ranks_of_a_lost_host() -> None:
    with Simulation(1, QUIET) as simulation:
        machines, _, counters = _mesh(simulation, 3, 2)
        watcher = counters.slice(hosts=0, gpus=0)
        failed = watcher.failed_when_lost.call_one(counters, counters.slice(hosts=1, gpus=1))
        simulation.later(0.5, lambda: simulation.kill_hosts(machines.slice(hosts=1)))
        assert failed.get() == (2, 3)


def test_the_agent_of_a_host_dies() -> None:
    with Simulation(1, QUIET) as simulation:
        machines, _, counters = _mesh(simulation, 3, 2)
        lost = simulation.processes_of(counters.slice(hosts=1))
        simulation.kill_agents(machines.slice(hosts=1))
        assert isinstance(counters.add.call().exception(), SupervisionError)
        simulation.run()
        assert not any(process.alive for process in lost)
        assert sorted(failure.deaths[0].rank for failure in simulation.faults) == [2, 3]


def test_permanent_silence_loses_the_host() -> None:
    """Both sides notice after the silence limit: the caller gets an error, and the lost host's processes end."""
    with Simulation(1, QUIET) as simulation:
        machines, _, counters = _mesh(simulation, 3)
        [process] = simulation.processes_of(counters.slice(hosts=1))
        began = simulation.now
        simulation.cut(machines.slice(hosts=1))
        assert isinstance(counters.add.call().exception(), SupervisionError)
        assert 2.0 < simulation.now - began < 4.1
        assert "nothing was heard from it" in str(simulation.faults or counters.add.call().exception())
        simulation.run(4.1 - (simulation.now - began))
        assert not process.alive
        assert len(simulation.faults) == 1


@pytest.mark.parametrize("seed", range(5))
def test_pause_loses_no_message(seed: int) -> None:
    with Simulation(seed) as simulation:
        machines, _, counters = _mesh(simulation, 4)
        calls = [counters.add.call() for _ in range(3)]
        simulation.run(1e-4)
        simulation.cut(machines.slice(hosts=slice(1, 3)), seconds=0.8)
        calls += [counters.add.call() for _ in range(3)]
        counts = [[count for _, count in call.get().values()] for call in calls]
        assert counts == [[number] * 4 for number in range(1, 7)]
        assert 0.8 < simulation.now < 2.0
        simulation.run()
        assert simulation.faults == []


def test_cut_between_two_hosts() -> None:
    """The two hosts lose each other, and the controller loses neither."""
    with Simulation(1, QUIET) as simulation:
        machines, _, counters = _mesh(simulation, 3)
        one, other = counters.slice(hosts=0), counters.slice(hosts=1)
        assert len(one.ask.call_one(other).get()) == 1
        simulation.cut(machines.slice(hosts=0), machines.slice(hosts=1))
        asked = one.ask.call_one(other)
        assert "nothing was heard from it" in str(asked.exception())
        assert len(counters.add.call().get()) == 3
        assert simulation.faults == []


@pytest.mark.parametrize("when", ["before they meet", "afterwards"])
def test_hosts_behind_an_unreachable_gateway(when: str) -> None:
    """Their messages pass through the controller's own host, in both directions."""
    with Simulation(1, QUIET) as simulation:
        machines, _, direct = _mesh(simulation, 1)
        assert simulation.hosts is not None
        made = [simulation.hosts._make() for _ in range(3)]
        first, *others = [f"tcp://{host.address[0]}:{host.address[1]}" for host in made if host.address is not None]
        behind = attach(first, others, secret=SECRET).spawn_procs({"gpus": 1}, name="behind").spawn("behind", Counter)
        behind.initialized.get()
        one, (before,) = behind.slice(hosts=1), simulation.hosts.of(machines)
        if when == "afterwards":
            assert len(one.ask.call_one(direct).get()) == 1
        simulation.hosts.cut(before, made[0], None)
        for asker, asked in ((direct, one), (one, direct), (direct, behind)):
            assert len(asker.ask.call_one(asked).get()) == len(asked)
        assert simulation.faults == []


def test_a_host_that_was_never_called_before_is_lost_within_the_bound() -> None:
    with Simulation(1, QUIET) as simulation:
        machines, _, counters = _mesh(simulation, 3)
        simulation.kill_hosts(machines.slice(hosts=1))
        began = simulation.now
        assert counters.slice(hosts=0).ask.call_one(counters.slice(hosts=1)).exception() is not None
        assert simulation.now - began < 3.1


def test_controller_death_leaves_no_processes() -> None:
    with Simulation(1) as simulation:
        _, _, counters = _mesh(simulation, 5, 2)
        counters.add.broadcast()
        simulation.controller.die(-9)
        simulation.run(2.0)
        left = [process for process in simulation.processes if process.alive]
        assert [process.label for process in left] == [f"the daemon of host{number}" for number in range(1, 6)]


def test_lost_connection_to_the_controller_leaves_no_processes() -> None:
    with Simulation(1) as simulation:
        _, _, counters = _mesh(simulation, 5, 2)
        simulation.cut(this_host())
        simulation.run(4.5)
        assert not any(process.alive for process in simulation.processes_of(counters))
        assert len(_services(simulation)) == 5 + 1  # daemons, and the controller's own gateway


def test_ranks_go_on_on_another_host() -> None:
    with Simulation(1, QUIET) as simulation:
        machines, _, counters = _mesh(simulation, 3, 2, restart=Restart(backoff=0.01))
        simulation.kill_hosts(machines.slice(hosts=1))
        assert isinstance(counters.add.call().exception(), SupervisionError)
        simulation.run(1.0)
        assert len(counters.add.call().get()) == 6
        assert {process.token[:8] for process in simulation.processes_of(counters)} < set(machines.hosts)
        assert simulation.faults == []


def test_actors_of_a_replaced_process_end() -> None:
    """Their owner first learns of the successor and stops the actors.

    Later it learns that the old process has ended.
    """
    with Simulation(1, QUIET) as simulation:
        machines, _, counters = _mesh(simulation, 2)
        homes = machines.spawn_procs({"gpus": 2}, name="homes", restart=Restart(backoff=0.001))
        [owner] = simulation.processes_of(counters.slice(hosts=0))
        program: Any = owner.program
        hears = program.on_process_lost
        program.on_process_lost = lambda *end: simulation.later(0.1, lambda: owner.run(lambda: hears(*end)))
        counters.slice(hosts=0).spawn_on.broadcast(homes)
        simulation.later(0.001, lambda: simulation.kill(homes.slice(hosts=1, gpus=1)))
        assert simulation.run(5.0, until=lambda: any(core.former for core in program.procs.values()))
        [crew] = [core for core in program.actors.values() if core.name == "crew"]
        assert not crew.dead, "the end is known already"
        stopped: list[Any] = []
        owner.run(lambda: stopped.append(program.stop_actors(crew, "abort", "the test ends it")))
        simulation.run(60.0)
        assert stopped[0].ready


def test_a_host_is_lost_while_all_ranks_are_started_anew() -> None:
    """Each successor is started once. A second start would leave a process that no owner knows."""
    with Simulation(1, QUIET) as simulation:
        policy = Restart("all", max_restarts=100, within=1e9, backoff=0.5, most_backoff=0.5)
        machines, procs, counters = _mesh(simulation, 4, 2, restart=policy)
        simulation.kill(counters.slice(hosts=0, gpus=0))
        simulation.later(0.2, lambda: simulation.kill_hosts(machines.slice(hosts=slice(2, 4))))
        simulation.run()
        assert len(counters.add.call().get()) == 8
        tokens = [process.token for process in simulation.processes if process.alive and process.program is not None]
        assert len(tokens) == len(set(tokens)) == 8 + 1
        procs.stop().get()
        simulation.run()
        assert [p.label for p in simulation.processes if p.alive and p.program is not None] == ["the main program"]
        assert simulation.errors == []


def test_the_controllers_own_gateway_dies() -> None:
    """All routes to other hosts are lost with it.

    Processes there end, and processes on the controller's host continue.
    """
    with Simulation(1, QUIET) as simulation:
        _, procs, counters = _mesh(simulation, 3)
        here = this_host().spawn_procs({"gpus": 2}, name="here").spawn("near", Counter)
        simulation.kill_agents(this_host())
        assert "the gateway of this host has ended" in str(counters.add.call().exception())
        simulation.run(2.0)
        assert not any(process.alive for process in simulation.processes_of(procs))
        assert len(simulation.faults) == 3
        assert len(here.add.call().get()) == 2
