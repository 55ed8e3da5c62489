"""Random faults on four hosts under load: a seed gives a schedule of kills, stops, cuts and resets.

The controller program `schedule` checks the invariants after it, so this module does not import pytest. call_journal.py
has its actors. ``python -m tests.hosts.fault_schedules FIRST [COUNT]`` runs that many seeds in turn.
"""

from __future__ import annotations

import contextlib
import os
import random
import signal
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import combinations
from pathlib import Path
from typing import Any

import monarch_backend.actor as ma
from monarch_backend.actor import ActorMesh, MeshFailure, SupervisionError
from monarch_backend.hosts import attach_to_workers
from tests.actor.actors import until
from tests.hosts.call_journal import (
    GPUS,
    UNKNOWN,
    VALUE,
    Caller,
    CallOutcome,
    Ledger,
    Talker,
    check_messages,
    check_port_order,
    one,
    read_ledgers,
    read_outcomes,
)
from tests.hosts.controller_programs import BOUNDS, Worker, agents, host_registry
from tests.hosts.support import NAMES, PATIENCE, Daemon, World, descendants, until_gone
from tests.support.hosts import Cables, address6, hosts, refusal

HOSTS = (1, 2, 3)
"""Hosts with daemons. The controller is on host 0."""

SHORT, LONG = (0.05, 0.35), (1.6, 2.2)
"""Seconds of a fault that every host survives, and of one that no host survives. The `silence` of BOUNDS is 1 s."""

HARMLESS = 0.45
"""Two hosts whose connection is disturbed for fewer seconds in total must not give each other up."""

LINK_UP = 1.0
"""Seconds that Linux may take until a link that was down carries frames: it polls links once a second."""

LATEST = 3 * BOUNDS["silence"]
"""Seconds after the last fault within which every call has completed."""

QUICKLY = 2.0
"""Seconds after a controller's death within which its processes end (promise 8 of docs/architecture.md)."""

WORKING = 1.2
"""Minimum seconds of a schedule. The last fault begins earlier."""

_BETWEEN_HOSTS = ("stop agent", "cut off", "cut there", "cut back", "cut from its controller", "unplug")
_KINDS = ("kill worker", "kill agent", "stop worker", "cut between", "cut one way", "reset", *_BETWEEN_HOSTS)


@dataclass(frozen=True)
class Fault:
    """A fault that starts after ``at`` seconds and lasts ``seconds``. ``who`` is a rank for a worker, else a host."""

    kind: str
    at: float
    seconds: float
    who: int
    other: int = 0  # the second host of a cut between two

    def __str__(self) -> str:
        whom = f" and {self.other}" if self.other else ""
        lasting = f" for {self.seconds:.2f} s" if self.seconds else ""
        return f"{self.at:.2f} s: {self.kind} {self.who}{whom}{lasting}"

    @property
    def pairs(self) -> set[tuple[int, int]]:
        """Pairs of hosts that cannot reach each other during the fault, the lower number first."""
        if self.kind in ("cut between", "cut one way"):
            return {(min(self.who, self.other), max(self.who, self.other))}
        if self.kind == "cut from its controller":
            return {(0, self.who)}
        return {pair for pair in combinations((0, *HOSTS), 2) if self.who in pair and self.kind in _BETWEEN_HOSTS}


def draw(seed: int) -> list[Fault]:
    """Draw one to four faults."""
    rng = random.Random(seed)
    return sorted((_draw_one(rng) for _ in range(rng.choice((1, 2, 2, 3, 3, 4)))), key=lambda fault: fault.at)


def _draw_one(rng: random.Random) -> Fault:
    kind, at = rng.choice(_KINDS), rng.uniform(0.0, 1.0)
    seconds = rng.uniform(*(LONG if rng.random() < 0.3 else SHORT))
    if kind in ("kill worker", "stop worker"):
        who = rng.randrange(GPUS * len(HOSTS))
        return Fault(kind, at, 0.0 if kind == "kill worker" else seconds, who)
    if kind in ("cut between", "cut one way"):
        who, other = rng.sample(HOSTS, 2)
        return Fault(kind, at, seconds, who, other)
    if kind == "kill agent":
        return Fault(kind, at, 0.0, rng.choice(HOSTS))
    # may also hit the controller's host
    if kind == "reset" or (kind in ("stop agent", "cut off") and rng.random() < 0.2):
        return Fault(kind, at, 0.0 if kind == "reset" else rng.uniform(*SHORT), rng.choice((0, *HOSTS)))
    return Fault(kind, at, seconds, rng.choice(HOSTS))


