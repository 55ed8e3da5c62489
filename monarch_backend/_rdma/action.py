"""RDMAAction: a batch of one-sided transfers and atomics with one completion."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

from monarch_backend._actor.calls.future import Future
from monarch_backend._core.timeouts import check_timeout
from monarch_backend._rdma.buffer import RDMABuffer
from monarch_backend._rdma.local_memory import CPU, LocalMemory, memory_of, watch, writable
from monarch_backend._rdma.routes.protocol import COMPARE_AND_SWAP, FETCH_ADD
from monarch_backend._rdma.transfers.engine import AtomicOp, Engine, ReadWriteOp, engine


class _Step(NamedTuple):
    """One transfer or atomic of an action and its local object.

    The local object is checked when it is added, and again at each submit.
    """

    buffer: RDMABuffer
    local: Any
    # returns the local memory as it is now; raises ValueError or TypeError if it can't be used
    look: Callable[[], LocalMemory]
    fills: bool  # the transfer writes to the local memory
    make: Callable[[LocalMemory], ReadWriteOp | AtomicOp]


_Replay = Callable[[Engine, list[_Step], float | None], Future[None] | None]


class RDMAAction:
    """Batch of transfers with one completion. It may be submitted any number of times.

    The methods that add a transfer return the action, and raise as RDMABuffer's methods do. The order of transfers
    within a batch is undefined.

    >>> import torch
    >>> from monarch_backend.rdma import RDMAAction, RDMABuffer
    >>> one, two = torch.ones(4), torch.zeros(4)
    >>> first, second = RDMABuffer(one), RDMABuffer(two)
    >>> copy = torch.empty(4)
    >>> RDMAAction().read_remote(copy, first).write_remote(second, one).submit(timeout=10).get()
    >>> copy.sum().item(), two.sum().item()
    (4.0, 4.0)
    >>> first.drop(), second.drop()
    (None, None)
    """

    def __init__(self) -> None:
        self._steps: list[_Step] = []
        self._ready: _Replay | None = None

    def __len__(self) -> int:
        return len(self._steps)

    def read_remote(self, dst: Any, src: RDMABuffer) -> RDMAAction:
        """Copy all of ``src`` to the beginning of ``dst``; the rest of ``dst`` keeps its values."""
        src, dst = _buffer_and_local(src, dst, "read_remote(dst, src)", "src")
        handle, size = src._handle, src.size()
        make = lambda memory: ReadWriteOp(handle, False, ((handle.offset, memory.address, size),))  # noqa: E731
        return self._add(_Step(src, dst, lambda: src._to_read(dst), True, make))

    def write_remote(self, dst: RDMABuffer, src: Any) -> RDMAAction:
        """Copy all of ``src`` to the beginning of ``dst``; the rest of ``dst`` keeps its values."""
        dst, src = _buffer_and_local(dst, src, "write_remote(dst, src)", "dst")
        handle = dst._handle
        make = lambda memory: ReadWriteOp(handle, True, ((handle.offset, memory.address, memory.nbytes),))  # noqa: E731
        return self._add(_Step(dst, src, lambda: dst._to_write(src), False, make))

    def fetch_add(self, dst: Any, src: RDMABuffer, add: int, offset: int = 0) -> RDMAAction:
        """Add to the 64-bit integer at byte ``offset`` of ``src``.

        ``dst``, 8 bytes on the CPU, receives the old value.
        """
        return self._atomic(dst, src, FETCH_ADD, offset, add, 0)

    def compare_and_swap(self, dst: Any, src: RDMABuffer, compare: int, swap: int, offset: int = 0) -> RDMAAction:
        """Store ``swap`` at byte ``offset`` if the value there equals ``compare``.

        ``dst``, 8 bytes on the CPU, receives the old value.
        """
        return self._atomic(dst, src, COMPARE_AND_SWAP, offset, swap, compare)

    def submit(self, *, timeout: float | None = None) -> Future[None]:
        """Start all transfers. Return a Future of None that fails with the first error, as RDMABuffer.read_into does.

        After ``timeout`` seconds it fails with TimeoutError. Raises ValueError if there are no transfers, if two steps
        write to the same local bytes, or if one reads what another writes: their order would be undefined.
        """
        timeout = check_timeout(timeout)
        mover, ready = engine(), self._ready
        if ready is not None and (again := ready(mover, self._steps, timeout)) is not None:
            return again
        steps = list(self._steps)  # another thread may add steps meanwhile
        if not steps:
            raise ValueError("there is nothing to submit: add transfers first")
        memories = [step.look() for step in steps]
        _refuse_overlaps(steps, memories)
        parts = [step.make(memory) for step, memory in zip(steps, memories, strict=True)]
        future = mover.start(parts, memories, timeout)
        self._ready = _ready(mover, steps, parts, memories)
        return future

    def _add(self, step: _Step) -> RDMAAction:
        step.look()
        self._steps.append(step)
        return self

    def _atomic(self, dst: Any, src: RDMABuffer, access: int, offset: int, operand: int, expected: int) -> RDMAAction:
        src, dst = _buffer_and_local(src, dst, "fetch_add(dst, src, add)", "src")
        change = src._atomic(access, offset, operand, expected)
        make = lambda memory: change._replace(take=lambda found: _put(memory, found))  # noqa: E731
        return self._add(_Step(src, dst, lambda: _eight_bytes(dst), True, make))


def _ready(
    mover: Engine, steps: list[_Step], parts: list[ReadWriteOp | AtomicOp], memories: list[LocalMemory]
) -> _Replay | None:
    """Return a function that starts the transfers of one submit again, or returns None if something has changed."""
    watches: list[Callable[[], bool]] = []
    for step, memory in zip(steps, memories, strict=True):
        is_as_it_was = watch(step.local, memory)
        if is_as_it_was is None:
            return None
        watches.append(is_as_it_was)
    again, count = mover.again(parts, memories), len(steps)
    if again is None:
        return None

    def start(now: Engine, steps: list[_Step], timeout: float | None) -> Future[None] | None:
        if now is not mover or len(steps) != count:
            return None
        for is_as_it_was in watches:
            if not is_as_it_was():
                return None
        return again(timeout)

    return start


def _eight_bytes(dst: Any) -> LocalMemory:
    found = writable(memory_of(dst, "dst"), "dst")
    if found.device != CPU:
        raise ValueError(f"dst is on {found.device}: what an atomic has found comes to the CPU")
    if found.nbytes != 8:
        raise ValueError(f"dst has {found.nbytes} bytes: an atomic needs 8")
    return found


def _buffer_and_local(buffer: Any, local: Any, usage: str, name: str) -> tuple[RDMABuffer, Any]:
    if not isinstance(buffer, RDMABuffer):
        raise TypeError(f"{name} is a {type(buffer).__name__}: {usage} wants an RDMABuffer there")
    if isinstance(local, RDMABuffer):
        raise TypeError(f"{usage} moves between an RDMABuffer and memory of this process, not between two RDMABuffers")
    return buffer, local


def _put(memory: LocalMemory, value: int) -> None:
    import ctypes

    ctypes.c_uint64.from_address(memory.address).value = value


def _refuse_overlaps(steps: list[_Step], memories: list[LocalMemory]) -> None:
    ranges = []
    for number, (step, memory) in enumerate(zip(steps, memories, strict=True)):
        size = min(memory.nbytes, step.buffer.size())
        ranges.append((memory.address, memory.address + size, step.fills, number))
    furthest: tuple[int, int] | None = None  # end of the ranges so far, and the step that ends there
    filled: tuple[int, int] | None = None  # the same for the ranges that are written to
    for start, stop, fills, number in sorted(ranges):
        before = furthest if fills else filled
        if before is not None and start < before[0]:
            raise ValueError(
                f"steps {min(before[1], number)} and {max(before[1], number)} share local memory, and one of them "
                "writes to it: put them into two actions, one after the other"
            )
        if furthest is None or stop > furthest[0]:
            furthest = stop, number
        if fills and (filled is None or stop > filled[0]):
            filled = stop, number
