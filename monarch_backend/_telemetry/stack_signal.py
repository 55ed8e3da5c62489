"""Signal on which a process writes the stacks of its Python threads to a memory file. stacks.py reads them.

Sent with a value, the signal is a request, which request_answers.py answers.

The handler is in C, so a process answers while its threads hang in locks, system calls or C code. It never reads frames
while another thread runs Python code: csrc/telemetry/stack_signal.h says how.
"""

from __future__ import annotations

import _thread
import contextlib
import faulthandler
import fcntl
import os
import signal
import sys

from monarch_backend import _native
from monarch_backend._core import fork, platform

FILE_NAME = "monarch-stacks"
"""Name of the memory file, by which readers find it in /proc/PID/fd."""

_installed: tuple[int, int] | None = None
"""The process that has installed the handler, and its descriptor."""


def stack_signal() -> int:
    """Return the signal: a real-time signal that neither libc, Python nor torch uses."""
    return int(signal.SIGRTMIN) + 12


def install() -> bool:
    """Install the handler in this process. Return False if the program has its own, or the system lacks memory files.

    A Python without the GIL has none, either: py-spy reads it.

    A fork of the process has none until it calls this function, too. Workers of multiprocessing do so.
    """
    global _installed
    if "t" in sys.abiflags:  # free-threaded: a dump would read frames that other threads change
        return False
    if not platform.HAS_MEMFD or not _native.ignore_unhandled(stack_signal()):
        return False
    if _installed is not None and _installed[0] == os.getpid():
        return True
    descriptor = os.memfd_create(FILE_NAME, os.MFD_CLOEXEC)
    fcntl.fcntl(descriptor, fcntl.F_SETFL, os.O_APPEND)  # readers truncate it
    # Not with chain=True: it lets system calls of other threads fail with EINTR.
    faulthandler.register(stack_signal(), descriptor, all_threads=True)
    try:
        _native.wrap_dump_handler(stack_signal(), descriptor)
    except BaseException:
        faulthandler.unregister(stack_signal())
        os.close(descriptor)
        raise
    _native.set_request_handler(_on_request)
    _installed = (os.getpid(), descriptor)
    return True


def _on_request(requester: int, descriptor: int) -> None:
    """Answer a request on a new thread. The calling one must not wait, for example for the lock of an import."""
    _thread.start_new_thread(_answer, (requester, descriptor))


def _answer(requester: int, descriptor: int) -> None:
    from monarch_backend._telemetry import request_answers

    request_answers.answer(requester, descriptor)


def _in_forked_child() -> None:
    """Close the parent's file. Without a file no reader signals this process."""
    global _installed
    if _installed is not None:
        faulthandler.unregister(stack_signal())
        with contextlib.suppress(OSError):  # the program has closed it
            os.close(_installed[1])
        _installed = None
        if (util := sys.modules.get("multiprocessing.util")) is not None:
            util.register_after_fork(install, _install_in_worker)  # has an effect in processes of multiprocessing only


def _install_in_worker(_: object) -> None:
    """Let a process that multiprocessing has forked, such as a worker of a DataLoader, write its stacks, too."""
    with contextlib.suppress(OSError, RuntimeError):  # no descriptor, memory or thread left
        install()


fork.register(fork.Step.RECORDING, after_in_child=_in_forked_child)
