"""Fixtures for host tests: daemons that serve one test after the other."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.actor.script_runner import WarmInterpreter
from tests.hosts.support import Daemon, World
from tests.support.hosts import Hosts, hosts, refusal


def _addresses(daemons: list[Daemon]) -> list[str]:
    """Of daemons that have started all that they start by themselves."""
    for daemon in daemons:
        daemon.wait_for_server()
    return [daemon.address for daemon in daemons]


@pytest.fixture(scope="package")
def namespaces() -> Iterator[Hosts]:
    """Four hosts; skips where there can be none."""
    if why := refusal():
        pytest.skip(why)
    with hosts(4) as made:
        yield made


@pytest.fixture(scope="package")
def world(namespaces: Hosts, tmp_path_factory: pytest.TempPathFactory) -> Iterator[World]:
    """Controllers run on host 0; on hosts 1 to 3 a daemon may."""
    with World(namespaces, tmp_path_factory.mktemp("world")) as made:
        made.controller()
        yield made


@pytest.fixture(scope="package")
def two_controllers(world: World) -> list[WarmInterpreter]:
    """On the same host."""
    return [world.controller(0), world.controller(1)]


@pytest.fixture(scope="package")
def daemons(world: World) -> list[Daemon]:
    """On hosts 1 to 3; no test may kill them."""
    made = [world.daemon(index) for index in (1, 2, 3)]
    _addresses(made)
    return made


@pytest.fixture(scope="package")
def workers(daemons: list[Daemon]) -> list[str]:
    """Their addresses."""
    return _addresses(daemons)


@pytest.fixture(scope="package")
def loopback(tmp_path_factory: pytest.TempPathFactory) -> Iterator[World]:
    """This machine, for where there are no namespaces."""
    with World(None, tmp_path_factory.mktemp("loopback")) as made:
        made.controller()
        yield made


@pytest.fixture(scope="package")
def loopback_workers(loopback: World) -> list[str]:
    """Addresses of two daemons there."""
    daemons = [loopback.daemon(index) for index in (1, 2)]
    return _addresses(daemons)


@pytest.fixture(scope="package")
def anywhere(request: pytest.FixtureRequest) -> tuple[World, list[str]]:
    """Hosts with networks of their own, or else this machine; and the addresses of daemons there."""
    names = ("loopback", "loopback_workers") if refusal() else ("world", "workers")
    where, addresses = map(request.getfixturevalue, names)
    return where, addresses
