"""Floors of transfers on one host: memcpy in one process, and a bare process_vm_readv. `floor.py BYTES`."""

from __future__ import annotations

import ctypes
import mmap
import os
import signal
import sys

import torch
from _runner import Calls, serve
from _timing import Call, fill, pattern

PR_SET_PDEATHSIG = 1
LIBC = ctypes.CDLL(None, use_errno=True)
LIBC.process_vm_readv.restype = ctypes.c_ssize_t


class Vector(ctypes.Structure):
    """A struct iovec."""

    _fields_ = (("address", ctypes.c_void_p), ("nbytes", ctypes.c_size_t))


def other_process(shared: torch.Tensor, nbytes: int) -> tuple[int, int]:
    """Fork a child that allocates its own memory and touches all pages of the shared memory.

    Return its pid and the address of its memory.
    """
    ready, tell = os.pipe()
    parent, pid = os.getpid(), os.fork()
    if pid == 0:
        LIBC.prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
        memory = pattern(nbytes)
        fill(shared)
        os.write(tell, memory.data_ptr().to_bytes(8, "little"))
        while os.getppid() == parent:
            signal.pause()
        os._exit(0)
    return pid, int.from_bytes(os.read(ready, 8), "little")


class Floor:
    """The reading process."""

    def __init__(self, nbytes: int) -> None:
        self.shared = torch.frombuffer(mmap.mmap(-1, nbytes), dtype=torch.uint8)  # MAP_SHARED
        self.pid, self.address = other_process(self.shared, nbytes)
        self.mine = pattern(nbytes)
        self.into = torch.zeros(nbytes, dtype=torch.uint8)

    def ready(self, case: str, size: int) -> Call:
        """Return the call of a case, as `Calls` needs it."""
        made: Call = getattr(self, f"_{case}")(size)
        return made

    def _copy(self, size: int) -> Call:
        to, source = self.into.data_ptr(), self.mine.data_ptr()
        return lambda: ctypes.memmove(to, source, size)

    def _copy_shared(self, size: int) -> Call:
        to, source = self.into.data_ptr(), self.shared.data_ptr()
        return lambda: ctypes.memmove(to, source, size)

    def _readv(self, size: int) -> Call:
        near = Vector(self.into.data_ptr(), size)
        far = Vector(self.address, size)
        arguments = self.pid, ctypes.byref(near), 1, ctypes.byref(far), 1, 0

        def call() -> None:
            if LIBC.process_vm_readv(*arguments) != size:
                raise OSError(ctypes.get_errno(), "process_vm_readv")

        return call


if __name__ == "__main__":
    torch.set_num_threads(1)
    floor = Floor(int(sys.argv[1]))
    serve("memmove and process_vm_readv through ctypes", Calls(floor.into, floor.ready).times)
