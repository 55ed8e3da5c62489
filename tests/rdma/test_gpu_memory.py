"""GPU memory on every route except a NIC that reaches it, with a fake driver (pretended_gpu.c).

Runs the cases of test_route_matrix.py and test_failures.py that apply. tests/gpu tests the real driver.
"""

from __future__ import annotations

import os
import re
import signal
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from monarch_backend import _native, rdma
from monarch_backend._rdma import local_memory, registrations
from monarch_backend._rdma.transfers import engine as transfer_engine
from monarch_backend.actor import ActorError, ActorMesh, endpoint, this_host
from monarch_backend.rdma import OwnerLostError, RDMABuffer, RDMAError
from tests.actor.actors import pid_of, stopped_processes
from tests.actor.support import Faults
from tests.rdma import pretended_gpu
from tests.rdma.actors import DEVICE_ROUTES, Process, as_tensor, case, fill, pattern, two_processes
from tests.rdma.conftest import MARKS
from tests.rdma.test_failures import (  # noqa: F401
    kill_owner_during_a_read,
    test_dead_reader_does_not_block_others,
    test_stopped_owner_hits_the_deadline,
)
from tests.rdma.test_route_matrix import (  # noqa: F401
    test_buffer_dropped_by_another_process_is_refused,
    test_dropped_buffer_is_refused,
    test_forged_handle_is_refused,
    test_many_parts_in_one_action_are_transferred,
    test_read_and_write_transfer_the_bytes,
    test_transfer_takes_the_expected_route,
)
from tests.rdma.verbs.peers import until

pytestmark = pytest.mark.usefixtures("faults")
MIB = 1 << 20
Pair = tuple[ActorMesh, ActorMesh]
_SLOW = {
    "gpu verbs": (pytest.mark.verbs, pytest.mark.slow),
    **dict.fromkeys(("gpu not exported", "gpu not mapped", "gpu tls"), MARKS["tls"]),
}
MANY = [pytest.param(name, marks=_SLOW.get(name, ())) for name in DEVICE_ROUTES]


class DeviceProcess(Process):
    """A process with a fake GPU, whose counters it reports."""

    @endpoint
    def counts(self) -> list[int]:
        return [pretended_gpu.count(which) for which in range(5)]

    @endpoint
    def mapped(self) -> int:
        return registrations.registry().native.mapped()

    @endpoint
    def adopted(self) -> int:
        return pretended_gpu.Adopted.living

    @endpoint
    def refuse(self, what: str) -> None:
        pretended_gpu.refuse(what)

    @endpoint
    def own_two(self, nbytes: int) -> list[RDMABuffer]:
        """Register one allocation twice."""
        self.last = fill(pretended_gpu.Array(nbytes), pattern(nbytes))
        return [RDMABuffer(self.last) for _ in range(2)]

    @endpoint
    def own_on(self, device: int, nbytes: int) -> RDMABuffer:
        self.last = fill(pretended_gpu.Array(nbytes, device=device), pattern(nbytes))
        return RDMABuffer(self.last)

    @endpoint
    def own_read_only(self, nbytes: int) -> RDMABuffer:
        self.last = pretended_gpu.Array(nbytes, readonly=True)
        return RDMABuffer(self.last)

    @endpoint
    def forget(self) -> None:
        """Drop the array. The GPU's memory is freed unless it is registered."""
        self.last = None

    @endpoint
    def failure(self, buffer: RDMABuffer, write: bool = False) -> str:
        mine = self.mine("tensor", buffer.size())
        error = (buffer.write_from(mine) if write else buffer.read_into(mine)).exception(20)
        return "" if error is None else f"{type(error).__name__}: {error}"

    @endpoint
    def way_in_words(self, buffer: RDMABuffer) -> str:
        return transfer_engine.engine().routes._same_host.copy_method(buffer._handle)

    @endpoint
    def read_to_the_cpu(self, buffer: RDMABuffer) -> None:
        buffer.read_into(bytearray(buffer.size())).get()

    @endpoint
    def copied_without_the_other(self, on_cpu: RDMABuffer, on_gpu: RDMABuffer) -> tuple[bool, bool, bool]:
        """Repeat a copy of both kinds of memory. Return whether the core copied both, copied the first, or cached a
        plan.
        """
        into, far = bytearray(on_cpu.size()), pretended_gpu.Array(on_gpu.size())
        action = rdma.RDMAAction().read_remote(into, on_cpu).read_remote(far, on_gpu)
        for _ in range(2):
            action.submit(timeout=20).get()
        assert into == pattern(on_cpu.size()).numpy().tobytes() and torch.equal(far.content(), pattern(on_gpu.size()))
        into[:] = bytes(len(into))
        here = local_memory.memory_of(into, "into").address, far.address
        both = [(b._handle, at) for b, at in zip((on_cpu, on_gpu), here, strict=True)]
        parts = [(h.token, h.ticket, False, h.offset, at, h.nbytes) for h, at in both]
        done = _native.Copies(registrations.registry().native, parts).run()
        return done, any(into), action._ready is not None

    @endpoint
    def begin(self, buffer: RDMABuffer) -> None:
        self.mine_now = self.mine("tensor", buffer.size())
        self.begun = buffer.read_into(self.mine_now)

    @endpoint
    def end(self) -> bool:
        self.begun.get(20)
        return torch.equal(as_tensor(self.mine_now), pattern(self.mine_now.nbytes))

    @endpoint
    def own_on_the_cpu(self, nbytes: int) -> RDMABuffer:
        self.last = pattern(nbytes)
        return RDMABuffer(self.last)

    @endpoint
    def registering(self, other: dict[str, Any], readonly: bool = False) -> str:
        """Register an array of four bytes with a changed array interface. Return the error, or the registered size
        and device.
        """
        array = pretended_gpu.Array(4, readonly=readonly)
        array.other = other
        try:
            buffer = RDMABuffer(array)
        except Exception as error:
            return f"{type(error).__name__}: {error}"
        buffer.drop()
        return f"{buffer.size()} bytes on {buffer.device}"


