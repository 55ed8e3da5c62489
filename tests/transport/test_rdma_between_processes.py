"""Large frames between two processes with NICs: over fake NICs, and over two devices where they exist.

Rank 0 calls rank 1. test_rdma_send.py has the failures that one process can show.
"""

from __future__ import annotations

import functools
import os
import random
import signal
import subprocess
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from monarch_backend._transport.network import connection_manager
from monarch_backend._transport.network.connection import PeerConnection, Timeouts
from monarch_backend._transport.network.tls import Tls
from monarch_backend._verbs import shared_engine
from tests.process_group import fake_nics
from tests.process_group.test_rdma_p2p import CABLE
from tests.rdma.verbs.peers import two_devices, until
from tests.support.ranks import run_ranks
from tests.transport.connected_hosts import Side, reset

MIB = 1 << 20
SECRET = bytes(range(32))
BOUNDS = Timeouts(heartbeat=0.2, silence=10.0, patience=30.0, pause=0.05)

Run = Callable[..., list[Any]]


class End:
    """One rank: its side, its connection to the other rank, and its fake NIC if it has one."""

    def __init__(self, side: Side, remote: PeerConnection, fabric: Any) -> None:
        self.side, self.remote, self.fabric = side, remote, fabric

    def __repr__(self) -> str:
        remote, session = self.remote, self.remote.session
        where = f"{session.received} received, {session.acknowledged} of {session.sent} acknowledged"
        return f"{remote}: {remote.lost or remote.trouble}; {where}, {len(remote.waiting)} wait; {remote.nics}"

    def send(self, name: bytes, nbytes: int) -> None:
        self.side.tcp.send(self.remote, name, [b"pickle", numbers(nbytes, len(name))], 1)

    def receive(self, name: bytes, nbytes: int) -> None:
        assert until(lambda: not (self.side.frames.empty() and self.side.lost.empty()), 60), self
        assert not self.side.frames.empty(), self
        got, body = self.side.frames.get()
        assert got == name
        assert body[6:] == numbers(nbytes, len(name)), f"{name!r}: other bytes"
        assert body[:6] == b"pickle"

    def meet(self) -> None:
        """Exchange frames until NICs carry them in both directions."""
        self.send(b"meet", MIB)
        self.receive(b"meet", MIB)
        assert until(lambda: self.remote.nics.ready, 30)
        self.send(b"met", 0)
        self.receive(b"met", 0)


