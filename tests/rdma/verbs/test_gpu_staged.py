"""GPU memory over NICs that cannot access it, through pinned memory of both hosts.

GPUs are fakes. NICs are fakes in the default run (cross_process_nics.py), and real if two devices exist.
tests/rdma/test_gpu_memory.py tests what all routes share.
"""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Iterator
from typing import Any

import msgspec
import pytest
import torch

from monarch_backend import _native
from monarch_backend._actor.runtime import program
from monarch_backend._rdma.registrations import registry
from monarch_backend._rdma.routes import pinned_pool
from monarch_backend._rdma.routes.gpu_staged import Piece, cut, piece_size
from monarch_backend._rdma.routes.pinned_pool import PinnedLease
from monarch_backend._rdma.routes.protocol import (
    DONE,
    DROPPED,
    NO_STAGING,
    OUT_OF_RANGE,
    READ_ONLY,
    REFUSED,
    cancel_scope,
)
from monarch_backend._rdma.routes.selection import VerbsWithTcpFallback
from monarch_backend._rdma.transfers.engine import engine
from monarch_backend._verbs import Region, VerbsError
from monarch_backend.actor import ActorError, ActorMesh, endpoint
from monarch_backend.rdma import RDMABuffer
from tests.actor.actors import pid_of, stopped_processes
from tests.actor.support import Faults
from tests.rdma import pretended_gpu
from tests.rdma.actors import as_tensor, fill, no_python_in, pattern, two_processes
from tests.rdma.test_gpu_memory import DeviceProcess
from tests.rdma.verbs import cross_process_nics
from tests.rdma.verbs.peers import until

MIB = 1 << 20
SLOT = pinned_pool.SLOT_BYTES
SIZES = [1, 77, 4096, 512 << 10, SLOT, SLOT + 1, 9 * MIB + 5]
Pair = tuple[ActorMesh, ActorMesh]


class StagedProcess(DeviceProcess):
    """A process that can change its fake NIC and count its leases of pinned memory."""

    @endpoint
    def nic(self, **behaviour: Any) -> None:
        cross_process_nics.behaviour.__dict__.update(behaviour)

    @endpoint
    def lent(self) -> int:
        return len(engine().routes.lender._lent)

    @endpoint
    def lends_no_more(self) -> None:
        pinned_pool.MAX_BORROWERS = 0

    @endpoint
    def may_take_tcp(self, buffer: RDMABuffer) -> None:
        """Allow TCP as the fallback, as between hosts without MONARCH_RDMA_TRANSPORT=verbs."""
        routes = engine().routes
        far = VerbsWithTcpFallback(routes._gpu_nics, routes._tcp, routes._warn_of_tcp, program().run_in_thread)
        routes._chosen[buffer._handle.token, True, True] = far

    @endpoint
    def many(self, buffers: list[RDMABuffer], rounds: int) -> bool:
        """Write and read all buffers at the same time, ``rounds`` times."""
        for seed in range(rounds):
            sources = [fill(self.mine("tensor", b.size()), pattern(b.size(), seed)) for b in buffers]
            for future in [b.write_from(s) for b, s in zip(buffers, sources, strict=True)]:
                future.get(60)
            into = [self.mine("tensor", b.size()) for b in buffers]
            for future in [b.read_into(i) for b, i in zip(buffers, into, strict=True)]:
                future.get(60)
            if not all(torch.equal(as_tensor(i), pattern(i.nbytes, seed)) for i in into):
                return False
        return True

    @endpoint
    def words_with_a_server(self) -> list[int]:
        """Send staging requests to a server in this process: see
        test_late_or_invalid_staging_requests_have_no_effect.
        """
        return _words_with_a_server()


@pytest.fixture(scope="module", params=["gpu nic", pytest.param("gpu verbs", marks=pytest.mark.verbs)])
def pair(request: pytest.FixtureRequest) -> Iterator[Pair]:
    pretended_gpu.library()
    yield from two_processes(request.param, StagedProcess)


@pytest.fixture
def fresh(faults: Faults) -> Iterator[Pair]:
    """Processes that a test may kill, with fake NICs whose behaviour it can change."""
    pretended_gpu.library()
    yield from two_processes("gpu nic", StagedProcess)


