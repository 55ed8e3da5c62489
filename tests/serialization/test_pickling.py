"""Serialization of every kind of object, by every route, in one process and between two."""

from __future__ import annotations

import array
import collections
import dataclasses
import enum
import functools
import gc
import itertools
import pickle
import random
import re
import subprocess
import sys
import textwrap
import threading
import types
import typing
import weakref
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from datetime import datetime, timezone
from decimal import Decimal
from fractions import Fraction
from pathlib import Path
from typing import Any

import cloudpickle
import numpy as np
import pytest
import torch
from torch import nn

from monarch_backend._serialization import pickling, tensors
from monarch_backend._serialization.pickling import (
    OUT_OF_BAND,
    DeserializationError,
    SerializationError,
    dumps,
    dumps_in_band,
    loads,
    try_dumps_in_band,
)
from tests.support.ranks import run_script

Point = collections.namedtuple("Point", "x y")


class Colour(enum.Enum):
    RED = 1
    BLUE = "b"


@dataclasses.dataclass
class Record:
    name: str
    values: Any = None


class Slotted:
    __slots__ = ("a", "b")

    def __init__(self, a: object, b: object) -> None:
        self.a, self.b = a, b

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Slotted) and (self.a, self.b) == (other.a, other.b)

    __hash__ = None  # type: ignore[assignment]


class Words(dict):  # type: ignore[type-arg]
    pass


class Broken:
    """Raises a given exception when it is pickled or unpickled."""

    def __init__(self, sending: Exception | None = None, receiving: str = "") -> None:
        self.sending, self.receiving = sending, receiving

    def __getstate__(self) -> object:
        if self.sending is not None:
            raise self.sending
        return {"receiving": self.receiving}

    def __setstate__(self, state: dict[str, str]) -> None:
        raise ValueError(state["receiving"])


def joined(body: Any) -> bytes:
    return b"".join(body) if isinstance(body, list) else body


def direct(obj: object) -> Any:
    """Pass the buffers on without a copy."""
    body, buffers = dumps(obj)
    return loads(joined(body), buffers)


def copied(obj: object) -> Any:
    """Copy everything to other, writable memory, as a socket does."""
    body, buffers = dumps(obj)
    return loads(bytearray(joined(body)), None if buffers is None else [bytearray(b) for b in buffers])


def read_only(obj: object) -> Any:
    """Pass everything on as read-only memory, as a read-only mapping does."""
    body, buffers = dumps(obj)
    return loads(memoryview(joined(body)), None if buffers is None else [bytes(b) for b in buffers])


def shifted(obj: object) -> Any:
    """Copy the buffers to odd addresses."""
    body, buffers = dumps(obj)
    if buffers is None:
        return loads(joined(body), None)
    moved = [memoryview(bytearray(len(b) + 1))[1:] for b in buffers]
    for new, old in zip(moved, buffers, strict=True):
        new[:] = old
    return loads(joined(body), moved)


def in_band(obj: object) -> Any:
    return loads(dumps_in_band(obj), None)


ROUTES = [direct, copied, read_only, shifted, in_band]
every_route = pytest.mark.parametrize("route", ROUTES, ids=lambda route: route.__name__)


# --- plain objects


PLAIN = [
    None,
    True,
    -(1 << 200),
    1.5,
    float("inf"),
    "é\ud800",
    "x" * 100_000,
    b"",
    b"y" * 5000,
    b"z" * 200_000,
    bytearray(b"w" * 200_000),
    array.array("d", range(10)),
    range(3),
    3 + 4j,
    (1, (2, [3, {"a": (4, {5, 6})}])),
    ((1, "x"), {"k": [1.0, None], "d": {"e": ()}}),
    list(range(1000)),
    {(1, 2): frozenset({3})},
    {"b": b"b" * 70_000, 2: "short"},
    Fraction(1, 3),
    Decimal("1.25"),
    datetime(2025, 1, 2, tzinfo=timezone.utc),
    Path("/tmp"),
    Point(1, "b"),
    Colour.RED,
    Record("r", [1, {2}]),
    Slotted(1, "b"),
    Words(a=1),
    collections.OrderedDict(a=1),
    collections.defaultdict(list, a=[1]),
    collections.deque([1, 2], maxlen=3),
    int,
    Record,
    len,
    functools.reduce,
    type(None),
    type(...),
    ...,
    NotImplemented,
    list[int],
    typing.Callable[[int], str],
    torch.float32,
    torch.Size([1, 2]),
    torch.device("cpu"),
    torch.strided,
    np.dtype("i4"),
    np.float64(1.5),
    np.datetime64("2025-01-01"),
]


@pytest.mark.parametrize("value", PLAIN, ids=lambda value: f"{type(value).__name__}-{str(value)[:12]!a}")
def test_plain_objects(value: object) -> None:
    for route in ROUTES:
        for obj in (value, ((value,), {"key": value}), [value, (value, {"k": [value]})]):
            result = route(obj)
            assert result == obj
            assert type(result) is type(obj)
        assert type(route((value,))[0]) is type(value)


def test_fast_path_takes_exact_builtin_values_only() -> None:
    class Loud(int):
        pass

    short: list[Any] = [1, None, "s" * 10**6, b"b", (1, [2, {"a": 3}]), ((1, "x"), {}), ((), {"k": [()]}), {1: {2: 3}}]
    long: list[Any] = [
        Loud(1),
        b"b" * 5000,
        bytearray(),
        {1, 2},
        Colour.RED,
        Point(1, 2),
        {Loud(1): 1},
        [[[[[1]]]]],
        list(range(100)),
        dict.fromkeys(range(100)),
        Words(),
        int,
        len,
    ]
    assert [x for x in short if not pickling._is_short((x,), 3)] == []
    assert [x for x in long if pickling._is_short((x,), 3)] == []


def test_a_list_that_contains_itself() -> None:
    knot: list[Any] = [1]
    knot.append(knot)
    result = direct((knot, {}))[0]
    assert result[1] is result


def test_one_object_twice_is_one_object_at_the_receiver() -> None:
    shared = Record("s", torch.zeros(4))
    first, second, tensor = direct((shared, [shared], shared.values))
    assert first is second[0]
    assert first.values is tensor


