"""Large copies on one host by several threads: each byte is copied once, and the first error stops all threads."""

from __future__ import annotations

import contextlib
import ctypes
import errno
import functools
import itertools
import mmap
import os
import random
import signal
import threading
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from monarch_backend import _native
from monarch_backend._rdma import registrations
from monarch_backend._rdma.routes.protocol import CANCELLED, DONE, FAILED, LOST, REFUSED
from tests.rdma.actors import ROUTES, pattern, two_processes
from tests.rdma.tcp_owners import Memory
from tests.rdma.verbs.peers import until

MIB = 1 << 20
PROT_NONE = 0
SIZE = 24 * MIB
CONTENT = pattern(SIZE, 3).numpy().tobytes()


@dataclass(frozen=True)
class Owner:
    """A process with registered memory. ``there`` is the address of the memory for other processes."""

    there: tuple[str, tuple[int, int, int]]
    pid: int


@contextlib.contextmanager
def owned(memory: Memory, missing: int = 0, first: bool = False) -> Iterator[Owner]:
    """Fork an owner whose last ``missing`` bytes cannot be accessed, or its first ones if ``first``."""
    said, says = os.pipe()
    hears, tell = os.pipe()
    pid = os.fork()
    if not pid:
        with contextlib.suppress(BaseException):
            registered = _native.Memory(host := _native.Host(64 * MIB))
            ticket = registered.add(memory.address, memory.size, True)
            if missing:
                at = memory.address + (0 if first else memory.size - missing)
                # The range stays mapped without access, and the kernel refuses it as it does an unmapped range. After
                # munmap, the next mapping could take the range.
                assert ctypes.CDLL(None).mprotect(ctypes.c_void_p(at), ctypes.c_size_t(missing), PROT_NONE) == 0
            os.write(says, " ".join(map(str, (host.token, *ticket))).encode())
            os.close(tell)
            os.read(hears, 1)
        os._exit(0)
    try:
        os.close(says), os.close(hears)
        token, *ticket = os.read(said, 200).decode().split()
        yield Owner((token, (int(ticket[0]), int(ticket[1]), int(ticket[2]))), pid)
    finally:
        os.close(tell), os.close(said)
        os.waitpid(pid, 0)


def segments(memory: Memory) -> list[tuple[int, int, int]]:
    """Return all of the memory as pieces of many sizes, in random order."""
    lot = random.Random(5)
    ends = sorted({0, SIZE, 8 * MIB, *(lot.randrange(SIZE) for _ in range(40)), *range(1000, 1300)})
    pieces = [(at, memory.address + at, end - at) for at, end in itertools.pairwise(ends)]
    lot.shuffle(pieces)
    return pieces


def has_no_copy_threads() -> bool:
    """Return whether no copying thread is left. The kernel may list a thread for a moment after it was joined."""
    names = []
    for each in Path("/proc/self/task").iterdir():
        with contextlib.suppress(OSError):
            names.append((each / "comm").read_text())
    return "monarch_copy\n" not in names


@pytest.mark.parametrize("threads", [1, 2, 3, 6, 16])
@pytest.mark.needs("process_vm_readv")
def test_each_byte_once(threads: int) -> None:
    there, here = Memory(SIZE, CONTENT), Memory(SIZE)
    with owned(there) as owner:
        native, forever = _native.Memory(_native.Host(64 * MIB), True, True, threads), _native.CancelScope()
        assert native.move(*owner.there, False, segments(here), forever)[0] == DONE
        assert native.copy_method(*owner.there) == ROUTES["kernel"].way
        assert here[:] == CONTENT
        here[:] = CONTENT[::-1]
        assert native.move(*owner.there, True, segments(here), forever)[0] == DONE
        here[:] = bytes(SIZE)
        assert native.move(*owner.there, False, here.all(), forever)[0] == DONE
        assert here[:] == CONTENT[::-1]
    assert until(has_no_copy_threads)


@pytest.mark.parametrize("missing", [mmap.PAGESIZE, 13 * MIB, SIZE])
@pytest.mark.parametrize("threads", [1, 2, 6])
@pytest.mark.parametrize("write", [False, True])
@pytest.mark.needs("process_vm_readv")
def test_memory_that_is_gone_in_one_of_the_shares(threads: int, missing: int, write: bool) -> None:
    here = Memory(SIZE)
    with owned(Memory(SIZE, CONTENT), missing) as owner:
        native, forever = _native.Memory(_native.Host(64 * MIB), True, True, threads), _native.CancelScope()
        outcome, _, error, *_ = native.move(*owner.there, write, here.all(), forever)
        assert (outcome, error) == (FAILED, errno.EFAULT)
        assert native.move(*owner.there, write, [(0, here.address, 8)], forever)[0] == (
            FAILED if missing == SIZE else DONE
        )
    assert until(has_no_copy_threads)


