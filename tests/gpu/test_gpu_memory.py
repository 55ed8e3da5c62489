"""Registered memory of a real GPU: `make test-gpu`. tests/rdma/test_gpu_memory.py needs no GPU.

Owner and reader share one GPU, so one is enough. The "hosts" are processes that use TCP between each other.
"""

from __future__ import annotations

import functools
import os
import signal
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from monarch_backend import rdma
from monarch_backend._rdma.transfers import engine as transfer_engine
from monarch_backend.actor import Actor, ActorError, ActorMesh, endpoint, this_host
from monarch_backend.rdma import DroppedError, OwnerLostError, RDMABuffer, ShardedState
from tests.actor.conftest import _fork_server, faults  # noqa: F401
from tests.actor.support import Faults
from tests.rdma.actors import pattern
from tests.rdma.test_route_matrix import DTYPES
from tests.support.gpus import needs_gpu

pytestmark = [
    pytest.mark.gpu,
    needs_gpu,
    pytest.mark.usefixtures("faults"),
]
MIB = 1 << 20
Pair = tuple[ActorMesh, ActorMesh]
ENVIRONMENTS = {
    "ipc": {},
    "thread": {"MONARCH_GPU_IPC": "0"},
    "expandable": {"PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True"},  # torch can share such memory
    "tcp": {"MONARCH_RDMA_TRANSPORT": "tcp", "MONARCH_TLS": "0"},
    "tls": {"MONARCH_RDMA_TRANSPORT": "tcp"},
}


def _on_gpu(value: torch.Tensor) -> torch.Tensor:
    return value.to("cuda:0")


