"""Errors raised in the caller before any byte is moved, warnings about routes, and counters.

No test depends on the route, so most use memory of this process.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import logging
import os
import pickle
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch

from monarch_backend._rdma import local_memory
from monarch_backend._rdma.transfers.engine import engine
from monarch_backend.actor import ActorMesh, this_host
from monarch_backend.job import ProcessJob
from monarch_backend.rdma import RDMAAction, RDMABuffer, RDMAError, ShardedState
from tests.job.support import MARK, in_program, new_mark
from tests.rdma.actors import Process, take

NBYTES = 64

Use = Callable[[RDMABuffer, Any], object]
USES: dict[str, Use] = {
    "registered": lambda _, value: RDMABuffer(value),
    "read into": lambda buffer, value: buffer.read_into(value),
    "written from": lambda buffer, value: buffer.write_from(value),
    "read by an action": lambda buffer, value: RDMAAction().read_remote(value, buffer),
    "written by an action": lambda buffer, value: RDMAAction().write_remote(buffer, value),
    "of an action's atomic": lambda buffer, value: RDMAAction().fetch_add(value, buffer, 1),
}
FILLED = ("read into", "read by an action", "of an action's atomic")


@pytest.fixture
def buffer() -> Iterator[RDMABuffer]:
    made = RDMABuffer(torch.zeros(NBYTES, dtype=torch.uint8))
    yield made
    made.drop()


@pytest.fixture(params=USES)
def use(request: pytest.FixtureRequest, buffer: RDMABuffer) -> Iterator[Callable[[Any], object]]:
    """Return each function that accepts memory. A refused call must leave no registration."""
    before = engine().registry.count()
    yield functools.partial(USES[request.param], buffer)
    assert engine().registry.count() == before


def test_handle_with_forged_fields_is_refused_as_damaged(buffer: RDMABuffer) -> None:
    handle = buffer._handle
    rebuild, fields = buffer.__reduce__()
    assert rebuild(*fields)._handle.ticket == handle.ticket
    fields = handle._asdict()
    slot, epoch, key = handle.ticket
    for name, value in [
        *((name, None) for name in fields), ("token", 5), ("token", b"x" * 32), ("pid", "1"), ("ways", 7),
        ("ways", (("h", "p"),)), ("ways", (("h",),)), ("writable", "yes"), ("encrypted", 2), ("staged", "no"),
        ("verbs", "\N{SNOWMAN}"), ("ticket", (slot, epoch)), ("ticket", (slot, epoch, key, 0)), ("ticket", "abc"),
        ("ticket", (-1, epoch, key)), ("ticket", (1 << 32, epoch, key)), ("ticket", (slot, 1 << 64, key)),
        ("ticket", (slot, epoch, 1 << 90)), ("offset", -1), ("offset", 1 << 64), ("nbytes", 1.5), ("nbytes", -1),
        ("device", 0), ("verbs", 3),
    ]:  # fmt: skip
        with pytest.raises(RDMAError, match="damaged"):
            rebuild(*handle._replace(**{name: value}))
    for wrong in (handle[:7], (*handle, 1), ()):
        with pytest.raises(RDMAError, match="damaged"):
            rebuild(*wrong)


# Values that are not memory, or not contiguous memory -----------------------------------------------------------------


class _Lends:
    """Memory with an array interface that NumPy has no name for."""

    def __init__(self, typestr: str, descr: Any = ()) -> None:
        self.memory = np.zeros(8, dtype=np.uint8)
        interface = self.memory.__array_interface__
        self.__array_interface__ = {**interface, "typestr": typestr, **({"descr": descr} if descr else {})}
        self.nbytes = self.memory.nbytes


class _LendsOnGpu:
    """The same as `_Lends`, for GPU memory."""

    def __init__(self, typestr: str) -> None:
        self.__cuda_array_interface__ = {"shape": (8,), "typestr": typestr, "data": (4096, False), "version": 3}


OBJECTS: dict[str, Callable[[], Any]] = {
    "object": lambda: np.array([object()] * 8, dtype=object),
    "a field": lambda: np.zeros(4, dtype=[("number", "f8"), ("thing", "O")]),
    "a field below": lambda: np.zeros(4, dtype=[("outer", [("thing", "O", (2,))])]),
    "a field beside a date": lambda: np.zeros(4, dtype=[("thing", "O"), ("at", "M8[s]")]),
    "strings": lambda: np.array(["x"] * 8, dtype=np.dtypes.StringDType()),
    "memoryview": lambda: memoryview(np.array([object()] * 8, dtype=object)),
    "memoryview of a field": lambda: memoryview(np.zeros(4, dtype=[("thing", "O")])),
    "ctypes": lambda: (ctypes.py_object * 8)(),
    "interface": lambda: _Lends("|O8"),
    "interface of a field": lambda: _Lends("|V8", [("thing", "|O")]),
    "interface of a GPU's": lambda: _LendsOnGpu("|O8"),
}


@pytest.mark.parametrize("make", OBJECTS.values(), ids=OBJECTS)
def test_pointers_to_objects(use: Callable[[Any], object], make: Callable[[], Any]) -> None:
    """Pointers to Python objects are invalid after a transfer, so such arrays are refused."""
    with pytest.raises(TypeError, match="pointers to Python's objects"):
        use(make())


def test_structured_arrays_with_o_in_field_names_work(buffer: RDMABuffer) -> None:
    for dtype in ([("O", "f8")], [("Of", [("O2", "i4")]), ("b", "i4")], [("O", "M8[s]")]):
        array = np.zeros(8, dtype=dtype)
        buffer.write_from(array).get()
        buffer.read_into(array).get()
        RDMABuffer(array).drop()


def test_arrays_of_objects_are_values_of_a_state() -> None:
    """A state pickles arrays of objects, as it does other values, and does not register their memory."""
    part = ShardedState.register({"w": torch.ones(2), "names": np.array(["a", None], dtype=object)})
    into: dict[str, Any] = {"w": torch.zeros(2), "names": None}
    ShardedState.merge([part]).read_into(into).get()
    assert into["names"].tolist() == ["a", None] and into["w"].tolist() == [1, 1]
    part.drop()


SCATTERED: dict[str, Callable[[], Any]] = {
    "tensor": lambda: torch.zeros(8, 8, dtype=torch.uint8).t(),
    "columns": lambda: torch.zeros(8, 16, dtype=torch.uint8)[:, :8],
    "expanded": lambda: torch.zeros(1, 8, dtype=torch.uint8).expand(8, 8),
    "array": lambda: np.zeros(2 * NBYTES, dtype=np.uint8)[::2],
    "transposed": lambda: np.zeros((8, 8), dtype=np.uint8).T,
    "dates": lambda: np.zeros(16, dtype="M8[s]")[::2],
    "memoryview": lambda: memoryview(bytearray(2 * NBYTES))[::2],
    "backwards": lambda: memoryview(bytearray(NBYTES))[::-1],
}


@pytest.mark.parametrize("make", SCATTERED.values(), ids=SCATTERED)
def test_noncontiguous_memory_is_refused(use: Callable[[Any], object], make: Callable[[], Any]) -> None:
    with pytest.raises(ValueError, match="is not contiguous"):
        use(make())


@pytest.mark.parametrize(
    "empty",
    [torch.empty(0), torch.empty(3, 0, 2), np.empty(0), np.empty(0, "M8[s]"), b"", bytearray(), memoryview(b"")],
    ids=["tensor", "dimensions", "array", "dates", "bytes", "bytearray", "memoryview"],
)
def test_empty_memory_is_refused(use: Callable[[Any], object], empty: Any) -> None:
    with pytest.raises(ValueError, match="has no bytes"):
        use(empty)


def _fixed() -> np.ndarray:
    array = np.zeros(NBYTES, dtype=np.uint8)
    array.flags.writeable = False
    return array


@pytest.mark.parametrize("name", FILLED)
@pytest.mark.parametrize(
    "fixed",
    [bytes(NBYTES), memoryview(bytes(NBYTES)), _fixed(), _fixed().view("M8[s]")],
    ids=["bytes", "memoryview", "array", "dates"],
)
def test_readonly_destination_is_refused(buffer: RDMABuffer, name: str, fixed: Any) -> None:
    with pytest.raises(ValueError, match="dst is read-only"):
        USES[name](buffer, fixed)
    buffer.write_from(fixed).get()  # a read-only array may be the source


@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::UserWarning")
def test_quantized_tensors(use: Callable[[Any], object]) -> None:
    value = torch.quantize_per_tensor(torch.ones(8, 8), 0.1, 0, torch.quint8)
    with pytest.raises(TypeError, match=r"is a quantized tensor \(torch\.quint8\).*int_repr"):
        use(value)
    with pytest.raises(TypeError, match=r"layout torch\.sparse_coo"):
        use(torch.ones(8, 8).to_sparse())


@pytest.mark.parametrize(
    ("start", "stop"),
    [(0, NBYTES + 1), (NBYTES, NBYTES + 1), (NBYTES, None), (-8, None), (None, -1), (8, 8), (9, 8), (1 << 64, None)],
)
def test_slice_beyond_the_buffer_is_refused(buffer: RDMABuffer, start: int | None, stop: int | None) -> None:
    with pytest.raises(IndexError, match=f"of an RDMABuffer of {NBYTES} bytes: there is no such part"):
        buffer[start:stop]


def test_sizes_that_do_not_match_are_refused(buffer: RDMABuffer) -> None:
    with pytest.raises(ValueError, match=f"dst has {NBYTES - 1} bytes and the buffer {NBYTES}: read a part"):
        buffer.read_into(bytearray(NBYTES - 1))
    with pytest.raises(ValueError, match=f"src has {NBYTES + 1} bytes and the buffer {NBYTES}: they do not fit"):
        buffer.write_from(bytearray(NBYTES + 1))


# Actions with conflicting steps ---------------------------------------------------------------------------------------


def _two_steps(buffer: RDMABuffer, first: str, second: str, one: Any, other: Any) -> RDMAAction:
    action = RDMAAction()
    for name, value in ((first, one), (second, other)):
        part = buffer[0 : len(value)]
        if name == "fills":
            action.read_remote(value, part)
        elif name == "reads":
            action.write_remote(part, value)
        else:
            action.fetch_add(value, part, 1)
    return action


@pytest.mark.parametrize(
    ("first", "second", "refused"),
    [("fills", "fills", True), ("fills", "reads", True), ("reads", "fills", True), ("reads", "reads", False),
     ("adds", "fills", True), ("adds", "reads", True)],
)  # fmt: skip
@pytest.mark.parametrize("starts", [(0, 0), (0, 7), (7, 0)], ids=str)
def test_steps_that_share_local_memory(
    buffer: RDMABuffer, first: str, second: str, refused: bool, starts: tuple[int, int]
) -> None:
    memory = torch.full((NBYTES,), 7, dtype=torch.uint8)
    one, other = (memory[start : start + 8] for start in starts)
    action = _two_steps(buffer, first, second, one, other)
    if refused:
        with pytest.raises(ValueError, match="steps 0 and 1 share local memory, and one of them writes to it"):
            action.submit()
        assert memory.tolist() == [7] * NBYTES, "nothing was begun"
    else:
        action.submit(timeout=30).get()


def test_the_step_in_between_does_not_hide_an_overlap(buffer: RDMABuffer) -> None:
    memory = torch.zeros(NBYTES, dtype=torch.uint8)
    action = RDMAAction().write_remote(buffer[0:32], memory[0:32]).write_remote(buffer[40:44], memory[4:8])
    action.submit(timeout=30).get()
    action.read_remote(memory[16:20], buffer[48:52])
    with pytest.raises(ValueError, match="steps 0 and 2 share"):
        action.submit()


def test_steps_side_by_side(buffer: RDMABuffer) -> None:
    memory = torch.full((NBYTES,), 7, dtype=torch.uint8)
    for first, second in (("fills", "fills"), ("fills", "reads"), ("adds", "fills")):
        _two_steps(buffer, first, second, memory[0:8], memory[8:16]).submit(timeout=30).get()
    # Only the filled bytes conflict. The rest of a larger destination is not touched.
    RDMAAction().read_remote(memory, buffer[0:8]).read_remote(memory[8:], buffer[0:8]).submit(timeout=30).get()


# Numbers and indexes as arguments -------------------------------------------------------------------------------------

INTEGERS = [int, np.int64, np.uint64, np.int16, np.uint8, torch.tensor]


@pytest.mark.parametrize("integer", INTEGERS, ids=lambda kind: kind.__name__)
def test_integers_of_all_kinds(integer: Callable[[int], Any]) -> None:
    numbers = torch.arange(8)
    buffer = RDMABuffer(numbers)
    part = pickle.loads(pickle.dumps(buffer[integer(8) : integer(24)]))
    assert part.size() == 16 and type(part.size()) is int
    into = torch.zeros(2, dtype=torch.int64)
    part.read_into(into).get()
    assert into.tolist() == [1, 2]
    assert part[integer(8) :].fetch_add(integer(40)).get() == 2
    assert buffer.fetch_add(integer(1), integer(16)).get() == 42
    assert buffer.compare_and_swap(integer(43), integer(3), offset=integer(16)).get() == 43
    found = torch.zeros(2, dtype=torch.int64)
    RDMAAction().fetch_add(found[:1], buffer, integer(1), integer(16)).submit(timeout=30).get()
    RDMAAction().compare_and_swap(found[1:], buffer, integer(4), integer(9), integer(16)).submit(timeout=30).get()
    assert found.tolist() == [3, 4] and numbers[2] == 9
    buffer.drop()


def test_sums_and_differences() -> None:
    numbers = torch.zeros(2, dtype=torch.int64)
    buffer = RDMABuffer(numbers)
    assert buffer.fetch_add(np.int64(-5)).get() == 0
    assert buffer.compare_and_swap(np.int64(-5), np.int32(-6)).get() == (1 << 64) - 5
    assert numbers[0] == -6
    for start, stop in zip([0, *np.cumsum([4, 12])[:-1]], np.cumsum([4, 12]), strict=True):
        pickle.loads(pickle.dumps(buffer[start:stop])).read_into(bytearray(16)).get()
    part = ShardedState.register({"w": numbers})
    ShardedState.merge([part]).plan({"w": torch.zeros(2, dtype=torch.int64)}, reader=np.int64(1)).read().get()  # type: ignore[arg-type]
    part.drop()
    buffer.drop()


@pytest.mark.parametrize("number", [2.0, np.float64(2), "2", torch.tensor(2.0)], ids=lambda each: type(each).__name__)
def test_nonintegers_are_refused(buffer: RDMABuffer, number: Any) -> None:
    dst = bytearray(8)
    calls: list[Callable[[], object]] = [
        lambda: buffer[number:8],
        lambda: buffer[:number],
        lambda: buffer.fetch_add(number),
        lambda: buffer.fetch_add(1, number),
        lambda: buffer.compare_and_swap(number, 1),
        lambda: buffer.compare_and_swap(1, number),
        lambda: RDMAAction().fetch_add(dst, buffer, number),
        lambda: RDMAAction().compare_and_swap(dst, buffer, number, 1),
    ]
    for call in calls:
        with pytest.raises(TypeError, match="it has to be an integer"):
            call()
    with pytest.raises(TypeError):
        buffer[0.0:4]  # type: ignore[misc]
    for step in (2, -1):
        with pytest.raises(TypeError, match="in bytes"):
            buffer[0:8:step]
    with pytest.raises(TypeError, match="in bytes"):
        buffer[number]


# Registered memory cannot be freed ------------------------------------------------------------------------------------


def _register(tensor: torch.Tensor) -> Any:
    return RDMABuffer(tensor)


def _register_state(tensor: torch.Tensor) -> Any:
    return ShardedState.register({"w": tensor})


@pytest.mark.parametrize("register", [_register, _register_state])
@pytest.mark.parametrize("default", ["none", "with", "set", "inference"])
def test_a_storage_is_not_resized(default: str, register: Callable[[torch.Tensor], Any]) -> None:
    """A resize is refused, because other processes would read freed memory."""
    weights = torch.arange(1000.0)
    if default == "with":
        with torch.device("meta"):
            held = register(weights)
    elif default == "set":
        torch.set_default_device("meta")
        try:
            held = register(weights)
        finally:
            torch.set_default_device(None)
    elif default == "inference":
        with torch.inference_mode():
            held = register(weights)
    else:
        held = register(weights)
    with pytest.raises(RuntimeError, match="not resizable"):
        weights.untyped_storage().resize_(0)
    held.drop()


def test_torch_without_numpy(monkeypatch: pytest.MonkeyPatch) -> None:
    """Only torch's errors about a missing NumPy count as such. Any other error of Tensor.numpy is raised."""
    fail = mock.Mock()
    monkeypatch.setattr(torch.Tensor, "numpy", fail)
    for words in local_memory._NO_NUMPY:
        fail.side_effect = RuntimeError(words)
        RDMABuffer(torch.zeros(1)).drop()
    fail.side_effect = RuntimeError("a tensor of another device")
    before = engine().registry.count()
    with pytest.raises(RuntimeError, match="of another device"):
        RDMABuffer(torch.zeros(1))
    assert engine().registry.count() == before


