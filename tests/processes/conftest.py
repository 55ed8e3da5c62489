"""Fixtures of tests of processes: servers that start them."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.processes.spawning import Host


@pytest.fixture(scope="module")
def host() -> Iterator[Host]:
    """Yield a server for the tests that do not end it."""
    host = Host()
    host.run(lambda: None)
    yield host
    host.spawner.close()


@pytest.fixture
def own_host() -> Iterator[Host]:
    """Yield a server for one test, which may kill it."""
    host = Host()
    yield host
    host.spawner.close()