class GpuProcess(Actor):
    def __init__(self) -> None:
        self.last: Any = None
        self.plan: Any = None

    @endpoint
    def pid(self) -> int:
        return os.getpid()

    @endpoint
    def own(self, value: torch.Tensor, start: int = 0) -> RDMABuffer:
        self.last = _on_gpu(value)
        return RDMABuffer(self.last[start:])

    @endpoint
    def own_slowly(self, nbytes: int) -> RDMABuffer:
        """Register memory while the kernel that fills it may still run."""
        self.last = torch.zeros(nbytes, dtype=torch.uint8, device="cuda:0")
        torch.cuda._sleep(100_000_000)
        self.last += 7
        return RDMABuffer(self.last)

    @endpoint
    def value(self) -> torch.Tensor:
        return self.last.cpu()

    @endpoint
    def read(self, buffer: RDMABuffer, dtype: torch.dtype = torch.uint8) -> torch.Tensor:
        into = torch.zeros(buffer.size() // dtype.itemsize, dtype=dtype, device="cuda:0")
        torch.cuda._sleep(10_000_000)
        into.view(torch.uint8).fill_(99)  # the fill ends before the read writes to the memory
        buffer.read_into(into, timeout=60).get()
        return into.cpu()

    @endpoint
    def write(self, buffer: RDMABuffer, value: torch.Tensor) -> None:
        buffer.write_from(_on_gpu(value), timeout=60).get()

    @endpoint
    def read_to_the_cpu(self, buffer: RDMABuffer) -> None:
        buffer.read_into(torch.empty(buffer.size(), dtype=torch.uint8)).get()

    @endpoint
    def read_for_ever(self, buffer: RDMABuffer) -> str:
        into = torch.empty(buffer.size(), dtype=torch.uint8, device="cuda:0")
        while True:
            try:
                buffer.read_into(into).get()
            except rdma.RDMAError as error:
                return f"{type(error).__name__}: {error}"

    @endpoint
    def way(self, buffer: RDMABuffer) -> str:
        return transfer_engine.engine().routes._same_host.copy_method(buffer._handle)

    @endpoint
    def drop(self, buffer: RDMABuffer) -> None:
        buffer.drop()

    @endpoint
    def offer(self) -> Any:
        self.last = {"layer": {"weight": torch.arange(12.0, device="cuda:0").reshape(4, 3)}, "step": 3}
        return ShardedState.register(self.last)

    @endpoint
    def sync(self, state: ShardedState) -> Any:
        mine: Any = {"layer": {"weight": torch.zeros(4, 3, device="cuda:0")}, "step": None}
        state.read_into(mine, timeout=60).get()
        return mine["layer"]["weight"].cpu(), mine["step"]

    @endpoint
    def gigabytes_per_second(self, buffer: RDMABuffer, times: int) -> float:
        into = torch.empty(buffer.size(), dtype=torch.uint8, device="cuda:0")
        buffer.read_into(into).get()
        begun = time.perf_counter()
        for _ in range(times):
            buffer.read_into(into).get()
        return buffer.size() * times / (time.perf_counter() - begun) / 1e9


def _take(environment: str) -> None:
    os.environ.update(ENVIRONMENTS[environment])


@pytest.fixture(params=ENVIRONMENTS)
def pair(request: pytest.FixtureRequest, faults: Faults) -> Iterator[Pair]:  # noqa: F811
    """Yield an owner and a reader on one GPU."""
    procs = this_host().spawn_procs({"gpus": 2}, bootstrap=functools.partial(_take, request.param))
    both = procs.spawn("process", GpuProcess)
    both.pid.call().get()
    yield both.slice(gpus=0), both.slice(gpus=1)
    procs.stop().get(60)


def _route(request: pytest.FixtureRequest) -> str:
    return str(request.node.callspec.params["pair"])


def test_read_and_write_transfer_the_bytes(pair: Pair, request: pytest.FixtureRequest) -> None:
    owner, reader = pair
    for size in (1, 4095, MIB + 3, 33 * MIB):
        content = pattern(size + 5)
        buffer = owner.own.call_one(content, 5).get()
        assert buffer.device == "cuda:0"
        assert torch.equal(reader.read.call_one(buffer).get(), content[5:])
        reader.write.call_one(buffer, pattern(size, 9)).get()
        assert torch.equal(owner.value.call_one().get()[5:], pattern(size, 9))
        part = buffer[size // 3 : size // 3 + 1]
        assert torch.equal(reader.read.call_one(part).get(), pattern(size, 9)[size // 3 : size // 3 + 1])
        if _route(request) in ("ipc", "thread"):
            words = {"ipc": "IPC", "thread": "copied by its own thread"}[_route(request)]
            assert words in reader.way.call_one(buffer).get()
        owner.drop.call_one(buffer).get()


def test_this_process(pair: Pair) -> None:
    owner, _ = pair
    buffer = owner.own.call_one(pattern(5 * MIB)).get()
    assert torch.equal(owner.read.call_one(buffer).get(), pattern(5 * MIB))


def test_transfer_waits_for_the_kernel_that_fills_memory(pair: Pair) -> None:
    owner, reader = pair
    buffer = owner.own_slowly.call_one(MIB).get()
    assert reader.read.call_one(buffer).get().unique().tolist() == [7]


def test_every_dtype_is_transferred(pair: Pair) -> None:
    owner, reader = pair
    for dtype in DTYPES:
        value = pattern(48 * dtype.itemsize)
        value = (value % 2 if dtype is torch.bool else value).view(dtype)
        buffer = owner.own.call_one(value).get()
        found = reader.read.call_one(buffer, dtype).get()
        assert torch.equal(found.view(torch.uint8), value.view(torch.uint8)), dtype
        owner.drop.call_one(buffer).get()


def test_drop_and_the_wrong_device(pair: Pair) -> None:
    owner, reader = pair
    buffer = owner.own.call_one(pattern(MIB)).get()
    assert torch.equal(reader.read.call_one(buffer).get(), pattern(MIB))
    with pytest.raises(ActorError, match="dst is on cpu"):
        reader.read_to_the_cpu.call_one(buffer).get()
    owner.drop.call_one(buffer).get()
    with pytest.raises(ActorError) as raised:
        reader.read.call_one(buffer).get()
    assert isinstance(raised.value.__cause__, DroppedError)


def test_an_owner_that_is_killed(pair: Pair, faults: Faults) -> None:  # noqa: F811
    owner, reader = pair
    buffer = owner.own.call_one(pattern(64 * MIB)).get()
    assert torch.equal(reader.read.call_one(buffer).get(), pattern(64 * MIB))
    reading = reader.read_for_ever.call_one(buffer)
    pid = owner.pid.call_one().get()
    os.kill(pid, signal.SIGKILL)
    assert reading.get(30).startswith("OwnerLostError")
    for left in Path("/dev/shm").glob(f"torch_{pid}_*"):
        left.unlink()  # torch's reference counts in shared memory, which a killed process cannot delete
    with pytest.raises(ActorError) as raised:
        reader.read.call_one(buffer).get(30)
    assert isinstance(raised.value.__cause__, OwnerLostError)
    faults.next()


def test_sharded_state(pair: Pair) -> None:
    owner, reader = pair
    state = ShardedState.merge([owner.offer.call_one().get()])
    weight, step = reader.sync.call_one(state).get()
    assert torch.equal(weight, torch.arange(12.0).reshape(4, 3)) and step == 3


def test_speed(pair: Pair, request: pytest.FixtureRequest) -> None:
    """No speed is promised, but IPC must be faster than any route through host memory."""
    owner, reader = pair
    buffer = owner.own.call_one(torch.zeros(512 * MIB, dtype=torch.uint8)).get()
    speed = reader.gigabytes_per_second.call_one(buffer, 10).get()
    print(f"\n{_route(request)}: {speed:.1f} GB/s")
    if _route(request) == "ipc":
        assert speed > 60, "more than PCI Express brings"
