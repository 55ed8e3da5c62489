"""Matrix of routes, kinds of memory, sizes and operations. All routes give the same results and errors."""

from __future__ import annotations

import itertools
import pickle

import numpy as np
import pytest
import torch

from monarch_backend import rdma
from monarch_backend._verbs import Region
from monarch_backend.actor import ActorError, ActorMesh
from monarch_backend.rdma import DroppedError, RDMABuffer, RDMAError
from tests.rdma.actors import case, no_python_in, pattern

pytestmark = pytest.mark.usefixtures("faults")

Pair = tuple[ActorMesh, ActorMesh]
KIB, MIB = 1 << 10, 1 << 20
SIZES = [1, 7, 8, 4 * KIB - 1, 64 * KIB, MIB + 3, 5 * MIB]
KINDS = ["tensor", "slice", "array", "memoryview"]
DTYPES = [
    torch.bool, torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64, torch.float16, torch.bfloat16,
    torch.float32, torch.float64, torch.complex64, torch.complex128, torch.float8_e4m3fn, torch.float8_e5m2,
    torch.uint16, torch.uint32, torch.uint64,
]  # fmt: skip


def test_transfer_takes_the_expected_route(pair: Pair, request: pytest.FixtureRequest) -> None:
    owner, reader = pair
    buffer = owner.own.call_one("tensor", 64).get()
    assert reader.backend.call_one(buffer).get() == case(request.node.callspec.params["pair"]).name
    assert owner.backend.call_one(buffer).get() == "this process"
    assert reader.way.call_one(buffer).get() == case(request.node.callspec.params["pair"]).way
    owner.drop.call_one(buffer).get()


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("kind", KINDS)
def test_read_and_write_transfer_the_bytes(pair: Pair, kind: str, size: int) -> None:
    owner, reader = pair
    buffer = owner.own.call_one(kind, size).get()
    assert buffer.size() == len(buffer) == size
    assert reader.read.call_one(buffer, kind).get()
    reader.write.call_one(buffer, kind, 9).get()
    assert owner.shows.call_one(size, 9).get()
    owner.drop.call_one(buffer).get()


@pytest.mark.parametrize("by_action", [False, True], ids=["read_into", "action"])
def test_read_into_larger_target_leaves_the_rest_unchanged(pair: Pair, by_action: bool) -> None:
    owner, reader = pair
    for kind, size in itertools.product(("tensor", "array"), (1, 4 * KIB - 1, MIB + 3)):
        buffer = owner.own.call_one("tensor", size).get()
        assert reader.read_into_larger.call_one(buffer, kind, by_action).get() == (True, True), (kind, size)
        owner.drop.call_one(buffer).get()


@pytest.mark.slow
@pytest.mark.parametrize("size", [64 * MIB, 256 * MIB])
def test_large_memory_is_transferred(pair: Pair, size: int) -> None:
    test_read_and_write_transfer_the_bytes(pair, "tensor", size)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_every_dtype_is_transferred(pair: Pair, dtype: torch.dtype) -> None:
    owner, reader = pair
    value = pattern(48 * dtype.itemsize)
    value = (value % 2 if dtype is torch.bool else value).view(dtype).view(6, 8)
    buffer = owner.own_value.call_one(value).get()
    found = reader.read_value.call_one(buffer, torch.zeros_like(value)).get()
    assert torch.equal(found.view(torch.uint8), value.view(torch.uint8))
    owner.drop.call_one(buffer).get()


def test_other_kinds_of_memory_are_transferred(pair: Pair) -> None:
    owner, reader = pair
    for value in (np.arange(30.0).reshape(5, 6), bytearray(b"bytes of a bytearray"), np.array(3.5), torch.tensor(2.5)):
        buffer = owner.own_value.call_one(value).get()
        found = reader.read_value.call_one(buffer, bytearray(buffer.size())).get()
        assert bytes(found) == (
            value.numpy().tobytes() if isinstance(value, torch.Tensor) else bytes(memoryview(value))
        )
        owner.drop.call_one(buffer).get()


def test_readonly_memory_can_be_read_only(pair: Pair) -> None:
    owner, reader = pair
    buffer = owner.own_value.call_one(b"bytes").get()
    assert reader.read_value.call_one(buffer, bytearray(5)).get() == b"bytes"
    with pytest.raises(ActorError, match="read-only"):
        reader.write_value.call_one(buffer, b"other").get()
    with pytest.raises(ActorError, match="read-only"):
        reader.add.call_one(owner.own_value.call_one(bytes(16)).get(), 1).get()
    owner.drop.call_one(buffer).get()


def test_parts_of_a_buffer_are_transferred(pair: Pair) -> None:
    owner, reader = pair
    size = 300 * KIB
    buffer = owner.own.call_one("tensor", size).get()
    for start, stop in [(0, 1), (1, 2), (size - 1, size), (5, 4000), (4095, 4097), (1000, size)]:
        part = pickle.loads(pickle.dumps(buffer[start:stop]))
        into = reader.read_value.call_one(part, torch.zeros(stop - start + 3, dtype=torch.uint8)).get()
        assert torch.equal(into[: stop - start], pattern(size)[start:stop])
        assert into[stop - start :].tolist() == [0, 0, 0]
    part = buffer[100:200][10:20]
    reader.write_value.call_one(part, bytes(10)).get()
    expected = pattern(size).clone()
    expected[110:120] = 0
    assert torch.equal(owner.value.call_one().get(), expected)
    owner.drop.call_one(buffer).get()


def test_many_parts_in_one_action_are_transferred(pair: Pair) -> None:
    owner, reader = pair
    size = 2 * MIB
    buffer = owner.own.call_one("tensor", size).get()
    ranges = [
        (start, min(size, start + length))
        for start, length in zip(range(0, size, 5003), itertools.cycle([1, 100, 5003]))
    ]
    assert reader.scatter.call_one(buffer, ranges).get()
    owner.drop.call_one(buffer).get()


