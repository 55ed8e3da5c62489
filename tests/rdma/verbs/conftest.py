"""Two hosts on two devices that reach each other, once with each package for verbs."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from monarch_backend.rdma.verbs import available
from monarch_backend.rdma.verbs._devices import survey
from tests.rdma.verbs.peers import Peer

Start = Callable[..., Peer]


@pytest.fixture(params=["pyverbs", "ibverbs"])
def binding(request: pytest.FixtureRequest) -> str:
    """The package; skips where it or a device is missing."""
    name = str(request.param)
    if importlib.util.find_spec(name) is None:
        pytest.skip(f"{name} is not installed")
    if reason := available():
        pytest.skip(reason)
    if len({port.device for port in survey() if port.active}) < 2:
        pytest.skip("two verbs devices are needed; make test-rdma has them")
    return name


@pytest.fixture
def devices() -> list[str]:
    return sorted({port.device for port in survey() if port.active})


@pytest.fixture
def start(binding: str) -> Iterator[Start]:
    """``start(name, device)``: one more host."""
    peers: list[Peer] = []

    def make(name: str, device: str, **settings: Any) -> Peer:
        peers.append(Peer(name, device, binding, settings))
        return peers[-1]

    yield make
    for peer in peers:
        peer.close()


@pytest.fixture
def owner(start: Start, devices: list[str]) -> Peer:
    return start("owner", devices[1])


@pytest.fixture
def asking(start: Start, devices: list[str]) -> Peer:
    return start("asking", devices[0])
