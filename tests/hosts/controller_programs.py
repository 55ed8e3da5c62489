"""Controller programs for the host tests. Each function is a whole program that gets addresses of daemons.

Worker processes import this module, so it does not import pytest. Programs check their results themselves. Output lines
with "measured" are for human readers.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import importlib
import logging
import os
import random
import signal
import socket
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

import monarch_backend.actor as ma
from monarch_backend._actor.runtime import program
from monarch_backend._hosts.attach import HostRegistry, expect_successors, explain_losses
from monarch_backend._hosts.loss_reasons import LossReason, LossReasons
from monarch_backend._mesh.host_mesh import HostMesh
from monarch_backend._telemetry import program_recording, sql
from monarch_backend._transport.local.tuning import CREDIT_WINDOW
from monarch_backend.actor import (
    Actor,
    ActorError,
    ActorMesh,
    Channel,
    DeadlockError,
    MeshFailure,
    ProcMesh,
    Restart,
    SupervisionError,
    concurrent_endpoint,
    current_rank,
    endpoint,
)
from monarch_backend.hosts import attach, attach_to_workers
from tests.actor.actors import PortHolder, resident_bytes, until
from tests.actor.support import Faults
from tests.hosts.support import NAMES, PATIENCE, ended_within, until_gone
from tests.support.hosts import Cables

BOUNDS = {"heartbeat": 0.2, "silence": 1.0}


class Worker(PortHolder):
    """Actor with the endpoints that most programs call. It records the numbers that it receives."""

    def __init__(self) -> None:
        self.seen: list[int] = []
        self.receiver: Any = None

    @endpoint
    def place(self) -> tuple[str, int, dict[str, int]]:
        return os.environ["MONARCH_HOST_NAME"], current_rank().rank, dict(current_rank())

    @endpoint
    def pid(self) -> int:
        return os.getpid()

    @endpoint
    def echo(self, value: Any) -> Any:
        return value

    @endpoint
    def digest(self, value: Any) -> tuple[int, str]:
        view = memoryview(value.numpy() if isinstance(value, torch.Tensor) else value).cast("B")
        return view.nbytes, hashlib.blake2b(view).hexdigest()

    @endpoint
    def count(self, to: int) -> Iterator[int]:
        yield from range(to)

    @endpoint
    def note(self, number: int) -> int:
        self.seen.append(number)
        return number

    @endpoint
    def take_seen(self) -> list[int]:
        seen, self.seen = self.seen, []
        return seen

    @endpoint
    def fails(self, text: str) -> None:
        raise ValueError(text)

    @endpoint
    def ask(self, other: ActorMesh, value: Any) -> Any:
        return other.echo.call_one(value).get(PATIENCE)

    @endpoint
    def note_many(self, other: ActorMesh, count: int) -> None:
        futures = [other.note.call_one(number) for number in range(count)]
        assert [future.get(PATIENCE) for future in futures] == list(range(count))

    @endpoint
    def receive(self) -> Any:
        return self.receiver.recv().get(PATIENCE)

    @endpoint
    def say(self, text: str) -> None:
        print(text, flush=True)

    @endpoint
    def log(self, text: str) -> None:
        logging.getLogger("worker").warning(text)


class Sleeper(Actor):
    """Actor whose endpoint never ends, and one that waits for it on another host."""

    @endpoint
    def sleep(self) -> None:
        time.sleep(1e6)  # the line of all that wait

    @endpoint
    def wait_for(self, other: ActorMesh) -> str:
        return text_of_timeout(other, "the line of all that wait")


def text_of_timeout(mesh: ActorMesh, wanted: str) -> str:
    """Return the text of a timeout of `Sleeper.sleep` that has the wanted text. A busy machine may answer too late."""
    end = time.monotonic() + PATIENCE
    while True:
        call = mesh.sleep.call()
        try:
            call.get(timeout=1.0)
        except TimeoutError as error:
            if wanted in str(error) or time.monotonic() > end:
                return str(error)
            call.cancel()  # else the next one is queued behind it


def places(*workers: str) -> None:
    """A timeout has the lines of ranks on other hosts, in the controller and in an actor of another host."""
    procs = attach_to_workers(workers).spawn_procs({"gpus": 1}, name="trainers")
    last = {"hosts": len(workers) - 1}
    sleepers = procs.spawn("sleeper", Sleeper)
    text = text_of_timeout(sleepers.slice(**last), "the line of all that wait")
    assert f"host {NAMES[len(workers)]}, pid " in text and "controller_programs.py:" in text, text
    assert "in sleep (time.sleep(1e6)  # the line of all that wait), running sleep for " in text, text
    asked = sleepers.slice(hosts=0).wait_for.call_one(sleepers.slice(**last)).get(2 * PATIENCE)
    assert f"host {NAMES[len(workers)]}, pid " in asked and "in sleep (time.sleep(1e6)" in asked, asked
    here = ma.this_host().spawn_procs(name="here").spawn("sleeper", Sleeper)
    asked = sleepers.slice(hosts=0).wait_for.call_one(here).get(2 * PATIENCE)
    assert "in sleep (time.sleep(1e6)" in asked, asked


class Reducer(Actor):
    """Actor whose rank 1 is late for a collective."""

    @endpoint
    def reduce(self) -> None:
        if dist.get_rank() == 1:
            time.sleep(1e6)
        dist.all_reduce(torch.ones(2))


def late_rank_there(*workers: str) -> None:
    """A timeout has the rank that is late for a collective, if all ranks are on another host."""
    procs = attach_to_workers(workers[-1:]).spawn_procs({"gpus": 2}, name="trainers")
    procs.process_group(timeout=10 * PATIENCE).get(PATIENCE)
    reducing, end, text = procs.spawn("reducer", Reducer).reduce.call(), time.monotonic() + PATIENCE, ""
    while "has not entered" not in text and time.monotonic() < end:
        try:
            reducing.get(timeout=1.0)
        except TimeoutError as error:
            text = str(error)
    assert "in reduce (dist.all_reduce(torch.ones(2))), running reduce for " in text, text
    assert ", in all_reduce #1 of group 0, which rank 1 (pid " in text, text
    procs.kill().get(PATIENCE)


class Waiter(Actor):
    """Actor with an endpoint that never replies."""

    def __init__(self) -> None:
        self.waiting = 0

    @concurrent_endpoint
    async def wait(self) -> None:
        self.waiting += 1
        await asyncio.Event().wait()

    @concurrent_endpoint
    async def waits(self) -> int:
        return self.waiting

    @concurrent_endpoint
    async def wait_for(self, other: ActorMesh) -> None:
        await other.wait.call_one()


def begin(addresses: Sequence[str], gpus: int = 2, **options: Any) -> tuple[HostMesh, ProcMesh, ActorMesh]:
    """Attach hosts, and spawn processes and actors on them."""
    hosts = attach_to_workers(addresses, **{**BOUNDS, **options})
    procs = hosts.spawn_procs({"gpus": gpus}, name="procs")
    return hosts, procs, procs.spawn("workers", Worker)


def expect_faults() -> Faults:
    """Collect failures that no owner handles. By default they end the program."""
    faults = Faults()
    ma.unhandled_fault_hook = faults
    return faults


# ---- basics


class Rank(Actor):
    """One rank of a torch.distributed world."""

    @endpoint
    def sum_of_ranks(self) -> tuple[float, str, str]:
        tensor = torch.full((1000,), float(dist.get_rank()))
        dist.all_reduce(tensor)
        return tensor[0].item(), os.environ["LOCAL_RANK"], os.environ["LOCAL_WORLD_SIZE"]


class Importer(Actor):
    """Actor that imports a module of the synchronised workspace."""

    @endpoint
    def value(self, folder: str) -> int:
        folder = os.path.expandvars(folder)
        if folder not in sys.path:
            sys.path.insert(0, folder)
        return int(importlib.import_module("brought").VALUE)


def groups(*workers: str) -> None:
    """Make one process group over all hosts, and another one over a slice."""
    procs = attach_to_workers(workers).spawn_procs({"gpus": 2})
    ranks = procs.spawn("rank", Rank)
    size = len(procs)
    procs.process_group().get(PATIENCE)
    answers = list(ranks.sum_of_ranks.call().get(PATIENCE).values())
    assert answers == [(sum(range(size)), str(rank % 2), "2") for rank in range(size)], answers
    procs.slice(gpus=1).process_group().get(PATIENCE)
    answers = list(ranks.slice(gpus=1).sum_of_ranks.call().get(PATIENCE).values())
    assert answers == [(sum(range(len(workers))), "0", "1")] * len(workers), answers


def workspace(folder: str, *workers: str) -> None:
    """`sync_workspace` copies changed files once, removes deleted files and reloads modules."""
    source, to = Path(folder, "source"), f"{folder}/$MONARCH_HOST_NAME"
    (source / "package" / "__pycache__").mkdir(parents=True)
    (source / "brought.py").write_text("VALUE = 1\n")
    (source / "package" / "large.bin").write_bytes(random.Random(0).randbytes(10 << 20))
    (source / "package" / "__pycache__" / "x.pyc").write_bytes(b"")
    (source / "script").write_text("#!/bin/sh\n")
    (source / "script").chmod(0o755)
    hosts = attach_to_workers(workers)
    count = len(workers)
    first = hosts.sync_workspace(source, to)
    assert (first.files, first.written, first.removed) == (3, 3 * count, 0), first
    assert first.sent > 10 << 20
    again = hosts.sync_workspace(source, to)
    assert (again.files, again.written, again.removed, again.sent) == (3, 0, 0, 0), again
    copies = [Path(folder, NAMES[index + 1]) for index in range(count)]
    for copy in copies:
        assert sorted(p.name for p in copy.rglob("*")) == [
            ".monarch_workspace",
            "brought.py",
            "large.bin",
            "package",
            "script",
        ]
        assert os.access(copy / "script", os.X_OK)
        (copy / "own").write_text("of the host itself")
    procs = hosts.spawn_procs({"gpus": 1})
    importers = procs.spawn("importer", Importer)
    assert set(importers.value.call(to).get(PATIENCE).values()) == {1}
    # the same size, and perhaps the same modification time in seconds
    (source / "brought.py").write_text("VALUE = 2\n")
    (source / "script").unlink()
    changed = hosts.sync_workspace(source, to, reload=procs)
    assert (changed.files, changed.written, changed.removed) == (2, count, count), changed
    assert set(importers.value.call(to).get(PATIENCE).values()) == {2}
    assert all((copy / "own").exists() and not (copy / "script").exists() for copy in copies)


def hello(*addresses: str) -> None:
    """Every actor replies."""
    _, procs, workers = begin(addresses)
    assert list(workers.echo.call("hello").get(PATIENCE).values()) == ["hello"] * 2 * len(addresses)
    procs.stop().get(PATIENCE)


def values(*addresses: str) -> None:
    """Results are in the order of ranks, for the whole mesh and for slices, and name the right host."""
    hosts, procs, workers = begin(addresses)
    assert dict(zip(hosts.extent.labels, hosts.extent.sizes, strict=True)) == {"hosts": len(addresses)}
    assert procs.sizes == {"hosts": len(addresses), "gpus": 2}
    places = workers.place.call().get(PATIENCE)
    expected = [
        (NAMES[1 + host], 2 * host + gpu, {"hosts": host, "gpus": gpu})
        for host in range(len(addresses))
        for gpu in (0, 1)
    ]
    assert list(places.values()) == expected
    assert [rank for rank, _ in places.items()] == [place[2] for place in expected]
    last = len(addresses) - 1
    assert workers.slice(hosts=last, gpus=1).place.call_one().get(PATIENCE)[:2] == (NAMES[1 + last], 0)
    assert [name for name, *_ in workers.slice(gpus=0).place.call().get(PATIENCE).values()] == [*NAMES[1 : 2 + last]]
    alone = hosts.slice(hosts=last).spawn_procs({"gpus": 1}).spawn("alone", Worker)
    assert alone.place.call_one().get(PATIENCE)[0] == NAMES[1 + last]
    procs.stop().get(PATIENCE)


class Caller(Actor):
    @endpoint
    def hop(self, route: list[ActorMesh]) -> str:
        return "end" if not route else str(route[0].hop.call_one(route[1:]).get())

    @endpoint
    def fill(self, target: ActorMesh, me: ActorMesh) -> tuple[int, str]:
        """Have an actor call back, and fill its queue. Return the number of sent messages, and the error's text."""
        target.call_back.broadcast(me)
        for sent in range(2 * CREDIT_WINDOW):
            try:
                target.nothing.broadcast()
            except DeadlockError as error:
                return sent, str(error)
        return 2 * CREDIT_WINDOW, ""

    @endpoint
    def call_back(self, target: ActorMesh) -> None:
        with contextlib.suppress(DeadlockError):
            target.hop.call_one([]).get()

    @endpoint
    def nothing(self) -> None:
        """Do nothing."""


