"""Default route between two hosts: verbs if their NICs reach each other, else TCP with one warning.

Transfers return to verbs when the NICs reach each other again. Every transfer in between is correct, and every atomic
runs once.
"""

from __future__ import annotations

import logging
import resource
import subprocess
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from unittest import mock

import pytest
import torch

from monarch_backend._rdma.routes import selection
from monarch_backend._verbs import available
from monarch_backend._verbs.connections import connection
from monarch_backend.actor import ActorMesh
from monarch_backend.job import Job, ProcessJob
from tests.actor.actors import until
from tests.job.support import MARK, in_program, new_mark
from tests.rdma.actors import Process, nics, no_python_in, pattern
from tests.rdma.verbs.peers import crossed, lock_at_most

pytestmark = [pytest.mark.verbs, pytest.mark.usefixtures("short")]

MIB = 1 << 20
Cable = Callable[[str], None]


@pytest.fixture(scope="module")
def job(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """Start a job with one host, which has the owner's NIC. Yield the path of its file."""
    owner, _ = nics("verbs")
    with new_mark() as mark:
        env = {MARK: mark, "MONARCH_RDMA_DEVICES": owner, "MONARCH_RDMA_TIMEOUT": "14"}
        job = ProcessJob({"there": 1}, path=tmp_path_factory.mktemp("job") / "job.json", env=env)
        job.apply()
        try:
            yield job.path
        finally:
            job.kill()


@pytest.fixture
def short(monkeypatch: pytest.MonkeyPatch) -> None:
    """Settings for forked programs: NICs are tried again after half a second, and a broken link is found as quickly."""
    _, reader = nics("verbs")
    monkeypatch.delenv("MONARCH_RDMA_TRANSPORT", raising=False)
    monkeypatch.setenv("MONARCH_RDMA_DEVICES", reader)
    monkeypatch.setenv("MONARCH_RDMA_TIMEOUT", "14")
    monkeypatch.setattr(selection, "RETRY_INTERVAL_S", 0.5)


class TcpWarnings(logging.Handler):
    """Collects the program's warnings about TCP."""

    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self.lines: list[str] = []
        logging.getLogger("monarch_backend").addHandler(self)

    def emit(self, record: logging.LogRecord) -> None:
        if "over TCP" in record.getMessage():
            self.lines.append(record.getMessage())


class Asking:
    """Reads known bytes of a process on the other host, and runs atomics there."""

    def __init__(self, owner: ActorMesh) -> None:
        self.owner = owner
        self.buffer = owner.own.call_one("tensor", MIB).get(60)
        self.number = owner.own_value.call_one(torch.zeros(1, dtype=torch.int64)).get(60)
        self.expected, self.added = pattern(MIB), 0

    def goes_by(self) -> str:
        """Run a read and an atomic, and check their results. Return the route."""
        into = torch.zeros(MIB, dtype=torch.uint8)
        self.buffer.read_into(into, timeout=30).get()
        assert torch.equal(into, self.expected)
        assert self.number.fetch_add(1, timeout=30).get() == self.added
        self.added += 1
        return self.buffer.backend

    def until_verbs(self) -> None:
        """Run transfers until they use verbs, then check that the data crosses the cable."""
        until(lambda: self.goes_by() == "verbs", "NICs are taken again", 60)
        before = crossed("rx")
        assert self.goes_by() == "verbs"
        assert crossed("rx") - before >= MIB


@contextmanager
def asking(path: Path, owners: int = 1) -> Iterator[tuple[list[str], list[Asking]]]:
    """Yield the list of warnings, and one reader for each owner."""
    said, procs = TcpWarnings(), Job.load(path).state().there.spawn_procs({"gpus": owners})
    all_of_them = procs.spawn("owner", Process, "kernel")
    made = [Asking(all_of_them.slice(gpus=i)) for i in range(owners)]
    yield said.lines, made
    for it in made:
        assert it.owner.value.call_one().get(30).tolist() == [it.added], "each atomic was done once"
    procs.stop().get(30)


def lose_the_way() -> None:
    """Let packets to the owner's address reach no host, with all ports up, until the cable is put up again."""
    nobody = ["10.77.0.2", "lladdr", "02:00:00:00:00:99", "dev", "v0", "nud", "permanent"]
    subprocess.run(["ip", "neigh", "replace", *nobody], check=True)


def _no_way(path: Path, cable: Cable) -> list[str]:
    with asking(path, 2) as (said, (one, other)):
        assert one.buffer.backend == "verbs"
        before = crossed("rx")
        assert {one.goes_by() for _ in range(3)} == {"verbs"}
        assert crossed("rx") - before >= 3 * MIB
        assert not said
        lose_the_way()
        assert available() is None
        for it in (one, other):
            assert {it.goes_by() for _ in range(3)} == {"tcp"}
        cable("up")
        for it in (one, other):
            it.until_verbs()
        return said


def test_two_nics_that_are_up_and_do_not_reach_each_other(job: Path, cable: Cable) -> None:
    """One owner has a connection and the other has none. Transfers use verbs before the loss and after the repair."""
    said = in_program(_no_way, job, cable, timeout=200)
    assert len(set(said)) == 2, "one for each process"
    assert all("transport retry counter exceeded" in line for line in said)


def _held(path: Path) -> list[str]:
    with asking(path) as (said, [it]):
        with no_python_in(it.owner), mock.patch.object(connection, "CONNECT_TIMEOUT_S", 0.5):
            assert {it.goes_by() for _ in range(3)} == {"tcp"}
        it.until_verbs()
        return said


@pytest.mark.usefixtures("cable")
def test_an_owner_that_does_not_answer(job: Path) -> None:
    """The owner runs no Python: native threads serve its memory over TCP, but the NICs cannot connect."""
    [said] = in_program(_held, job, timeout=200)
    assert "has not answered within" in said


def _no_port(path: Path, cable: Cable, looked: bool) -> list[str]:
    with asking(path) as (said, [it]):
        if looked:
            assert it.buffer.backend == "verbs"
        cable("down")
        assert {it.goes_by() for _ in range(3)} == {"tcp"}
        cable("up")
        it.until_verbs()
        return said


@pytest.mark.parametrize("looked", [False, pytest.param(True, marks=pytest.mark.slow)], ids=["never", "not any more"])
def test_no_port_is_up_here(job: Path, cable: Cable, looked: bool) -> None:
    """No port is up at the first transfer. In one case the route was queried before, while a port was up."""
    [said] = in_program(_no_port, job, cable, looked, timeout=200)
    assert "no port is both ACTIVE" in said


def _little_memory(path: Path) -> list[str]:
    lock_at_most(MIB // 2)
    with asking(path) as (said, [it]):
        assert it.goes_by() == "tcp"
        for _ in range(3):  # over either route, because the NICs reach each other and small memory can be registered
            it.goes_by()
        resource.setrlimit(resource.RLIMIT_MEMLOCK, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
        it.until_verbs()
        return said


@pytest.mark.usefixtures("cable")
def test_no_more_memory_may_be_locked(job: Path) -> None:
    [said] = in_program(_little_memory, job, timeout=200)
    assert f"cannot register {MIB} bytes" in said