@dataclass
class Harm:
    """Applies the faults of a schedule to these processes, and records how long each really lasted."""

    wires: Cables
    workers: list[int]
    agents: list[int]  # pids by host; for host 0 the controller's gateway
    log: list[str] = field(default_factory=list)
    # seconds of disturbance for each pair of hosts
    troubled: defaultdict[tuple[int, int], float] = field(default_factory=lambda: defaultdict(float))
    _begun: dict[Fault, float] = field(default_factory=dict)

    def run(self, faults: Sequence[Fault]) -> None:
        """Apply each fault at its time, then undo all that still last."""
        steps: list[tuple[float, Fault, Callable[[Fault], None]]] = []
        for fault in faults:
            steps.append((fault.at, fault, self.begin))
            if fault.seconds:
                steps.append((fault.at + fault.seconds, fault, self.end))
        began = time.monotonic()
        try:
            for at, fault, step in sorted(steps, key=lambda step: step[0]):
                time.sleep(max(0.0, began + at - time.monotonic()))
                step(fault)
                self.log.append(f"{time.monotonic() - began:.2f} s: {step.__name__} {fault.kind} {fault.who}")
            time.sleep(max(0.0, began + WORKING - time.monotonic()))
        finally:
            for fault in list(self._begun):
                self.end(fault)

    def begin(self, fault: Fault) -> None:
        if fault.seconds:
            self._begun[fault] = time.monotonic()
        who, wires, everybody = fault.who, self.wires, [host for host in (0, *HOSTS) if host != fault.who]
        acts: dict[str, Callable[[], object]] = {
            "kill worker": lambda: _signal(self.workers[who], signal.SIGKILL),
            "kill agent": lambda: _signal(self.agents[who], signal.SIGKILL),
            "stop worker": lambda: _signal(self.workers[who], signal.SIGSTOP),
            "stop agent": lambda: _signal(self.agents[who], signal.SIGSTOP),
            "cut off": lambda: wires.cut_off(who),
            "cut there": lambda: [wires.cut(other, who) for other in everybody],
            "cut back": lambda: [wires.cut(who, other) for other in everybody],
            "cut from its controller": lambda: wires.cut_off(who, [0]),
            "cut between": lambda: wires.cut_off(who, [fault.other]),
            "cut one way": lambda: wires.cut(who, fault.other),
            "unplug": lambda: wires.ip(who, "link set eth0 down"),
            "reset": lambda: wires.reset(who),
        }
        acts[fault.kind]()

    def end(self, fault: Fault) -> None:
        who, wires = fault.who, self.wires
        if fault.kind == "stop worker":
            _signal(self.workers[who], signal.SIGCONT)
        elif fault.kind == "stop agent":
            _signal(self.agents[who], signal.SIGCONT)
        elif fault.kind == "unplug":  # an interface that comes up again has lost its added addresses
            wires.ip(who, "link set eth0 up", f"addr replace {address6(who)}/64 dev eth0 nodad")
        elif fault.kind == "cut off":
            wires.heal(who)
        else:
            wires.heal(who, [other for pair in fault.pairs for other in pair if other != who])
        lasted = time.monotonic() - self._begun.pop(fault) + (LINK_UP if fault.kind == "unplug" else 0.0)
        for pair in fault.pairs:
            self.troubled[pair] += lasted

    def parted(self, one: int, other: int) -> bool:
        """Return whether these two hosts may have given each other up."""
        return self.troubled[min(one, other), max(one, other)] > HARMLESS


def _signal(pid: int, number: int) -> None:
    with contextlib.suppress(ProcessLookupError):  # the process has already ended
        os.kill(pid, number)


