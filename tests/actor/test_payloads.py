"""Payloads of every kind and size, as argument and reply, to one and to many actors. Nothing is shared or leaked."""

from __future__ import annotations

import inspect
import os
import resource
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from monarch_backend._transport.local import links, tuning
from monarch_backend.actor import (
    Actor,
    ActorError,
    ActorMesh,
    Channel,
    DeserializationError,
    Port,
    ProcMesh,
    concurrent_endpoint,
    current_rank,
    endpoint,
    this_host,
)
from tests.actor.actors import pid_of, resident_bytes, running, stopped_processes
from tests.actor.support import PATIENCE

pytestmark = pytest.mark.usefixtures("faults")

KIB, MIB = 1 << 10, 1 << 20
DTYPES = sorted(
    (
        dtype
        for dtype in vars(torch).values()
        if isinstance(dtype, torch.dtype) and not str(dtype).startswith("torch.q")
    ),
    key=str,
)
PLAIN = [
    dtype
    for dtype in dict.fromkeys(DTYPES)
    if not any(
        part in str(dtype) for part in ("bits", "int1", "int2", "int3", "int4", "int5", "int6", "int7", "float4")
    )
    or str(dtype) in ("torch.int16", "torch.int32", "torch.int64", "torch.uint16", "torch.uint32", "torch.uint64")
]


