"""Large tensors between actors of two hosts with NICs, over two verbs devices of the virtual machine."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.hosts.support import World
from tests.rdma.verbs.peers import two_devices, until

pytestmark = pytest.mark.verbs


@pytest.fixture
def devices() -> list[str]:
    return two_devices()


@pytest.fixture
def machine(tmp_path: Path) -> Iterator[World]:
    """This machine, on which the gateways of the controller and of the host have one device each."""
    with World(None, tmp_path) as made:
        yield made


@pytest.mark.parametrize("forced", ["", "tcp"])
def test_tensors_between_actors_go_over_nics(
    capfd: pytest.CaptureFixture[str], machine: World, devices: list[str], forced: str
) -> None:
    """NICs carry large tensors in both directions, unless the host's setting forces TCP.

    The controller's gateway logs to the standard error of this process.
    """
    there = {"MONARCH_RDMA_DEVICES": devices[1], "MONARCH_DEBUG": "1", "MONARCH_RDMA_TRANSPORT": forced}
    here = {"MONARCH_RDMA_DEVICES": devices[0], "MONARCH_DEBUG": "1"}
    daemon = machine.daemon(1, env=there)
    machine.run("tensors", daemon.address, env=here, module="nic_programs")
    words, said = "large frames to", capfd.readouterr().err
    if forced:
        assert words not in said + daemon.output
    else:
        assert until(lambda: "verbs" in _after(words, daemon.output)), daemon.output
        assert "verbs" in _after(words, said), said


def _after(words: str, text: str) -> str:
    return text.partition(words)[2].partition("\n")[0]
