"""Controller programs that read and write registered memory of other hosts. Each function is a whole program.

Worker processes import this module, so it does not import pytest.
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch

import monarch_backend.actor as ma
from monarch_backend._mesh.host_mesh import HostMesh
from monarch_backend.actor import ActorMesh
from monarch_backend.hosts import attach, attach_to_workers
from monarch_backend.rdma import OwnerLostError, RDMABuffer, RDMAError
from tests.actor.support import Faults
from tests.hosts.controller_programs import BOUNDS
from tests.hosts.support import PATIENCE
from tests.rdma.actors import Process, no_python_in, pattern
from tests.support.hosts import Cables

MIB = 1 << 20


@contextmanager
def _processes(hosts: HostMesh) -> Iterator[list[ActorMesh]]:
    """Spawn one process on each host, and yield their actors."""
    procs = hosts.spawn_procs({"gpus": 1}, name="memory")
    both = procs.spawn("process", Process, "tls")
    both.pid.call().get(PATIENCE)
    yield [both.slice(hosts=index, gpus=0) for index in range(len(hosts))]
    procs.stop().get(PATIENCE)


def reads_and_writes(workers: Sequence[str]) -> None:
    """Two hosts and the controller read and write each other's memory. Each of them is owner and reader."""
    hosts = attach_to_workers(workers[:2], **BOUNDS)
    with _processes(hosts) as (one, other):
        for owner, reader in ((one, other), (other, one)):
            for size in (1, 4097, 3 * MIB, 40 * MIB):
                buffer = owner.own.call_one("tensor", size).get(PATIENCE)
                assert reader.backend.call_one(buffer).get(PATIENCE) == buffer.backend == "tcp"
                assert reader.read.call_one(buffer).get(PATIENCE)
                reader.write.call_one(buffer, "tensor", 7).get(PATIENCE)
                assert owner.shows.call_one(size, 7).get(PATIENCE)
                mine = torch.zeros(size, dtype=torch.uint8)
                buffer.read_into(mine, timeout=PATIENCE).get(PATIENCE)
                assert torch.equal(mine, pattern(size, 7))
                reader.drop.call_one(buffer).get(PATIENCE)
                assert "DroppedError" in reader.read_for_ever.call_one(buffer).get(PATIENCE)
        mine = pattern(5 * MIB, 3).clone()
        buffer, number = RDMABuffer(mine), RDMABuffer(torch.zeros(1, dtype=torch.int64))
        for each in (one, other):
            assert each.read.call_one(buffer, "tensor", 3).get(PATIENCE)
            each.add.call_one(number, 1, 20).get(PATIENCE)
        assert number.fetch_add(0).get() == 40
        one.write.call_one(buffer, "tensor", 4).get(PATIENCE)
        assert torch.equal(mine, pattern(5 * MIB, 4))
        with no_python_in(one):
            theirs = other.own.call_one("tensor", 4 * MIB).get(PATIENCE)
            assert other.read.call_one(theirs).get(PATIENCE)
        buffer.drop(), number.drop()


def losses(workers: Sequence[str], pids: Sequence[int]) -> None:
    """A reader gets an error when the owner is killed, and when the network between the two hosts is cut."""
    faults = Faults()
    ma.unhandled_fault_hook = faults
    hosts = attach_to_workers(workers[:2], **BOUNDS)
    for how in ("kill", "cut"):
        procs = hosts.spawn_procs({"gpus": 1}, name="memory")
        both = procs.spawn("process", Process, "tls")
        owner, reader = both.slice(hosts=0, gpus=0), both.slice(hosts=1, gpus=0)
        pid = owner.pid.call_one().get(PATIENCE)
        buffer = owner.own.call_one("tensor", 16 * MIB).get(PATIENCE)
        assert reader.read.call_one(buffer).get(PATIENCE)
        reading = reader.read_for_ever.call_one(buffer, PATIENCE)
        begun = time.monotonic()
        if how == "kill":
            os.kill(pid, 9)
        else:
            Cables(pids).cut_off(1)
        words = reading.get(PATIENCE)
        took = time.monotonic() - begun
        assert words.startswith("OwnerLostError"), words
        assert took < (2.0 if how == "kill" else 6.0), took
        print(f"measured: {how}: {took:.2f} s: {words[:200]}")
        reading_here = buffer.read_into(torch.empty(16 * MIB, dtype=torch.uint8), timeout=PATIENCE)
        lost = reading_here.exception(PATIENCE)
        assert isinstance(lost, OwnerLostError) and lost.pid == pid, lost
        faults.next()
        procs.stop().get(PATIENCE)
        if how == "cut":
            Cables(pids).heal(1)


def behind_a_gateway(gateway: str, workers: Sequence[str]) -> None:
    """Hosts behind a gateway read each other's memory. A read without a route raises an error and does not hang."""
    hosts = attach(gateway, workers, **BOUNDS)
    with _processes(hosts) as (one, other):
        buffer = one.own.call_one("tensor", 2 * MIB).get(PATIENCE)
        assert other.read.call_one(buffer).get(PATIENCE)
        mine = RDMABuffer(torch.zeros(64, dtype=torch.uint8))
        failed = one.read_value.call_one(mine, bytearray(64), 3.0).exception(PATIENCE)
        assert failed is None or isinstance(failed.__cause__, (RDMAError, TimeoutError)), failed
        mine.drop()