# ---- transfers


@pytest.mark.parametrize("size", SIZES)
def test_staged_reads_and_writes(pair: Pair, size: int) -> None:
    owner, reader = pair
    buffer = owner.own.call_one("slice", size).get()
    assert reader.backend.call_one(buffer).get() == "verbs"
    assert reader.read.call_one(buffer, "slice").get()
    reader.write.call_one(buffer, "slice", 9).get()
    assert owner.shows.call_one(size, 9).get()
    owner.drop.call_one(buffer).get()


def test_many_at_once(pair: Pair) -> None:
    """More transfers at once than there are slots and connections for staging requests."""
    owner, reader = pair
    buffers = [owner.own.call_one("tensor", size).get() for size in (SIZES * 2)]
    assert reader.many.call_one(buffers, 4).get(120)
    assert owner.lent.call_one().get() == 1
    assert owner.counts.call_one().get()[pretended_gpu.PINNED] <= 1
    assert reader.counts.call_one().get()[pretended_gpu.PINNED] <= pinned_pool.MAX_IDLE_BUFFERS
    for buffer in buffers:
        owner.drop.call_one(buffer).get()


def test_the_owner_runs_no_python_meanwhile(pair: Pair) -> None:
    owner, reader = pair
    buffer = owner.own.call_one("tensor", 3 * MIB).get()
    assert reader.read.call_one(buffer).get(), "they have met"
    with no_python_in(owner):
        for _ in range(2):
            assert reader.read.call_one(buffer).get(30)
    owner.drop.call_one(buffer).get()


def test_reason_for_staging_is_logged(fresh: Pair) -> None:
    owner, reader = fresh
    buffer = owner.own.call_one("tensor", 100).get()
    (said,) = reader.debug_lines.call_one(buffer).get()
    assert "verbs, staged through pinned memory of both hosts: cannot register 100 bytes of a GPU with across0" in said
    assert "by peer memory: Bad address" in said and "by dma-buf: " in said
    owner.drop.call_one(buffer).get()


@pytest.mark.parametrize("size", [100, 9 * MIB + 5])
def test_staging_when_one_nic_reaches_its_gpu(fresh: Pair, size: int) -> None:
    """The owner's NIC can register GPU memory. The reader's NIC cannot, which the first transfer finds out."""
    owner, reader = fresh
    owner.nic.call_one(takes_gpus=True).get()
    buffer = owner.own.call_one("tensor", size).get()
    said = reader.debug_lines.call_one(buffer).get()
    assert len(said) == 2 and said[0].endswith(": verbs")
    assert f"verbs, staged through pinned memory of both hosts: cannot register {size} bytes of a GPU" in said[1]
    assert reader.read.call_one(buffer).get()
    reader.write.call_one(buffer, "tensor", 9).get()
    assert owner.shows.call_one(size, 9).get()
    owner.nic.call_one(takes_gpus=False).get()
    reader.nic.call_one(takes_gpus=True).get()
    again = owner.own.call_one("tensor", size).get()
    assert reader.read.call_one(again).get(), "the other way round"
    for each in (buffer, again):
        owner.drop.call_one(each).get()


# ---- failures


@pytest.mark.parametrize("write", [False, True], ids=["read", "write"])
def test_a_connection_of_the_nics_that_breaks(fresh: Pair, write: bool) -> None:
    owner, reader = fresh
    buffer = owner.own.call_one("tensor", 9 * MIB).get()
    assert reader.read.call_one(buffer).get(), "they have met"
    for fails in (1, 2):
        reader.nic.call_one(fails=fails).get()
        assert reader.failure.call_one(buffer, write).get() == ""
    reader.write.call_one(buffer, "tensor", 3).get()
    assert reader.read.call_one(buffer, "tensor", 3).get()


@pytest.mark.verbs
def test_a_cable_is_cut(faults: Faults, cable: Any) -> None:
    """Staging requests still arrive, but the transfer fails without a timeout. A transfer after the repair is
    correct.
    """
    pretended_gpu.library()
    processes = two_processes("gpu verbs", StagedProcess)
    owner, reader = next(processes)
    buffer = owner.own.call_one("tensor", 9 * MIB).get()
    assert reader.read.call_one(buffer).get(60)
    cable("down")
    reading = reader.read_for_ever.call_one(buffer)
    assert reading.get(90).startswith("RDMAError")
    cable("up")
    assert reader.read.call_one(buffer).get(60)
    reader.write.call_one(buffer, "tensor", 3).get(60)
    assert owner.shows.call_one(9 * MIB, 3).get()
    assert next(processes, None) is None


