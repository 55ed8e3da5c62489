"""Operations directly on the callers' memory: tensors in shared memory, and process_vm_readv.

Results are compared with the reference. The output of MONARCH_DEBUG=1 shows which mechanism an operation used.
"""

from __future__ import annotations

import ctypes
import gc
import mmap
import os
import re
import signal
import sys
import time
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

import monarch_backend
from monarch_backend import MonarchError, RankFailedError, SharedMemoryError, empty_shared
from monarch_backend.process_group._shm import segment
from tests.process_group import reference
from tests.shm.random_programs import ALL_GATHER_SINGLE, REDUCE_SCATTER_SINGLE
from tests.support.ranks import run_ranks

pytestmark = [
    pytest.mark.skipif(sys.platform != "linux", reason="the shared-memory core is Linux's"),
    pytest.mark.filterwarnings("ignore:`torch.distributed.*is deprecated. Please use:FutureWarning"),
]

SHARED, READ = "no copy, straight from tensors in shared memory", "one copy, with process_vm_readv"
STAGE, SLOTS = "through the stage", "through slots"
SEE = {"MONARCH_DEBUG": "1"}


def _ways(text: str) -> dict[str, set[str]]:
    """Return collective -> the mechanisms that the MONARCH_DEBUG output of all ranks names."""
    found: dict[str, set[str]] = {}
    for name, way in re.findall(r"group 0: (\w+)(?:\([^)]*\))?: (.*)", text):
        found.setdefault(name, set()).add(way)
    return found


# Every collective, with tensors in private and in shared memory -------------------------------------------------------


def _placed(x: Tensor, where: str, rank: int) -> Tensor:
    shared = where == "shared" or (where == "some" and rank == 0)
    return empty_shared(*x.shape, dtype=x.dtype).copy_(x) if shared else x.clone()


def _all(rank: int, where: str, dtype: str, n: int) -> None:
    size = dist.get_world_size()
    inputs = [((torch.arange(n * size) * 7 + 3 * r) % 5).to(getattr(torch, dtype)) for r in range(size)]

    def put(x: Tensor) -> Tensor:
        return _placed(x, where, rank)

    pieces = [list(x.view(size, n).unbind()) for x in inputs]
    for again in range(2):  # the second turn runs with the state of the first
        x = put(inputs[rank])
        dist.all_reduce(x)
        assert reference.same(x, reference.reduced("SUM", inputs)), again
        x = put(inputs[rank])
        dist.reduce(x, size - 1)
        assert rank != size - 1 or reference.same(x, reference.reduced("SUM", inputs))
        x = put(inputs[rank])
        dist.broadcast(x, 1)
        assert reference.same(x, inputs[1])
        row = [put(torch.zeros_like(x)) for _ in range(size)]
        dist.all_gather(row, put(inputs[rank]))
        assert all(reference.same(a, b) for a, b in zip(row, inputs, strict=True))
        out = put(torch.zeros(n, dtype=x.dtype))
        REDUCE_SCATTER_SINGLE(out, put(inputs[rank]))
        assert reference.same(out, reference.reduced("SUM", [p[rank] for p in pieces]))
        dist.gather(put(inputs[rank]), row if rank == 0 else None, dst=0)
        assert all(reference.same(a, b) for a, b in zip(row, inputs, strict=True))
        dist.scatter(out, [put(p) for p in pieces[1]] if rank == 1 else None, src=1)
        assert reference.same(out, pieces[1][rank])
        x = put(torch.zeros_like(x))
        dist.all_to_all_single(x, put(inputs[rank]))
        assert reference.same(x, torch.cat([pieces[r][rank] for r in range(size)]))
        # In place, as FSDP does: a rank's input is its part of the output.
        x = put(torch.zeros_like(x))
        mine = x.view(size, n)[rank].copy_(pieces[rank][0])
        ALL_GATHER_SINGLE(x, mine)
        assert reference.same(x, torch.cat([pieces[r][0] for r in range(size)]))
        x = put(inputs[rank])
        mine = x.view(size, n)[rank]
        REDUCE_SCATTER_SINGLE(mine, x)
        assert reference.same(mine, reference.reduced("SUM", [p[rank] for p in pieces]))


COLLECTIVES = (
    "all_reduce",
    "reduce",
    "broadcast",
    "all_gather",
    "reduce_scatter",
    "gather",
    "scatter",
    "all_to_all",
)
READS = ("all_gather", "gather", "scatter", "all_to_all")