def test_atomics_return_the_old_value(pair: Pair) -> None:
    owner, reader = pair
    buffer = owner.own_value.call_one(_counters(pair)).get()
    assert reader.add.call_one(buffer, 5, 3, 8).get() == [10, 15, 20]
    assert reader.add.call_one(buffer, -1, 1, 0).get() == [0]
    assert reader.swap.call_one(buffer, 25, 7, 8).get() == 25
    assert reader.swap.call_one(buffer, 25, 9, 8).get() == 7
    assert owner.add.call_one(buffer, 1, 1, 8).get() == [7], "its owner, too"
    assert owner.value.call_one().get().tolist() == [-1, 8, 20]
    for offset, text in ((4, "multiple of 8"), (20, "are not in a buffer"), (-8, "are not in a buffer")):
        with pytest.raises(ActorError, match=text):
            reader.add.call_one(buffer, 1, 1, offset).get()
    owner.drop.call_one(buffer).get()


def _counters(pair: Pair) -> torch.Tensor:
    return torch.tensor([0, 10, 20])


def test_concurrent_adds_are_all_counted(pair: Pair) -> None:
    owner, reader = pair
    buffer = owner.own_value.call_one(torch.zeros(1, dtype=torch.int64)).get()
    calls = [each.add.call_one(buffer, 1, 300) for each in (owner, reader)]
    seen = [number for call in calls for number in call.get()]
    assert sorted(seen) == list(range(600))
    owner.drop.call_one(buffer).get()


def test_owner_runs_no_python_during_transfers(pair: Pair) -> None:
    owner, reader = pair
    buffer = owner.own.call_one("tensor", 3 * MIB).get()
    numbers = owner.own_value.call_one(torch.zeros(1, dtype=torch.int64)).get()
    assert reader.read.call_one(buffer).get(), "they have met"
    reader.add.call_one(numbers, 1).get()
    with no_python_in(owner):
        for _ in range(2):
            assert reader.read.call_one(buffer).get(30)
            assert len(reader.add.call_one(numbers, 1).get(30)) == 1
    for each in (buffer, numbers):
        owner.drop.call_one(each).get()


def test_dropped_buffer_is_refused(pair: Pair) -> None:
    owner, reader = pair
    before = owner.drop.call_one(owner.own.call_one("tensor", 8).get()).get()
    buffer = owner.own.call_one("tensor", 100).get()
    again = owner.own.call_one("tensor", 100).get()
    assert owner.drop.call_one(buffer).get() == before + 1
    other = owner.own.call_one("tensor", 100, 5).get()  # in the same slot of the table
    for call in (reader.read.call_one(buffer), reader.write.call_one(buffer), reader.add.call_one(buffer, 1)):
        with pytest.raises(ActorError, match="not registered any more") as raised:
            call.get()
        assert isinstance(raised.value.__cause__, DroppedError)
    assert owner.drop.call_one(buffer).get() == before + 2, "dropping it twice does nothing"
    assert reader.read.call_one(again).get()
    assert reader.read.call_one(other, "tensor", 5).get()
    owner.drop.call_one(again).get()
    owner.drop.call_one(other).get()


def test_buffer_dropped_by_another_process_is_refused(pair: Pair) -> None:
    owner, reader = pair
    buffer = owner.own.call_one("tensor", 100).get()
    assert reader.read.call_one(buffer).get()
    reader.drop.call_one(buffer).get()
    assert reader.read_for_ever.call_one(buffer).get(20).startswith("DroppedError")


def test_forged_handle_is_refused(pair: Pair, request: pytest.FixtureRequest) -> None:
    owner, reader = pair
    buffer = owner.own.call_one("tensor", 100).get()
    for forged, text in _forged(buffer, request.node.callspec.params["pair"] == "verbs"):
        for call in (reader.read.call_one(forged), reader.write.call_one(forged), reader.add.call_one(forged, 1)):
            with pytest.raises(ActorError, match=text):
                call.get()
    for start, size in ((0, 101), (100, 1), (1 << 40, 8), ((1 << 64) - 8, 16)):
        wide = RDMABuffer._of(buffer._handle._replace(offset=start, nbytes=size))
        with pytest.raises(ActorError, match="outside"):
            reader.read.call_one(wide).get()
        with pytest.raises(ActorError, match="outside"):
            reader.write.call_one(wide).get()
    assert owner.shows.call_one(100, 1).get(), "nothing was written"
    owner.drop.call_one(buffer).get()


def _forged(buffer: RDMABuffer, by_nic: bool) -> list[tuple[RDMABuffer, str]]:
    handle = buffer._handle
    if by_nic:  # the NIC checks its own keys
        region = Region.from_bytes(handle.verbs)
        region.keys[:] = [key ^ 0x5A00 for key in region.keys]
        return [(RDMABuffer._of(handle._replace(verbs=region.to_bytes())), "remote access error")]
    slot, epoch, key = handle.ticket
    tickets = [
        ((slot, epoch, key ^ 1), "key"),
        ((slot, epoch + 2, key), "not registered"),
        ((slot, epoch - 2, key), "not registered"),
        ((slot + 1, epoch, key), "not registered|key"),
        ((1 << 31, epoch, key), "key"),
        ((slot, epoch, 0), "key"),
    ]
    return [(RDMABuffer._of(handle._replace(ticket=ticket)), text) for ticket, text in tickets]


def test_errors_have_the_same_type_on_every_route() -> None:
    assert issubclass(DroppedError, RDMAError)
    assert issubclass(rdma.OwnerLostError, RDMAError)