def deadlock(*addresses: str) -> None:
    """Actors on two hosts that wait for each other raise DeadlockError, and go on. Busy ones raise nothing."""
    _, procs, workers = begin(addresses)
    callers = procs.spawn("callers", Caller)
    a, b, c = (callers.slice(hosts=host, gpus=gpu) for host, gpu in ((0, 0), (1, 0), (1, 1)))
    for route in ([b, a], [b, c, a]):
        start = time.monotonic()
        error = a.hop.call_one(route).exception(PATIENCE)
        assert isinstance(error, ActorError) and isinstance(error.__cause__, DeadlockError), error
        text = str(error.__cause__)
        assert len(error.__cause__.members) == len(route)
        assert f"host {NAMES[1]}, pid" in text and f"host {NAMES[2]}, pid" in text, text
        print(f"measured: a cycle of {len(route)} over hosts is found in {time.monotonic() - start:.3f} s")
    start = time.monotonic()
    sent, text = a.fill.call_one(b, a).get(PATIENCE)
    print(f"measured: a cycle with a full queue over hosts is found in {time.monotonic() - start:.3f} s")
    assert sent == CREDIT_WINDOW
    assert f"host {NAMES[1]}, pid" in text and f"host {NAMES[2]}, pid" in text, text
    assert a.hop.call_one([b, c]).get(PATIENCE) == "end"
    assert len(workers.place.call().get(PATIENCE)) == len(workers)
    procs.stop().get(PATIENCE)


