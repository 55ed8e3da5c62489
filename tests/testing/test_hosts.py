"""Hosts in the simulator: the promises in worlds with hosts, that checks can fail, and what single faults do."""

from __future__ import annotations

import hashlib
import threading
from collections.abc import Callable
from typing import Any

import pytest

from monarch_backend.actor import Actor, Restart, SupervisionError, current_rank, endpoint, this_host
from monarch_backend.hosts import _agent
from monarch_backend.testing import Conditions, Simulation, SimulationError
from monarch_backend.transport import _carried
from monarch_backend.transport._far import FarLinks
from monarch_backend.transport._gateway import Gateway
from monarch_backend.transport._session import Session, SessionError
from tests.testing import hosts_world
from tests.testing.seeds import run_in_interpreters

SEEDS = 60
MANY_SEEDS, BIG_CHUNK = 1200, 300
SIZES = ("hosts:any", "hosts:4", "hosts:6", "hosts:16")
QUIET = Conditions(late=0.0, kept_back=0.0, crossing=0.0)


class Counter(Actor):
    """Counts what it is sent."""

    def __init__(self) -> None:
        self.count = 0

    @endpoint
    def add(self) -> tuple[int, int]:
        self.count += 1
        return current_rank().rank, self.count

    @endpoint
    def ask(self, others: Any) -> Any:
        return others.add.call().get()


def _mesh(simulation: Simulation, hosts: int, each: int = 1, **options: Any) -> tuple[Any, Any, Any]:
    machines = simulation.attach(hosts)
    procs = machines.spawn_procs({"gpus": each}, name="procs", **options)
    counters = procs.spawn("counters", Counter)
    counters.initialized.get()
    return machines, procs, counters


# ---- the promises


def test_promises() -> None:
    run_in_interpreters(range(SEEDS), "hosts:any", "hosts:4")


@pytest.mark.slow
@pytest.mark.parametrize("first", range(SEEDS, SEEDS + MANY_SEEDS, BIG_CHUNK))
def test_promises_of_many_seeds(first: int) -> None:
    run_in_interpreters(range(first, first + BIG_CHUNK), *SIZES)


def test_64_hosts() -> None:
    ran = hosts_world.run(5, 64)
    assert ran.watch.executed > 200
    assert len([process for process in ran.simulation.processes if process.program is None]) == 64 * 2 + 1


def _digest(seed: int) -> str:
    """Of all that happens in a run, to the last byte."""
    digest = hashlib.sha256()

    class Listening(Simulation):
        def note(self, process: Any, what: Any, event: Any = None) -> None:
            digest.update(repr((self.now, process.label, getattr(what, "label", what), event)).encode())
            super().note(process, what, event)

    ordinary, hosts_world.Simulation = hosts_world.Simulation, Listening  # type: ignore[misc]
    try:
        hosts_world.run(seed, 6)
    finally:
        hosts_world.Simulation = ordinary  # type: ignore[misc]
    return digest.hexdigest()


def test_the_same_seed_is_the_same_run() -> None:
    assert _digest(3) == _digest(3)
    assert _digest(3) != _digest(4)


# ---- the checks can fail: each of these breaks the code in one place


def _forgets_the_last(gateway: Gateway, frame: Any) -> None:
    rows, rest = _carried.unpack_receivers(frame.prefix)
    _FOR_MANY(gateway, frame._replace(prefix=_carried.pack_receivers(rows[:-1] or rows) + rest))


def _gives_up(gateway: Gateway, link: int, frame: Any) -> None:
    """What finds no room is lost."""
    gateway._links.send(link, *frame._replace(body=[frame.body]))


def _nothing(*_: Any, **__: Any) -> None:
    return None


def _nothing_again(_: Session, __: int) -> Any:
    return iter(())


_FOR_MANY = Gateway._for_many
WAITS = "promise 3|nothing that is waited for can happen"

BREAKS: dict[str, tuple[Any, str, Callable[..., Any], str]] = {
    "a receiver of many is left out": (Gateway, "_for_many", _forgets_the_last, WAITS),
    "ends are not told": (Gateway, "_has_ended", _nothing, WAITS),
    "the loss of a host is not told": (Gateway, "lost_host", _nothing, WAITS),
    "what finds no room is lost": (Gateway, "_put", _gives_up, WAITS),
    "a break loses what was under way": (Session, "resume", _nothing_again, "comes after frame"),
    "a process hears of no end": (FarLinks, "_lose", _nothing, WAITS),
    "agents do not mind silence": (_agent.AgentProcess, "_lost", _nothing, f"promise 8|{WAITS}"),
}


@pytest.mark.parametrize("what", BREAKS)
def test_a_break_is_noticed(what: str, monkeypatch: pytest.MonkeyPatch) -> None:
    where, name, broken, promise = BREAKS[what]
    monkeypatch.setattr(where, name, broken)
    error = _first_failure(range(60), 6)
    assert any(word in str(error) for word in promise.split("|")), error


def _first_failure(seeds: range, hosts: int) -> Exception:
    for seed in seeds:
        try:
            hosts_world.run(seed, hosts)
        except (AssertionError, SimulationError, SessionError) as error:
            return error
    raise AssertionError(f"none of {len(seeds)} seeds has noticed it")