@pytest.fixture(scope="module", params=MANY)
def pair(request: pytest.FixtureRequest) -> Iterator[Pair]:
    """Start an owner of GPU memory and a reader, on each route."""
    pretended_gpu.library()
    yield from two_processes(request.param, DeviceProcess)


@pytest.fixture(
    params=[
        name if name in ("gpu ipc", "gpu nic") else pytest.param(name, marks=_SLOW.get(name, MARKS["tls"]))
        for name in DEVICE_ROUTES
        if name != "gpu lent"
    ]
)
def fresh(request: pytest.FixtureRequest, faults: Faults) -> Iterator[Pair]:
    """The same with processes that a test may kill."""
    pretended_gpu.library()
    yield from two_processes(request.param, DeviceProcess)


@pytest.fixture
def on(faults: Faults) -> Iterator[Any]:
    """Yield ``on(route)``, which starts an owner and a reader on this route."""
    pretended_gpu.library()
    made = []

    def of(route: str) -> Pair:
        made.append(two_processes(route, DeviceProcess))
        return next(made[-1])

    yield of
    for each in made:
        assert next(each, None) is None


def _eventually(look: Any, wanted: Any) -> None:
    """Poll until ``look`` returns ``wanted``, because no event reports the change."""
    assert until(lambda: look() == wanted, 20), f"it is {look()}"


def test_this_process(pair: Pair) -> None:
    owner, _ = pair
    buffer = owner.own.call_one("slice", 5 * MIB + 1).get()
    assert owner.backend.call_one(buffer).get() == "this process"
    assert owner.read.call_one(buffer).get()
    owner.write.call_one(buffer, "tensor", 4).get()
    assert owner.shows.call_one(5 * MIB + 1, 4).get()
    owner.drop.call_one(buffer).get()