def exceptions(*addresses: str) -> None:
    """An endpoint's exception reaches the caller with its traceback, endpoint and file. The actor continues."""
    _, _, workers = begin(addresses)
    one = workers.slice(hosts=1, gpus=1)
    error = one.fails.call_one("what went wrong").exception(PATIENCE)
    assert isinstance(error, ActorError) and isinstance(error.__cause__, ValueError), error
    for part in ("what went wrong", "in fails", "controller_programs.py", "workers.fails"):
        assert part in str(error), (part, str(error))
    assert one.echo.call_one(5).get(PATIENCE) == 5


def payloads(*addresses: str) -> None:
    """Bytes and tensors of many sizes arrive unchanged in both directions."""
    _, _, workers = begin(addresses, 1)
    one = workers.slice(hosts=1)
    for size in (0, 1, 100, 4096, 65535, 65536, 65537, 1 << 20, (8 << 20) + 3):
        data = os.urandom(size)
        assert one.echo.call_one(data).get(PATIENCE) == data, size
    for size in (0, 1, 1000, 1 << 14, 1 << 20):
        tensor = torch.randn(size)
        assert torch.equal(one.echo.call_one(tensor).get(PATIENCE), tensor), size
    large = torch.randint(0, 255, (64 << 20,), dtype=torch.uint8)
    began = time.monotonic()
    size, digest = one.digest.call_one(large).get(PATIENCE)
    print("measured 64 MiB there, and hashed", time.monotonic() - began)
    assert (size, digest) == (64 << 20, hashlib.blake2b(memoryview(large.numpy()).cast("B")).hexdigest())
    assert torch.equal(one.echo.call_one(large).get(PATIENCE), large)
    answers = workers.echo.call({"a": [torch.arange(1000), b"x" * (1 << 20)], "b": None}).get(PATIENCE)
    for answer in answers.values():
        assert torch.equal(answer["a"][0], torch.arange(1000)) and answer["a"][1] == b"x" * (1 << 20)


def streams(*addresses: str) -> None:
    """Generators are read to the end or closed early, and `stream` yields replies one by one."""
    _, _, workers = begin(addresses)
    one = workers.slice(hosts=1, gpus=0)
    assert list(one.count.call_one(1000)) == list(range(1000))
    some = one.count.call_one(10**9)
    assert [next(some) for _ in range(10)] == list(range(10))
    some.close()
    assert sorted(future.get(PATIENCE) for future in workers.echo.stream("x")) == ["x"] * (2 * len(addresses))
    assert one.echo.call_one("on").get(PATIENCE) == "on"


def ports_and_references(*addresses: str) -> None:
    """Ports work on one host and between hosts.

    Actors of two hosts call each other. References can be sent before their actors are constructed.
    """
    hosts = attach_to_workers(addresses, **BOUNDS)
    first, second = hosts.slice(hosts=0).spawn_procs({"gpus": 2}), hosts.slice(hosts=1).spawn_procs({"gpus": 2})
    early, late = first.spawn("early", Worker), second.spawn("late", Worker)
    assert early.slice(gpus=0).ask.call_one(late.slice(gpus=1), 41).get(PATIENCE) == 41
    assert late.slice(gpus=1).ask.call_one(early.slice(gpus=1), 42).get(PATIENCE) == 42
    assert late.slice(gpus=0).ask.call_one(late.slice(gpus=1), 43).get(PATIENCE) == 43
    port, receiver = Channel.open()
    early.send_to.call(port, "here").get(PATIENCE)
    late.send_to.call(port, "there").get(PATIENCE)
    assert sorted(receiver.recv().get(PATIENCE) for _ in range(4)) == ["here", "here", "there", "there"]
    there = early.slice(gpus=0).open_port.call_one().get(PATIENCE)
    late.slice(gpus=0).send_to.call_one(there, {"from": "late"}).get(PATIENCE)
    assert early.slice(gpus=0).receive.call_one().get(PATIENCE) == {"from": "late"}
    here = ma.this_host().spawn_procs({"gpus": 1}).spawn("local", Worker)
    assert here.ask.call_one(late.slice(gpus=0), "from this host").get(PATIENCE) == "from this host"
    assert late.slice(gpus=0).ask.call_one(here, "to this host").get(PATIENCE) == "to this host"


