"""Registration of GPU memory with NICs: which method is used, and its result. GPUs and NICs are fakes."""

from __future__ import annotations

import ctypes
import errno
import mmap
import os
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from monarch_backend import _native
from monarch_backend._rdma.routes.protocol import UNREACHABLE
from monarch_backend._rdma.routes.verbs import result_of
from monarch_backend._verbs import Engine, Region, Settings, UnreachableMemoryError, VerbsError
from monarch_backend._verbs.providers.provider import REMOTE_READ
from monarch_backend._verbs.registrations.cache import MemoryCache, allocation_of, register_gpu
from tests.rdma.verbs.fabric import Fabric
from tests.rdma.verbs.peers import Outcome
from tests.rdma.verbs.test_engine import ports  # noqa: F401

PAGE = os.sysconf("SC_PAGESIZE")


class Gpu:
    """One GPU allocation: a memfd, with addresses that the process cannot access."""

    def __init__(self, pages: int, offset: int = 0, nbytes: int = 0) -> None:
        self.size = pages * PAGE
        self.fd = os.memfd_create("gpu")
        os.ftruncate(self.fd, self.size)
        self.real = mmap.mmap(self.fd, self.size)
        self._real = ctypes.c_char.from_buffer(self.real)
        self.place = mmap.mmap(-1, self.size, prot=0)
        buffer = ctypes.py_object(self.place)
        view = (ctypes.c_byte * 256)()
        ctypes.pythonapi.PyObject_GetBuffer(buffer, view, 0)
        self.base = ctypes.cast(view, ctypes.POINTER(ctypes.c_void_p))[0] or 0
        ctypes.pythonapi.PyBuffer_Release(view)
        self.address, self.nbytes = self.base + offset, nbytes or self.size - offset
        self.exported: list[tuple[int, int]] = []

    @property
    def __cuda_array_interface__(self) -> dict[str, Any]:
        return {"shape": (self.nbytes,), "typestr": "|u1", "data": (self.address, False), "version": 3}

    def range(self) -> tuple[int, int, int]:
        return self.base, self.size, ctypes.addressof(self._real)

    def bytes(self) -> bytes:
        start = self.address - self.base
        return self.real[start : start + self.nbytes]

    def fill(self, content: bytes) -> None:
        start = self.address - self.base
        self.real[start : start + len(content)] = content

    def close(self) -> None:
        del self._real
        self.real.close()
        self.place.close()
        os.close(self.fd)


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., Gpu]]:
    """Yield ``gpu(pages, ...)``, which makes memory that the fake driver knows and can export as a dma-buf."""
    made: list[Gpu] = []

    def make(*words: int, **other: int) -> Gpu:
        made.append(Gpu(*words, **other))
        return made[-1]

    def at(address: int) -> Gpu | None:
        return next((each for each in made if each.base <= address < each.base + each.size), None)

    def dma_buf(address: int, nbytes: int) -> int:
        found = at(address)
        assert found is not None and address % PAGE == nbytes % PAGE == 0
        if address != found.base:
            raise _native.GpuFailure("only whole allocations here")
        found.exported.append((address, nbytes))
        return os.dup(found.fd)

    monkeypatch.setattr(_native, "gpu_device_of", lambda address: -1 if at(address) is None else 0)
    monkeypatch.setattr(_native, "gpu_dma_buf", dma_buf)
    yield make
    for each in made:
        each.close()


def fabric(*gpus: Gpu, **options: Any) -> Fabric:
    return Fabric(gpus=[each.range() for each in gpus], **options)


def test_an_array_of_a_gpu_is_an_allocation(gpu: Callable[..., Gpu]) -> None:
    array = gpu(2, offset=100)
    found = allocation_of(array)
    assert (found.address, found.nbytes, found.anchor) == (array.address, array.nbytes, array)

    class Slotted:
        __slots__ = ("__cuda_array_interface__",)

    slotted = Slotted()
    slotted.__cuda_array_interface__ = array.__cuda_array_interface__
    found = allocation_of(slotted)
    assert found.hold is slotted and type(found.anchor).__weakrefoffset__