def bytes_of(n: int) -> bytes:
    """Return n bytes of a fixed pattern. Neighbouring bytes differ."""
    return (bytes(range(251)) * (n // 251 + 1))[:n]


def tensor(shape: tuple[int, ...], dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """Return a tensor of this shape whose bytes have a fixed pattern."""
    count = int(np.prod(shape, dtype=np.int64)) * dtype.itemsize
    raw = torch.frombuffer(bytearray(bytes_of(max(count, 1))), dtype=torch.uint8)[:count].clone()
    if dtype is torch.bool:
        raw = raw % 2
    return raw.view(dtype).reshape(shape)


def model() -> nn.Module:
    """Return two layers that share one weight."""
    torch.manual_seed(1)
    made = nn.Sequential(nn.Linear(60, 60), nn.ReLU(), nn.Linear(60, 60))
    made[2].weight = made[0].weight
    return made


def nested() -> Any:
    shared = tensor((5000,))
    array = np.arange(3000.0)
    return {
        "a": [shared, shared, {"deep": (array, array)}],
        "b": (1, "text", None, 2.5, b"bytes", {1, 2}, range(3)),
        "c": [bytes_of(100_000), bytearray(b"x" * 20_000), memoryview(b"view" * 5000)],
    }


PAYLOADS: dict[str, Callable[[], Any]] = {
    "none": lambda: None,
    "scalars": lambda: (1, -(1 << 80), 2.5, 1j, True, "ü€", ""),
    "empty containers": lambda: [(), [], {}, set(), b"", bytearray()],
    "nested": nested,
    "a model with tied weights": model,
    "an exception": lambda: [ValueError("as a value")],
    "a class and a function": lambda: [nn.Linear, bytes_of, lambda x: x + 1],
    "many small tensors": lambda: [tensor((i,)) for i in range(300)],
    "many large tensors": lambda: [tensor((3000 + i,)) for i in range(100)],
    "parameter": lambda: nn.Parameter(tensor((300, 30))),
    "transposed": lambda: tensor((300, 200)).t(),
    "a part of a tensor": lambda: tensor((300, 200))[7:200:3, 5:],
    "expanded": lambda: tensor((1, 200)).expand(500, 200),
    "no dimensions": lambda: tensor(()),
    "requires grad": lambda: tensor((5000,)).requires_grad_(),
    "sparse": lambda: torch.eye(200).to_sparse(),
    "a Fortran array": lambda: np.asfortranarray(np.arange(20_000.0).reshape(100, 200)),
    "a part of an array": lambda: np.arange(60_000).reshape(300, 200)[3::2, 1:],
    "an array of objects": lambda: np.array([1, "two", None], dtype=object),
    "an array of strings": lambda: np.array(["eins", "zwei"] * 2000),
    "a structured array": lambda: np.zeros(2000, dtype=[("a", "i4"), ("b", "f8", (2,))]),
    "a read-only array": lambda: np.frombuffer(bytes_of(40_000), np.uint8),
    "dates": lambda: np.arange("2020-01", "2024-01", dtype="datetime64[D]"),
}
PAYLOADS |= {f"small {dtype}": lambda dtype=dtype: tensor((3, 4), dtype) for dtype in PLAIN}  # type: ignore[misc]
PAYLOADS |= {f"large {dtype}": lambda dtype=dtype: tensor((300, 41), dtype) for dtype in PLAIN}  # type: ignore[misc]
PAYLOADS |= {f"empty {dtype}": lambda dtype=dtype: tensor((3, 0), dtype) for dtype in PLAIN[:3]}  # type: ignore[misc]
# Sizes around each change of route: buffer beside the pickle, through the ring, direct multicast, left in place.
EDGES = [0, 1, 4 * KIB, 8 * KIB, 16 * KIB, 32 * KIB, 64 * KIB, 128 * KIB, MIB, 20 * MIB]
SIZES = sorted({max(0, edge + more) for edge in EDGES for more in (-1, 0, 1)} - {1})
PAYLOADS |= {f"{size} bytes": lambda size=size: bytes_of(size) for size in SIZES}  # type: ignore[misc]
PAYLOADS |= {f"tensor of {size}": lambda size=size: tensor((size,), torch.uint8) for size in SIZES}  # type: ignore[misc]
HUGE = [name for name in PAYLOADS if name.endswith(tuple(str(20 * MIB + more) for more in (-1, 0, 1)))]


def same(a: Any, b: Any) -> bool:
    """Return whether two values have equal types, values and layouts, and share objects in the same places."""
    return _same(a, b, {})


def _same(a: Any, b: Any, known: dict[int, int]) -> bool:
    if type(a) is not type(b):
        return False
    if isinstance(a, (torch.Tensor, np.ndarray, nn.Module)) and known.setdefault(id(a), id(b)) != id(b):
        return False
    if isinstance(a, torch.Tensor):
        if (a.dtype, a.shape, a.requires_grad, a.layout) != (b.dtype, b.shape, b.requires_grad, b.layout):
            return False
        if a.layout is not torch.strided:
            return torch.equal(a.to_dense(), b.to_dense())
        a, b = a.detach().contiguous(), b.detach().contiguous()
        return torch.equal(a.flatten().view(torch.uint8), b.flatten().view(torch.uint8))
    if isinstance(a, np.ndarray):
        described = a.dtype == b.dtype and a.shape == b.shape and a.flags.writeable == b.flags.writeable
        return described and (a.dtype.hasobject or a.tobytes() == b.tobytes()) and bool((a == b).all())
    if isinstance(a, nn.Module):
        return _same(
            dict(a.named_parameters(remove_duplicate=False)), dict(b.named_parameters(remove_duplicate=False)), known
        )
    if isinstance(a, dict):
        return list(a) == list(b) and all(_same(a[key], b[key], known) for key in a)
    if isinstance(a, (list, tuple)):
        return len(a) == len(b) and all(_same(x, y, known) for x, y in zip(a, b, strict=True))
    if isinstance(a, BaseException):
        return a.args == b.args
    if callable(a):
        return bool(a.__qualname__ == b.__qualname__)
    return bool(a == b)


class Carrier(Actor):
    """Actor that checks, makes and keeps payloads."""

    def __init__(self, kept: Any = None) -> None:
        self.kept = kept
        self.list: list[Any] = []

    @endpoint
    def is_payload(self, name: str, value: Any) -> bool:
        return same(value, PAYLOADS[name]())

    @endpoint
    def make(self, name: str) -> Any:
        return PAYLOADS[name]()

    @endpoint
    def echo(self, value: Any) -> Any:
        return value

    @endpoint
    def all_ones(self, value: torch.Tensor) -> int:
        """Return the length of a tensor of ones, and -1 for other tensors."""
        return len(value) if bool((value == 1).all()) else -1

    @endpoint
    def length(self, value: torch.Tensor) -> int:
        return len(value)

    @endpoint
    def ones(self, n: int) -> torch.Tensor:
        return torch.ones(n, dtype=torch.uint8)

    @endpoint
    def keep(self, value: Any) -> None:
        self.kept = value

    @endpoint
    def kept_is(self) -> Any:
        return self.kept

    @endpoint
    def change(self, by: float) -> None:
        """Add to the kept value in place, more on higher ranks."""
        self.kept += by * (current_rank().rank + 1)

    @endpoint
    def add_to_list(self, value: Any) -> int:
        self.list.append(value)
        return len(self.list)

    @endpoint
    def ones_in_list(self) -> list[int]:
        return [int(value.count_nonzero()) for value in self.list]

    @endpoint
    def note(self, value: Any) -> None:
        self.list.append(len(value) if isinstance(value, (bytes, torch.Tensor)) else value)

    @endpoint
    def noted(self) -> list[Any]:
        return self.list

    @endpoint
    def send_and_change(self, port: Port[Any], size: int, times: int) -> None:
        """Send one tensor repeatedly, and change it after each send."""
        value = torch.zeros(size)
        for _ in range(times):
            port.send(value)
            value += 1

    @endpoint
    def resident(self) -> int:
        return resident_bytes()


class AsyncCarrier(Actor):
    @concurrent_endpoint
    async def make(self, name: str) -> Any:
        return PAYLOADS[name]()

    @concurrent_endpoint
    async def is_payload(self, name: str, value: Any) -> bool:
        return same(value, PAYLOADS[name]())


@pytest.fixture(scope="module")
def procs() -> Iterator[ProcMesh]:
    with running({"gpus": 3}) as mesh:
        yield mesh


@pytest.fixture(scope="module")
def carriers(procs: ProcMesh) -> ActorMesh:
    mesh: ActorMesh = procs.spawn("carriers", Carrier)
    return mesh


@pytest.fixture
def fresh(procs: ProcMesh) -> Iterator[ActorMesh]:
    """Yield actors for one test. The values that they keep are freed after it."""
    mesh = procs.spawn("fresh", Carrier)
    yield mesh
    mesh.stop().get(PATIENCE)


@pytest.fixture
def one(carriers: ActorMesh) -> ActorMesh:
    return carriers.slice(gpus=1)


# ---- every kind, every size


@pytest.mark.filterwarnings("ignore:BComplex32 support is experimental")  # torch 2.15 warns
@pytest.mark.parametrize("name", PAYLOADS)
def test_payloads_to_and_from_one_actor_are_equal(one: ActorMesh, name: str) -> None:
    value = PAYLOADS[name]()
    assert one.is_payload.call_one(name, value).get(PATIENCE)
    assert same(one.make.call_one(name).get(PATIENCE), value)


@pytest.mark.parametrize("name", [name for name in PAYLOADS if name not in HUGE[1:]])
def test_payloads_to_and_from_many_actors_are_equal(carriers: ActorMesh, name: str) -> None:
    value = PAYLOADS[name]()
    assert all(carriers.is_payload.call(name, value).get(PATIENCE).values())
    assert all(same(reply, value) for reply in carriers.make.call(name).get(PATIENCE).values())


@pytest.mark.parametrize("name", ["nested", "a model with tied weights", "many large tensors", f"{MIB} bytes"])
def test_payloads_through_ports_streams_and_constructors_are_equal(
    procs: ProcMesh, carriers: ActorMesh, name: str
) -> None:
    expected = PAYLOADS[name]()
    port, receiver = Channel.open()
    carriers.make.send((name,), port=port)
    assert all(same(receiver.recv().get(PATIENCE), expected) for _ in range(3))
    assert all(same(future.get(PATIENCE), expected) for future in carriers.make.stream(name))
    receiver.close()
    built = procs.spawn("built", Carrier, kept=expected)
    assert all(same(kept, expected) for kept in built.kept_is.call().get(PATIENCE).values())
    built.stop().get(PATIENCE)


@pytest.mark.slow
def test_payload_of_several_fragments_is_equal(fresh: ActorMesh) -> None:
    n = links.MOST_IN_ONE + 1000 * KIB + 7
    assert n > 256 * MIB
    one = fresh.slice(gpus=2)
    large = torch.ones(n, dtype=torch.uint8)
    assert one.all_ones.call_one(large).get(PATIENCE) == n
    del large
    reply = one.ones.call_one(n).get(PATIENCE)
    assert len(reply) == n
    assert bool((reply == 1).all())


def test_code_sent_by_value_keeps_its_file_name(one: ActorMesh) -> None:
    """A function and a nested function go to the actor and back. Tracebacks and ``inspect`` need their file name."""

    def outer() -> Callable[[], str]:
        def inner() -> str:
            return "found"

        return inner

    came = one.echo.call_one(outer).get(PATIENCE)
    for copy, original in ((came, outer), (came(), outer())):
        assert copy.__code__ is not original.__code__
        assert copy.__code__.co_filename == __file__
        assert inspect.getsource(copy) == inspect.getsource(original)


def test_undecodable_argument_is_an_error_and_the_actor_lives(one: ActorMesh) -> None:
    with pytest.raises(ActorError, match="can't rebuild an object") as caught:
        one.echo.call_one(Unreadable()).get(PATIENCE)
    assert isinstance(caught.value.__cause__, DeserializationError)
    one.note.broadcast(Unreadable())
    assert one.echo.call_one(1).get(PATIENCE) == 1


def test_undecodable_reply_is_an_error(one: ActorMesh) -> None:
    future = one.echo.call_one(ReadableOnce())
    for _ in range(2):
        with pytest.raises(DeserializationError, match="can't rebuild an object"):
            future.get(PATIENCE)
    assert one.echo.call_one(1).get(PATIENCE) == 1


class Unreadable:
    def __reduce__(self) -> Any:
        return _refuse, ()


def _refuse() -> None:
    raise OSError("not here")


class ReadableOnce:
    """An object that can be unpickled in the actor and not in the process that gets the reply."""

    def __reduce__(self) -> Any:
        return _only_elsewhere, (os.getpid(), ReadableOnce._home)

    _home = os.getpid()


def _only_elsewhere(sender: int, home: int) -> Any:
    if os.getpid() == home:
        raise OSError("not here")
    again = ReadableOnce()
    ReadableOnce._home = home
    return again


# ---- payloads sent in pieces


@pytest.fixture(scope="module")
def in_pieces() -> Iterator[ProcMesh]:
    """Yield processes that send payloads above 64 KiB in pieces."""
    with running({"gpus": 3}, bootstrap=send_in_pieces) as mesh:
        yield mesh


def send_in_pieces() -> None:
    tuning.MOST_IN_ONE = 64 * KIB


@pytest.fixture
def pieces(in_pieces: ProcMesh, monkeypatch: pytest.MonkeyPatch) -> Iterator[ActorMesh]:
    monkeypatch.setattr(tuning, "MOST_IN_ONE", 64 * KIB)
    mesh = in_pieces.spawn("pieces", Carrier)
    yield mesh
    mesh.stop().get(PATIENCE)


IN_PIECES = [
    "nested",
    "many large tensors",
    "many small tensors",
    "a model with tied weights",
    f"{64 * KIB - 1} bytes",
    f"{64 * KIB} bytes",
    f"{64 * KIB + 1} bytes",
    f"tensor of {MIB}",
    f"{MIB + 1} bytes",
    "empty containers",
]


@pytest.mark.parametrize("name", IN_PIECES)
def test_fragments_are_reassembled(pieces: ActorMesh, name: str) -> None:
    value = PAYLOADS[name]()
    assert pieces.slice(gpus=0).is_payload.call_one(name, value).get(PATIENCE)
    assert all(pieces.is_payload.call(name, value).get(PATIENCE).values())
    assert same(pieces.slice(gpus=1).make.call_one(name).get(PATIENCE), value)
    assert all(same(reply, value) for reply in pieces.make.call(name).get(PATIENCE).values())
    assert same(pieces.slice(gpus=2).echo.call_one(value).get(PATIENCE), value)


def test_fragmented_message_keeps_its_place_in_order(pieces: ActorMesh) -> None:
    sizes = [10, 200_000, 20, 70_000, 30, 65_536, 65_537, 500_000, 1, 80_000] * 3
    for i, size in enumerate(sizes):
        (pieces if i % 2 else pieces.slice(gpus=slice(0, 3))).note.broadcast(
            bytes_of(size) if i % 3 else tensor((size,))
        )
    assert list(pieces.noted.call().get(PATIENCE).values()) == [sizes] * 3


def test_fragmented_messages_of_many_threads_arrive(pieces: ActorMesh) -> None:
    def send(i: int) -> None:
        one = pieces.slice(gpus=i % 3)
        for n in range(4):
            value = torch.full((100_000 + 10 * i + n,), i, dtype=torch.uint8)
            results.append(torch.equal(one.echo.call_one(value).get(PATIENCE), value))

    results: list[bool] = []
    threads = [threading.Thread(target=send, args=(i,)) for i in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(PATIENCE)
    assert results == [True] * 24


def test_fragmented_replies_of_actors_of_one_process_arrive(
    in_pieces: ProcMesh, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tuning, "MOST_IN_ONE", 64 * KIB)
    proc = in_pieces.slice(gpus=0)
    meshes = [proc.spawn(f"m{i}", (Carrier, AsyncCarrier)[i % 2]) for i in range(6)]
    names = [f"tensor of {MIB}", "many large tensors", f"{MIB + 1} bytes"]
    replies = [(name, mesh.make.call_one(name)) for name in names for mesh in meshes]
    arguments = [mesh.is_payload.call_one(name, PAYLOADS[name]()) for name in names for mesh in meshes]
    assert all(same(reply.get(PATIENCE), PAYLOADS[name]()) for name, reply in replies)
    assert all(argument.get(PATIENCE) for argument in arguments)
    for mesh in meshes:
        mesh.stop().get(PATIENCE)


def test_fragmented_messages_in_both_directions_arrive(pieces: ActorMesh, in_pieces: ProcMesh) -> None:
    pairs = in_pieces.spawn("pairs", Exchanging)
    value = tensor((300_000,), torch.uint8)
    calls = [pairs.slice(gpus=i).exchange.call_one(pairs, value, 5) for i in range(3)]
    assert [call.get(PATIENCE) for call in calls] == [15 * 300_000] * 3
    pairs.stop().get(PATIENCE)


class Exchanging(Actor):
    """Actor that calls all actors of its mesh, while they do the same."""

    @concurrent_endpoint
    async def exchange(self, mesh: ActorMesh, value: torch.Tensor, times: int) -> int:
        total = 0
        for _ in range(times):
            total += sum(len(reply) for reply in (await mesh.give_back.call(value)).values())
        return total

    @concurrent_endpoint
    async def give_back(self, value: torch.Tensor) -> torch.Tensor:
        return value


# ---- nothing is shared

ELEMENTS = [10, 3000, 10_000, 300_000]
"""Numbers of float32: in the pickle, beside it, through shared memory, and large enough to stay in shared memory."""


@pytest.mark.parametrize("size", ELEMENTS)
@pytest.mark.parametrize("kind", ["tensor", "array"])
def test_payload_of_each_rank_is_independent(fresh: ActorMesh, size: int, kind: str) -> None:
    value: Any = torch.zeros(size) if kind == "tensor" else np.zeros(size, np.float32)
    fresh.keep.broadcast(value)
    fresh.change.call(1).get(PATIENCE)
    assert float(value.sum()) == 0
    for rank, kept in enumerate(fresh.kept_is.call().get(PATIENCE).values()):
        assert (kept == rank + 1).all()
    value += 9
    fresh.change.call(1).get(PATIENCE)
    for rank, kept in enumerate(fresh.kept_is.call().get(PATIENCE).values()):
        assert (kept == 2 * (rank + 1)).all()


@pytest.mark.parametrize("size", ELEMENTS)
def test_reply_belongs_to_the_caller(fresh: ActorMesh, size: int) -> None:
    fresh.keep.call(torch.zeros(size)).get(PATIENCE)
    replies = list(fresh.kept_is.call().get(PATIENCE).values())
    replies[0] += 5
    assert [float(reply.max()) for reply in replies] == [5, 0, 0]
    assert [float(kept.max()) for kept in fresh.kept_is.call().get(PATIENCE).values()] == [0, 0, 0]
    fresh.change.call(1).get(PATIENCE)
    assert [float(reply.max()) for reply in replies] == [5, 0, 0]


@pytest.mark.parametrize("size", ELEMENTS)
@pytest.mark.parametrize("to", ["one", "many"])
def test_argument_can_be_changed_after_the_call_returns(fresh: ActorMesh, size: int, to: str) -> None:
    target = fresh if to == "many" else fresh.slice(gpus=0)
    value, array, raw = torch.ones(size), np.ones(size), bytearray(b"1" * size)
    pids = [pid_of(fresh.slice(gpus=i)) for i in range(3)]
    with stopped_processes(*pids):  # the processes are stopped, so none has read the message
        future = target.echo.call((value, array, raw))
        value.zero_()
        array[:] = 0
        raw[:] = b"0" * size
    for reply in future.get(PATIENCE).values():
        assert float(reply[0].sum()) == size
        assert float(reply[1].sum()) == size
        assert reply[2] == b"1" * size


@pytest.mark.parametrize("size", ELEMENTS)
def test_sent_value_can_be_changed_after_the_send(fresh: ActorMesh, size: int) -> None:
    port, receiver = Channel.open()
    fresh.slice(gpus=0).send_and_change.broadcast(port, size, 10)
    for i in range(10):
        assert (receiver.recv().get(PATIENCE) == i).all()
    receiver.close()


def test_tensor_sent_twice_in_a_message_arrives_as_one(one: ActorMesh) -> None:
    value = torch.zeros(10_000)
    first, second, other = one.echo.call_one((value, value, value.clone())).get(PATIENCE)
    assert first is second
    first += 1
    assert float(other.sum()) == 0


# ---- memory is released


def grown(before: dict[str, int], after: dict[str, int]) -> dict[str, int]:
    return {name: (after[name] - before[name]) // MIB for name in before}


def resident_bytes_by_process(mesh: ActorMesh) -> dict[str, int]:
    ranks = {f"rank {i}": size for i, size in enumerate(mesh.resident.call().get(PATIENCE).values())}
    return {"caller": resident_bytes(), **ranks}


@pytest.mark.parametrize("way", ["argument", "reply", "argument to all", "reply of all", "port", "broadcast"])
@pytest.mark.needs("/proc")
def test_memory_of_messages_is_released(fresh: ActorMesh, way: str) -> None:
    large = torch.ones(16 * MIB, dtype=torch.uint8)
    one = fresh.slice(gpus=0)
    port, receiver = Channel.open()

    def exchange(times: int) -> None:
        for _ in range(times):
            if way == "argument":
                assert one.length.call_one(large).get(PATIENCE) == 16 * MIB
            elif way == "reply":
                assert len(one.ones.call_one(16 * MIB).get(PATIENCE)) == 16 * MIB
            elif way == "argument to all":
                fresh.keep.call(large).get(PATIENCE)
            elif way == "reply of all":
                assert all(len(reply) == 16 * MIB for reply in fresh.ones.call(16 * MIB).get(PATIENCE).values())
            elif way == "port":
                port.send(large)
                assert len(receiver.recv().get(PATIENCE)) == 16 * MIB
            else:
                fresh.keep.broadcast(large)
            fresh.keep.call(None).get(PATIENCE)  # one message at a time: the arena would keep the memory of several

    exchange(10)
    before = resident_bytes_by_process(fresh)
    exchange(200 if way in ("argument", "reply") else 60)
    # The limit is a tenth of the bytes that a process has sent or received. Which pages of its arena a process touches
    # depends on the order of releases.
    assert max(grown(before, resident_bytes_by_process(fresh)).values()) < 96
    receiver.close()


def test_receiver_that_keeps_all_messages_does_not_block_the_sender() -> None:
    """The sender's arena has 64 MiB and the receiver keeps 160 MiB, so part of it must be copied."""
    with this_host().spawn_procs({"gpus": 1}, bootstrap=small_arena) as procs:
        one = procs.spawn("small", Carrier)
        kept = [one.ones.call_one(8 * MIB).get(PATIENCE) for _ in range(20)]
        for i, value in enumerate(kept):
            assert int(value.count_nonzero()) == 8 * MIB
            value.fill_(i)
        assert [int(value[0]) for value in kept] == list(range(20))
        # The value goes back to its own sender, whose reply needs the small arena again.
        assert torch.equal(one.echo.call_one(kept[3]).get(PATIENCE), kept[3])


def test_full_arena_blocks_the_sender_until_memory_is_free() -> None:
    with this_host().spawn_procs({"gpus": 2}, bootstrap=small_arena) as procs:
        mesh = procs.spawn("small", Carrier)
        mesh.initialized.get(PATIENCE)
        source, sink = mesh.slice(gpus=0), mesh.slice(gpus=1)
        relay = procs.slice(gpus=0).spawn("relay", Relay)
        with stopped_processes(pid_of(sink)):
            sent = relay.send.call_one(sink, 8 * MIB, 20)
            assert source.echo.call_one("others go on").get(PATIENCE) == "others go on"
            assert not sent.done()
        assert sent.get(PATIENCE) == 20
        assert sink.ones_in_list.call_one().get(PATIENCE) == [8 * MIB] * 20


class Relay(Actor):
    @endpoint
    def send(self, to: ActorMesh, size: int, times: int) -> int:
        futures = [to.add_to_list.call_one(torch.ones(size, dtype=torch.uint8)) for _ in range(times)]
        return int(futures[-1].get(PATIENCE))


def small_arena() -> None:
    links.ARENA_BYTES = 64 * MIB
    tuning.MOST_IN_ONE = 16 * MIB


class Limited(Actor):
    """Actor that limits the address space of its process to little more than it uses."""

    @endpoint
    def limit(self, spare: int) -> None:
        pages = int(Path("/proc/self/statm").read_text().split()[0])
        resource.setrlimit(resource.RLIMIT_AS, (pages * resource.getpagesize() + spare, resource.RLIM_INFINITY))

    @endpoint
    def length(self, value: Any) -> int:
        return len(value)

    @endpoint
    def zeros(self, size: int) -> bytes:
        return bytes(size)

    @endpoint
    def ask(self, other: ActorMesh, size: int) -> str:
        return repr(other.zeros.call_one(size).exception(PATIENCE))


@pytest.mark.slow
@pytest.mark.parametrize("size", [300 * MIB, 5 << 30])
def test_message_above_the_memory_limit_is_an_error_and_both_sides_continue(size: int) -> None:
    """The message is an argument, then a result. A process without a limit still receives it."""
    with this_host().spawn_procs({"gpus": 2}) as procs:
        mesh = procs.spawn("limited", Limited)
        limited, other = mesh.slice(gpus=0), mesh.slice(gpus=1)
        # the two processes have mapped each other's memory
        assert limited.ask.call_one(other, 1).get(PATIENCE) == "None"
        limited.limit.call_one(64 * MIB).get(PATIENCE)
        for value in (bytes(size), np.zeros(size, dtype=np.uint8)):  # never written to: no page is committed
            error = limited.length.call_one(value).exception(4 * PATIENCE)
            assert isinstance(error, ActorError) and isinstance(error.__cause__, DeserializationError), error
            assert "MemoryError" in str(error) and "RLIMIT_AS" in str(error), error
        assert "RLIMIT_AS" in limited.ask.call_one(other, size).get(4 * PATIENCE)
        # Failed messages return their credit. Each message takes a third of the window.
        for _ in range(4 if size < 1 << 30 else 0):
            assert limited.length.call_one(bytes(size)).exception(PATIENCE) is not None
        assert list(mesh.length.call(b"abc").get(PATIENCE).values()) == [3, 3]
        if size < 1 << 30:
            assert other.length.call_one(bytes(size)).get(PATIENCE) == size


@pytest.mark.needs("/proc")
def test_memory_of_a_dead_process_is_released() -> None:
    before = resident_bytes()
    for _ in range(3):
        with this_host().spawn_procs({"gpus": 1}) as procs:
            one = procs.spawn("c", Carrier)
            kept = [one.ones.call_one(8 * MIB).get(PATIENCE) for _ in range(8)]
        assert all(int(value[-1]) == 1 for value in kept)  # the memory stays valid after its sender has ended
        del kept
    assert resident_bytes() - before < 64 * MIB
