"""DTensors with shards on several hosts. Hosts are namespaces."""

from __future__ import annotations

import pytest

from tests.hosts.support import World


@pytest.mark.slow
def test_training_over_two_hosts(anywhere: tuple[World, list[str]]) -> None:
    world, workers = anywhere
    world.run("trains", workers, module="dtensor_programs")


@pytest.mark.slow
def test_lost_host_fails_the_mesh(world: World, workers: list[str]) -> None:
    with world.daemon(3) as victim:
        world.run("loses_a_host", [workers[0], victim.address], victim.pid, module="dtensor_programs")