EACH_ONCE = [(2, "float32"), (3, "int64"), (4, "bfloat16")]
PAIRS = [(size, dtype) for size in (2, 3, 4) for dtype in ("float32", "bfloat16", "int64")]


@pytest.mark.parametrize(
    ("world_size", "dtype"),
    [pytest.param(*case, marks=() if case in EACH_ONCE else pytest.mark.slow) for case in PAIRS],
)
def test_tensors_in_shared_memory(world_size: int, dtype: str, capfd: pytest.CaptureFixture[str]) -> None:
    n = (5 << 20) // getattr(torch, dtype).itemsize // world_size + 3
    run_ranks(_all, world_size, "shared", dtype, n, env=SEE)
    ways = _ways(capfd.readouterr().err)
    for name in COLLECTIVES:
        assert ways[name] == {SHARED}, name


@pytest.mark.needs("process_vm_readv")
@pytest.mark.parametrize("world_size", [2, 3])
def test_the_kernel_copies(world_size: int, capfd: pytest.CaptureFixture[str]) -> None:
    run_ranks(_all, world_size, "own", "bfloat16", 700_001, env=SEE | {"MONARCH_CMA_MIN_BYTES": "100000"})
    ways = _ways(capfd.readouterr().err)
    if READ not in ways["gather"] and not _may_read():
        pytest.skip("this kernel does not let a process read its peers (Yama, seccomp)")
    for name in COLLECTIVES:
        assert any((READ if name in READS else STAGE) in way for way in ways[name]), name
        assert len(ways[name]) == 1


def _may_read() -> bool:
    """Return whether peers may read each other's memory. A child and its parent have more rights than peers."""
    return run_ranks(_reads_rank_0, 2, backend=None)[1]


def _reads_rank_0(rank: int, address: str) -> bool:
    dist.init_process_group("monarch", init_method=address, rank=rank, world_size=2)
    word = ctypes.c_uint64(41)
    told = [(os.getpid(), ctypes.addressof(word))]
    dist.broadcast_object_list(told, 0)
    pid, at = told[0]
    here, there = (ctypes.c_uint64 * 2)(ctypes.addressof(word), 8), (ctypes.c_uint64 * 2)(at, 8)
    got = ctypes.CDLL(None, use_errno=True).process_vm_readv(pid, here, 1, there, 1, 0)
    dist.barrier()
    dist.destroy_process_group()
    return bool(got == 8)


@pytest.mark.parametrize("where", ["own", "some"])
def test_other_operations_use_the_stage(where: str, capfd: pytest.CaptureFixture[str]) -> None:
    run_ranks(_all, 2, where, "float32", 700_001, env=SEE | {"MONARCH_CMA_MIN_BYTES": "0"})
    ways = _ways(capfd.readouterr().err)
    for name in ("all_reduce", "all_gather", "reduce_scatter", "all_to_all"):
        assert ways[name] and all(STAGE in way for way in ways[name])


def test_small_tensors_go_through_slots(capfd: pytest.CaptureFixture[str]) -> None:
    run_ranks(_all, 2, "shared", "float32", 100, env=SEE)
    ways = _ways(capfd.readouterr().err)
    assert all(len(ways[name]) == 1 and SLOTS in next(iter(ways[name])) for name in COLLECTIVES)


def test_algorithm_is_logged_once_and_only_with_debug(capfd: pytest.CaptureFixture[str]) -> None:
    run_ranks(_all, 2, "shared", "float32", 1000, env=SEE)
    lines = [line for line in capfd.readouterr().err.splitlines() if " -> " not in line]
    assert len(lines) == len(set(lines)) and lines[0].startswith("[monarch rank ")
    run_ranks(_all, 2, "shared", "float32", 1000, env={"MONARCH_DEBUG": "0"})
    assert capfd.readouterr().err == ""


# Equal bits by every mechanism ----------------------------------------------------------------------------------------


