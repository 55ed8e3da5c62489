"""RDMABuffer: handle to registered memory. transfers/engine.py runs its transfers."""

from __future__ import annotations

import operator
from typing import Any

import msgspec

from monarch_backend._actor.calls.future import DoneFuture, Future
from monarch_backend._core.timeouts import check_timeout
from monarch_backend._rdma.errors import RDMAError
from monarch_backend._rdma.local_memory import CPU, LocalMemory, frozen, memory_of, writable
from monarch_backend._rdma.registrations import Handle, registry
from monarch_backend._rdma.routes.protocol import COMPARE_AND_SWAP, FETCH_ADD
from monarch_backend._rdma.transfers.engine import AtomicOp, ReadWriteOp, TransferPlanCache, after, engine
from monarch_backend._rdma.transfers.future import SingleFuture

_64_BITS = (1 << 64) - 1


class RDMABuffer:
    """Handle to registered memory of a process. Other processes that receive it read and write the memory one-sided.

    ``data`` is a contiguous tensor of any dtype, on a CPU or a GPU, a NumPy array, or a memoryview. Any other object
    with the buffer protocol or ``__cuda_array_interface__`` works as well. Read-only memory is registered as read-only.
    The memory stays registered and alive until a process calls `drop`, or until its owner ends. The handle itself may
    be pickled, copied and deleted.

    Transfers do not synchronize with the owner: a read during a write of the owner returns bytes of both states. Order
    them by messages, for example of actors. Raises TypeError or ValueError for an object without memory, or with memory
    that is not contiguous.

    >>> import torch
    >>> from monarch_backend.rdma import RDMABuffer
    >>> weights = torch.arange(8.0)
    >>> buffer = RDMABuffer(weights)  # send it to an actor, which does the rest
    >>> mine = torch.zeros(8)
    >>> buffer.read_into(mine).get()
    >>> mine[7].item(), buffer.size()
    (7.0, 32)
    >>> buffer[4:8].write_from(torch.tensor([42.0])).get()  # bytes
    >>> weights[1].item()
    42.0
    >>> buffer.drop()
    """

    __slots__ = ("_handle", "_last")

    def __init__(self, data: Any) -> None:
        self._handle: Handle = registry().add(frozen(memory_of(data, "the memory to register")))
        self._last: list[TransferPlanCache | None] = [None, None]  # of the last read, of the last write

    @classmethod
    def _of(cls, handle: Handle) -> RDMABuffer:
        made = cls.__new__(cls)
        made._handle = handle
        made._last = [None, None]
        return made

    # ---- properties

    def size(self) -> int:
        """Return the size of the memory in bytes."""
        return self._handle.nbytes

    def __len__(self) -> int:
        return self._handle.nbytes

    @property
    def owner(self) -> str:
        """The process that owns the memory, as text for messages."""
        return f"process {self._handle.pid} on host {self._handle.host}"

    @property
    def backend(self) -> str:
        """The route from this process to the memory: "this process", "same host", "verbs" or "tcp"."""
        return engine().routes.to(self._handle).name

    @property
    def device(self) -> str:
        """The device of the memory as its owner names it: "cpu" or "cuda:0"."""
        return self._handle.device

    def __getitem__(self, part: slice) -> RDMABuffer:
        """Return a handle to a range of bytes, ``buffer[start:stop]``. Raises IndexError beyond the end."""
        if not isinstance(part, slice) or part.step not in (None, 1):
            raise TypeError("a part of an RDMABuffer is buffer[start:stop], in bytes")
        start = 0 if part.start is None else _whole(part.start, "start")
        stop = self.size() if part.stop is None else _whole(part.stop, "stop")
        if not 0 <= start < stop <= self.size():
            raise IndexError(f"bytes {start} to {stop} of an RDMABuffer of {self.size()} bytes: there is no such part")
        return RDMABuffer._of(self._handle.part(start, stop))

    def __repr__(self) -> str:
        return f"<RDMABuffer: {self._handle}, {self._handle.device}>"

    def __reduce__(self) -> Any:
        return (_arrived, tuple(engine().routes.outgoing(self._handle)))

    # ---- transfers

    def read_into(self, dst: Any, *, timeout: float | None = None) -> Future[None]:
        """Copy the whole buffer to the beginning of ``dst``, which has at least as many bytes. Return a Future of None.

        The bytes of ``dst`` after the first ``size()`` keep their values. ``dst`` must not be used until the future is
        done. Cancelling the future ends the transfer. Raises ValueError for an unsuitable ``dst``.

        After ``timeout`` seconds the future fails with TimeoutError. It fails with DroppedError if the memory is not
        registered any more. It fails with OwnerLostError (a SupervisionError) if the owner's process has ended, and
        with RDMAError for other errors. A part may have been copied by then.
        """
        return self._move(False, dst, timeout)

    def write_from(self, src: Any, *, timeout: float | None = None) -> Future[None]:
        """Copy all of ``src`` to the beginning of the buffer. Return a Future of None, which fails as `read_into`'s.

        ``timeout`` is in seconds. Raises ValueError if ``src`` has more bytes than the buffer, is on another kind of
        device, or if the buffer was registered read-only.
        """
        return self._move(True, src, timeout)

    def fetch_add(self, add: int, offset: int = 0, *, timeout: float | None = None) -> Future[int]:
        """Add to the 64-bit integer at byte ``offset``, modulo 2**64, atomically. Return a Future of the old value.

        The integer is unsigned; NICs need an address that is a multiple of 8. The operation is atomic only among
        processes that use the same route: NICs and CPUs do not exclude each other. ``timeout`` is in seconds.

        Raises TypeError for values that are no integers, ValueError if the 8 bytes are outside the buffer or read-only.
        """
        return self._change(FETCH_ADD, offset, add, 0, timeout)

    def compare_and_swap(
        self, compare: int, swap: int, offset: int = 0, *, timeout: float | None = None
    ) -> Future[int]:
        """Store ``swap`` at byte ``offset`` if the 64-bit integer there equals ``compare``.

        Return a Future of the old value: the swap has happened if it equals ``compare``. The integer, ``timeout``
        in seconds and what is raised are as for `fetch_add`.
        """
        return self._change(COMPARE_AND_SWAP, offset, swap, compare, timeout)

    def drop(self) -> None:
        """End the registration, so that the owner may free the memory. Dropping it twice does nothing.

        On the owner, transfers with the memory have ended when this returns. From another process they end soon after.
        Later transfers fail with DroppedError.
        """
        engine().drop(self._handle)

    # ---- implementation

    def _to_read(self, dst: Any) -> LocalMemory:
        memory = writable(memory_of(dst, "dst"), "dst")
        self._check(memory, "dst")
        if memory.nbytes < self.size():
            raise ValueError(
                f"dst has {memory.nbytes} bytes and the buffer {self.size()}: read a part, buffer[start:stop]"
            )
        return memory

    def _to_write(self, src: Any) -> LocalMemory:
        memory = memory_of(src, "src")
        self._check(memory, "src")
        if not self._handle.writable:
            raise ValueError(f"{self!r} was registered read-only")
        if memory.nbytes > self.size():
            raise ValueError(f"src has {memory.nbytes} bytes and the buffer {self.size()}: they do not fit")
        return memory

    def _check(self, memory: LocalMemory, what: str) -> None:
        if (self._handle.device == CPU) != (memory.device == CPU):
            raise ValueError(
                f"{what} is on {memory.device} and the buffer, of {self.owner}, on {self._handle.device}: copy it to "
                "the same kind of device first"
            )

    def _move(self, write: bool, local: Any, timeout: float | None) -> Future[None]:
        handle, mover, last = self._handle, engine(), self._last[write]
        if last is not None and timeout is None and (again := last.start(mover, local)) is not None:
            return again
        if timeout is not None:
            timeout = check_timeout(timeout)
        memory = self._to_write(local) if write else self._to_read(local)
        nbytes = memory.nbytes if write else handle.nbytes
        if (timeout is None or timeout > 0) and mover.at_once(handle, write, memory, nbytes):
            return DoneFuture()
        part = ReadWriteOp(handle, write, ((handle.offset, memory.address, nbytes),))
        future = mover.start((part,), (memory,), timeout)
        if type(future) is SingleFuture:
            self._last[write] = after(last, mover, part, local, memory)
        return future

    def _change(self, access: int, offset: int, operand: int, expected: int, timeout: float | None) -> Future[int]:
        return engine().change(self._atomic(access, offset, operand, expected), check_timeout(timeout))

    def _atomic(self, access: int, offset: int, operand: int, expected: int) -> AtomicOp:
        offset, operand, expected = (
            _whole(offset, "offset"), _whole(operand, "what to add or swap"), _whole(expected, "what to compare with")
        )  # fmt: skip
        if not 0 <= offset <= self.size() - 8:
            raise ValueError(f"8 bytes at {offset} are not in a buffer of {self.size()} bytes")
        if not self._handle.writable:
            raise ValueError(f"{self!r} was registered read-only")
        handle = self._handle
        return AtomicOp(handle, access, handle.offset + offset, operand & _64_BITS, expected & _64_BITS, lambda _: None)


def _whole(number: Any, what: str) -> int:
    """Convert to Python's int: NumPy's integers do not fit into a handle, nor do they hold all 64-bit values."""
    try:
        return operator.index(number)
    except TypeError:
        raise TypeError(f"{what} is {number!r}, a {type(number).__name__}: it has to be an integer") from None


def _arrived(*fields: Any) -> RDMABuffer:
    try:
        handle = msgspec.convert(fields, Handle)
    except msgspec.ValidationError as error:
        raise RDMAError(f"the handle of an RDMABuffer was damaged on its way: {error}") from None
    slot, epoch, key = handle.ticket
    numbers = (slot, 32), (epoch, 64), (key, 64), (handle.offset, 64), (handle.nbytes, 64)
    if not all(0 <= number < 1 << bits for number, bits in numbers):
        raise RDMAError("the handle of an RDMABuffer was damaged on its way: a number is out of range")
    return RDMABuffer._of(handle)