@pytest.mark.needs("process_vm_readv")
def test_where_one_fails_the_others_stop() -> None:
    """A thread may finish its share before the failing thread starts, so the test has 20 tries."""
    with owned(Memory(4 * SIZE, CONTENT * 4), mmap.PAGESIZE, first=True) as owner:
        native, forever = _native.Memory(_native.Host(64 * MIB), True, True, 2), _native.CancelScope()
        for _ in range(20):
            here = Memory(4 * SIZE)
            assert native.move(*owner.there, False, here.all(), forever)[0] == FAILED
            if here[4 * SIZE - MIB : 4 * SIZE] == bytes(MIB):
                return
    pytest.fail("the second thread has copied all of its share, 20 times")


@pytest.mark.slow
@pytest.mark.needs("process_vm_readv")
def test_cancelled_in_the_middle() -> None:
    found = set()
    with owned(Memory(4 * SIZE, CONTENT * 4)) as owner:
        native, here = _native.Memory(_native.Host(64 * MIB), True, True, 4), Memory(4 * SIZE)
        for turn in range(200):
            scope = _native.CancelScope()
            cancelling = threading.Timer(turn % 20 * (1 + turn // 20) * 1e-3, scope.cancel)
            cancelling.start()
            found.add(native.move(*owner.there, turn % 2 == 1, here.all(), scope)[0])
            cancelling.join()
            if {DONE, CANCELLED} <= found:
                break
    assert found == {DONE, CANCELLED}


@pytest.mark.parametrize("write", [False, True])
@pytest.mark.needs("process_vm_readv")
def test_an_owner_that_is_killed_in_the_middle(write: bool) -> None:
    native, here = _native.Memory(_native.Host(64 * MIB), True, True, 4), Memory(4 * SIZE)
    for turn in range(8):
        with owned(Memory(4 * SIZE)) as owner:
            assert native.move(*owner.there, False, here.all(), _native.CancelScope())[0] == DONE
            killing = threading.Timer(turn * 2e-3, os.kill, (owner.pid, signal.SIGKILL))
            killing.start()
            assert native.move(*owner.there, write, here.all() * 3, _native.CancelScope())[0] in (DONE, LOST)
            killing.join()
            # The system may end the process some time after the signal.
            copy = functools.partial(native.move, *owner.there, write, here.all())
            assert until(lambda copy=copy: copy(_native.CancelScope())[0] == LOST)
    assert until(has_no_copy_threads)


@pytest.mark.needs("process_vm_readv")
def test_cancelled_and_out_of_range_copies_stop() -> None:
    here = Memory(SIZE)
    with owned(Memory(SIZE, CONTENT)) as owner:
        native, scope = _native.Memory(_native.Host(64 * MIB), True, True, 4), _native.CancelScope()
        behind = [*here.all(), (SIZE, here.address, 1)]
        assert native.move(*owner.there, False, behind, scope)[0] == REFUSED
        assert here[:] == bytes(SIZE)
        scope.cancel()
        assert native.move(*owner.there, False, here.all(), scope)[0] == CANCELLED


@pytest.mark.usefixtures("faults")
def test_mapped_memory() -> None:
    for owner, reader in two_processes("mapped"):
        size = 33 * MIB + 5
        buffer = owner.own.call_one("tensor", size).get()
        assert reader.read.call_one(buffer, "tensor").get()
        reader.write.call_one(buffer, "tensor", 9).get()
        assert owner.shows.call_one(size, 9).get()
        owner.drop.call_one(buffer).get()


@pytest.mark.parametrize("value", ["0", "17", "two", "-1", "1.5"])
def test_a_setting_that_is_none(monkeypatch: pytest.MonkeyPatch, value: str) -> None:
    monkeypatch.setenv("MONARCH_CMA_THREADS", value)
    with pytest.raises(ValueError, match=rf"MONARCH_CMA_THREADS='{value}': .*1 to 16"):
        registrations._copying_threads()


@pytest.mark.parametrize(("value", "processors", "threads"), [("1", 8, 1), ("16", 8, 8), ("", 8, 2), ("4", 1, 1)])
def test_no_more_threads_than_processors(
    monkeypatch: pytest.MonkeyPatch, value: str, processors: int, threads: int
) -> None:
    monkeypatch.setattr(registrations.platform, "usable_cpus", lambda: processors)
    monkeypatch.setenv("MONARCH_CMA_THREADS", value)
    assert registrations._copying_threads() == threads