def numbers(nbytes: int, seed: int) -> bytes:
    """Return bytes with a period of 251, so that no two blocks of a power-of-two size are equal."""
    one = bytes((i * 7 + seed) & 0xFF for i in range(251))
    return (one * (nbytes // 251 + 1))[:nbytes]


@pytest.fixture(params=["pretended", pytest.param("verbs", marks=pytest.mark.verbs)])
def run(request: pytest.FixtureRequest, tmp_path: Path) -> Run:
    """Return ``run(fn, *args)``, which runs ``fn`` in two new, connected processes. It returns the results by rank."""
    devices = two_devices() if request.param == "verbs" else []

    def start(fn: Callable[..., Any], *args: Any) -> list[Any]:
        return run_ranks(_rank, 2, fn, args, devices, str(tmp_path / "port"), backend=None)

    return start


def _rank(rank: int, _: str, fn: Callable[..., Any], args: tuple[Any, ...], devices: list[str], port: str) -> Any:
    fabric = None
    if devices:
        os.environ["MONARCH_RDMA_DEVICES"] = devices[rank]
    else:
        fabric = fake_nics.install()
    side = Side(SECRET, bounds=BOUNDS, offers_rdma=True, tls=functools.cache(Tls.of_secret))
    if rank == 1:
        _, number = side.tcp.listen("127.0.0.1")
        Path(port + "~").write_text(str(number))
        Path(port + "~").rename(port)
    else:
        assert until(lambda: os.path.exists(port), 30)
        side.tcp.call(("127.0.0.1", int(Path(port).read_text())), SECRET)
    end = End(side, side.up.get(timeout=60), fabric)
    end.meet()
    result = fn(rank, end, *args)
    side.tcp.close()
    assert shared_engine._engine is None
    assert fabric is None or all(nic.opened == nic.closed for nic in fabric.nics)
    return result


def _sizes(rank: int, end: End) -> tuple[int, int]:
    sizes = [0, 1, MIB - 1, MIB, MIB + 1, 5 * MIB + 3, 16 * MIB]
    for nbytes in sizes:
        name = b"%d" % nbytes
        if rank == 0:
            end.send(name, nbytes)
            end.receive(name, nbytes)
        else:
            end.receive(name, nbytes)
            end.send(name, nbytes)
    end.send(b"over", 0)
    end.receive(b"over", 0)
    return end.remote.nics.frames_sent, end.remote.nics.read


def test_sizes_there_and_back(run: Run) -> None:
    for rdma_parts, read in run(_sizes):
        assert (rdma_parts, read) == (4, 4)


def _storm(rank: int, end: End, count: int) -> int:
    connection_manager.RECONNECT_AFTER_CLOSE_S = 20.0  # a handshake takes more than a second in the virtual machine
    mine = [random.Random(1000 * rank + i).choice((0, 3000, MIB, 3 * MIB)) for i in range(count)]
    other = [random.Random(1000 * (1 - rank) + i).choice((0, 3000, MIB, 3 * MIB)) for i in range(count)]
    for number, nbytes in enumerate(mine):
        end.send(b"%d" % number, nbytes)
        if number % 20 == 10 * rank:
            end.side.tcp.call_soon(lambda: reset(end.side, end.remote))
    for number, nbytes in enumerate(other):
        end.receive(b"%d" % number, nbytes)
    assert until(lambda: not (end.remote.waiting or end.remote.nics.rdma_send or end.remote.session._kept), 30)
    return end.remote.nics.frames_sent


def test_broken_connections_lose_no_frame_under_load(run: Run) -> None:
    """Each frame arrives once, in order and unchanged, though connections break. RDMA carries most of them."""
    assert all(rdma_parts > 10 for rdma_parts in run(_storm, 60))


def _killed(rank: int, end: End, reader: bool) -> None:
    if rank == 1 and end.fabric is not None:
        end.fabric.at_once = False  # its NIC stops working
    if rank == 0:
        for number in range(4):
            end.send(b"%d" % number, 8 * MIB)
        if not reader:
            assert until(lambda: end.remote.nics.rdma_send is not None and end.remote.nics.rdma_send.number > 0)
            os.kill(os.getpid(), signal.SIGKILL)
        began = time.monotonic()
        assert end.side.lost.get(timeout=30) is end.remote
        assert time.monotonic() - began < 20
        assert until(lambda: end.remote.nics.rdma_send is None)
        return
    if reader:
        assert until(lambda: end.remote.nics.reading is not None, 30)
        os.kill(os.getpid(), signal.SIGKILL)
    assert end.side.lost.get(timeout=30) is end.remote
    taken = end.side.frames.qsize()
    for number in range(taken):
        end.receive(b"%d" % number, 8 * MIB)
    assert taken < 4


@pytest.mark.parametrize("reader", [True, False])
def test_sender_killed_during_an_rdma_read(run: Run, reader: bool) -> None:
    """The other rank notices as early as without NICs. It has every complete frame, and leaves no memory registered."""
    with pytest.raises(AssertionError) as told:
        run(_killed, reader)
    text = str(told.value)
    assert text.startswith(f"--- rank {int(reader)}:\nthe rank died") and "--- rank" not in text[3:], text


def _cut(rank: int, end: End) -> tuple[int, float]:
    began = 0.0
    for number in range(3):
        if rank == 0 and number == 1:
            subprocess.run([CABLE, "down"], check=True)
        if number == 1:
            began = time.monotonic()
        end.send(b"%d" % number, 4 * MIB)
        end.receive(b"%d" % number, 4 * MIB)
    took, session = time.monotonic() - began, end.remote.session
    # closing the connection would drop unacknowledged frames
    assert until(lambda: session.acknowledged == session.sent, 60), end
    return end.remote.nics.read, took


@pytest.mark.verbs
def test_messages_over_a_cut_link_end_in_time(run: Run, request: pytest.FixtureRequest) -> None:
    """Frames go over TCP, because the hosts still reach each other by another network than that of the NICs."""
    if not CABLE.exists() or "pretended" in request.node.name:
        pytest.skip("only the guest has a cable that can be cut")
    try:
        for read, seconds in run(_cut):
            assert read <= 2 and seconds < 60
    finally:
        subprocess.run([CABLE, "up"], check=True)