def test_copy_method_of_gpu_memory(pair: Pair, request: pytest.FixtureRequest) -> None:
    """With IPC the read is one-sided: the owner's driver makes no call."""
    owner, reader = pair
    size, route = 3 * MIB, request.node.callspec.params["pair"]
    buffer = owner.own.call_one("tensor", size).get()
    reader.way.call_one(buffer).get()
    theirs, mine = owner.counts.call_one().get(), reader.counts.call_one().get()
    assert reader.read.call_one(buffer).get()
    theirs_now, mine_now = owner.counts.call_one().get(), reader.counts.call_one().get()
    copied = pretended_gpu.COPIED_BYTES
    assert mine_now[copied] - mine[copied] == size
    assert theirs_now[copied] - theirs[copied] == (0 if route in ("gpu ipc", "gpu lent") else size)
    for counts in (theirs_now, mine_now):
        assert counts[pretended_gpu.PINNED] <= (0 if case(route).name == "same host" else 16)
        assert counts[pretended_gpu.STREAMS] <= 64
    assert mine_now[pretended_gpu.IMPORTED] == (1 if route == "gpu ipc" else 0)
    owner.drop.call_one(buffer).get()


def test_another_kind_of_device_is_refused_at_the_caller(pair: Pair) -> None:
    owner, reader = pair
    on_gpu = owner.own.call_one("tensor", 100).get()
    with pytest.raises(ActorError, match=r"dst is on cpu and the buffer, of process .* on cuda:0: copy it") as raised:
        reader.read_to_the_cpu.call_one(on_gpu).get()
    assert isinstance(raised.value.__cause__, ValueError)
    on_cpu = owner.own_on_the_cpu.call_one(100).get()
    with pytest.raises(ActorError, match=r"dst is on cuda:0 and the buffer, of process .* on cpu: copy it"):
        reader.read.call_one(on_cpu).get()
    reader.read_to_the_cpu.call_one(on_cpu).get()
    for each in (on_gpu, on_cpu):
        owner.drop.call_one(each).get()


def test_atomics_are_refused(pair: Pair) -> None:
    owner, reader = pair
    buffer = owner.own.call_one("tensor", 64).get()
    for each in (owner, reader):
        with pytest.raises(ActorError, match="atomics on memory of a GPU are possible over verbs only") as raised:
            each.add.call_one(buffer, 1).get()
        assert isinstance(raised.value.__cause__, RDMAError)
    assert reader.read.call_one(buffer).get(), "it is as it was"
    owner.drop.call_one(buffer).get()


def test_read_only(pair: Pair) -> None:
    owner, reader = pair
    buffer = owner.own_read_only.call_one(100).get()
    with pytest.raises(ActorError, match="read-only"):
        reader.write.call_one(buffer).get()
    lies = RDMABuffer._of(buffer._handle._replace(writable=True))
    assert "registered read-only" in reader.failure.call_one(lies, True).get()
    owner.drop.call_one(buffer).get()


def test_another_gpu(pair: Pair) -> None:
    owner, reader = pair
    buffer = owner.own_on.call_one(1, 2 * MIB).get()
    assert buffer.device == "cuda:1"
    assert reader.read.call_one(buffer).get()
    owner.drop.call_one(buffer).get()


@pytest.mark.parametrize("write", [False, True], ids=["read", "write"])
def test_a_driver_that_fails(pair: Pair, write: bool, request: pytest.FixtureRequest) -> None:
    owner, reader = pair
    buffer = owner.own.call_one("tensor", 3 * MIB).get()
    assert reader.read.call_one(buffer).get(), "they have met"
    for what in ("copy", "wait"):
        reader.refuse.call_one(what).get()
        said = reader.failure.call_one(buffer, write).get()
        assert said.startswith("RDMAError") and "an illegal memory access was encountered (700)" in said
        reader.refuse.call_one("").get()
        assert reader.failure.call_one(buffer).get() == ""
    if request.node.callspec.params["pair"] not in ("gpu ipc", "gpu lent"):
        for what in ("copy", "wait"):
            owner.refuse.call_one(what).get()
            assert "its owner's GPU, or the driver of it" in reader.failure.call_one(buffer, write).get()
            owner.refuse.call_one("").get()
    reader.write.call_one(buffer, "tensor", 3).get()
    assert reader.read.call_one(buffer, "tensor", 3).get()
    owner.drop.call_one(buffer).get()


def test_owner_killed_during_a_read_fails_it(fresh: Pair, faults: Faults) -> None:
    _, reader = fresh
    _, _, lost = kill_owner_during_a_read(fresh)
    assert isinstance(lost, OwnerLostError)
    faults.next()
    _eventually(lambda: reader.counts.call_one().get()[pretended_gpu.IMPORTED], 0)


