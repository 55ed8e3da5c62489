"""Fixtures for tests of registered memory: the fixtures of the actor tests, and two processes for each route."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from monarch_backend._core import platform
from monarch_backend._rdma.transfers.engine import engine
from monarch_backend.actor import ActorMesh
from tests.actor.conftest import _fork_server, faults  # noqa: F401
from tests.rdma.actors import ROUTES, two_processes

NEEDS = {"kernel": pytest.mark.needs("process_vm_readv")}
VARIANTS = ("tls",) if platform.IS_PORTABLE else ("mapped", "thread", "tls")
MARKS = {**NEEDS, "verbs": (pytest.mark.verbs, pytest.mark.slow), **dict.fromkeys(VARIANTS, pytest.mark.slow)}
"""Marks of routes in tests that start processes for each case. The default run leaves out the marked routes there."""


def routes(marks: dict[str, Any] = MARKS) -> list[Any]:
    """Return the routes as parameters. The verbs route has a mark, because it needs NICs."""
    return [pytest.param(name, marks=marks.get(name, ())) for name in sorted(ROUTES)]


@pytest.fixture(scope="session", autouse=True)
def _server() -> None:
    """Open this process's listeners and devices before the first test. They stay open, so no test must close them."""
    engine().routes.ways()
    if engine().routes.verbs.unusable() is None:
        engine().routes.verbs.opened().devices()


@pytest.fixture(scope="module", params=routes({**NEEDS, "verbs": pytest.mark.verbs}))
def pair(request: pytest.FixtureRequest) -> Iterator[tuple[ActorMesh, ActorMesh]]:
    """Start an owner of memory and a reader in separate processes, for each route."""
    yield from two_processes(request.param)