def output(*addresses: str) -> None:
    """Print and log on other hosts. The test checks that this program shows it with its origin."""
    _, procs, workers = begin(addresses)
    workers.slice(hosts=0, gpus=1).say.call_one("said this").get(PATIENCE)
    workers.slice(hosts=1, gpus=0).log.call_one("logged that").get(PATIENCE)
    procs.stop().get(PATIENCE)


def order(*addresses: str) -> None:
    """Each message arrives once and in the order of its sender, also while others send."""
    _, _, workers = begin(addresses)
    count = 2000
    one, other = workers.slice(hosts=0, gpus=0), workers.slice(hosts=1, gpus=1)
    futures = [other.note.call_one(number) for number in range(count)]
    assert [future.get(PATIENCE) for future in futures] == list(range(count))
    assert other.take_seen.call_one().get(PATIENCE) == list(range(count))
    both = [one.note_many.call_one(other, count), workers.slice(hosts=1, gpus=0).note_many.call_one(other, count)]
    mine = [other.note.call_one(-1 - number) for number in range(count)]
    for future in [*both, *mine]:
        future.get(PATIENCE)
    seen = other.take_seen.call_one().get(PATIENCE)
    assert [number for number in seen if number < 0] == [-1 - number for number in range(count)]
    assert sorted(number for number in seen if number >= 0) == sorted([*range(count)] * 2)
    for number in range(200):
        workers.note.broadcast(number)
    assert all(seen == list(range(200)) for seen in workers.take_seen.call().get(PATIENCE).values())


# ---- errors while hosts are attached


def refused(addresses: list[str], parts: list[str], good: list[str]) -> None:
    """Attaching ``addresses`` fails in time, with ``parts`` in the error. Attaching ``good`` works."""
    said = ""
    with ended_within(PATIENCE / 2, "to be refused"):
        try:
            attach_to_workers(addresses, timeout=3.0, **BOUNDS)
        except ConnectionError as error:
            said = str(error)
    print(said)
    assert said, "it was attached"
    for part in parts:
        assert part in said, (part, said)
    if good:
        _, _, workers = begin(good, 1)
        assert workers.echo.choose(1).get(PATIENCE) == 1


def up_refused(cases: list[tuple[str, dict[str, str], str]]) -> None:
    """`monarch-backend up` exits with 2 and prints the reason, for each address and environment in ``cases``."""
    import io

    from monarch_backend.cli import main

    for address, environment, part in cases:
        for name in ("MONARCH_SECRET", "MONARCH_SECRET_FILE"):
            os.environ.pop(name, None)
        os.environ.update(environment)
        said = io.StringIO()
        with contextlib.redirect_stderr(said), ended_within(5.0, "up"):
            assert main(["up", "--address", address]) == 2, address
        print(said.getvalue())
        assert part in said.getvalue(), (part, said.getvalue())


# ---- failures


def host_registry() -> HostRegistry:
    """Return the registry of the hosts that this program has attached."""
    found = program().extensions.get(HostRegistry)
    assert found is not None
    return found


def agents() -> dict[str, int]:
    """Return the pids of this program's agents by host name."""
    return {host.name: host.agent.pid for host in host_registry().hosts.values() if host.lost is None}


def failed(future: Any) -> SupervisionError:
    """Return the SupervisionError of a call to a dead actor."""
    error = future.exception(PATIENCE)
    assert isinstance(error, SupervisionError), error
    return error


def measured(what: str, began: float, most: float) -> None:
    took = time.monotonic() - began
    print(f"measured {what}: {took:.3f} s", flush=True)
    assert took < most, f"{what} took {took:.2f} s, more than {most}"


def goes_on(hosts: HostMesh, workers: ActorMesh) -> None:
    """Check that the remaining ranks reply, and that a new mesh works."""
    alive = workers.without(workers.failed_ranks)
    assert list(alive.echo.call("on").get(PATIENCE).values()) == ["on"] * len(alive)
    with hosts.spawn_procs({"gpus": 1}, name="new") as procs:
        again = procs.spawn("again", Worker)
        assert list(again.echo.call("again").get(PATIENCE).values()) == ["again"] * len(hosts)


def worker_killed(*addresses: str) -> None:
    """A process on another host is killed.

    Its callers get an error with its identity and cause of death; other ranks continue.
    """
    faults = expect_faults()
    hosts, procs, workers = begin(addresses)
    waiters = procs.spawn("waiters", Waiter)
    pids = list(workers.pid.call().get(PATIENCE).values())
    victim = waiters.slice(hosts=1, gpus=1)
    waiting = [victim.wait.call_one(), waiters.slice(hosts=0, gpus=0).wait_for.call_one(victim)]
    until(lambda: victim.waits.call_one().get(PATIENCE) == 2, "both wait")
    began = time.monotonic()
    os.kill(pids[3], signal.SIGKILL)
    error = failed(waiting[0])
    measured("kill -9 of a worker, to its controller's error", began, 1.0)
    assert (error.host, error.rank, error.pid, error.signal) == ("gamma", 3, pids[3], 9)
    assert error.delivery == "unknown"
    for part in ("hosts 1 gpus 1", "gamma", str(pids[3]), "SIGKILL", "waiters.wait"):
        assert part in str(error), (part, str(error))
    theirs = waiting[1].exception(PATIENCE)
    measured("kill -9 of a worker, to the error of an actor on another host", began, 1.0)
    assert isinstance(theirs, ActorError) and isinstance(theirs.__cause__, SupervisionError), theirs
    assert (theirs.__cause__.host, theirs.__cause__.rank) == ("gamma", 3), theirs.__cause__
    failure = faults.next()
    assert failure.ranks == (3,) and failure.mesh_name == "procs", failure
    assert failure.deaths[0].host == "gamma" and failure.deaths[0].signal == 9
    assert any("waiters.wait" in line for line in failure.deaths[0].messages), failure.deaths[0].messages
    assert f"- {failure.deaths[0].messages[0]}" in failure.report()
    assert failed(workers.slice(hosts=1, gpus=1).echo.call_one(1)).delivery == "not sent"
    goes_on(hosts, workers)
    faults.none()


