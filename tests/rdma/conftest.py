"""Fixtures for the tests of registered memory: those of actors, and two processes for each route."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from typing import Any

import pytest

from monarch_backend.actor import ActorMesh, this_host
from monarch_backend.rdma._transfers import engine
from tests.actor.conftest import _fork_server, faults  # noqa: F401
from tests.rdma.actors import ROUTES, Process, take


def routes() -> list[Any]:
    """Of this machine; that over verbs has a mark, since it needs NICs."""
    return [pytest.param(name, marks=pytest.mark.verbs if name == "verbs" else ()) for name in sorted(ROUTES)]


@pytest.fixture(scope="session", autouse=True)
def _server() -> None:
    """What this process listens with comes with the first who asks, and stays: no test leaves it behind."""
    engine().routes.ways()


@pytest.fixture(scope="module", params=routes())
def pair(request: pytest.FixtureRequest) -> Iterator[tuple[ActorMesh, ActorMesh]]:
    """An owner of memory and a reader in processes of their own, on each route."""
    bootstrap = functools.partial(take, request.param)
    procs = this_host().spawn_procs({"gpus": 2}, bootstrap=bootstrap, name=f"memory {request.param}")
    both = procs.spawn("process", Process, request.param)
    both.pid.call().get()
    yield both.slice(gpus=0), both.slice(gpus=1)
    procs.stop().get(30)