def host_of(rank: int) -> int:
    """Return the host of a rank."""
    return HOSTS[rank // GPUS]


# ---- the program of a controller


def schedule(seed: int, addresses: list[str], cables: list[int], folder: str) -> None:
    """Attach hosts, send messages while faults occur, and check the invariants."""
    faults, told_failures = draw(seed), list[MeshFailure]()
    ma.unhandled_fault_hook = told_failures.append
    print(f"seed {seed}:", "; ".join(map(str, faults)))
    procs = attach_to_workers(addresses, **BOUNDS).spawn_procs({"gpus": GPUS}, name="procs")
    ledgers, talkers = procs.spawn("ledgers", Ledger, folder), procs.spawn("talkers", Talker, folder)
    workers = list(talkers.pid.call().get(PATIENCE).values())
    ledgers.note.call("first", 1).get(PATIENCE)
    by_name = agents()
    harm = Harm(Cables(cables), workers, [host_registry().gateway.pid, *(by_name[NAMES[host]] for host in HOSTS)])
    caller = Caller(seed, ledgers)
    ranks = range(len(workers))
    talks = {rank: one(talkers, rank).talk.call_one(seed, ledgers, caller.port) for rank in ranks}
    caller.start()
    try:
        harm.run(faults)
        whole = time.monotonic()
        sent = _stop_talking(talkers, talks)
        caller.stop(LATEST)
        _goes_on(ledgers)
        took = time.monotonic() - whole
        assert took < LATEST, f"{took:.2f} s after the last fault all is known, more than {LATEST}"
        print(f"measured {took:.3f} s from the last fault until all is known")
        lost = {rank for failure in told_failures for rank in failure.ranks}
        _check_failures(faults, harm, told_failures, set(ledgers.failed_ranks))
        _check_outcomes(harm, caller, folder, lost)
        until(lambda: all(len(caller.heard[sender]) >= count for sender, count in sent.items()), "all has come")
        check_port_order(caller.heard, sent)
        _lost_hosts_are_empty(harm, lost)
        _works_again(addresses)
        lost = {rank for failure in told_failures for rank in failure.ranks}
        assert lost == set(ledgers.failed_ranks), (
            f"failures of {lost} were told, and {ledgers.failed_ranks} have failed"
        )
        print(f"lost {sorted(lost)}, {len(caller.told)} messages of the program, {sum(sent.values())} of talkers")
    except BaseException:
        print("\n".join([*harm.log, *(failure.report() for failure in told_failures)]), flush=True)
        raise


def _stop_talking(talkers: ActorMesh, talks: dict[int, Any]) -> dict[str, int]:
    """Stop the talkers. Return the number of messages of each talker that completed."""
    deadline, sent = time.monotonic() + LATEST, {}
    for rank in talks:
        one(talkers, rank).stop_talking.call_one()
    for rank, talk in talks.items():
        try:
            sent[f"talker{rank}"] = talk.get(max(0.001, deadline - time.monotonic()))
        except SupervisionError:
            pass
        except TimeoutError:
            raise AssertionError(
                f"after {LATEST} s talker {rank} still waits for an answer, or is waited for"
            ) from None
    return sent


def _goes_on(ledgers: ActorMesh) -> None:
    """Wait until all ranks that are left reply. Some may be given up only now."""

    def answered() -> bool:
        failed = ledgers.failed_ranks
        if len(failed) == len(ledgers):
            return True
        with contextlib.suppress(SupervisionError):
            ledgers.without(failed).note.call("last", len(failed) + 1).get(LATEST)
            return True
        return False

    until(answered, "the ranks that are left answer", LATEST)


def _check_failures(faults: Sequence[Fault], harm: Harm, told: Sequence[MeshFailure], failed: set[int]) -> None:
    """Check that every rank that had to be lost is lost, and no rank that had to survive."""
    must = _bound_to_be_lost(faults)
    may = must | {rank for rank in range(GPUS * len(HOSTS)) if harm.parted(0, host_of(rank))}
    lost = {rank for failure in told for rank in failure.ranks}
    assert must <= lost, f"ranks {sorted(must - lost)} had to be lost, and no failure says so"
    assert lost | failed <= may, f"ranks {sorted((lost | failed) - may)} are lost, and should not be"
    for failure in told:
        assert failure.mesh_name == "procs", failure
        for death in failure.deaths:
            assert death.host == NAMES[host_of(death.rank)], f"rank {death.rank} was not on {death.host}"
            assert f"hosts {death.rank // GPUS} gpus {death.rank % GPUS}" in death.where, death


def _bound_to_be_lost(faults: Sequence[Fault]) -> set[int]:
    """Return the ranks that are killed or whose host is silent for too long.

    Faults that share a pair of hosts are left out, because the end of one heals the other.
    """
    found = set[int]()
    for fault in faults:
        alone = all(other is fault or other.pairs.isdisjoint(fault.pairs) for other in faults)
        silent = alone and (0, fault.who) in fault.pairs and fault.seconds >= LONG[0]
        if fault.kind == "kill worker":
            found.add(fault.who)
        elif fault.kind == "kill agent" or silent:
            found |= {rank for rank in range(GPUS * len(HOSTS)) if host_of(rank) == fault.who}
    return found


def _check_outcomes(harm: Harm, caller: Caller, folder: str, lost: set[int]) -> None:
    talked = read_outcomes(Path(folder))
    ran = read_ledgers(Path(folder))
    check_messages([*caller.told, *talked], ran)
    for told in caller.told:
        if told.rank in lost:
            _names_it(told)
        else:  # the error of a call of many ranks names only one of them
            assert not told.error, f"rank {told.rank} is not lost: {told}"
            assert told.outcome == UNKNOWN or (told.sender, told.number) in ran[told.rank], f"it never came: {told}"
    for told in talked:
        sender = int(told.sender.removeprefix("talker"))
        _names_it(told)
        if told.rank not in lost and sender not in lost and not harm.parted(host_of(sender), host_of(told.rank)):
            assert told.outcome == VALUE, f"neither is lost, and they heard each other: {told}"


def _names_it(told: CallOutcome) -> None:
    """Check that a typed error names host and rank."""
    if told.error:
        for part in (
            "Error: ledgers.",
            f"hosts {told.rank // GPUS} gpus {told.rank % GPUS}",
            NAMES[host_of(told.rank)],
        ):
            assert part in told.error, f"{part!r} is not in: {told}"


def _lost_hosts_are_empty(harm: Harm, lost: set[int]) -> None:
    """Check that a host that was given up has ended its agent and processes."""
    for host in HOSTS:
        ranks = [rank for rank in range(len(harm.workers)) if host_of(rank) == host]
        if lost.issuperset(ranks) and harm.parted(0, host):
            until_gone([harm.agents[host], *(harm.workers[rank] for rank in ranks)], LATEST)
    until_gone([harm.workers[rank] for rank in lost], LATEST)


def _works_again(addresses: Sequence[str]) -> None:
    """Check that the daemons serve the same controller again."""
    procs = attach_to_workers(addresses, name="again").spawn_procs({"gpus": 1}, name="again")
    workers = procs.spawn("workers", Worker)
    assert [place[0] for place in workers.place.call().get(PATIENCE).values()] == [NAMES[host] for host in HOSTS]
    procs.stop().get(PATIENCE)


# ---- runs of schedules


def run(world: World, daemons: Sequence[Daemon], seed: int) -> float:
    """Run one schedule until no process of its controller is left. Return the seconds that it took."""
    assert world.where is not None
    began, cables, addresses = time.monotonic(), world.where.cables, [daemon.address for daemon in daemons]
    before = [descendants(daemon.pid) for daemon in daemons]
    with tempfile.TemporaryDirectory(dir=world.folder) as folder:
        try:
            world.run("schedule", seed, addresses, cables.pids, folder, module="fault_schedules")
            for daemon, those in zip(daemons, before, strict=True):
                until_gone([pid for pid in descendants(daemon.pid) if pid not in those], QUICKLY)
        except BaseException:
            print(f"again: python -m tests.hosts.fault_schedules {seed}", flush=True)
            raise
    return time.monotonic() - began


def main(first: int, count: int = 1) -> int:
    """Run ``count`` seeds on new hosts. Return the number of failed seeds."""
    if why := refusal():
        print(f"no schedule of faults can run here: {why}")
        return 0
    failed = []
    with hosts(1 + len(HOSTS)) as where, tempfile.TemporaryDirectory() as folder, World(where, Path(folder)) as world:
        daemons = [world.daemon(host) for host in HOSTS]
        for seed in range(first, first + count):
            try:
                run(world, daemons, seed)
            except AssertionError as error:
                print(f"seed {seed} failed: {error}", flush=True)
                failed.append(seed)
    print(f"{count - len(failed)} of {count} schedules passed; failed: {failed}", flush=True)
    return len(failed)


if __name__ == "__main__":
    sys.exit(min(1, main(*map(int, sys.argv[1:]))))