def lives_of_hosts() -> list[tuple[str, str]]:
    """Return the recorded names and events of this program's hosts, in their order."""
    recording = program_recording.read(str(os.getpid()))
    rows = sql.answer("select name, detail from events where kind = 'host' order by id", recording).rows
    return [(str(name), str(what)) for name, what in rows]


def lost_host(addresses: list[str], how: str, most: float, cables: list[int], daemons: list[int]) -> None:
    """Host 2, the second of the mesh, is lost as ``how`` says. It can be attached again unless its daemon died."""
    faults, wires = expect_faults(), Cables(cables)
    hosts, procs, workers = begin(addresses)
    waiters = procs.spawn("waiters", Waiter)
    pids = list(workers.pid.call().get(PATIENCE).values())
    agent = agents()["gamma"]
    waiting = [waiters.slice(hosts=1, gpus=0).wait.call_one(), waiters.slice(hosts=1).wait.call()]
    asker, victim = workers.slice(hosts=0, gpus=0), waiters.slice(hosts=1, gpus=1)
    theirs = waiters.slice(hosts=0, gpus=0).wait_for.call_one(victim)
    until(lambda: victim.waits.call_one().get(PATIENCE) == 2, "both wait")
    harm = {
        "agent killed": lambda: os.kill(agent, signal.SIGKILL),
        "agent stopped": lambda: os.kill(agent, signal.SIGSTOP),
        "daemon killed": lambda: os.kill(daemons[1], signal.SIGKILL),
        "cut off": lambda: wires.cut_off(2),
        "cut there": lambda: [wires.cut(other, 2) for other in (0, 1)],
        "cut back": lambda: [wires.cut(2, other) for other in (0, 1)],
        "cut from its controller": lambda: wires.cut_off(2, [0]),
        "unplugged": lambda: wires.ip(2, "link set eth0 down"),
    }
    began = time.monotonic()
    harm[how]()
    try:
        for future in waiting:
            error = failed(future)
            measured(f"{how}, to the controller's error", began, most)
            assert error.host == "gamma" and error.rank in (2, 3), error
            assert "gamma" in str(error) and "is lost" in str(error), error
        failure = faults.next()
        while set(failure.ranks) != {2, 3}:  # as one failure, or as two
            more = faults.next()
            failure = MeshFailure(failure.mesh_name, [*failure.deaths, *more.deaths])
        assert failure.mesh_name == "procs" and {death.host for death in failure.deaths} == {"gamma"}
        theirs = theirs.exception(PATIENCE)
        measured(f"{how}, to the error of an actor on another host", began, most)
        assert isinstance(theirs, ActorError) and isinstance(theirs.__cause__, SupervisionError), theirs
        assert theirs.__cause__.host == "gamma", theirs.__cause__
        if how == "agent stopped":  # a stopped agent ends its processes only after it continues and notices the loss
            os.kill(agent, signal.SIGCONT)
        measured(f"{how}, to the end of what ran there", began, most + until_gone(pids[2:], most + 2.0))
        assert workers.failed_ranks == (2, 3)
        lives = lives_of_hosts()
        assert [(name.split()[0], what.partition(":")[0]) for name, what in lives] == [
            ("beta", "ready"),
            ("gamma", "ready"),
            ("gamma", "failed"),
        ], lives
        assert "is lost" in lives[-1][1]
        alive = hosts.slice(hosts=0)
        goes_on(alive, workers)
        with contextlib.suppress(RuntimeError):
            hosts.spawn_procs({"gpus": 1})
            raise AssertionError("processes were spawned on a host that is lost")
    finally:
        wires.ip(2, "link set eth0 up")
        wires.heal(2)
    if how != "daemon killed":
        again = attach_to_workers([addresses[1]]).spawn_procs({"gpus": 1}).spawn("again", Worker)
        assert again.place.call_one().get(PATIENCE)[0] == "gamma"
        assert asker.ask.call_one(again, "a").get(PATIENCE) == "a"
    until_gone([agent], PATIENCE)
    faults.none()


def daemon_stopped(addresses: list[str], daemon: int) -> None:
    """The daemon is stopped: its agents and processes continue.

    Attaching times out, and works after the daemon continues.
    """
    faults = expect_faults()
    hosts, procs, workers = begin(addresses)
    workers.echo.call(0).get(PATIENCE)
    os.kill(daemon, signal.SIGSTOP)
    try:
        goes_on(hosts, workers)
        with ended_within(12.0, "attaching a host whose daemon is stopped"):
            error: Exception | None = None
            try:
                attach_to_workers(addresses[1:], timeout=2.0)
            except ConnectionError as raised:
                error = raised
        assert error is not None and addresses[1].removeprefix("tcp://") in str(error), error
        goes_on(hosts, workers)
    finally:
        os.kill(daemon, signal.SIGCONT)
    again = attach_to_workers(addresses[1:]).spawn_procs({"gpus": 1}).spawn("again", Worker)
    assert again.place.call_one().get(PATIENCE)[0] == "gamma"
    procs.stop().get(PATIENCE)
    faults.none()


