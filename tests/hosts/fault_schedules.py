"""Random faults on four hosts under load: a seed is a schedule of kills, stops, cuts and resets, with its invariants.

`schedule` is a controller program, so this module does not import pytest. call_journal.py has its actors. ``python -m
tests.hosts.fault_schedules FIRST [COUNT]`` runs that many seeds, one after the other.
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
    Ledger,
    Talker,
    Told,
    check_heard,
    check_messages,
    one,
    read_ledgers,
    read_told,
)
from tests.hosts.controller_programs import BOUNDS, Worker, agents, host_registry
from tests.hosts.support import NAMES, PATIENCE, Daemon, World, descendants, until_gone
from tests.support.hosts import Cables, address6, hosts, refusal

HOSTS = (1, 2, 3)
"""With daemons; the controller is on host 0."""

SHORT, LONG = (0.05, 0.35), (1.6, 2.2)
"""Seconds of a fault that every host outlives, and of one that none does: BOUNDS has a silence of 1."""

HARMLESS = 0.45
"""Seconds of trouble, all in all, in which no host may be given up."""

LINK_UP = 1.0
"""Seconds that Linux may take until a link that was down carries anything: it looks at links once a second."""

LATEST = 3 * BOUNDS["silence"]
"""Seconds after the last fault in which everybody knows what became of his calls."""

QUICKLY = 2.0
"""Seconds that promise 8 gives to what a controller has started."""

WORKING = 1.2
"""Seconds of a schedule at least; the last fault begins before."""

_BETWEEN_HOSTS = ("stop agent", "cut off", "cut there", "cut back", "cut from its controller", "unplug")
_KINDS = ("kill worker", "kill agent", "stop worker", "cut between", "cut one way", "reset", *_BETWEEN_HOSTS)


@dataclass(frozen=True)
class Fault:
    """At ``at`` seconds, for so many; ``who`` is a rank for a worker, a host for all else."""

    kind: str
    at: float
    seconds: float
    who: int
    other: int = 0  # the other host, of a cut between two

    def __str__(self) -> str:
        whom = f" and {self.other}" if self.other else ""
        lasting = f" for {self.seconds:.2f} s" if self.seconds else ""
        return f"{self.at:.2f} s: {self.kind} {self.who}{whom}{lasting}"

    @property
    def pairs(self) -> set[tuple[int, int]]:
        """Pairs of hosts that do not hear each other meanwhile, the lower one first."""
        if self.kind in ("cut between", "cut one way"):
            return {(min(self.who, self.other), max(self.who, self.other))}
        if self.kind == "cut from its controller":
            return {(0, self.who)}
        return {pair for pair in combinations((0, *HOSTS), 2) if self.who in pair and self.kind in _BETWEEN_HOSTS}


def draw(seed: int) -> list[Fault]:
    """One to four of them."""
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
    if kind == "reset" or (kind in ("stop agent", "cut off") and rng.random() < 0.2):  # also the controller's host
        return Fault(kind, at, 0.0 if kind == "reset" else rng.uniform(*SHORT), rng.choice((0, *HOSTS)))
    return Fault(kind, at, seconds, rng.choice(HOSTS))


@dataclass
class Harm:
    """Does what a schedule says, to these processes, and remembers how long it has really lasted."""

    wires: Cables
    workers: list[int]
    agents: list[int]  # by host; of host 0 the gateway of the controller
    log: list[str] = field(default_factory=list)
    troubled: defaultdict[tuple[int, int], float] = field(default_factory=lambda: defaultdict(float))  # seconds
    _begun: dict[Fault, float] = field(default_factory=dict)

    def run(self, faults: Sequence[Fault]) -> None:
        """All of them, in their time; then the world is whole again."""
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
        elif fault.kind == "unplug":  # it comes back without what has been added to it
            wires.ip(who, "link set eth0 up", f"addr replace {address6(who)}/64 dev eth0 nodad")
        elif fault.kind == "cut off":
            wires.heal(who)
        else:
            wires.heal(who, [other for pair in fault.pairs for other in pair if other != who])
        lasted = time.monotonic() - self._begun.pop(fault) + (LINK_UP if fault.kind == "unplug" else 0.0)
        for pair in fault.pairs:
            self.troubled[pair] += lasted

    def parted(self, one: int, other: int) -> bool:
        """These hosts may have given each other up."""
        return self.troubled[min(one, other), max(one, other)] > HARMLESS


def _signal(pid: int, number: int) -> None:
    with contextlib.suppress(ProcessLookupError):  # it has ended before
        os.kill(pid, number)


def host_of(rank: int) -> int:
    """Where a rank is."""
    return HOSTS[rank // GPUS]


# ---- the program of a controller


def schedule(seed: int, addresses: list[str], cables: list[int], folder: str) -> None:
    """Attach, work, suffer, and look what came of it."""
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
        _check_told(harm, caller, folder, lost)
        until(lambda: all(len(caller.heard[sender]) >= count for sender, count in sent.items()), "all has come")
        check_heard(caller.heard, sent)
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
    """How many messages each one has sent that knows of all of them what became of them."""
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
    """Whoever is left answers; some are perhaps given up only now."""

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
    """Those, and only those, are lost that had to be."""
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
    """Ranks that are killed, or whose host is silent for too long; what shares its ways with others may be healed."""
    found = set[int]()
    for fault in faults:
        alone = all(other is fault or other.pairs.isdisjoint(fault.pairs) for other in faults)
        silent = alone and (0, fault.who) in fault.pairs and fault.seconds >= LONG[0]
        if fault.kind == "kill worker":
            found.add(fault.who)
        elif fault.kind == "kill agent" or silent:
            found |= {rank for rank in range(GPUS * len(HOSTS)) if host_of(rank) == fault.who}
    return found


def _check_told(harm: Harm, caller: Caller, folder: str, lost: set[int]) -> None:
    talked = read_told(Path(folder))
    ran = read_ledgers(Path(folder))
    check_messages([*caller.told, *talked], ran)
    for told in caller.told:
        if told.rank in lost:
            _names_it(told)
        else:  # an error that names nobody is that of a call of many
            assert not told.error, f"rank {told.rank} is not lost: {told}"
            assert told.outcome == UNKNOWN or (told.sender, told.number) in ran[told.rank], f"it never came: {told}"
    for told in talked:
        sender = int(told.sender.removeprefix("talker"))
        _names_it(told)
        if told.rank not in lost and sender not in lost and not harm.parted(host_of(sender), host_of(told.rank)):
            assert told.outcome == VALUE, f"neither is lost, and they heard each other: {told}"


def _names_it(told: Told) -> None:
    """A typed error names host and rank."""
    if told.error:
        for part in (
            "Error: ledgers.",
            f"hosts {told.rank // GPUS} gpus {told.rank % GPUS}",
            NAMES[host_of(told.rank)],
        ):
            assert part in told.error, f"{part!r} is not in: {told}"


def _lost_hosts_are_empty(harm: Harm, lost: set[int]) -> None:
    """A host that was given up ends what it has."""
    for host in HOSTS:
        ranks = [rank for rank in range(len(harm.workers)) if host_of(rank) == host]
        if lost.issuperset(ranks) and harm.parted(0, host):
            until_gone([harm.agents[host], *(harm.workers[rank] for rank in ranks)], LATEST)
    until_gone([harm.workers[rank] for rank in lost], LATEST)


def _works_again(addresses: Sequence[str]) -> None:
    """The daemons serve their controller as before."""
    procs = attach_to_workers(addresses, name="again").spawn_procs({"gpus": 1}, name="again")
    workers = procs.spawn("workers", Worker)
    assert [place[0] for place in workers.place.call().get(PATIENCE).values()] == [NAMES[host] for host in HOSTS]
    procs.stop().get(PATIENCE)


# ---- running them


def run(world: World, daemons: Sequence[Daemon], seed: int) -> float:
    """One schedule, from the start of its controller until nothing of it is left; the seconds that it took."""
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
    """So many seeds, on hosts of their own; how many have failed."""
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