def test_a_reader_that_stands_still(fresh: Pair, request: pytest.FixtureRequest) -> None:
    """A stopped reader delays the owner's drop only if the reader itself copies."""
    owner, reader = fresh
    pid = pid_of(reader)
    buffer = owner.own.call_one("tensor", 64 * MIB).get()
    reading = reader.read_for_ever.call_one(buffer)
    for _ in range(5):
        with stopped_processes(pid):
            assert not reading.done()
    if request.node.callspec.params["fresh"] == "gpu ipc":
        owner.drop.call_one(buffer).get(20)
    else:
        with stopped_processes(pid):
            owner.drop.call_one(buffer).get(20)
    assert reading.get(20).startswith("DroppedError")


def test_threads_without_a_context(pair: Pair) -> None:
    """The driver may refuse to tell a thread without a context which GPU an address belongs to."""
    owner, reader = pair
    buffer = owner.own.call_one("tensor", 3 * MIB).get()
    assert reader.read.call_one(buffer).get()
    for each in (owner, reader):
        each.refuse.call_one("attribute").get()
    assert reader.read.call_one(buffer).get()
    reader.write.call_one(buffer, "tensor", 3).get()
    for each in (owner, reader):
        each.refuse.call_one("").get()
    assert reader.read.call_one(buffer, "tensor", 3).get()
    owner.drop.call_one(buffer).get()


def test_parts_of_both_kinds_are_copied_once(pair: Pair) -> None:
    """The core copies either all parts of an action or none."""
    owner, reader = pair
    on_gpu, on_cpu = owner.own.call_one("tensor", 4096).get(), owner.own_on_the_cpu.call_one(100).get()
    assert reader.copied_without_the_other.call_one(on_cpu, on_gpu).get() == (False, False, False)
    for each in (on_gpu, on_cpu):
        owner.drop.call_one(each).get()


@pytest.mark.parametrize("route", ["gpu ipc", "gpu not mapped"])
def test_starting_a_transfer_does_not_wait_for_a_stopped_owner(on: Any, route: str) -> None:
    """Whether memory can be mapped is not known before the first mapping. Starting a transfer must not wait for it."""
    owner, reader = on(route)
    first, second = owner.own_two.call_one(4096).get()
    assert reader.read.call_one(first).get(), "they have met"
    with stopped_processes(pid_of(owner)):
        reader.begin.call_one(second).get(20)
    assert reader.end.call_one().get(30)
    for each in (first, second):
        owner.drop.call_one(each).get()


# ---- IPC


def test_allocation_is_unmapped_after_the_last_drop(on: Any) -> None:
    owner, reader = on("gpu ipc")
    first, second = owner.own_two.call_one(MIB).get()
    for buffer in (first, second):
        assert reader.read.call_one(buffer).get()
    assert reader.counts.call_one().get()[pretended_gpu.IMPORTED] == 1
    owner.drop.call_one(first).get()
    assert reader.read.call_one(second).get()
    assert reader.mapped.call_one().get() == 1
    owner.drop.call_one(second).get()
    _eventually(lambda: reader.counts.call_one().get()[pretended_gpu.IMPORTED], 0)
    assert reader.failure.call_one(second).get().startswith("DroppedError")


def test_new_memory_at_the_address_of_dropped_memory(on: Any) -> None:
    owner, reader = on("gpu ipc")
    for seed in range(5):
        buffer = owner.own.call_one("tensor", MIB, seed).get()
        assert reader.read.call_one(buffer, "tensor", seed).get()
        owner.drop.call_one(buffer).get()
        owner.forget.call_one().get()
        assert reader.failure.call_one(buffer).get().startswith("DroppedError")


def test_registered_memory_stays_allocated(on: Any) -> None:
    owner, reader = on("gpu ipc")
    buffer = owner.own.call_one("tensor", MIB).get()
    owner.forget.call_one().get()
    assert reader.read.call_one(buffer).get()
    owner.drop.call_one(buffer).get()


