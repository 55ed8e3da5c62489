"""Transfers that end early, on every route: owners that die or do not answer, deadlines, cancellation, and limits."""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import gc
import mmap
import os
import signal
import subprocess
import sys
import threading
import warnings
import weakref
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from monarch_backend import _native
from monarch_backend._rdma import registrations
from monarch_backend._rdma import registrations as registrations_module
from monarch_backend._rdma.routes.protocol import DONE, LOST
from monarch_backend._rdma.transfers.engine import engine
from monarch_backend.actor import ActorError, ActorMesh, CancelledError, SupervisionError
from monarch_backend.rdma import DroppedError, OwnerLostError, RDMAAction, RDMABuffer, RDMAError
from tests.actor.actors import pid_of, resident_bytes, stopped_processes, until
from tests.actor.support import Faults
from tests.rdma.actors import ONE_SIDED_ROUTES, ROUTES, pattern, two_processes
from tests.rdma.conftest import routes
from tests.support import features

MIB = 1 << 20
Pair = tuple[ActorMesh, ActorMesh]


@pytest.fixture(params=routes())
def fresh(request: pytest.FixtureRequest, faults: Faults, monkeypatch: pytest.MonkeyPatch) -> Iterator[Pair]:
    """Start an owner and a reader that a test may kill."""
    if request.param == "verbs":  # NICs must also reach the main program's memory
        monkeypatch.setattr(engine().routes, "_forced", "verbs")
    yield from two_processes(request.param)


def route_of(request: pytest.FixtureRequest) -> str:
    return str(request.node.callspec.params["fresh"])


def test_main_program_can_own_and_read(fresh: Pair) -> None:
    owner, reader = fresh
    mine = pattern(3 * MIB, 3).clone()
    buffer = RDMABuffer(mine)
    assert reader.read.call_one(buffer, "tensor", 3).get()
    reader.write.call_one(buffer, "tensor", 4).get()
    assert torch.equal(mine, pattern(3 * MIB, 4))
    buffer.drop()
    theirs = owner.own.call_one("tensor", 3 * MIB).get()
    into = torch.zeros(3 * MIB, dtype=torch.uint8)
    theirs.read_into(into, timeout=30).get()
    assert torch.equal(into, pattern(3 * MIB))
    owner.drop.call_one(theirs).get()


def kill_owner_during_a_read(pair: Pair) -> tuple[RDMABuffer, int, BaseException | None]:
    """Kill the owner of a buffer during a read. Return the buffer, the pid, and the cause of the next read's error."""
    owner, reader = pair
    pid = owner.pid.call_one().get()
    buffer = owner.own.call_one("tensor", 32 * MIB).get()
    assert reader.read.call_one(buffer).get()
    reading = reader.read_for_ever.call_one(buffer)
    os.kill(pid, signal.SIGKILL)
    words = reading.get(20)
    assert words.startswith("OwnerLostError after 0."), words
    assert str(pid) in words
    with pytest.raises(ActorError) as raised:
        reader.read.call_one(buffer).get(20)
    return buffer, pid, raised.value.__cause__


def test_owner_killed_during_a_read_fails_it(fresh: Pair, faults: Faults) -> None:
    buffer, pid, lost = kill_owner_during_a_read(fresh)
    assert isinstance(lost, OwnerLostError) and isinstance(lost, SupervisionError) and isinstance(lost, RDMAError)
    faults.next()
    with pytest.raises(OwnerLostError, match="signal 9") as here:
        buffer.read_into(torch.empty(32 * MIB, dtype=torch.uint8)).get(20)
    assert here.value.pid == pid and here.value.signal == 9
    buffer.drop()  # no effect: the owner has died


