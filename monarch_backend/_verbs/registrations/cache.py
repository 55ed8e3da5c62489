"""Cache of registrations of this process's memory for its own requests.

An allocation is registered once and as a whole. It stays registered until it is freed or others need the room. A weak
reference to its owner reports the end. Registrations for other processes are separate: see Engine.expose.
"""

from __future__ import annotations

import ctypes
import errno
import math
import os
import threading
import weakref
from collections import OrderedDict, deque
from collections.abc import Callable
from typing import Any, NamedTuple

from monarch_backend import _native
from monarch_backend._core import debug_log
from monarch_backend._verbs.discovery import locked_memory
from monarch_backend._verbs.errors import UnreachableMemoryError, VerbsError, registration_error
from monarch_backend._verbs.providers.provider import LOCAL_WRITE, Nic, Registration, destroy


class Allocation(NamedTuple):
    """Memory, and the object that lives exactly as long."""

    address: int
    nbytes: int
    anchor: Any
    hold: Any = None  # keeps the memory in place


class _Buffer(ctypes.Structure):
    _fields_ = (
        ("buf", ctypes.c_void_p),
        ("obj", ctypes.py_object),
        ("len", ctypes.c_ssize_t),
        ("rest", ctypes.c_byte * 128),
    )


def allocation_of(owner: Any) -> Allocation:
    """Return the allocation of an object that owns memory.

    Objects are torch tensors and storages, NumPy arrays, and those with a contiguous buffer or
    ``__cuda_array_interface__``. Raises TypeError for other objects. For a tensor it is the storage, for an array the
    one that it is a view of.

    >>> allocation_of(b"four").nbytes
    4
    """
    if hasattr(owner, "untyped_storage"):
        owner = owner.untyped_storage()
    if hasattr(owner, "data_ptr") and hasattr(owner, "nbytes"):
        return Allocation(owner.data_ptr(), owner.nbytes(), owner)
    if hasattr(owner, "__array_interface__"):
        while type(owner) is type(owner.base):
            owner = owner.base
        if owner.flags.c_contiguous or owner.flags.f_contiguous:
            return Allocation(owner.__array_interface__["data"][0], owner.nbytes, owner)
    if hasattr(owner, "__cuda_array_interface__"):
        return _of_gpu_array(owner)
    try:
        view = memoryview(owner)
    except TypeError:
        raise TypeError(f"{type(owner).__name__} owns no memory of a known kind") from None
    if not view.contiguous:
        raise TypeError("the buffer is not contiguous: register the object that it is a view of")
    # A bytearray has no weak references. The view then ends the allocation, after one transfer.
    return Allocation(_address_of(view), view.nbytes, owner if type(owner).__weakrefoffset__ else view, view)


class _Anchor:
    """Anchor for objects without weak references; it lives for one transfer."""


def _of_gpu_array(array: Any) -> Allocation:
    described = array.__cuda_array_interface__
    nbytes = math.prod(described["shape"]) * int(described["typestr"][2:])
    anchor = array if type(array).__weakrefoffset__ else _Anchor()
    return Allocation(described["data"][0], nbytes, anchor, array)


def _address_of(view: memoryview) -> int:
    buffer = _Buffer()
    ctypes.pythonapi.PyObject_GetBuffer(ctypes.py_object(view), ctypes.byref(buffer), 0)
    address = buffer.buf or 0
    ctypes.pythonapi.PyBuffer_Release(ctypes.byref(buffer))
    return address


