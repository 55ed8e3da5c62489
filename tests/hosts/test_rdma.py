"""Registered memory of other hosts over encrypted TCP. Hosts are namespaces."""

from __future__ import annotations

import pytest

from tests.hosts.support import Daemon, World


def test_reads_and_writes_of_remote_memory_transfer_the_bytes(world: World, workers: list[str]) -> None:
    world.run("reads_and_writes", workers, module="rdma_programs")


@pytest.mark.slow
def test_lost_owner_fails_transfers(world: World, daemons: list[Daemon]) -> None:
    assert world.where is not None
    world.run("losses", [daemon.address for daemon in daemons], world.where.cables.pids, module="rdma_programs")


@pytest.mark.slow
def test_transfers_to_hosts_behind_a_gateway_work(world: World, workers: list[str]) -> None:
    with world.daemon(1, "--workers", ",".join(workers[1:])) as gateway:
        world.run("behind_a_gateway", gateway.address, workers[1:], module="rdma_programs")