# Reports of routes ----------------------------------------------------------------------------------------------------

SAID = {
    "kernel": "process_vm_readv",
    "mapped": "its memory is mapped here",
    "thread": "copied by its own thread: MONARCH_CMA=0",
}


@contextlib.contextmanager
def _two(route: str) -> Iterator[tuple[ActorMesh, ActorMesh]]:
    """Start an owner and a reader that are not connected yet."""
    procs = this_host().spawn_procs({"gpus": 2}, bootstrap=functools.partial(take, route), name="said")
    both = procs.spawn("process", Process, route)
    both.pid.call().get()
    yield both.slice(gpus=0), both.slice(gpus=1)
    procs.stop().get(30)


@pytest.mark.parametrize("atomic", [False, True], ids=["read", "atomic"])
@pytest.mark.parametrize(
    "route", [pytest.param("kernel", marks=pytest.mark.needs("process_vm_readv")), "mapped", "thread"]
)
@pytest.mark.usefixtures("faults")
def test_copy_method_on_one_host_is_logged_once(route: str, atomic: bool) -> None:
    with _two(route) as (owner, reader):
        buffer = owner.own.call_one("tensor", 4096).get()
        assert reader.backend.call_one(buffer).get() == "same host", "asked for before they have met"
        said = reader.debug_lines.call_one(buffer, atomic).get()
        assert said == [f"monarch: memory of {buffer.owner}: same host, {SAID[route]}"]
        assert reader.debug_lines.call_one(buffer, atomic).get() == []
        again = owner.own.call_one("tensor", 3 << 20).get()
        assert reader.debug_lines.call_one(again).get() == [], "once for two processes"
        theirs = reader.own.call_one("tensor", 4096).get()
        assert len(owner.debug_lines.call_one(theirs).get()) == 1, "the other way round, they have met already"