def test_reported_copy_methods(on: Any) -> None:
    texts = {
        "gpu ipc": "CUDA IPC",
        "gpu thread": "copied by its own thread: through memory of the host, since MONARCH_GPU_IPC=0",
        "gpu not exported": "copied by its own thread: through memory of the host, since its driver does not export",
        "gpu not mapped": r"copied by its own thread: through memory of the host, since the GPU's driver .*\(801\)",
    }
    for route, text in texts.items():
        owner, reader = on(route)
        buffer = owner.own.call_one("tensor", 100).get()
        assert reader.read.call_one(buffer).get()
        said = reader.way_in_words.call_one(buffer).get()
        assert re.match(text, said), said
        owner.drop.call_one(buffer).get()


def test_memory_mapped_by_torch_is_returned(on: Any, faults: Faults) -> None:
    owner, reader = on("gpu lent")
    first, second = owner.own_two.call_one(MIB).get()
    for buffer in (first, second):
        assert reader.way.call_one(buffer).get() == 4
        assert reader.way_in_words.call_one(buffer).get() == "CUDA IPC, by torch"
    assert reader.adopted.call_one().get() == 2
    with stopped_processes(pid_of(owner)):
        assert reader.read.call_one(first).get(20), "nobody needs the owner"
    owner.drop.call_one(first).get()
    _eventually(lambda: reader.adopted.call_one().get(), 1)
    assert reader.failure.call_one(first).get().startswith("DroppedError")
    assert reader.read.call_one(second).get()
    os.kill(pid_of(owner), signal.SIGKILL)
    _eventually(lambda: reader.adopted.call_one().get(), 0)
    faults.next()


# ---- registration


def test_arrays_that_do_not_do(on: Any) -> None:
    owner, _ = on("gpu ipc")
    assert owner.registering.call_one({}).get() == "4 bytes on cuda:0"
    assert owner.registering.call_one({}, True).get() == "4 bytes on cuda:0"
    assert owner.registering.call_one({"shape": (2, 2), "strides": (2, 1)}).get() == "4 bytes on cuda:0"
    assert owner.registering.call_one({"shape": (1, 4), "strides": (99, 1)}).get() == "4 bytes on cuda:0"
    assert owner.registering.call_one({"shape": (2,), "typestr": "<f2", "stream": None}).get() == "4 bytes on cuda:0"
    refused = [
        ({"shape": (2, 2), "strides": (1, 2)}, "ValueError: the memory to register is not contiguous"),
        ({"mask": object}, "ValueError: the memory to register has a mask"),
        ({"shape": (0,)}, "ValueError: the memory to register has no bytes"),
        ({"data": (4096, False)}, "ValueError: .* which the GPU's driver does not know as memory of a GPU"),
        ({"typestr": "|O"}, "TypeError: .* holds pointers to Python's objects"),
        ({"typestr": "|?"}, "ValueError: .* no size that is known"),
    ]
    for other, text in refused:
        said = owner.registering.call_one(other).get()
        assert re.match(text, said), said


def test_failed_stream_of_an_array_refuses_registration(on: Any) -> None:
    owner, _ = on("gpu ipc")
    assert owner.registering.call_one({}).get() == "4 bytes on cuda:0"
    owner.refuse.call_one("settle").get()
    said = owner.registering.call_one({}).get()
    assert said.startswith("RDMAError: what fills the memory to register has failed")
    assert owner.registering.call_one({"stream": None}).get() == "4 bytes on cuda:0", "it asks for no wait"


def _without_a_driver() -> None:
    os.environ["MONARCH_GPU_DRIVER"] = "/nowhere/libcuda.so.1"


def test_without_a_driver(faults: Faults) -> None:
    procs = this_host().spawn_procs({"gpus": 1}, bootstrap=_without_a_driver)
    owner = procs.spawn("process", DeviceProcess, "gpu ipc")
    said = owner.registering.call_one({}).get()
    assert said.startswith("RDMAError: the memory to register is memory of a GPU, whose driver can't be used")
    assert "/nowhere/libcuda.so.1" in said
    assert owner.own_on_the_cpu.call_one(8).get().size() == 8, "others need none"
    procs.stop().get(30)
