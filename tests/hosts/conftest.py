"""Fixtures for host tests: daemons that serve one test after the other."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.actor.script_runner import WarmInterpreter
from tests.hosts.support import Daemon, World
from tests.support.hosts import Hosts, hosts, refusal


def _addresses(daemons: list[Daemon]) -> list[str]:
    """Return the addresses of daemons, after each has started its fork server."""
    for daemon in daemons:
        daemon.wait_for_server()
    return [daemon.address for daemon in daemons]


@pytest.fixture(scope="package")
def namespaces() -> Iterator[Hosts]:
    """Yield four hosts in namespaces. Skip where namespaces cannot be made."""
    if why := refusal():
        pytest.skip(why)
    with hosts(4) as made:
        yield made


@pytest.fixture(scope="package")
def world(namespaces: Hosts, tmp_path_factory: pytest.TempPathFactory) -> Iterator[World]:
    """Yield a world with a controller on host 0 and no daemons yet."""
    with World(namespaces, tmp_path_factory.mktemp("world")) as made:
        made.controller()
        yield made


@pytest.fixture(scope="package")
def two_controllers(world: World) -> list[WarmInterpreter]:
    """Return two controllers on host 0."""
    return [world.controller(0), world.controller(1)]


@pytest.fixture(scope="package")
def daemons(world: World) -> list[Daemon]:
    """Return the daemons on hosts 1 to 3. No test may kill them."""
    made = [world.daemon(index) for index in (1, 2, 3)]
    _addresses(made)
    return made


@pytest.fixture(scope="package")
def workers(daemons: list[Daemon]) -> list[str]:
    """Return the addresses of the daemons on hosts 1 to 3."""
    return _addresses(daemons)


@pytest.fixture(scope="package")
def loopback(tmp_path_factory: pytest.TempPathFactory) -> Iterator[World]:
    """Yield a world on this machine's loopback interface, for machines without namespaces."""
    with World(None, tmp_path_factory.mktemp("loopback")) as made:
        made.controller()
        yield made


@pytest.fixture(scope="package")
def loopback_workers(loopback: World) -> list[str]:
    """Return the addresses of two daemons on the loopback interface."""
    daemons = [loopback.daemon(index) for index in (1, 2)]
    return _addresses(daemons)


@pytest.fixture(scope="package")
def anywhere(request: pytest.FixtureRequest) -> tuple[World, list[str]]:
    """Return a world and the addresses of its daemons: in namespaces where possible, else on the loopback interface."""
    names = ("loopback", "loopback_workers") if refusal() else ("world", "workers")
    where, addresses = map(request.getfixturevalue, names)
    return where, addresses