def test_stopped_owner_hits_the_deadline(fresh: Pair, request: pytest.FixtureRequest) -> None:
    owner, reader = fresh
    pid = owner.pid.call_one().get()
    buffer = owner.own.call_one("tensor", 4 * MIB).get()
    assert reader.read.call_one(buffer).get()
    reader.way.call_one(buffer).get()  # the owner's thread reads GPU memory until its mapping exists
    with stopped_processes(pid):
        limit = 20 if route_of(request) in ONE_SIDED_ROUTES else 0.3
        reading = reader.read.call_one(buffer, "tensor", 1, limit)
        if route_of(request) in ONE_SIDED_ROUTES:
            assert reading.get(20), "nobody needs it"
        else:
            with pytest.raises(ActorError, match=r"was not done within 0\.3 s") as raised:
                reading.get(20)
            assert isinstance(raised.value.__cause__, TimeoutError)
            waiting = reader.cancel_after.call_one(buffer, 0.2)
            assert waiting.get(20) == "CancelledError"
    assert reader.read.call_one(buffer).get(20)
    owner.drop.call_one(buffer).get(20)


def test_atomics_of_a_stopped_owner_hit_the_deadline(fresh: Pair, request: pytest.FixtureRequest) -> None:
    owner, reader = fresh
    pid = owner.pid.call_one().get()
    buffer = owner.own.call_one("tensor", 64).get()
    reader.add.call_one(buffer, 1).get()
    with stopped_processes(pid):
        needs_no_owner = route_of(request) in ("mapped", "verbs")
        adding = reader.add_within.call_one(buffer, 20 if needs_no_owner else 0.2)
        assert adding.get(20) == ("done" if needs_no_owner else "TimeoutError")
    assert len(reader.add.call_one(buffer, 1).get(20)) == 1


def test_dead_reader_does_not_block_others(fresh: Pair, faults: Faults) -> None:
    owner, reader = fresh
    buffer = owner.own.call_one("tensor", 32 * MIB).get()
    reading = reader.read_for_ever.call_one(buffer)
    assert not reading.done()
    os.kill(pid_of(reader), signal.SIGKILL)
    owner.drop.call_one(buffer).get(20)
    faults.next()
    with pytest.raises(SupervisionError):
        reading.get(20)


def test_stopped_reader_does_not_block_others(fresh: Pair, request: pytest.FixtureRequest) -> None:
    _, reader = fresh
    if route_of(request) in ("kernel", "mapped"):
        pytest.skip("on this route the reader itself may be in the middle of the memory")
    pid = pid_of(reader)
    buffer = RDMABuffer(torch.ones(64 * MIB, dtype=torch.uint8))
    reading = reader.read_for_ever.call_one(buffer)
    for _ in range(5):
        with stopped_processes(pid):
            assert not reading.done()
    with stopped_processes(pid):
        buffer.drop()
    assert reading.get(20).startswith("DroppedError")


def test_memory_in_use_is_not_released(
    fresh: Pair, monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest
) -> None:
    _, reader = fresh
    if route_of(request) not in ("kernel", "mapped") or features.missing("process_vm_readv"):
        pytest.skip(
            "on this route it is read by a thread of its owner, which holds it while it copies a piece, no longer"
        )
    monkeypatch.setattr(registrations, "DROP_TIMEOUT_S", 0.2)
    pid = pid_of(reader)
    mine = torch.ones(64 * MIB, dtype=torch.uint8)
    buffer = RDMABuffer(mine)
    ticket, native = buffer._handle.ticket, registrations.registry().native
    reading = reader.read_for_ever.call_one(buffer)
    while True:  # until the reader is stopped in the middle of a transfer
        with stopped_processes(pid):
            if native.user_of(ticket):
                with pytest.raises(RDMAError, match=f"process {pid} is in the middle of a transfer"):
                    buffer.drop()
                break
    monkeypatch.undo()
    buffer.drop()
    assert reading.get(20).startswith("DroppedError")
    assert not native.user_of(ticket)


# ---- without a second process