class Entry:
    """A kept registration. It is not closed while it has users.

    Users come and go without the cache's lock, which would cost more than the rest. A new user checks `kept` after it
    was added. A leaving user checks it after it was removed. The cache looks for users after it has cleared `kept`. So
    in a race at least one of the two detects the other.
    """

    def __init__(self, allocation: Allocation, registration: Registration, device: str, *, writable: bool) -> None:
        self.address, self.nbytes, self.writable = allocation.address, allocation.nbytes, writable
        self.registration, self._device = registration, device
        self.lkey = registration.lkey
        self.users: list[None] = []  # append and pop are atomic
        self.kept = False
        self.recent = False  # used since the last lack of room
        self.anchor: weakref.ref[Any] | None = None
        self._closed = False

    def covers(self, allocation: Allocation, *, writable: bool) -> bool:
        """True if the registration covers the allocation. An object may get other memory, as a resized storage does."""
        same = self.address == allocation.address and self.nbytes == allocation.nbytes
        return same and (self.writable or not writable)

    def close(self) -> None:
        """Close under the cache's lock, without users.

        A failure is only logged, because other calls are in progress.
        """
        if not self._closed:
            self._closed = True
            destroy(self.registration, "a registration", self._device)


class MemoryCache:
    """Cache of one device.

    ``on_gone`` is called when an allocation ends, at any point of other code: it may only wake the thread.
    """

    def __init__(
        self, nic: Nic, most_entries: int, most_bytes: int, on_gone: Callable[[], None] = lambda: None
    ) -> None:
        self._nic, self._on_gone = nic, on_gone
        self._most_entries, self._most_bytes = most_entries, most_bytes
        self._entries: OrderedDict[int, Entry] = OrderedDict()  # by the anchor's id; the first is evicted first
        self._gone: deque[int] = deque()
        self._lock = threading.RLock()
        self.nbytes = 0

    def __len__(self) -> int:
        return len(self._entries)

    def take(self, allocation: Allocation, *, writable: bool) -> Entry:
        """Register an allocation until :meth:`give`. ``writable``: the device will write to it. Raises VerbsError."""
        entry = self.known(allocation, writable=writable)
        if entry is not None:
            return entry
        with self._lock:
            self.sweep()
            key = id(allocation.anchor)
            entry = self._entries.get(key)
            if entry is not None and not entry.covers(allocation, writable=writable):
                self._drop(key)
                entry = None
            if entry is None:
                entry = self._register(allocation, writable=writable)
                self._keep(key, entry, allocation)
            entry.users.append(None)
            return entry

    def known(self, allocation: Allocation, *, writable: bool) -> Entry | None:
        """Return the entry as `take` does if the allocation is registered already, else None."""
        entry = self._entries.get(id(allocation.anchor))
        if entry is None or not entry.covers(allocation, writable=writable):
            return None
        anchor = entry.anchor
        if anchor is None or anchor() is not allocation.anchor:  # another object has this id now
            return None
        entry.users.append(None)
        if entry.kept:
            entry.recent = True
            return entry
        self.give(entry)
        return None

    def has(self, allocation: Allocation) -> bool:
        entry = self._entries.get(id(allocation.anchor))
        return entry is not None and entry.covers(allocation, writable=False)

    def give(self, entry: Entry) -> None:
        entry.users.pop()
        if entry.kept and not self._is_full:
            return
        with self._lock:
            if not entry.users and not entry.kept:
                entry.close()
            self._shrink()

    def sweep(self) -> None:
        with self._lock:
            while self._gone:
                key = self._gone.popleft()
                entry = self._entries.get(key)
                if entry is not None and entry.anchor is not None and entry.anchor() is None:
                    self._drop(key)

    def close(self) -> None:
        with self._lock:
            for key in list(self._entries):
                self._drop(key)

    def _keep(self, key: int, entry: Entry, allocation: Allocation) -> None:
        gone, on_gone = self._gone, self._on_gone

        def ended(_: object) -> None:
            gone.append(key)
            on_gone()

        entry.anchor = weakref.ref(allocation.anchor, ended)
        entry.kept = True
        self._entries[key] = entry
        self.nbytes += entry.nbytes

    def _drop(self, key: int) -> None:
        entry = self._entries.pop(key)
        entry.kept, entry.anchor = False, None
        self.nbytes -= entry.nbytes
        if not entry.users:
            entry.close()

    @property
    def _is_full(self) -> bool:
        return len(self._entries) > self._most_entries or self.nbytes > self._most_bytes

    def _shrink(self) -> None:
        """Evict entries beyond the limits; those unused since the last pass go first."""
        for _ in range(2 * len(self._entries) if self._is_full else 0):
            key, entry = next(iter(self._entries.items()))
            if entry.users or entry.recent:
                entry.recent = False
                self._entries.move_to_end(key)
            else:
                self._drop(key)
                if not self._is_full:
                    return

    def make_room(self) -> bool:
        """Close all entries without users; False if there was none."""
        with self._lock:
            idle = [key for key, entry in self._entries.items() if not entry.users]
            for key in idle:
                self._drop(key)
            return bool(idle)

    def _register(self, allocation: Allocation, *, writable: bool) -> Entry:
        nic, address, nbytes = self._nic, allocation.address, allocation.nbytes
        try:
            return Entry(allocation, register(nic, address, nbytes, LOCAL_WRITE, [self]), nic.name, writable=True)
        except VerbsError as error:
            cause = error.__cause__
            if writable or not isinstance(cause, OSError) or cause.errno not in (errno.EFAULT, errno.EACCES):
                raise
        # mapped read-only
        return Entry(allocation, register(nic, address, nbytes, 0, [self]), nic.name, writable=False)