def test_stuck_nic_times_out_and_later_transfers_are_right(fresh: Pair) -> None:
    """A transfer that times out or is cancelled releases its memory, and later transfers are correct."""
    owner, reader = fresh
    buffer = owner.own.call_one("tensor", 9 * MIB).get()
    reader.nic.call_one(silent=True).get()
    with pytest.raises(ActorError, match=r"was not done within 0\.3 s"):
        reader.read.call_one(buffer, "tensor", 1, 0.3).get(30)
    assert reader.cancel_after.call_one(buffer, 0.2).get(30) == "CancelledError"
    reader.nic.call_one(silent=False).get()
    assert reader.read.call_one(buffer).get(30)
    reader.write.call_one(buffer, "tensor", 3).get(30)
    assert reader.read.call_one(buffer, "tensor", 3).get(30)


def test_cancelled_read_of_a_stopped_owner_leaves_the_next_right(fresh: Pair) -> None:
    """The owner answers a cancelled request late. The reader must not take this answer for that of the next request."""
    owner, reader = fresh
    first, second = owner.own.call_one("tensor", 9 * MIB, 1).get(), owner.own.call_one("tensor", 9 * MIB, 2).get()
    assert reader.read.call_one(first).get(), "they have met"
    for _ in range(4):
        with stopped_processes(pid_of(owner)):
            assert reader.cancel_after.call_one(first, 0.1).get(30) == "CancelledError"
        assert reader.read.call_one(second, "tensor", 2).get(30)
    assert reader.read.call_one(first).get()


@pytest.mark.parametrize("why", ["no way", "no locked memory", "nothing is lent"])
def test_tcp_is_used_where_staging_is_impossible(fresh: Pair, why: str) -> None:
    """Transfers use TCP, and the owner's leases end."""
    owner, reader = fresh
    buffer = owner.own.call_one("tensor", 5 * MIB).get()
    if why == "no way":
        owner.nic.call_one(unreachable=True).get()
    elif why == "no locked memory":
        reader.nic.call_one(memory=MIB).get()
    else:
        owner.lends_no_more.call_one().get()
    assert reader.failure.call_one(buffer).get().startswith("RDMAError"), "MONARCH_RDMA_TRANSPORT=verbs"
    reader.may_take_tcp.call_one(buffer).get()
    assert reader.read.call_one(buffer).get()
    assert reader.backend.call_one(buffer).get() == "tcp"
    assert owner.lent.call_one().get() == 0
    reader.write.call_one(buffer, "tensor", 3).get()
    assert owner.shows.call_one(5 * MIB, 3).get()


def test_lease_of_a_dead_reader_is_taken_back(fresh: Pair, faults: Faults) -> None:
    owner, reader = fresh
    buffer = owner.own.call_one("tensor", 9 * MIB).get()
    assert reader.read.call_one(buffer).get()
    assert owner.lent.call_one().get() == 1
    reading = reader.read_for_ever.call_one(buffer)
    assert not reading.done()
    os.kill(pid_of(reader), signal.SIGKILL)
    assert until(lambda: owner.lent.call_one().get() == 0, 20)
    assert until(lambda: owner.counts.call_one().get()[pretended_gpu.PINNED] == 0, 20), "and its memory is free"
    owner.drop.call_one(buffer).get()
    faults.next()


# ---- parts of the route


def test_pieces() -> None:
    assert list(cut([(0, 100, 10), (50, 200, 3)], 8)) == [
        Piece([(0, 100, 8)], 8),
        Piece([(8, 108, 2), (50, 200, 3)], 5),
    ]
    many = list(cut([(i, i, 1) for i in range(600)], 1000))
    assert [len(piece.segments) for piece in many] == [256, 256, 88]
    assert [piece_size(total, 4, 2 * MIB) for total in (1, MIB, 5 * MIB + 1, 100 * MIB)] == [
        512 << 10,
        512 << 10,
        5 * MIB // 4 + 1,
        2 * MIB,
    ]