def _bits(rank: int) -> None:
    n, size = 1_500_001, dist.get_world_size()
    x = torch.randn(n, generator=torch.Generator().manual_seed(rank)) * 10.0 ** (rank * 2)
    a, b = x.clone(), empty_shared(n).copy_(x)
    dist.all_reduce(a)
    dist.all_reduce(b)
    assert torch.equal(a, b)
    whole = x[: n // size * size]
    a, b = torch.zeros(len(whole) // size), empty_shared(len(whole) // size)
    REDUCE_SCATTER_SINGLE(a, whole.clone())
    REDUCE_SCATTER_SINGLE(b, empty_shared(len(whole)).copy_(whole))
    assert torch.equal(a, b)


@pytest.mark.parametrize("world_size", [2, 3, 4])
def test_results_have_the_same_bits_in_private_and_shared_memory(world_size: int) -> None:
    run_ranks(_bits, world_size)


def _overlapping(rank: int) -> None:
    """The core must not read directly from memory that it also writes. It uses a private copy of such an output."""
    n = 400_000
    x = empty_shared(3 * n).copy_(torch.arange(3 * n) + rank * 1000)
    want = [torch.arange(n, 2 * n) + r * 1000.0 for r in range(2)]
    ALL_GATHER_SINGLE(x[: 2 * n], x[n : 2 * n])
    assert torch.equal(x[:n], want[0])
    assert torch.equal(x[n : 2 * n], want[1])


def test_overlapping_input_and_output(capfd: pytest.CaptureFixture[str]) -> None:
    run_ranks(_overlapping, 2, env=SEE)
    assert len(_ways(capfd.readouterr().err)["all_gather"]) == 1


# Lifetime of shared tensors -------------------------------------------------------------------------------------------


def _life(rank: int) -> None:
    host = segment.this_process().host
    before = host.used()
    x = empty_shared(1000, 1000)
    assert host.used() == before + 4_001_792  # rounded up to whole pages
    assert x.shape == (1000, 1000) and x.dtype is torch.float32 and x.is_contiguous()
    part = x[7].fill_(3)
    del x
    gc.collect()
    assert host.used() > before and part.eq(3).all()  # a view keeps the memory
    del part
    gc.collect()
    assert host.used() == before
    weight = torch.nn.Parameter(empty_shared(4, 4, dtype=torch.float64).fill_(1))
    (weight * 2).sum().backward()
    assert weight.grad is not None and weight.grad.eq(2).all()
    assert empty_shared((2, 3)).shape == empty_shared(torch.Size([2, 3])).shape == (2, 3)
    assert empty_shared(0, 3).shape == (0, 3) and empty_shared().shape == ()
    for bad in ((-1,), (2, -3)):
        with pytest.raises(ValueError, match="empty_shared: a tensor can't have the shape"):
            empty_shared(*bad)
    with pytest.raises(TypeError):
        empty_shared("3")  # type: ignore[arg-type]
    left = host.size() - host.used()
    with pytest.raises(
        SharedMemoryError, match=rf"no room for {left + 4096} bytes .*MONARCH_SHM_ARENA_BYTES.*rank {rank}"
    ):
        empty_shared(left + 4096, dtype=torch.uint8)
    assert host.used() <= before + 3 * 4096  # the earlier tensors that are still alive


def test_life_of_a_shared_tensor() -> None:
    run_ranks(_life, 2, env={"MONARCH_SHM_ARENA_BYTES": str(64 << 20)})


def _fork(rank: int) -> None:
    x = empty_shared(100).fill_(rank)
    pid = os.fork()
    if pid == 0:
        kept = [x]
        del kept
        y = empty_shared(100).fill_(9)  # from the child's own arena
        os._exit(0 if float(y.sum()) == 900 else 1)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
    dist.all_reduce(x)
    assert x.eq(1).all()


def test_a_forked_child_has_shared_memory_of_its_own() -> None:
    run_ranks(_fork, 2)


def test_shared_tensor_made_before_init_is_reduced() -> None:
    def early(rank: int, address: str) -> float:
        x = empty_shared(1_000_000).fill_(rank + 1)
        dist.init_process_group("monarch", init_method=address, rank=rank, world_size=2)
        dist.all_reduce(x)
        dist.destroy_process_group()
        return float(x.mean())

    assert run_ranks(early, 2, backend=None) == [3.0, 3.0]


# Failures -------------------------------------------------------------------------------------------------------------


def _again_and_again(call: Callable[[], Any], deadline: float) -> None:
    while time.monotonic() < deadline:
        call()


def _until_it_fails(make: Callable[[int], Tensor], call: Callable[[Tensor], Any]) -> None:
    x = make(1 << 20).fill_(1)
    deadline = time.monotonic() + 60
    with pytest.raises(RankFailedError, match=r"rank 1 \(host \S+, pid \d+\) killed by signal 9"):
        _again_and_again(lambda: call(x), deadline)


def _dies(rank: int, where: str) -> None:
    make = empty_shared if where == "shared" else torch.empty
    row = [torch.zeros(1 << 20) for _ in range(dist.get_world_size())]

    def call(x: Tensor) -> None:
        dist.all_reduce(x.fill_(1))
        dist.all_gather(row, x)

    if rank == 1:
        x = make(1 << 20).fill_(1)
        signal.setitimer(signal.ITIMER_REAL, 0.2)
        signal.signal(signal.SIGALRM, lambda *_: os.kill(os.getpid(), signal.SIGKILL))
        while True:
            call(x)
    _until_it_fails(make, call)
    with pytest.raises(RankFailedError):
        dist.all_reduce(torch.ones(3))


@pytest.mark.parametrize("where", ["shared", "own"])
def test_a_rank_dies_while_others_read_its_memory(where: str) -> None:
    with pytest.raises(AssertionError) as caught:
        run_ranks(_dies, 3, where, env={"MONARCH_CMA_MIN_BYTES": "100000"})
    story = str(caught.value)
    assert "rank 1:\nthe rank died without an answer" in story
    assert "rank 0" not in story and "rank 2" not in story


def _unreadable(rank: int) -> None:
    if rank == 0:
        row = [torch.zeros(1 << 20, dtype=torch.uint8) for _ in range(2)]
        with pytest.raises(
            MonarchError, match=r"rank 1 \(host \S+, pid \d+\) has a tensor in memory that other ranks can't"
        ):
            dist.gather(row[0].clone(), row, dst=0)
    else:
        # only the middle is unreadable: before it offers the memory, the core tests both ends
        hole = mmap.mmap(-1, 1 << 20)
        x = torch.frombuffer(hole, dtype=torch.uint8)
        libc = ctypes.CDLL(None, use_errno=True)
        libc.mprotect.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
        assert libc.mprotect(x.data_ptr() + (1 << 19), 4096, 0) == 0
        with pytest.raises(MonarchError, match=r"rank 1 .* has a tensor in memory that other ranks can't read"):
            dist.gather(x, None, dst=0)
        assert libc.mprotect(x.data_ptr() + (1 << 19), 4096, mmap.PROT_READ | mmap.PROT_WRITE) == 0


@pytest.mark.needs("process_vm_readv")
def test_unreadable_memory_is_named() -> None:
    if not _may_read():
        pytest.skip("this kernel does not let a process read its peers (Yama, seccomp)")
    run_ranks(_unreadable, 2, env={"MONARCH_CMA_MIN_BYTES": "100000"})


def _no_privilege_to_read(rank: int, address: str) -> str:
    libc = ctypes.CDLL(None, use_errno=True)
    if rank == 1:  # without capabilities this rank may not read the other's memory
        header, data = (ctypes.c_uint32 * 2)(0x20080522, 0), (ctypes.c_uint32 * 6)()
        assert libc.capset(header, data) == 0
    else:
        assert libc.prctl(4, 0, 0, 0, 0) == 0  # PR_SET_DUMPABLE=0: unprivileged processes may not read this one
    dist.init_process_group("monarch", init_method=address, rank=rank, world_size=2)
    row = [torch.zeros(1 << 20) for _ in range(2)]
    dist.all_gather(row, torch.full((1 << 20,), float(rank)))
    assert row[1].eq(1).all() and row[0].eq(0).all()
    dist.destroy_process_group()
    return monarch_backend.__version__


def test_a_rank_that_may_not_read(capfd: pytest.CaptureFixture[str]) -> None:
    """If one rank may not read, all ranks use the stage."""
    run_ranks(_no_privilege_to_read, 2, backend=None, env=SEE | {"MONARCH_CMA_MIN_BYTES": "100000"})
    (way,) = _ways(capfd.readouterr().err)["all_gather"]
    assert STAGE in way


@pytest.mark.parametrize("text", ["-1", "1e6", "many"])
def test_a_readv_limit_that_is_no_number(text: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MONARCH_CMA_MIN_BYTES", text)
    with pytest.raises(ValueError, match=r"MONARCH_CMA_MIN_BYTES=.*give a number of bytes, 0 for never"):
        segment.read_from()