def gateway_killed(*addresses: str) -> None:
    """The gateway of the controller's host is killed: all other hosts are lost, and every waiting call fails."""
    faults = expect_faults()
    _, procs, workers = begin(addresses)
    pids = list(workers.pid.call().get(PATIENCE).values())
    here = ma.this_host().spawn_procs({"gpus": 1}).spawn("here", Worker)
    assert here.ask.call_one(workers.slice(hosts=0, gpus=0), 1).get(PATIENCE) == 1
    waiters = procs.spawn("waiters", Waiter)
    waiting = waiters.wait.call()
    until(lambda: list(waiters.waits.call().get(PATIENCE).values()) == [1] * len(pids), "all wait")
    began = time.monotonic()
    os.kill(host_registry().gateway.pid, signal.SIGKILL)
    assert "gateway" in str(failed(waiting))
    measured("kill -9 of the controller's gateway, to its error", began, 1.0)
    lost: set[int] = set()
    while len(lost) < len(pids):
        lost.update(faults.next().ranks)
    measured(
        "kill -9 of the controller's gateway, to the end of what ran elsewhere", began, 4.0 + until_gone(pids, 4.0)
    )
    theirs = here.ask.call_one(workers.slice(hosts=0, gpus=0), 2).exception(PATIENCE)
    assert isinstance(theirs, ActorError), theirs
    assert here.echo.call_one("on").get(PATIENCE) == "on"
    try:
        attach_to_workers(addresses, timeout=1.0)
    except RuntimeError as error:
        print(error)
    else:
        raise AssertionError("attached without a gateway")
    faults.none()


def cut_between(addresses: list[str], cables: list[int]) -> None:
    """Two hosts cannot reach each other but both reach the controller.

    Calls between them fail, and the rest continues.
    """
    faults, wires = expect_faults(), Cables(cables)
    _, procs, workers = begin(addresses)
    waiters = procs.spawn("waiters", Waiter)
    one, other = waiters.slice(hosts=0, gpus=0), waiters.slice(hosts=1, gpus=0)
    waiting = [one.wait_for.call_one(other), other.wait_for.call_one(one)]
    until(lambda: [mesh.waits.call_one().get(PATIENCE) for mesh in (one, other)] == [1, 1], "both wait")
    began = time.monotonic()
    wires.cut_off(1, [2])
    try:
        for future in waiting:
            error = future.exception(PATIENCE)
            assert isinstance(error, ActorError) and isinstance(error.__cause__, (SupervisionError, ConnectionError)), (
                error
            )
            assert "is lost" in str(error), error
            measured("cut between two hosts, to the errors of their actors", began, 4.0)
        assert list(workers.echo.call("on").get(PATIENCE).values()) == ["on"] * 4
    finally:
        wires.heal(1)
    # actors that have never exchanged a message
    first, second = workers.slice(hosts=0, gpus=1), workers.slice(hosts=1, gpus=1)
    assert first.ask.call_one(second, 1).get(PATIENCE) == 1
    assert second.ask.call_one(first, 2).get(PATIENCE) == 2
    faults.none()


def through_another(gateway: str, workers: list[str], cables: list[int]) -> None:
    """The controller reaches hosts 2 and 3 only through host 1. First an agent there is lost, then host 1 itself."""
    faults, wires = expect_faults(), Cables(cables)
    wires.cut_off(0, [2, 3])
    try:
        hosts = attach(gateway, **BOUNDS)  # type: ignore[arg-type]
        procs = hosts.spawn_procs({"gpus": 2}, name="procs")
        there = procs.spawn("workers", Worker)
        assert [place[0] for place in there.place.call().get(PATIENCE).values()] == ["gamma", "gamma", "delta", "delta"]
        near = attach_to_workers([gateway], **BOUNDS).spawn_procs({"gpus": 1}).spawn("near", Worker)  # type: ignore[arg-type]
        here = ma.this_host().spawn_procs({"gpus": 1}).spawn("here", Worker)
        one, two = there.slice(hosts=0, gpus=0), there.slice(hosts=1, gpus=1)
        for asker, asked in ((one, two), (here, two), (two, here), (near, one), (one, near)):
            assert asker.ask.call_one(asked, "a").get(PATIENCE) == "a"
        payload = os.urandom(3 << 20)
        assert all(answer == payload for answer in there.echo.call(payload).get(PATIENCE).values())
        for number in range(200):
            there.note.broadcast(number)
        assert list(there.take_seen.call().get(PATIENCE).values()) == [list(range(200))] * 4
        procs.process_group().get(PATIENCE)
        assert list(procs.spawn("rank", Rank).sum_of_ranks.call().get(PATIENCE).values())[3][0] == 6.0
        pids = list(there.pid.call().get(PATIENCE).values())
        waiters = procs.spawn("waiters", Waiter)
        waiting = waiters.slice(hosts=1, gpus=0).wait.call_one()
        until(lambda: waiters.slice(hosts=1, gpus=0).waits.call_one().get(PATIENCE) == 1, "it waits")
        began = time.monotonic()
        os.kill(agents()["delta"], signal.SIGKILL)
        assert "delta" in str(failed(waiting))
        measured("kill -9 of an agent behind another host, to its controller's error", began, 3.0)
        assert {rank for _ in range(2) for rank in faults.next().ranks} == {2, 3}
        assert isinstance(here.ask.call_one(two, 1).exception(PATIENCE), ActorError)
        assert here.ask.call_one(one, 1).get(PATIENCE) == 1
        again = attach(gateway, workers[1:], **BOUNDS).spawn_procs({"gpus": 1}).spawn("again", Worker)  # type: ignore[arg-type]
        assert again.place.call_one().get(PATIENCE)[0] == "delta"
        pids.append(again.pid.call_one().get(PATIENCE))
        for agent in [host.agent.pid for host in host_registry().hosts.values() if host.name == "beta"]:
            os.kill(agent, signal.SIGKILL)
        lost: set[int] = set()
        while not lost >= {0, 1}:
            lost.update(faults.next().ranks)
        assert "lost" in str(failed(one.echo.call_one(1)))
        until_gone(pids, PATIENCE)
    finally:
        wires.heal(0)


