"""Fixtures for actor tests: one shared fork server, and a recorder in place of ``unhandled_fault_hook``."""

from __future__ import annotations

from collections.abc import Iterator
from importlib.util import find_spec

import pytest

import monarch_backend.actor as ma
from monarch_backend.actor import MeshFailure, this_host
from tests.actor.support import Faults


@pytest.fixture(scope="session", autouse=True)
def _fork_server() -> Iterator[None]:
    """Start the fork server before all tests. It lives until the end, so it is no leak of the first test.

    Failures that arrive after the end of their test are recorded, so that they do not end pytest, and reported at the
    end.
    """
    if find_spec("uvloop"):
        import uvloop

        uvloop.new_event_loop().close()  # libuv opens a pipe with its first loop and shares it with all later ones
    strays: list[MeshFailure] = []
    ending, ma.unhandled_fault_hook = ma.unhandled_fault_hook, strays.append
    procs = this_host().spawn_procs({"gpus": 1})
    procs.initialized.get(120)
    procs.stop().get(30)
    yield
    ma.unhandled_fault_hook = ending
    assert not strays, "failures that no test has waited for: " + "; ".join(failure.report() for failure in strays)


@pytest.fixture
def faults(monkeypatch: pytest.MonkeyPatch) -> Iterator[Faults]:
    """Record the failures that reach the program. A failure that the test does not take fails the test."""
    told = Faults()
    monkeypatch.setattr(ma, "unhandled_fault_hook", told)
    yield told
    told.none()
