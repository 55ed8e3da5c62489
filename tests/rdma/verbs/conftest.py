"""Fixtures: two hosts on two connected devices, once with each verbs package."""

from __future__ import annotations

import importlib.util
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.rdma.verbs.peers import Peer, two_devices

Start = Callable[..., Peer]
CABLE = Path("/run/cable")
"""Program of the test guest that takes the cable down or up."""


@pytest.fixture(params=["pyverbs", "ibverbs"])
def binding(request: pytest.FixtureRequest) -> str:
    """Return the package's name. Skips if the package or a device is missing."""
    name = str(request.param)
    if importlib.util.find_spec(name) is None:
        pytest.skip(f"{name} is not installed")
    two_devices()
    return name


@pytest.fixture
def devices() -> list[str]:
    return two_devices()


@pytest.fixture
def start(binding: str) -> Iterator[Start]:
    """Yield ``start(name, device)``, which starts one more host."""
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


@pytest.fixture
def cable() -> Iterator[Callable[[str], None]]:
    """Yield ``cable``: ``cable("down")`` cuts the link. The link is up again at the end."""
    if not CABLE.exists():
        pytest.skip("only the guest has a cable that can be cut")

    def do(what: str) -> None:
        subprocess.run([CABLE, what], check=True)

    yield do
    do("up")
