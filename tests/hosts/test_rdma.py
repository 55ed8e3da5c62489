"""Registered memory of other hosts over encrypted TCP. Hosts are namespaces."""

from __future__ import annotations

import pytest

from tests.hosts.support import Daemon, World


def test_what_is_read_and_written(world: World, workers: list[str]) -> None:
    world.run("reads_and_writes", workers, module="rdma_programs")


def test_owners_that_are_lost(world: World, daemons: list[Daemon]) -> None:
    assert world.where is not None
    world.run("losses", [daemon.address for daemon in daemons], world.where.cables.pids, module="rdma_programs")


@pytest.mark.slow
def test_hosts_behind_a_gateway(world: World, workers: list[str]) -> None:
    with world.daemon(1, "--workers", ",".join(workers[1:])) as gateway:
        world.run("behind_a_gateway", gateway.address, workers[1:], module="rdma_programs")