def cut_before_they_meet(addresses: list[str], cables: list[int]) -> None:
    """The network between two hosts is cut before their first message.

    A call between them fails as early as one to a lost host.
    """
    faults, wires = expect_faults(), Cables(cables)
    _, _, workers = begin(addresses)
    workers.echo.call("up").get(PATIENCE)
    one, other = workers.slice(hosts=0, gpus=0), workers.slice(hosts=1, gpus=0)
    wires.cut_off(1, [2])
    try:
        began = time.monotonic()
        error = one.ask.call_one(other, 1).exception(PATIENCE)
        measured("call of a host that can't be reached, to the error", began, 5.0)
        assert isinstance(error, ActorError) and isinstance(error.__cause__, SupervisionError), error
        assert list(workers.echo.call("on").get(PATIENCE).values()) == ["on"] * 4
    finally:
        wires.heal(1)
    error = other.ask.call_one(one, 2).exception(PATIENCE)  # the host that was given up learns it from the reply
    assert isinstance(error, ActorError) and "given up" in str(error.__cause__), error
    assert other.ask.call_one(workers.slice(hosts=0, gpus=1), 3).get(PATIENCE) == 3
    faults.none()


def stopped_after_loss(addresses: list[str], how: str) -> None:
    """A mesh is stopped while the scheduler is still asked why its host is lost, which can take minutes."""
    expect_faults()
    hosts, procs, workers = begin(addresses)
    workers.echo.call(0).get(PATIENCE)
    explain_losses(hosts, LossReasons(lambda _: [LossReason("it runs", False)], 400.0, lambda: time.sleep(0.1)), "ab")
    lost, owner = program().hosts.find((hosts.hosts or ())[1]), program().owner
    os.kill(agents()["gamma"], signal.SIGKILL)
    until(lambda: lost.lost is not None, "the host is lost")
    began = time.monotonic()
    getattr(procs, how)().get(PATIENCE)
    measured(f"{how} of a mesh with a lost host", began, 4.0)
    program().call_soon(lambda: lost.spawner.host_lost("the reason at last"))
    until(lambda: not owner.records.by_number, "no record is left")
    assert not owner.starter.early


def spare(addresses: list[str], daemons: list[int]) -> None:
    """Ranks of a lost host are restarted on another host of the same mesh."""
    faults = expect_faults()
    hosts = attach_to_workers(addresses, **BOUNDS)
    procs = hosts.spawn_procs({"gpus": 1}, restart=Restart(backoff=0.0))
    workers = procs.spawn("workers", Worker)
    assert [place[0] for place in workers.place.call().get(PATIENCE).values()] == ["beta", "gamma"]
    os.kill(agents()["gamma"], signal.SIGKILL)

    def back() -> bool:
        with contextlib.suppress(SupervisionError):
            return [place[0] for place in workers.place.call().get(PATIENCE).values()] == ["beta", "beta"]
        return False

    until(back, "somebody in its place")
    faults.none()


def successor(addresses: list[str], strategy: Any, how: str) -> None:
    """Ranks of a lost host wait for the host that takes its place, and are restarted there.

    With ``how`` "none" there is none after all. With "stop" the mesh is stopped meanwhile, and with
    "end" the program ends.
    """
    faults, search, answer = expect_faults(), threading.Event(), threading.Event()
    hosts = attach_to_workers(addresses[:2], **BOUNDS)

    def find(name: str, stopping: threading.Event) -> HostMesh | None:
        assert name == "gamma"
        search.set()
        if how == "end":
            assert stopping.wait(PATIENCE)
            return None
        assert answer.wait(PATIENCE)
        return attach_to_workers(addresses[2:], **BOUNDS) if how == "found" else None

    expect_successors(hosts, find, ["beta", "gamma"])
    procs = hosts.spawn_procs({"gpus": 1}, restart=Restart(strategy, max_restarts=1, backoff=0.0))
    workers = procs.spawn("workers", Worker)

    def places() -> list[str]:
        with contextlib.suppress(SupervisionError):
            return [place[0] for place in workers.place.call().get(PATIENCE).values()]
        return []

    assert places() == ["beta", "gamma"]
    os.kill(agents()["gamma"], signal.SIGKILL)
    until(search.is_set, "the successor is searched")
    until(lambda: places() == [], "the lost rank answers no more")
    assert workers.slice(hosts=0).place.call_one().get(PATIENCE)[0] == "beta"
    if how == "end":
        began = time.monotonic()
        program().shutdown.run()
        measured("end of a program that waits for a host", began, 4.0)
        assert not [each for each in threading.enumerate() if each.name == "monarch-successor"]
        return
    if how == "stop":
        began = time.monotonic()
        procs.stop().get(PATIENCE)
        measured("stop of a mesh that waits for a host", began, 4.0)
        answer.set()
        until(lambda: not program().owner.records.by_number, "no record is left")
        return
    answer.set()
    expected = ["beta", "delta" if how == "found" else "beta"]
    until(lambda: places() == expected, "all ranks answer")
    if how == "found":
        lives = [(name.split()[0], what.partition(":")[0]) for name, what in lives_of_hosts()]
        assert lives[2:] == [("gamma", "failed"), ("delta", "ready"), ("gamma", "restarted")], lives
        more = hosts.spawn_procs({"gpus": 1}).spawn("workers", Worker)
        assert [place[0] for place in more.place.call().get(PATIENCE).values()] == expected
        hosts.shutdown().get(PATIENCE)
        assert places() == [] and program().owner.records.by_number == {}
    faults.none()