def test_registered_memory_stays_alive_until_drop() -> None:
    memory = np.arange(1000)
    gone = weakref.ref(memory)
    value = torch.from_numpy(memory)
    buffer = RDMABuffer(value)
    value.data = torch.zeros(1, dtype=torch.int64)  # as in model.to()
    del value, memory
    gc.collect()
    assert gone() is not None
    into = torch.zeros(1000, dtype=torch.int64)
    buffer.read_into(into).get()
    assert torch.equal(into, torch.arange(1000))
    buffer.drop()
    gc.collect()
    assert gone() is None
    with pytest.raises(DroppedError, match="not registered any more"):
        buffer.read_into(into).get()


def test_registered_memory_cannot_be_resized() -> None:
    value = torch.arange(1000)
    buffer = RDMABuffer(value)
    with pytest.raises(RuntimeError, match="resiz"):
        value.untyped_storage().resize_(0)
    buffer.drop()


def test_memory_that_changes_before_an_action_is_submitted() -> None:
    value = torch.zeros(1 << 20, dtype=torch.uint8)
    buffer, into = RDMABuffer(value), bytearray(1 << 20)
    action = RDMAAction().read_remote(into, buffer)
    del into[16:]
    with pytest.raises(ValueError, match="dst has 16 bytes"):
        action.submit()
    source = bytearray(8)
    action = RDMAAction().write_remote(buffer[0:8], source)
    source.extend(bytes([255] * 8))
    with pytest.raises(ValueError, match="do not fit"):
        action.submit()
    assert not value.any()
    buffer.drop()


def test_action_can_be_submitted_repeatedly(fresh: Pair, request: pytest.FixtureRequest) -> None:
    owner, reader = fresh
    if route_of(request) in ("tcp", "tls", "verbs"):
        pytest.skip("on this route each submit is a new one")
    into, theirs = torch.zeros(4096, dtype=torch.uint8), owner.own.call_one("tensor", 4096, 1).get()
    action = RDMAAction().read_remote(into, theirs)
    for seed in (1, 2, 3):
        reader.write.call_one(theirs, "tensor", seed).get()
        action.submit().get()
        assert torch.equal(into, pattern(4096, seed))
    other = torch.zeros(8, dtype=torch.uint8)
    action.read_remote(other, theirs[4:12]).submit().get()
    assert torch.equal(other, pattern(4096, 3)[4:12])
    into.data = torch.zeros(4096, dtype=torch.uint8)  # the tensor has other memory now
    action.submit().get()
    assert torch.equal(into, pattern(4096, 3))
    into.untyped_storage().resize_(4000)
    with pytest.raises(ValueError, match="was freed"):
        action.submit()
    into.untyped_storage().resize_(4096)
    action.submit(timeout=30).get()
    owner.drop.call_one(theirs).get()
    with pytest.raises(DroppedError):
        action.submit().get()


def test_action_releases_its_arguments() -> None:
    value, into = torch.ones(8, dtype=torch.uint8), bytearray(8)
    buffer = RDMABuffer(value)
    action = RDMAAction().read_remote(into, buffer)
    action.submit().get()
    into.extend(b"more")  # allowed, as before the submission
    action.submit().get()
    assert into == bytearray([1] * 8) + b"more"
    buffer.drop()


def test_buffers_stay_alive_during_a_transfer() -> None:
    buffer = RDMABuffer(torch.ones(64 * MIB, dtype=torch.uint8))
    with mmap.mmap(-1, 64 * MIB) as room:
        future = buffer.read_into(room)
        if not future.done():
            with contextlib.suppress(BufferError):
                room.close()
        future.get(20)
        assert room.closed or room[-1] == 1
    buffer.drop()


def test_memory_of_a_file_that_can_only_be_read(tmp_path: Path) -> None:
    np.zeros(8192, dtype=np.uint8).tofile(tmp_path / "file")
    mapped = np.memmap(tmp_path / "file", mode="r", dtype=np.uint8)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        buffer = RDMABuffer(torch.from_numpy(mapped))
    with pytest.raises(RDMAError, match="read-only"):
        buffer.write_from(bytes(8192)).get(20)
    buffer.drop()
    del mapped  # the error's traceback references this frame for a while