@every_route
def test_large_bytes_are_not_copied(route: Callable[[object], Any]) -> None:
    big = random.Random(1).randbytes(100_000)
    for obj in (big, ((big, 1), {}), ((), {"a": [big]}), Record("r", big)):
        body, buffers = dumps(obj)
        assert isinstance(body, list)
        assert buffers is None
        assert sum(chunk is big for chunk in body) == 1
        assert sum(map(len, body)) < len(big) + 500  # type: ignore[arg-type]
        assert route(obj) == obj


# --- memoryviews


@every_route
@pytest.mark.parametrize("size", [0, 1, 100, OUT_OF_BAND, 100_000])
def test_memoryviews(size: int, route: Callable[[object], Any]) -> None:
    data = bytes(range(256)) * (size // 256 + 1)
    for base in (data[:size], bytearray(data[:size])):
        result = route(memoryview(base))
        assert type(result) is memoryview
        assert result == base
        assert result.readonly is isinstance(base, bytes)
        every_other = route(memoryview(base)[::-2])
        assert every_other == base[::-2]
        assert every_other.readonly is isinstance(base, bytes)


@every_route
def test_memoryviews_with_a_shape(route: Callable[[object], Any]) -> None:
    grid = memoryview(np.arange(6000, dtype="i4")).cast("B").cast("i", (60, 100))
    result = route(grid)
    assert (result.format, result.shape, result.tolist()) == ("i", (60, 100), grid.tolist())
    point = memoryview(np.array(2.5)).cast("B").cast("d", ())
    assert route(point).tolist() == 2.5
    assert route(memoryview(np.asfortranarray(np.ones((40, 50))))).tolist() == np.ones((40, 50)).tolist()


def test_a_cycle_with_a_message_can_be_collected() -> None:
    """An exception whose frames hold the sent objects is such a cycle. Older Pythons crash on exported views."""
    code = """
import gc
from monarch_backend._serialization.pickling import dumps
gc.collect()
for base in (bytearray(10_000), memoryview(bytearray(10_000)).cast("i", (50, 50))):
    view = memoryview(base)
    cycle = [view, dumps({"payload": view})[1][0]]
    cycle.append(cycle)
    del view, cycle
    gc.collect()
print("collected")
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stdout, done.stderr) == (0, "collected\n", "")


def test_a_memoryview_is_not_copied_and_one_of_records_is_refused() -> None:
    base = bytearray(OUT_OF_BAND)
    _, buffers = dumps(memoryview(base))
    assert buffers is not None
    base[0] = 7
    assert buffers[0][0] == 7
    with pytest.raises(SerializationError, match=r"send view\.cast\('B'\)"):
        dumps(memoryview(np.zeros(3, dtype=[("a", "i4"), ("b", "f8")])))


@every_route
def test_pickle_buffers(route: Callable[[object], Any]) -> None:
    for size in (10, OUT_OF_BAND):
        assert bytes(route(pickle.PickleBuffer(bytearray(b"q" * size)))) == b"q" * size


# --- NumPy's arrays


DTYPES = [
    "b1",
    "i1",
    "u2",
    "i4",
    "u8",
    "f2",
    "f4",
    "f8",
    "g",
    "F",
    "D",
    "S3",
    "U5",
    "V7",
    "M8[ns]",
    "m8[D]",
    ">i4",
    ">f8",
]
STRUCTURED = [[("a", "i4"), ("b", "f8", (2,))], [("when", "M8[s]"), ("n", "U3")]]
SHAPES = [(), (0,), (3, 0, 2), (1,), (5,), (7, 1, 3), (4, 6, 5), (40, 60)]


def filled(dtype: Any, shape: tuple[int, ...]) -> np.ndarray[Any, Any]:
    dtype = np.dtype(dtype)
    count = int(np.prod(shape, dtype=int))
    rng = np.random.default_rng(count)
    if dtype.kind == "U":
        values = ["".join(chr(c) for c in rng.integers(97, 122, 3)) for _ in range(count)]
        return np.array(values, dtype=dtype).reshape(shape)
    if dtype.kind in "bSVMmiu" or dtype.names:
        data = rng.integers(0, 2 if dtype.kind == "b" else 90, count * dtype.itemsize).astype("u1")
        return np.frombuffer(data.tobytes(), dtype=dtype).reshape(shape).copy()
    return rng.integers(-50, 50, count).astype(dtype).reshape(shape)


def layouts(base: np.ndarray[Any, Any]) -> Iterator[tuple[str, np.ndarray[Any, Any]]]:
    yield "C", base
    yield "F", np.asfortranarray(base)
    if base.ndim == 3:
        yield "permuted", base.transpose(1, 0, 2)
    if base.ndim:
        yield "every other", base[..., ::2]
        yield "reversed", base[::-1]
        yield "a column", base[..., :1]
        yield "broadcast", np.broadcast_to(base, (3, *base.shape))


def same_array(a: np.ndarray[Any, Any], b: np.ndarray[Any, Any]) -> None:
    assert type(a) is type(b)
    assert (a.dtype, a.shape) == (b.dtype, b.shape)
    assert a.dtype.metadata == b.dtype.metadata
    assert a.tobytes() == b.tobytes()


@pytest.mark.parametrize("dtype", [*DTYPES, *STRUCTURED], ids=str)
def test_arrays(dtype: Any) -> None:
    for route, shape in itertools.product(ROUTES, SHAPES):
        for name, value in layouts(filled(dtype, shape)):
            result = route((value, {"layout": name}))[0]
            same_array(result, value)
            assert result.flags.writeable is value.flags.writeable, (route, name)
            if value.flags.forc:
                assert result.strides == value.strides, (route, name)


@every_route
def test_arrays_that_go_numpys_own_way(route: Callable[[object], Any]) -> None:
    values: list[Any] = [
        np.array([None, "a", Fraction(1)], dtype=object),
        np.array([(1, [2])], dtype=[("a", "i4"), ("b", object)]),
        np.zeros(3, dtype="V0"),
        np.zeros(2, dtype="U0"),
        np.rec.array([(1, 2.0)], dtype=[("a", "i4"), ("b", "f8")]),
        np.ma.masked_array([1, 2, 3], mask=[0, 1, 0]),
        np.array(["a", "bc" * 50], dtype=np.dtypes.StringDType()),
        np.array([1], dtype=np.dtype("i4", metadata={"unit": "m"})),
    ]
    for value in values:
        result = route(value)
        assert type(result) is type(value)
        assert result.dtype == value.dtype
        assert result.dtype.metadata == value.dtype.metadata
        assert result.tolist() == value.tolist()


@pytest.mark.parametrize("dtype", [*DTYPES, *STRUCTURED], ids=str)
def test_dense_arrays_are_not_copied(dtype: Any) -> None:
    base = filled(dtype, (16, 32, 64))
    for value in (
        base,
        np.asfortranarray(base),
        base.transpose(2, 0, 1),
        base[3:7],
        base.reshape(-1)[5:].reshape(-1, 1),
    ):
        body, buffers = dumps(((value,), {}))
        assert buffers is not None
        assert [b.nbytes for b in buffers] == [value.nbytes]
        assert len(joined(body)) < 700
        sent = np.frombuffer(buffers[0], "u1")
        assert np.shares_memory(sent, value)
        assert sent.ctypes.data == value.ctypes.data
        result = loads(body, buffers)[0][0]
        assert np.shares_memory(result, value)
        same_array(result, value)


def test_a_read_only_buffer_is_copied_because_the_array_must_be_writable() -> None:
    body, buffers = dumps(np.ones(5000))
    assert buffers is not None
    frozen = bytes(buffers[0])
    result = loads(body, [frozen])
    result[0] = 9
    assert np.frombuffer(frozen)[0] == 1


def test_small_arrays_stay_in_the_pickle() -> None:
    below, above = np.zeros(OUT_OF_BAND - 1, "u1"), np.zeros(OUT_OF_BAND, "u1")
    assert dumps(below)[1] is None
    _, buffers = dumps([below, above, below])
    assert buffers is not None
    assert [b.nbytes for b in buffers] == [OUT_OF_BAND]
    assert [(b.format, b.ndim, b.c_contiguous) for b in buffers] == [("B", 1, True)]


# --- torch's tensors


def _knows_copies(dtype: torch.dtype) -> bool:
    """Return False for the quantized types and those of a few bits, which torch cannot copy."""
    return dtype.itemsize == 16 or not re.search(r"\.(u?int[1-7]|bits.*|q.*|float4.*)$", str(dtype))


ALL = sorted({v for v in vars(torch).values() if isinstance(v, torch.dtype)}, key=str)
USUAL = [dtype for dtype in ALL if _knows_copies(dtype)]


def random_tensor(dtype: torch.dtype, shape: tuple[int, ...]) -> torch.Tensor:
    count = int(np.prod(shape, dtype=int))
    data = torch.randint(0, 2 if dtype == torch.bool else 255, (count * dtype.itemsize,), dtype=torch.uint8)
    return data.view(dtype).reshape(shape) if count else torch.empty(shape, dtype=dtype)


def raw(tensor: torch.Tensor) -> bytes:
    """Return the elements' bytes in logical order, for dtypes without ``==``."""
    tensor = tensor.detach().resolve_conj().resolve_neg()
    return tensor.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()


def same_tensor(a: torch.Tensor, b: torch.Tensor) -> None:
    assert type(a) is type(b)
    assert (a.dtype, a.shape, a.device, a.layout) == (b.dtype, b.shape, b.device, b.layout)
    assert raw(a) == raw(b)


def views(base: torch.Tensor) -> Iterator[tuple[str, torch.Tensor, bool]]:
    """Yield views of one tensor: name, view and whether the view is dense."""
    yield "whole", base, True
    yield "rows", base[1:3], True
    yield "transposed", base.t(), True
    yield "columns", base[:, 1:], False
    yield "every other", base[::2, ::3], False
    yield "flat, from the middle", base.reshape(-1)[5:], True
    yield "one", base[2, 3], True
    yield "none", base[:0], True
    yield "expanded", base[:1].expand(9, *base.shape[1:]), True
    yield "expanded columns", base[:, None, 1:].expand(-1, 4, -1), False


@pytest.mark.filterwarnings("ignore:ComplexHalf support is experimental")
@pytest.mark.parametrize("dtype", USUAL, ids=str)
def test_tensors(dtype: torch.dtype) -> None:
    for route, shape in itertools.product(ROUTES, [(4, 5), (64, 200)]):
        for name, value, dense in views(random_tensor(dtype, shape)):
            result = route(((value,), {"name": name}))[0][0]
            same_tensor(result, value)
            assert not result._is_view(), (route, name)
            if dense:
                assert result.stride() == value.stride(), (route, name)
            if 0 not in value.stride():
                result.copy_(value)  # the result is writable


@pytest.mark.filterwarnings("ignore:ComplexHalf support is experimental")
@pytest.mark.parametrize("dtype", USUAL, ids=str)
def test_dense_tensors_are_not_copied_and_only_the_part_viewed_is_sent(dtype: torch.dtype) -> None:
    base = random_tensor(dtype, (40, 50, 60))
    for value in (base, base[10:30], base.transpose(0, 2), base.permute(1, 0, 2), base.view(-1)[7:-7], base[:, None]):
        body, buffers = dumps(((value,), {}))
        assert buffers is not None
        assert [b.nbytes for b in buffers] == [value.nbytes]
        assert len(joined(body)) < 250
        assert torch.frombuffer(buffers[0], dtype=torch.uint8).data_ptr() == value.data_ptr()
        result = loads(body, buffers)[0][0]
        assert result.data_ptr() == value.data_ptr()
        same_tensor(result, value)


def test_an_expanded_tensor_sends_each_element_once() -> None:
    value = torch.arange(5000).view(5000, 1).expand(5000, 10**6)
    _, buffers = dumps(value)
    assert buffers is not None
    assert [b.nbytes for b in buffers] == [40_000]
    result = copied(value)
    assert (result.shape, result.stride()) == (value.shape, value.stride())
    assert result[4999, 999_999] == 4999


@every_route
def test_channels_last(route: Callable[[object], Any]) -> None:
    value = torch.randn(2, 3, 40, 50).to(memory_format=torch.channels_last)
    result = route(value)
    assert result.is_contiguous(memory_format=torch.channels_last)
    same_tensor(result, value)


@every_route
def test_numbers_and_tensors_without_elements(route: Callable[[object], Any]) -> None:
    for value in (torch.tensor(1.5), torch.tensor(True), torch.empty(0), torch.empty(3, 0, 2), torch.empty(0, 5).t()):
        result = route(value)
        same_tensor(result, value)
        assert result.stride() == value.stride()


@every_route
def test_gradients_are_asked_for_again_by_leaves_only(route: Callable[[object], Any]) -> None:
    leaf = torch.randn(60, 70, requires_grad=True)
    with_history = leaf * 2
    transposed_leaf = torch.randn(60, 70).t().requires_grad_()
    arrived, value, other, plain = route((leaf, with_history, transposed_leaf, torch.zeros(3)))
    assert [t.requires_grad for t in (arrived, value, other, plain)] == [True, False, True, False]
    assert arrived.is_leaf
    same_tensor(value, with_history)
    (arrived.sum() + other.sum()).backward()
    assert arrived.grad is not None


@every_route
def test_conjugate_and_negative_views(route: Callable[[object], Any]) -> None:
    base = torch.randn(40, 50, dtype=torch.complex64)
    for value in (base.conj(), base.conj().t(), base.conj().imag, base.conj()[:, ::2], torch._neg_view(base.conj())):
        result = route(value)
        same_tensor(result, value)
        assert result.is_conj() == value.is_conj()
    _, buffers = dumps(base.conj())
    assert buffers is not None
    assert torch.frombuffer(buffers[0], dtype=torch.uint8).data_ptr() == base.data_ptr()


@every_route
def test_parameters(route: Callable[[object], Any]) -> None:
    tied = nn.Parameter(torch.randn(50, 60))
    frozen = nn.Parameter(torch.randn(3).t(), requires_grad=False)
    frozen.partition = ("rows", 2)  # type: ignore[attr-defined]
    first, second, other = route((tied, {"again": tied}, frozen))
    assert type(first) is nn.Parameter
    assert second["again"] is first
    assert (first.requires_grad, other.requires_grad, other.partition) == (True, False, ("rows", 2))
    assert not hasattr(first, "partition")
    same_tensor(first, tied)


@every_route
def test_attributes_of_tensors(route: Callable[[object], Any]) -> None:
    tensor = torch.randn(5000)
    tensor.note = {"itself": tensor, "other": torch.ones(5000)}  # type: ignore[attr-defined]
    result = route(tensor)
    same_tensor(result, tensor)
    assert result.note["itself"] is result
    same_tensor(result.note["other"], torch.ones(5000))


class Tagged(torch.Tensor):
    """A tensor subclass without additions."""


@every_route
@pytest.mark.filterwarnings("ignore:Sparse CSR tensor support is in beta")
def test_subclasses_and_other_layouts_go_torchs_own_way(route: Callable[[object], Any]) -> None:
    tagged = torch.randn(60, 70).as_subclass(Tagged)
    tagged.tag = "t"
    result = route(tagged)
    assert type(result) is Tagged
    assert result.tag == "t"
    assert torch.equal(result, tagged)
    coo = torch.eye(100).to_sparse()
    csr = torch.eye(100).to_sparse_csr()
    for sparse in (coo, csr):
        arrived = route(sparse)
        assert arrived.layout == sparse.layout
        assert torch.equal(arrived.to_dense(), torch.eye(100))


@every_route
@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
def test_nested_tensors(route: Callable[[object], Any]) -> None:
    parts = [torch.randn(40, 50), torch.randn(60, 50)]
    result = route(torch.nested.nested_tensor(parts))
    assert result.is_nested
    for part, got in zip(parts, result.unbind(), strict=True):
        same_tensor(got, part)


@every_route
def test_tensors_without_memory(route: Callable[[object], Any]) -> None:
    meta = torch.empty(3, 4, device="meta", dtype=torch.bfloat16).t()
    result = route(meta)
    assert (result.device.type, result.shape, result.stride(), result.dtype) == ("meta", (4, 3), (1, 4), torch.bfloat16)


@every_route
# warnings of torch itself
@pytest.mark.filterwarnings("ignore:.*quantize_per_tensor", "ignore:TypedStorage is deprecated")
def test_quantized_tensors(route: Callable[[object], Any]) -> None:
    value = torch.quantize_per_tensor(torch.randn(60, 70), 0.1, 10, torch.quint8)
    result = route(value)
    assert result.is_quantized
    assert torch.equal(result.int_repr(), value.int_repr())
    assert (result.q_scale(), result.q_zero_point()) == (value.q_scale(), value.q_zero_point())


@every_route
def test_storages_are_shared_within_a_message_where_torch_sends_storages(route: Callable[[object], Any]) -> None:
    base = torch.randn(60, 70)
    one, two = base.as_subclass(Tagged), base[3:].as_subclass(Tagged)
    one.tag = two.tag = "t"
    first, second, storage = route((one, two, base.untyped_storage()))
    first[3, 0] = 17
    assert second[0, 0] == 17
    assert first.untyped_storage().data_ptr() == second.untyped_storage().data_ptr() == storage.data_ptr()
    empty = route(torch.UntypedStorage(0))
    assert (type(empty), empty.nbytes()) == (torch.UntypedStorage, 0)


def test_storages_are_not_copied() -> None:
    value = torch.randn(60, 70).as_subclass(Tagged)
    _, buffers = dumps(value)
    assert buffers is not None
    assert [b.nbytes for b in buffers] == [value.nbytes]
    assert torch.frombuffer(buffers[0], dtype=torch.uint8).data_ptr() == value.data_ptr()


@every_route
def test_modules(route: Callable[[object], Any]) -> None:
    torch.manual_seed(1)
    model = nn.Sequential(nn.Embedding(100, 64), nn.LSTM(64, 64, batch_first=True))
    model.register_buffer("steps", torch.tensor(3))
    head = nn.Linear(64, 100)
    head.weight = model[0].weight  # tied weights
    arrived, arrived_head = route((model, head))
    assert arrived_head.weight is arrived[0].weight
    words = torch.arange(10).view(1, 10)
    expected, _ = model(words)
    result, _ = arrived(words)
    assert torch.equal(result, expected)
    result.sum().backward()
    assert arrived[0].weight.grad is not None
    state = route(model.state_dict())
    assert type(state) is collections.OrderedDict
    assert {k: raw(v) for k, v in state.items()} == {k: raw(v) for k, v in model.state_dict().items()}


@every_route
def test_optimizers_and_dataclasses_with_tensors(route: Callable[[object], Any]) -> None:
    model = nn.Linear(100, 100)
    optimizer = torch.optim.Adam(model.parameters())
    model(torch.ones(1, 100)).sum().backward()
    optimizer.step()
    record, point, arrived, states = route((Record("r", torch.ones(5000)), Point(model.weight, 1), model, optimizer))
    same_tensor(record.values, torch.ones(5000))
    assert type(point) is Point
    assert states.param_groups[0]["params"][0] is arrived.weight is point.x
    same_tensor(states.state[arrived.weight]["exp_avg"], optimizer.state[model.weight]["exp_avg"])


def test_backward_hook_is_dropped_with_a_warning() -> None:
    tensor = torch.randn(3, requires_grad=True)
    tensor.register_hook(lambda grad: grad)
    with pytest.warns(UserWarning, match="hook"):
        result = direct(tensor)
    same_tensor(result, tensor)


def test_tensor_with_freed_memory_is_an_error() -> None:
    tensor = torch.randn(100, 100)
    tensor.untyped_storage().resize_(0)
    with pytest.raises(SerializationError, match=r"args\[0\] \(a torch.Tensor: ValueError: .* its memory was freed"):
        dumps(((tensor,), {}))


def test_buffers_keep_the_tensor_alive_and_objects_keep_the_buffers_alive() -> None:
    tensor = torch.full((5000,), 3.0)
    gone = weakref.ref(tensor)
    body, buffers = dumps(tensor)
    del tensor
    assert gone() is not None
    result = loads(body, buffers)
    del buffers
    gc.collect()
    assert gone() is not None
    assert result[4999] == 3
    del result
    gc.collect()
    assert gone() is None


def test_small_tensors_stay_in_the_pickle() -> None:
    assert dumps(torch.zeros(OUT_OF_BAND - 1, dtype=torch.uint8))[1] is None
    _, buffers = dumps(torch.zeros(OUT_OF_BAND, dtype=torch.uint8))
    assert buffers is not None


def test_random_views() -> None:
    rng = random.Random(7)
    for _ in range(300):
        value = torch.arange(rng.choice([24, 5040]))
        dims = rng.choice([(2, 3, 4), (4, 6), (24,), (1, 4, 6), (2, 2, 3, 2)])
        value = value.view(-1, *dims)
        for _ in range(rng.randrange(4)):
            axis = rng.randrange(value.ndim)
            move = rng.randrange(5)
            if move == 0:
                value = value.transpose(axis, rng.randrange(value.ndim))
            elif move == 1:
                value = value.narrow(axis, 0, rng.randint(0, value.shape[axis]))
            elif move == 2:
                value = value[(slice(None),) * axis + (slice(rng.randrange(2), None, rng.randint(1, 3)),)]
            elif move == 3:
                value = value.unsqueeze(axis).expand(*value.shape[:axis], rng.randint(1, 3), *value.shape[axis:])
            else:
                value = value.unfold(axis, 1, 1) if value.shape[axis] else value
        route = rng.choice(ROUTES)
        assert torch.equal(route(value), value)
        array_ = value.numpy()
        same_array(route(array_), array_)


@pytest.fixture(scope="module")
def _cuda_context() -> None:
    """Open the descriptors that the driver keeps from the first use of a GPU on, before the leak check counts them."""
    torch.zeros(1, device="cuda")


@pytest.mark.gpu
@pytest.mark.usefixtures("_cuda_context")
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA or HIP device")
@every_route
def test_tensors_on_a_device(route: Callable[[object], Any]) -> None:
    base = torch.randn(60, 70, device="cuda")
    views_ = [base, base.t(), base[:, ::2], base[:1].expand(60, 70), base.to(torch.bfloat16), base[:0], base[0, 0]]
    for value in [*views_, base.to(torch.complex64).conj()]:
        result = route(value)
        assert result.device == value.device
        assert (result.dtype, result.is_conj()) == (value.dtype, value.is_conj())
        assert torch.equal(result, value)
    parameter = route(nn.Parameter(base))
    assert (type(parameter), parameter.device, parameter.requires_grad) == (nn.Parameter, base.device, True)
    leaf = route(base.clone().requires_grad_())
    leaf.sum().backward()
    assert leaf.grad.device == base.device


def test_a_device_that_is_not_here_is_an_error_of_the_receiver() -> None:
    if torch.cuda.is_available():
        pytest.skip("there is a CUDA device")
    arguments = (bytearray(16), "float32", (4,), (1,), False, "cuda:0", False)
    with pytest.raises((RuntimeError, AssertionError)):
        tensors.build_tensor(*arguments)


# --- functions and classes


def test_importable_objects_are_pickled_by_name() -> None:
    for obj in (Record, Colour, Point, filled, Record("a"), torch.nn.Linear, functools.partial, Slotted.__eq__):
        body = joined(dumps(obj)[0])
        assert len(body) < 200
        assert direct(obj) is obj or isinstance(obj, Record)


SEVEN = 7
TypeName = typing.TypeVar("TypeName")


def local_things() -> dict[str, Any]:
    """Return objects that have no import path."""
    count = 0

    def counter() -> int:
        nonlocal count
        count += 1
        return count

    def even(n: int) -> bool:
        return n == 0 or odd(n - 1)

    def odd(n: int) -> bool:
        return n != 0 and even(n - 1)

    class Shape(enum.Flag):
        ROUND = 1
        FLAT = 2

    @dataclasses.dataclass(order=True)
    class Local:
        n: int
        tags: list[str] = dataclasses.field(default_factory=list)

        @property
        def double(self) -> int:
            return self.n * 2

        @classmethod
        def make(cls) -> Local:
            return cls(1)

        @staticmethod
        def fixed() -> int:
            return SEVEN

    class Child(Local):
        def __init__(self, n: int) -> None:
            super().__init__(n, ["child"])

    import abc

    class Abstract(abc.ABC):
        @abc.abstractmethod
        def f(self) -> int: ...

    class Concrete(Abstract):
        def f(self) -> int:
            return 5

    class Box(typing.Generic[TypeName]):
        def __init__(self, item: TypeName) -> None:
            self.item = item

    class Slots:
        __slots__ = ("a",)

    Pair = collections.namedtuple("Pair", "left right")
    return dict(locals())


@every_route
def test_local_functions_and_classes(route: Callable[[object], Any]) -> None:
    things = local_things()
    got = route((things, {}))[0]
    assert [got["counter"](), got["counter"]()] == [1, 2]
    assert got["even"](10) and not got["odd"](10)
    assert got["Local"](2).double == 4
    assert got["Local"].make() == got["Local"](1)
    assert got["Local"].fixed() == 7
    assert got["Child"](3).tags == ["child"]
    assert got["Concrete"]().f() == 5
    assert got["Box"](1).item == 1
    assert got["Shape"].ROUND | got["Shape"].FLAT
    assert got["Pair"](1, 2).right == 2
    with pytest.raises(TypeError, match="abstract"):
        got["Abstract"]()


@every_route
def test_instances_of_local_classes_stay_instances_of_them(route: Callable[[object], Any]) -> None:
    things = local_things()
    child, flat, pair = things["Child"](4), things["Shape"].FLAT, things["Pair"](1, torch.ones(9000))
    got = route((child, flat, pair))
    assert type(got[0]) is things["Child"]
    assert got[0] == child
    assert got[1] is flat
    assert type(got[2]) is things["Pair"]
    same_tensor(got[2].right, pair.right)


@every_route
def test_lambdas_carry_their_globals_and_closures(route: Callable[[object], Any]) -> None:
    tensor = torch.ones(9000)
    f = route(lambda x: (tensor * x).sum().item() + SEVEN)
    assert f(2) == 18_007
    assert route(functools.partial(lambda a, b: a - b, b=2))(5) == 3
    assert route([].append.__self__.append)(1) is None
    assert route(Record("m").__eq__)(Record("m"))
    assert route(str.join)(",", "ab") == "a,b"


def test_class_that_returns_is_unchanged() -> None:
    """cloudpickle would replace the methods of the class by copies with other globals."""
    calls: list[int] = []

    class Here:
        def call(self) -> None:
            calls.append(1)

    method = Here.call
    assert type(direct(Here())) is Here
    assert Here.call is method
    Here().call()
    assert calls == [1]


def test_modules_registered_by_value(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "by_value_module.py").write_text(
        "FACTOR = 3\ndef times(x): return FACTOR * x\nclass Thing: n = FACTOR\n"
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    module = __import__("by_value_module")
    by_name = joined(dumps((module.times, module.Thing()))[0])
    cloudpickle.register_pickle_by_value(module)
    try:
        body = joined(dumps((module.times, module.Thing(), module.Thing))[0])
    finally:
        cloudpickle.unregister_pickle_by_value(module)
    del sys.modules["by_value_module"]
    sys.path.remove(str(tmp_path))
    with pytest.raises(DeserializationError, match=r"No module named 'by_value_module'.*register_pickle_by_value"):
        loads(by_name, None)
    times, thing, _ = loads(body, None)
    assert times(5) == 15
    assert thing.n == 3


def test_a_module_made_at_run_time_goes_by_value() -> None:
    module = types.ModuleType("made_here")
    module.x = 5  # type: ignore[attr-defined]
    assert direct((module, sys))[0].x == 5
    assert direct((module, sys))[1] is sys


COMMON = """
import abc, asyncio, dataclasses, enum, sys, typing, torch
from monarch_backend._serialization.pickling import dumps, loads

def save(path, obj):
    body, buffers = dumps(obj)
    body = b"".join(body) if isinstance(body, list) else body
    with open(path, "wb") as file:
        for part in (body, *(buffers or ())):
            file.write(len(part).to_bytes(8, "little"))
            file.write(part)

def load(path):
    with open(path, "rb") as file:
        parts = []
        while size := file.read(8):
            parts.append(file.read(int.from_bytes(size, "little")))
    return loads(parts[0], parts[1:] or None)
"""

SENDER = """
RATE = 10
BIG = torch.arange(10_000)

class Base(abc.ABC):
    @abc.abstractmethod
    def cost(self): ...

@dataclasses.dataclass
class Task(Base):
    n: int
    data: torch.Tensor
    def cost(self): return helper(self.n)
    def again(self): return Task(self.n + 1, self.data)

class Kind(enum.Enum):
    SMALL = "s"

def helper(n): return RATE * n
def mutual(n): return "end" if n == 0 else other(n - 1)
def other(n): return mutual(n)
async def later(n): return helper(n)
def stream(n):
    yield from range(n)
def total(): return BIG.sum().item()

class Node:
    def __init__(self): self.me = self

class Failure(Exception):
    def __init__(self, code): super().__init__(f"code {code}"); self.code = code

if __name__ == "__main__":
    task = Task(4, torch.ones(5000))
    save(sys.argv[1], dict(task=task, cls=Task, kind=Kind.SMALL, mutual=mutual, later=later, stream=stream, total=total,
        f=lambda x: helper(x) + 1, node=Node(), method=task.cost, nested=[{"t": (task, Kind)}],
        generic=typing.List[Task]))
"""

RECEIVER = """
got = load(sys.argv[1])
task = got["task"]
assert (task.n, task.data.sum().item(), task.cost()) == (4, 5000, 40)
assert type(task) is got["cls"] and type(task.again()) is got["cls"] and got["cls"](1, 2).cost() == 10
assert got["kind"].value == "s" and got["nested"][0]["t"][0] is task and type(got["kind"]) is got["nested"][0]["t"][1]
assert got["mutual"](5) == "end" and asyncio.run(got["later"](2)) == 20 and list(got["stream"](3)) == [0, 1, 2]
assert got["total"]() == 49995000 and got["f"](1) == 11 and got["method"]() == 40
assert got["node"].me is got["node"] and typing.get_args(got["generic"]) == (got["cls"],)
again = load(sys.argv[1])
assert type(again["task"]) is type(task)
if len(sys.argv) > 2:
    save(sys.argv[2], (task.again(), got["cls"], got["kind"]))
print("ok")
"""

RETURNED = """
    import subprocess
    cost = Task.cost
    result = subprocess.run([sys.executable, sys.argv[2], sys.argv[1], sys.argv[3]], capture_output=True, text=True)
    assert result.stdout == "ok\\n", result.stderr
    back, cls, kind = load(sys.argv[3])
    RATE = 100
    assert cls is Task and type(back) is Task and back.n == 5 and kind is Kind.SMALL and Task.cost is cost
    assert back.cost() == 500  # the class here was left alone: it sees this module's variables
    print("back")
"""


def python(*arguments: str, stdin: str | None = None, cwd: Path | None = None) -> str:
    command = [sys.executable, *arguments]
    result = subprocess.run(command, input=stdin, capture_output=True, text=True, timeout=120, cwd=cwd)
    assert result.returncode == 0, result.stderr
    return result.stdout


@pytest.fixture(scope="module")
def scripts(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("scripts")
    for name, text in {"sender": SENDER, "receiver": RECEIVER, "returned": SENDER + RETURNED}.items():
        (folder / f"{name}.py").write_text(COMMON + text)
    return folder


UNDER_ANOTHER_NAME = """
import sys, types
name, message, path = sys.argv[1:]
main = types.ModuleType(name)
sys.modules[name] = sys.modules["__main__"] = main
sys.argv[1:] = [message]
text = open(path).read().replace('if __name__ == "__main__"', 'if True')
exec(compile(text, path, "exec"), main.__dict__)
"""


@pytest.fixture(scope="module")
def senders(scripts: Path) -> dict[str, Future[str]]:
    """Run the sender in each way to start a program, two at a time: each spends most of its time on importing torch."""
    path, text = str(scripts / "sender.py"), (scripts / "sender.py").read_text()
    with ThreadPoolExecutor(2) as pool:
        return {
            "script": pool.submit(python, path, str(scripts / "script")),
            "stdin": pool.submit(python, "-", str(scripts / "stdin"), stdin=text),
            "command": pool.submit(python, "-c", text, str(scripts / "command")),
            "module": pool.submit(python, "-m", "sender", str(scripts / "module"), cwd=scripts),
        }


@pytest.mark.parametrize("how", ["script", "stdin", "command", "module"])
def test_objects_of_main_are_pickled_by_value(scripts: Path, senders: dict[str, Future[str]], how: str) -> None:
    senders[how].result()
    assert run_script(str(scripts / "receiver.py"), str(scripts / how)) == "ok\n"


# As in a child that multiprocessing has spawned, and in a program that registers its main module again.
@pytest.mark.parametrize("name", ["__mp_main__", "alias"])
def test_objects_of_main_under_another_name(scripts: Path, tmp_path: Path, name: str) -> None:
    (tmp_path / "under.py").write_text(UNDER_ANOTHER_NAME)
    run_script(str(tmp_path / "under.py"), name, str(scripts / name), str(scripts / "sender.py"))
    assert run_script(str(scripts / "receiver.py"), str(scripts / name)) == "ok\n"


def test_instances_go_to_another_process_and_back(scripts: Path) -> None:
    paths = [str(scripts / name) for name in ("message", "receiver.py", "reply")]
    assert python(str(scripts / "returned.py"), *paths) == "back\n"


def test_neither_torch_nor_numpy_is_imported_for_plain_objects(tmp_path: Path) -> None:
    """The package itself imports torch, so the script replaces it. The pickling module must not import torch."""
    script = """
    import sys, types
    for name, path in (("monarch_backend", "{root}"), ("monarch_backend._transport", "{root}/transport")):
        package = sys.modules[name] = types.ModuleType(name)
        package.__path__ = [path]
    from monarch_backend._serialization.pickling import dumps, loads
    class Mine: x = 5
    body, buffers = dumps((Mine(), {{1, 2}}, lambda: 3, b"b" * 100_000))
    assert loads(b"".join(body), buffers)[2]() == 3
    print(*sorted({{"torch", "numpy"}} & set(sys.modules)))
    import numpy, array
    _, buffers = dumps(numpy.zeros(10_000))
    print(len(buffers))
    """
    root = Path(pickling.__file__).parents[1]
    assert python("-c", textwrap.dedent(script.format(root=root))) == "\n1\n"


# --- errors


def attempt(obj: object) -> SerializationError:
    with pytest.raises(SerializationError) as caught:
        dumps(obj)
    return caught.value


class Holder:
    def __init__(self, **values: object) -> None:
        vars(self).update(values)


class Refuses:
    def __reduce__(self) -> Any:
        raise ValueError("not me")


class BadRepr:
    def __repr__(self) -> str:
        raise RuntimeError("no looks")


LOCK = threading.Lock()


def _uses_the_lock() -> object:
    return LOCK


def culprits() -> Iterator[tuple[object, str, str]]:
    lock = threading.Lock()
    yield ((1, {"lock": lock}), {}), "args[1]['lock']", "a _thread.lock"
    yield ((1,), {"deep": [0, (1, {"k": Holder(a=Holder(b=lock))})]}), "kwargs['deep'][1][1]['k'].a.b", "a _thread.lock"
    yield (("x", Refuses()), {}), "args[1]", "ValueError: not me"
    yield lock, "the object", "a _thread.lock"
    yield [1, lock], "the object[1]", "a _thread.lock"
    yield Point(1, lock), "the object.y", "a _thread.lock"
    yield {lock: 1}, "the object key ", "a _thread.lock"
    yield {1, 2, Slotted.__init__.__class__, (i for i in "x")}, "the object member ", "a generator"
    yield Words(a=lock), "the object['a']", "a _thread.lock"
    yield collections.deque([1, lock]), "the object[1]", "a _thread.lock"
    yield Slotted(1, lock), "the object.b", "a _thread.lock"
    yield Record("r", lock), "the object.values", "a _thread.lock"
    yield functools.partial(print, lock), "the object", "a _thread.lock"
    yield (lambda: lock), "the object closure variable 'lock'", "a _thread.lock"
    yield (
        types.FunctionType(_uses_the_lock.__code__, {"LOCK": lock}),
        "the object global variable 'LOCK'",
        "a _thread.lock",
    )
    yield Holder(lock=lock).__init__, "the object.__self__.lock", "a _thread.lock"
    yield [Holder(bad=BadRepr(), gen=(i for i in "x"))], "the object[0].gen", "a generator"
    yield {BadRepr(): lock}, "the object[<BadRepr>]", "a _thread.lock"
    yield type("Local", (), {"lock": lock}), "the object.lock", "a _thread.lock"
    yield [Broken(ZeroDivisionError("division"))], "the object[0]", "ZeroDivisionError: division"


@pytest.mark.parametrize(
    ("obj", "path", "what"), list(culprits()), ids=lambda value: value if isinstance(value, str) else ""
)
def test_the_error_names_the_part_to_blame(obj: object, path: str, what: str) -> None:
    error = attempt(obj)
    assert error.path.startswith(path)
    assert f"can't serialize {path}" in str(error)
    assert what in str(error)
    assert "Leave it out" in str(error)
    assert isinstance(error.__cause__, Exception)
    again = pickle.loads(pickle.dumps(error))
    assert (type(again), str(again), again.path) == (SerializationError, str(error), error.path)
    assert isinstance(error, TypeError)


def test_the_search_for_the_culprit_ends() -> None:
    knot: list[Any] = [1]
    knot.append(knot)
    knot.append(threading.Lock())
    assert "_thread.lock" in str(attempt(knot))
    assert attempt([0] * 50_000 + [threading.Lock()]).path == "the object"


def test_an_error_of_the_sender_is_the_cause() -> None:
    reason = KeyError("secret")
    error = attempt(((Broken(reason),), {}))
    assert error.__cause__ is reason
    assert "args[0] (a tests.serialization.test_pickling.Broken: KeyError: 'secret')" in str(error)


def test_deeply_nested_object_is_an_error() -> None:
    deep: list[Any] = []
    for _ in range(100_000):
        deep = [deep]
    assert "nested more deeply than Python's recursion limit" in str(attempt(deep))
    while deep:  # frees the lists one by one
        deep = deep.pop()


@pytest.mark.parametrize("error", [KeyboardInterrupt, MemoryError, SystemExit])
def test_unrelated_errors_pass_through(error: type[BaseException]) -> None:
    class Interrupted:
        def __reduce__(self) -> Any:
            raise error

    with pytest.raises(error):
        dumps(Interrupted())


def test_in_band_without_an_answer() -> None:
    assert try_dumps_in_band(LOCK) is None
    data = try_dumps_in_band([1])
    assert data is not None
    assert loads(data, None) == [1]
    with pytest.raises(SerializationError, match="lock"):
        dumps_in_band(LOCK)


def test_errors_of_the_receiver() -> None:
    body, _ = dumps([Broken(receiving="bad state")])
    with pytest.raises(
        DeserializationError, match=r"ValueError: bad state. Look at the __setstate__.*pid \d+\]"
    ) as caught:
        loads(joined(body), None)
    assert isinstance(caught.value.__cause__, ValueError)
    again = pickle.loads(pickle.dumps(caught.value))
    assert (type(again), str(again)) == (DeserializationError, str(caught.value))


@pytest.mark.parametrize(
    ("body", "says"),
    [
        (b"cno_such_module_x\nf\n.", "No module named 'no_such_module_x'. Make the module importable here"),
        (b"cmath\nno_such_name\n.", "no_such_name.*Compare the versions"),
        (b"", "The bytes are damaged"),
        (b"\x80\x05", "The bytes are damaged"),
        (b"garbage", "can't rebuild an object"),
        (b"\x80\xff.", "unsupported pickle protocol"),
    ],
)
def test_bad_bytes(body: bytes, says: str) -> None:
    with pytest.raises(DeserializationError, match=says):
        loads(body, None)


def test_bad_buffers() -> None:
    body, buffers = dumps(torch.ones(100, 100))
    assert buffers is not None
    for wrong in (None, [], [buffers[0][:100]], [b""], [object()]):
        with pytest.raises(DeserializationError):
            loads(body, wrong)  # type: ignore[arg-type]
    with pytest.raises(DeserializationError):
        loads(joined(dumps(np.ones(5000))[0]), [bytearray(10)])


def test_truncated_and_flipped_bytes_never_do_worse_than_an_error() -> None:
    body = joined(dumps(((1, "x", {"k": [1.5, Record("r")]}, np.ones(3), torch.ones(3)), {}))[0])
    rng = random.Random(3)
    for cut in itertools.chain(range(0, len(body), 3), [len(body) - 1]):
        with pytest.raises(DeserializationError):
            loads(body[:cut], None)
    del rng


def test_many_threads_at_once() -> None:
    things = local_things()
    problems: list[object] = []

    def work() -> None:
        try:
            for _ in range(50):
                got = copied((things["Child"](2), np.ones(5000), torch.ones(5000), lambda: 5))
                assert (got[0].n, got[1].sum(), got[2].sum(), got[3]()) == (2, 5000, 5000, 5)
        except BaseException as error:
            problems.append(error)

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert problems == []


def test_a_reduce_that_serializes_itself() -> None:
    class Outer:
        def __reduce__(self) -> Any:
            return loads, (joined(dumps([np.ones(3), {1}])[0]), None)

    assert direct(Outer())[1] == {1}
