"""Fixtures for actor tests: one shared fork server, and a replacement for the end of the program."""

from __future__ import annotations

from collections.abc import Iterator
from importlib.util import find_spec

import pytest

import monarch_backend.actor as ma
from monarch_backend.actor import MeshFailure, this_host
from tests.actor.support import Faults


@pytest.fixture(scope="session", autouse=True)
def _fork_server() -> Iterator[None]:
    """The server comes with the first processes and stays: it is nothing that a test leaves behind.

    No failure may end pytest, also not one that comes after its test: those are found here.
    """
    if find_spec("uvloop"):
        import uvloop

        uvloop.new_event_loop().close()  # libuv opens a pipe for all loops to come
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
    """Failures that reach the program, in place of its end. Those that a test does not expect fail it."""
    told = Faults()
    monkeypatch.setattr(ma, "unhandled_fault_hook", told)
    yield told
    told.none()