@pytest.mark.parametrize(
    ("options", "said", "exported"),
    [
        ({"peer_memory": True, "dma_buf": True}, "by peer memory", False),
        ({"dma_buf": True}, "by dma-buf (by peer memory: Bad address)", True),
    ],
    ids=["peer memory", "dma-buf"],
)
def test_registration_method_is_chosen(
    gpu: Callable[..., Gpu],
    options: dict[str, bool],
    said: str,
    exported: bool,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setenv("MONARCH_DEBUG", "1")
    array = gpu(3, offset=100, nbytes=5000)
    nic = fabric(array, **options).open_nic("fake0", 16)
    made: Any = register_gpu(nic, array.address, array.nbytes, REMOTE_READ)
    assert capsys.readouterr().err == f"monarch: 5000 bytes of a GPU are registered with fake0 {said}\n"
    assert (made.address, made.nbytes) == (array.address, array.nbytes)
    assert array.exported == ([(array.base, 2 * PAGE)] if exported else []), "whole pages"
    made.close()
    nic.close()


def test_gpu_memory_without_a_method_is_refused(gpu: Callable[..., Gpu]) -> None:
    array = gpu(2)
    nic = fabric(array).open_nic("fake0", 16)
    before = len(os.listdir("/proc/self/fd"))
    with pytest.raises(UnreachableMemoryError) as raised:
        register_gpu(nic, array.address, array.nbytes, REMOTE_READ)
    for words in ("8192 bytes of a GPU with fake0", "pinned memory", "Bad address", "nvidia_peermem", "not supported"):
        assert words in str(raised.value)
    assert isinstance(raised.value, VerbsError)
    assert len(os.listdir("/proc/self/fd")) == before
    cache = MemoryCache(nic, 10, 1 << 30)
    with pytest.raises(UnreachableMemoryError):
        cache.take(allocation_of(array), writable=False)
    assert result_of(raised.value, 0).outcome == UNREACHABLE, "another route is taken"
    nic.close()


def test_gpu_memory_without_dma_buf_export_is_refused(gpu: Callable[..., Gpu]) -> None:
    array = gpu(3, offset=PAGE)
    nic = fabric(array, dma_buf=True).open_nic("fake0", 16)
    with pytest.raises(UnreachableMemoryError, match="by dma-buf: only whole allocations here"):
        register_gpu(nic, array.address, array.nbytes, REMOTE_READ)
    nic.close()


def test_cpu_memory_is_registered_as_usual(gpu: Callable[..., Gpu]) -> None:
    gpu(1)
    nic = Fabric(memory=10).open_nic("fake0", 16)
    with pytest.raises(VerbsError, match="cannot register 100 bytes with fake0") as raised:
        MemoryCache(nic, 10, 1 << 30).take(allocation_of(bytearray(100)), writable=True)
    assert not isinstance(raised.value, UnreachableMemoryError)
    assert isinstance(raised.value.__cause__, OSError) and raised.value.__cause__.errno == errno.ENOMEM
    nic.close()


@pytest.mark.parametrize("options", [{"peer_memory": True}, {"dma_buf": True}], ids=["peer memory", "dma-buf"])
@pytest.mark.usefixtures("ports")
def test_read_and_write_transfer_gpu_memory(gpu: Callable[..., Gpu], options: dict[str, bool]) -> None:
    here, there = gpu(5, offset=64), gpu(5, offset=200, nbytes=4 * PAGE)
    content = bytes(i * 7 % 251 for i in range(there.nbytes))
    there.fill(content)
    binding = fabric(here, there, **options)
    owner = Engine(settings=Settings(), binding=binding)
    asking = Engine(
        lambda peer: asking.connect(peer, owner.accept("asking", asking.offer(peer))),
        settings=Settings(),
        binding=binding,
    )
    region = Region.from_bytes(owner.expose(there.address, there.nbytes, there).to_bytes())
    read, wrote = Outcome(), Outcome()
    asking.transfer("owner", "read", region, [(0, here.address, there.nbytes)], here, read)
    read.wait()
    assert here.bytes()[: there.nbytes] == content
    here.fill(b"written")
    asking.transfer("owner", "write", region, [(100, here.address, 7)], here, wrote)
    wrote.wait()
    assert there.bytes() == content[:100] + b"written" + content[107:]
    asking.close()
    owner.close()
    assert all(nic.opened == nic.closed for nic in binding.nics)