def test_many_waiting_transfers_do_not_block_others(fresh: Pair, request: pytest.FixtureRequest) -> None:
    owner, reader = fresh
    if route_of(request) not in ("thread", "tcp", "tls"):
        pytest.skip("on this route nobody waits for an owner")
    buffer = owner.own.call_one("tensor", 4 * MIB).get()
    mine = RDMABuffer(torch.ones(4 * MIB, dtype=torch.uint8))
    assert reader.read.call_one(buffer).get()
    with stopped_processes(pid_of(owner)):
        assert reader.gives_up_many.call_one(buffer, mine, 12).get(20) == ["CancelledError"] * 12
    buffer.drop(), mine.drop()


def test_ten_thousand_registrations_leave_no_memory() -> None:
    def some(count: int) -> None:
        for _ in range(count):
            buffer = RDMABuffer(torch.empty(4096, dtype=torch.uint8))
            buffer.drop()

    some(1000)
    gc.collect()
    before = resident_bytes(os.getpid())
    some(10_000)
    gc.collect()
    assert resident_bytes(os.getpid()) - before < 2 * MIB


def test_registration_limit_raises() -> None:
    value = torch.empty(8, dtype=torch.uint8)
    buffers: list[RDMABuffer] = []
    with pytest.raises(RDMAError, match="65536 registrations are the most"):
        buffers.extend(RDMABuffer(value) for _ in range(70_000))
    for buffer in buffers:
        buffer.drop()
    assert len(buffers) > 60_000
    RDMABuffer(value).drop()


def test_asyncio() -> None:
    value = torch.arange(3 * MIB, dtype=torch.int32)
    buffer = RDMABuffer(value)
    into = [torch.zeros_like(value) for _ in range(4)]

    async def all_of_them() -> None:
        await asyncio.gather(*(buffer.read_into(each).as_asyncio() for each in into))
        await buffer[:8].read_into(into[0])

    asyncio.run(all_of_them())
    assert all(torch.equal(each, value) for each in into)
    buffer.drop()