def test_tcp_is_warned_of_once(
    buffer: RDMABuffer, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """TCP is warned of once per process, for all kinds of memory, even if the process ends while its handles are in
    use.
    """
    ways = engine().routes
    monkeypatch.setattr(ways, "_forced", "")
    handle = buffer._handle
    there = [handle._replace(token="x" * len(handle.token[:-1]) + end, pid=pid) for end, pid in (("1", 11), ("2", 12))]
    with caplog.at_level(logging.WARNING, "monarch_backend"):
        for _ in range(3):
            assert ways.to(there[0]).name == "tcp"
            assert ways.to(there[0]._replace(device="cuda:0")).name == "tcp"
            ways.forget(there[0].token)
        assert ways.to(there[1]).name == "tcp"
        monkeypatch.setattr(ways, "_forced", "tcp")
        assert ways.to(there[1]._replace(token="y" * len(handle.token), pid=13)).name == "tcp", "asked for"
    for each in there:
        ways.forget(each.token)
    ways.forget("y" * len(handle.token))
    told = [record.getMessage() for record in caplog.records if "over TCP" in record.getMessage()]
    assert [words.split(" on host")[0] for words in told] == ["memory of process 11", "memory of process 12"]
    assert all(": " in words.split("over TCP")[1] for words in told), "with the reason"


def _between_hosts(path: Path, mark: str) -> tuple[Any, ...]:
    job = ProcessJob({"there": 1}, path=path, env={MARK: mark})
    procs = job.state().there.spawn_procs({"gpus": 1})
    try:
        theirs = procs.spawn("process", Process, "kernel")
        buffer = theirs.own.call_one("tensor", 4096).get(60)
        into = torch.zeros(4096, dtype=torch.uint8)
        buffer.read_into(into, timeout=60).get()
        mine = engine().routes.outgoing(RDMABuffer(torch.zeros(8))._handle)
        name = buffer.backend
        return name, bool(buffer._handle.ways), buffer._handle.encrypted, mine.encrypted, int(into.count_nonzero())
    finally:
        procs.stop().get(30)


@pytest.mark.parametrize("tls", [None, pytest.param("0", marks=pytest.mark.slow)], ids=["by default", "not wanted"])
def test_traffic_between_hosts_is_encrypted(tls: str | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("MONARCH_TLS", raising=False)
    monkeypatch.setenv("MONARCH_RDMA_TRANSPORT", "tcp")
    if tls is not None:
        monkeypatch.setenv("MONARCH_TLS", tls)
    with new_mark() as mark:
        job = ProcessJob({"there": 1}, path=tmp_path / "job.json", env={MARK: mark})
        job.apply()
        try:
            name, has_ways, theirs, mine, read = in_program(_between_hosts, job.path, mark)
        finally:
            job.kill()
    assert (name, has_ways) == ("tcp", True) and read > 4000
    assert theirs is mine is (tls is None)


# Transfers at the end of the interpreter ------------------------------------------------------------------------------

LAST = """
import sys
import torch
from monarch_backend.rdma import RDMABuffer

buffer, into = RDMABuffer(torch.ones(2 << 20, dtype=torch.uint8)), torch.zeros(2 << 20, dtype=torch.uint8)

class Last:
    def __del__(self):
        try:
            buffer[0:8].read_into(into).get()
            print("small", int(into[7]), int(into[8]), flush=True)
            buffer.read_into(into).get(5)
        except BaseException as error:
            print(type(error).__name__, error, flush=True)

sys.modules["last"] = Last()
"""


def test_a_transfer_that_takes_a_thread_at_the_end_of_python() -> None:
    """The interpreter starts no threads at its end. A transfer that needs one raises an error, and does not hang."""
    done = subprocess.run(
        [sys.executable, "-c", LAST], capture_output=True, text=True, timeout=60, env=dict(os.environ)
    )
    assert done.returncode == 0, done.stderr
    small, large = done.stdout.splitlines()
    assert small == "small 1 0", "what takes none is done"
    assert large.startswith("RDMAError Python is ending, and runs no threads any more")