def register(nic: Nic, address: int, nbytes: int, access: int, caches: list[MemoryCache]) -> Registration:
    """Register with the device. If there is no room, unused entries of ``caches`` are closed. Raises VerbsError."""
    if _native.gpu_device_of(address) >= 0:
        return register_gpu(nic, address, nbytes, access)
    while True:
        try:
            return nic.register(address, nbytes, access)
        except OSError as error:
            short = error.errno in (errno.ENOMEM, errno.EAGAIN, errno.EPERM)
            if not (short and sum(cache.make_room() for cache in caches)):
                raise registration_error(error, nbytes, nic.name, locked_memory()) from error


def register_gpu(nic: Nic, address: int, nbytes: int, access: int) -> Registration:
    """Register GPU memory, which the device then accesses without a copy in host memory.

    Drivers offer two ways. With peer memory the NIC's driver asks the GPU's driver about an address (nvidia_peermem,
    amdgpu). With dma-buf the GPU's driver exports the range as a file. Raises UnreachableMemoryError with the reasons
    if both ways fail. Then the data are staged (_rdma/routes/gpu_staged.py).
    """
    try:
        made = nic.register(address, nbytes, access)
        _say(nic, nbytes, "by peer memory")
        return made
    except OSError as error:
        peer_memory = os.strerror(error.errno) if error.errno else str(error)
    try:
        made = _by_dma_buf(nic, address, nbytes, access)
        _say(nic, nbytes, f"by dma-buf (by peer memory: {peer_memory})")
        return made
    except (OSError, _native.GpuFailure) as failure:
        dma_buf = str(failure)
    raise UnreachableMemoryError(
        f"cannot register {nbytes} bytes of a GPU with {nic.name}, so they go through pinned memory of the hosts: by "
        f"peer memory: {peer_memory} (is nvidia_peermem loaded?); by dma-buf: {dma_buf}",
        "",
        nic.name,
    ) from None


def _by_dma_buf(nic: Nic, address: int, nbytes: int, access: int) -> Registration:
    page = os.sysconf("SC_PAGESIZE")
    first = address // page * page
    last = -(-(address + nbytes) // page) * page
    descriptor = _native.gpu_dma_buf(first, last - first)
    try:
        return nic.register_dmabuf(descriptor, address - first, nbytes, address, access)
    finally:
        os.close(descriptor)  # the registration has its own reference


def _say(nic: Nic, nbytes: int, how: str) -> None:
    debug_log.write(f"monarch: {nbytes} bytes of a GPU are registered with {nic.name} {how}")