def successors(addresses: list[str]) -> None:
    """Two hosts of a mesh are lost. Both successors are searched at once, and only the second one is found."""
    faults, searched, answer = expect_faults(), set[str](), threading.Event()
    hosts = attach_to_workers(addresses[:2], **BOUNDS)

    def find(name: str, _: threading.Event) -> HostMesh | None:
        searched.add(name)
        assert answer.wait(PATIENCE)
        return attach_to_workers(addresses[2:], **BOUNDS) if name == "gamma" else None

    expect_successors(hosts, find, ["beta", "gamma"])
    procs = hosts.spawn_procs({"gpus": 1}, restart=Restart("all", max_restarts=1, backoff=0.0))
    workers = procs.spawn("workers", Worker)
    assert [place[0] for place in workers.place.call().get(PATIENCE).values()] == ["beta", "gamma"]
    os.kill(agents()["beta"], signal.SIGKILL)
    until(lambda: searched == {"beta"}, "the first successor is searched")
    os.kill(agents()["gamma"], signal.SIGKILL)
    until(lambda: searched == {"beta", "gamma"}, "both successors are searched")
    answer.set()

    def places() -> list[str]:
        with contextlib.suppress(SupervisionError):
            return [place[0] for place in workers.place.call().get(PATIENCE).values()]
        return []

    until(lambda: places() == ["delta", "delta"], "all ranks answer")
    faults.none()


def beside_silent(addresses: list[str]) -> None:
    """Hosts are attached while another thread waits for a host that does not answer."""
    with socket.create_server(("127.0.0.1", 0)) as silent:
        address = f"tcp://127.0.0.1:{silent.getsockname()[1]}"
        attach_to_workers(addresses[:1], **BOUNDS)  # starts the gateway

        def attach_silent() -> None:
            with contextlib.suppress(ConnectionError):
                attach_to_workers([address], timeout=8.0, **BOUNDS)

        waiting = threading.Thread(target=attach_silent)
        waiting.start()
        connection, _ = silent.accept()
        began = time.monotonic()
        attach_to_workers(addresses[1:], **BOUNDS)
        measured("attach beside a silent host", began, 4.0)
        connection.close()
        silent.close()
        waiting.join()


def breaks(addresses: list[str], cables: list[int], how: str, times: int) -> None:
    """Connections break or stall during traffic. No message is lost or repeated.

    With ``how="nothing"`` the program leaves the network alone, and the test breaks it.
    """
    wires = Cables(cables)
    _, _, workers = begin(addresses, silence=3.0, heartbeat=0.5)
    one, other = workers.slice(hosts=0, gpus=0), workers.slice(hosts=1, gpus=0)
    senders = workers.slice(gpus=1)  # an actor that sends waits for replies, and handles no message meanwhile
    workers.echo.call(0).get(PATIENCE)
    stop = threading.Event()

    def harm() -> None:
        while how != "nothing" and not stop.wait(random.uniform(0.2, 0.8)):
            for index in (0, 2):
                if how == "reset":
                    wires.reset(index)
                else:
                    wires.cut_off(index)
                    stop.wait(0.3 if how == "pause" else 1.7)
                    wires.heal(index)
                    stop.wait(random.uniform(0.5, 1.0) if how == "pause" else PATIENCE)

    thread = threading.Thread(target=harm)
    thread.start()
    payload = os.urandom(3 << 20)
    try:
        for turn in range(times):
            count = 300
            both = [
                senders.slice(hosts=0).note_many.call_one(other, count),
                senders.slice(hosts=1).note_many.call_one(one, count),
            ]
            large = [one.echo.call_one(payload) for _ in range(2)]
            mine = [other.note.call_one(-1 - number) for number in range(count)]
            assert list(one.count.call_one(1000)) == list(range(1000))
            assert [future.get(PATIENCE) for future in mine] == [-1 - number for number in range(count)]
            for future in both:
                future.get(PATIENCE)
            assert all(future.get(PATIENCE) == payload for future in large), "other bytes came back"
            seen = other.take_seen.call_one().get(PATIENCE)
            assert [number for number in seen if number < 0] == [-1 - number for number in range(count)], turn
            assert [number for number in seen if number >= 0] == list(range(count)), turn
            assert one.take_seen.call_one().get(PATIENCE) == list(range(count)), turn
    finally:
        stop.set()
        thread.join()
        for index in (0, 2):
            wires.heal(index)


def controller(*addresses: str) -> None:
    """Spawn processes on all hosts, print their pids, and wait until the program is killed."""
    hosts = attach_to_workers(addresses, **BOUNDS)
    procs = hosts.spawn_procs({"gpus": 2})
    workers = procs.spawn("workers", Worker)
    pids = [*workers.pid.call().get(PATIENCE).values(), *agents().values(), host_registry().gateway.pid]
    print("pids", *pids, flush=True)
    procs.spawn("waiters", Waiter).wait.call().get()


# ---- unauthenticated connections


def strangers(address: str, daemon: int) -> None:
    """Open 1000 unauthenticated connections of several kinds. Meanwhile hosts are attached and work."""
    from monarch_backend._hosts.connection_settings import parse_address

    where = parse_address(address)
    before = resident_bytes(daemon)
    sockets = []
    for number in range(1000):
        one = socket.create_connection(where, 5)
        sockets.append(one)
        with contextlib.suppress(OSError):
            if number % 4 == 1:
                one.sendall(os.urandom(1 << 12))
            elif number % 4 == 2:
                one.sendall(b"monh")  # the first bytes of a valid handshake
            elif number % 4 == 3 and number % 8 == 3:
                one.shutdown(socket.SHUT_WR)
    slow = socket.create_connection(where, 5)
    stop = threading.Event()

    def drip() -> None:
        with contextlib.suppress(OSError):
            while not stop.wait(0.05):
                slow.sendall(b"m")

    thread = threading.Thread(target=drip)
    thread.start()
    try:
        for _ in range(3):
            _, procs, workers = begin([address], 1)
            assert workers.echo.choose(1).get(PATIENCE) == 1
            procs.stop().get(PATIENCE)
            for _ in range(50):
                sockets.append(socket.create_connection(where, 5))
        print("measured memory of 1,150 strangers:", resident_bytes(daemon) - before)
        assert resident_bytes(daemon) - before < 64 << 20
        descriptors = len(os.listdir(f"/proc/{daemon}/fd"))
        assert descriptors < 400, descriptors
    finally:
        stop.set()
        thread.join()
        for one in [*sockets, slow]:
            one.close()
    until(lambda: len(os.listdir(f"/proc/{daemon}/fd")) < 50, "their places are free")