def _borrowed() -> PinnedLease:
    region = Region(1, 4096, 4 * SLOT, True, [7])
    return PinnedLease(msgspec.msgpack.encode(pinned_pool._LeaseDescription(region.to_bytes(), 5, SLOT, 4, "because")))


def test_freed_slots_go_to_the_waiting_transfer() -> None:
    borrowed = _borrowed()
    assert (borrowed.key, borrowed.why, borrowed.region.nbytes) == (5, "because", 4 * SLOT)
    assert borrowed.take(3, cancel_scope(None)) == [0, 1, 2]
    assert borrowed.take(3, cancel_scope(None)) == [3]
    assert borrowed.take(1, cancel_scope(0.0)) == [] and not borrowed.is_short
    got: list[list[int]] = []
    waiting = threading.Thread(target=lambda: got.append(borrowed.take(2, cancel_scope(20.0))))
    waiting.start()
    assert until(lambda: borrowed.is_short, 20)
    borrowed.give(1)
    waiting.join(20)
    assert got == [[1]] and not borrowed.is_short
    with pytest.raises(VerbsError, match="no staging memory"):
        PinnedLease(b"nonsense")


def _words_with_a_server() -> list[int]:
    """Send valid and invalid requests, and check the slot's bytes at the end. Return the refusals."""
    array = fill(pretended_gpu.Array(1000), pattern(1000))
    buffer, fixed = RDMABuffer(array), RDMABuffer(pretended_gpu.Array(8, readonly=True))
    memory = _native.PinnedMemory(0, 4 * 512)
    identity = _native.MemoryIdentity("a" * 32, b"s" * 32)
    server = _native.MemoryServer(registry().native, identity)
    server.add_staging(77, memory, 512)
    client = _native.MemoryClient("127.0.0.1", server.listen("127.0.0.1"), identity, "a" * 32)
    connection, opened = client.open_staging_connection(cancel_scope(20.0))
    assert connection is not None and opened[0] == DONE
    found: list[int] = []

    def words(handle: Any, write: bool, ranges: Any, key: int, slot: int, sequence: int) -> None:
        assert connection.send_request(write, handle.ticket, ranges, key, slot, sequence)[0] == DONE
        outcome, refusal = connection.receive_reply()[:2]
        assert (outcome == REFUSED) == (refusal != 0)
        found.append(refusal)

    mine, other = buffer._handle, fixed._handle
    words(mine, False, [(0, 0, 100), (500, 0, 12)], 77, 1, 5)
    for wrong in ((78, 1, 6), (77, 4, 6), (77, 255, 6), (77, 1, 5), (77, 1, 4)):
        words(mine, False, [(0, 0, 100)], *wrong)
    words(mine, False, [(0, 0, 513)], 77, 1, 6)
    words(mine, False, [(900, 0, 101)], 77, 1, 6)
    words(other, True, [(0, 0, 8)], 77, 1, 7)
    words(mine, True, [(600, 0, 100)], 77, 1, 8)
    expected = pattern(1000).clone()
    expected[600:700] = expected[:100]
    assert torch.equal(array.content(), expected)
    buffer.drop()
    words(mine, False, [(0, 0, 100)], 77, 1, 9)
    server.remove_staging(77)
    words(mine, False, [(0, 0, 100)], 77, 1, 10)
    held = bytes(memoryview(memory)[512 : 512 + 112])  # type: ignore[arg-type]
    assert held == pattern(1000)[:100].numpy().tobytes() + pattern(1000)[500:512].numpy().tobytes()
    connection.close()
    fixed.drop()
    client.close()
    server.close()
    return found


def test_late_or_invalid_staging_requests_have_no_effect(pair: Pair) -> None:
    """Requests with an unknown slot, outside the registration, or that write to read-only memory are also refused."""
    _, reader = pair
    wrong = [NO_STAGING] * 6 + [OUT_OF_RANGE, READ_ONLY]
    assert reader.words_with_a_server.call_one().get() == [0, *wrong, 0, DROPPED, NO_STAGING]