def test_threads() -> None:
    value = pattern(2 * MIB)
    buffer, number = RDMABuffer(value), RDMABuffer(torch.zeros(1, dtype=torch.int64))
    failed: list[Any] = []

    def work() -> None:
        for _ in range(20):
            into = torch.zeros(2 * MIB, dtype=torch.uint8)
            buffer.read_into(into).get(20)
            number.fetch_add(1).get(20)
            if not torch.equal(into, value):
                failed.append(into)

    threads = [threading.Thread(target=work) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failed
    assert number.fetch_add(0).get() == 160
    buffer.drop(), number.drop()


def test_expired_deadline_fails_the_transfer() -> None:
    procs_free = RDMABuffer(torch.zeros(8))
    with pytest.raises(ValueError, match="timeout"):
        procs_free.read_into(torch.zeros(8), timeout=-1)
    procs_free.drop()
    large = torch.zeros(64 * MIB, dtype=torch.uint8)
    buffer = RDMABuffer(large)
    with pytest.raises(TimeoutError, match=r"was not done (at once \(timeout=0\)|within 0 s)"):
        buffer.read_into(torch.empty_like(large), timeout=0).get(20)
    buffer.drop()


def test_cancel_returns_whether_it_was_in_time() -> None:
    """Cancel transfers within one process. `test_stopped_owner_hits_the_deadline` does it over each route."""
    memory = torch.full((64 * MIB,), 7, dtype=torch.uint8)
    before = registrations_module.registry().count()
    buffer = RDMABuffer(memory)
    for _ in range(5):
        into = torch.zeros_like(memory)
        future = buffer.read_into(into)
        cancelled = future.cancel()
        assert isinstance(future.exception(20), CancelledError) == cancelled
        assert cancelled or torch.equal(into, memory)
    assert RDMAAction().read_remote(torch.zeros(8), buffer[:8]).submit().get(20) is None
    buffer.drop()
    assert registrations_module.registry().count() == before


# ---- a fork made by the user


def _in_a_fork(buffer: RDMABuffer) -> list[str]:
    """Return the errors in a forked child that uses the parent's buffer."""
    told, tell = os.pipe()
    pid = os.fork()
    if not pid:
        with contextlib.suppress(BaseException):
            for use in (lambda: buffer.read_into(bytearray(8)), lambda: buffer.backend, buffer.drop):
                try:
                    use()
                    os.write(tell, b"nothing\n")
                except RDMAError as error:
                    os.write(tell, f"{error}\n".encode())
            mine = torch.ones(8)
            RDMABuffer(mine).read_into(into := torch.zeros(8)).get(10)
            os.write(tell, b"its own\n" if torch.equal(mine, into) else b"")
        os._exit(0)
    os.close(tell)
    with os.fdopen(told) as lines:
        said = lines.read().splitlines()
    os.waitpid(pid, 0)
    return said


def test_buffer_in_a_forked_child_raises() -> None:
    memory = torch.arange(2.0)
    buffer = RDMABuffer(memory)
    *refused, own = _in_a_fork(buffer)
    assert len(refused) == 3
    assert all(f"process {os.getpid()}" in each and "was forked from" in each for each in refused)
    assert own == "its own"
    into = torch.zeros(2)
    buffer.read_into(into).get(10)  # in the parent the buffer still works
    assert torch.equal(into, memory)
    buffer.drop()


# ---- a pid that is reused before this process's threads notice that the owner has ended

_OTHERS = b"S"
_IMPOSTOR = """
import ctypes, os, sys
address, nbytes, pid = map(int, sys.argv[1:])
while os.getpid() != pid:
    with open("/proc/sys/kernel/ns_last_pid", "w") as last:
        last.write(str(pid - 1))
    child = os.fork()
    if child:
        os.waitpid(child, 0)
    elif os.getpid() != pid:
        os._exit(0)
    if child == pid:
        sys.exit()
libc = ctypes.CDLL(None)
integer, size = ctypes.c_int, ctypes.c_size_t
libc.mmap.restype = ctypes.c_void_p
libc.mmap.argtypes = [ctypes.c_void_p, size, integer, integer, integer, ctypes.c_long]
assert libc.mmap(address, nbytes, 3, 0x100022, -1, 0) == address  # MAP_FIXED_NOREPLACE
ctypes.memset(address, ord("S"), nbytes)
print("there", flush=True)
sys.stdin.read()
"""
_HOLD = """
import ctypes, os, sys
tid, libc = int(sys.argv[1]), ctypes.CDLL(None, use_errno=True)
none = ctypes.c_void_p()
for request in (0x4206, 0x4207):  # PTRACE_SEIZE, PTRACE_INTERRUPT
    if libc.ptrace(request, tid, none, none):
        sys.exit(os.strerror(ctypes.get_errno()))
os.waitpid(tid, 0x40000000)  # __WALL
print("held", flush=True)
sys.stdin.read()
"""


class _Replaced:
    """A forked owner of memory, and another process that gets its pid. Both have memory at the same address."""

    NBYTES = 1 << 16
    mother: subprocess.Popen[bytes] | None = None  # parent of the process that gets the pid

    def __init__(self) -> None:
        self.memory = mmap.mmap(-1, self.NBYTES, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        self.memory[:] = b"A" * self.NBYTES
        self.address = ctypes.addressof(ctypes.c_char.from_buffer(self.memory))
        self.said, said = os.pipe()
        hears, self.asks = os.pipe()
        self.pid = os.fork()
        if not self.pid:
            with contextlib.suppress(BaseException):
                self._own(hears, said)
            os._exit(1)
        os.close(hears), os.close(said)
        self.token, *ticket = os.read(self.said, 200).decode().split()
        self.ticket = (int(ticket[0]), int(ticket[1]), int(ticket[2]))

    def _own(self, hears: int, said: int) -> None:
        host = _native.Host(64 * MIB)
        registered = _native.Memory(host)
        ticket = registered.add(self.address, self.NBYTES, True)
        os.write(said, " ".join(map(str, (host.token, *ticket))).encode())
        os.read(hears, 1)
        os.dup2(hears, 0), os.dup2(said, 1)
        os.execv(sys.executable, self._impostor)

    @property
    def _impostor(self) -> list[str]:
        return [sys.executable, "-c", _IMPOSTOR, str(self.address), str(self.NBYTES), str(self.pid or os.getpid())]

    def by_a_program(self) -> None:
        """Make the owner's process execute another program."""
        os.write(self.asks, b"x")
        assert os.read(self.said, 5) == b"there"

    def by_a_process(self) -> None:
        """Kill the owner and start another process with its pid."""
        if not os.access("/proc/sys/kernel/ns_last_pid", os.W_OK):
            pytest.skip("only root can choose the next pid")
        os.kill(self.pid, signal.SIGKILL), os.waitpid(self.pid, 0)
        self.mother = subprocess.Popen(self._impostor, stdin=-1, stdout=-1)
        assert self.mother.stdout is not None
        assert self.mother.stdout.read(5) == b"there"

    def shows(self) -> bytes:
        """Return the bytes at the address in the process that has the pid now."""
        with open(f"/proc/{self.pid}/mem", "rb", buffering=0) as there:
            return os.pread(there.fileno(), 8, self.address)

    def end(self) -> None:
        if self.mother is not None:
            self.mother.communicate()
        else:
            os.kill(self.pid, signal.SIGKILL), os.waitpid(self.pid, 0)
        os.close(self.said), os.close(self.asks)


def _watchers() -> set[str]:
    """Return this process's threads that watch for the end of other processes."""
    all_of_them = Path("/proc/self/task").iterdir()
    return {each.name for each in all_of_them if (each / "comm").read_text() == "monarch_watch\n"}


@contextlib.contextmanager
def _stopped_thread(thread: str) -> Iterator[None]:
    """Stop a thread of this process during the block."""
    program = [sys.executable, "-c", _HOLD, thread]
    with subprocess.Popen(program, stdin=-1, stdout=-1, stderr=-1, text=True) as holder:
        assert holder.stdout is not None
        assert holder.stderr is not None
        if holder.stdout.readline() != "held\n":
            pytest.skip(f"threads can't be held: {holder.stderr.read()}")
        try:
            yield
        finally:
            holder.communicate()


@pytest.mark.parametrize("replaced", ["by_a_program", "by_a_process"])
@pytest.mark.needs("process_vm_readv")
def test_memory_of_a_replaced_owner_process_is_not_accessed(replaced: str) -> None:
    before, owner = _watchers(), _Replaced()
    try:
        host = _native.Host(64 * MIB)
        until(lambda: len(_watchers() - before) == 1, "its thread has its name")
        [watching] = _watchers() - before
        registered, forever = _native.Memory(host), _native.CancelScope()
        here = (ctypes.c_char * _Replaced.NBYTES)()
        there = owner.token, owner.ticket
        all_of_it = [(0, ctypes.addressof(here), len(here))]
        assert registered.move(*there, False, all_of_it, forever)[0] == DONE
        assert here.raw == b"A" * len(here)
        assert registered.copy_method(*there) == ROUTES["kernel"].way
        with _stopped_thread(watching):
            getattr(owner, replaced)()
            assert owner.shows() == _OTHERS * 8, "else nothing is shown by this"
            for write in (False, True):
                assert not registered.at_once(*there, write, 8, ctypes.addressof(here), 8)
                assert registered.move(*there, write, all_of_it, forever)[0] == LOST
            here[0] = b"W"
            assert owner.shows() == _OTHERS * 8
            assert registered.copy_method(*there) == ROUTES["kernel"].way, "the owner's end was seen too early"
        del registered, host
    finally:
        owner.end()
