"""Abilities of the operating system that the package uses where they exist.

Linux has all of them, macOS has none. With MONARCH_PORTABLE=1 a process on Linux uses none either, so that tests run
the code of macOS (docs/adr/0098-portable-mode.md). csrc/platform/ has the same for the C++ core.
"""

from __future__ import annotations

import os
import sys

from monarch_backend._core import env


def _is_portable() -> bool:
    """Return whether this process uses only what macOS has, too. Raises RuntimeError without a portable core."""
    if sys.platform != "linux":
        return True
    if not env.get("MONARCH_PORTABLE"):
        return False
    from monarch_backend import _native

    if not _native.is_portable:
        raise RuntimeError(
            "MONARCH_PORTABLE=1 needs the portable build of the C++ core, and this one is for Linux: build it with "
            "MONARCH_BUILD_PORTABLE=1, or unset MONARCH_PORTABLE. `make test-portable` does the first"
        )
    return True


IS_PORTABLE = _is_portable()
"""Whether none of the abilities below is used."""

_IS_LINUX = not IS_PORTABLE

HAS_SAFE_FORK = _IS_LINUX
"""A process that has imported torch can be forked: macOS's own libraries do not allow that."""

HAS_PRCTL = _IS_LINUX
"""A process can die with its parent, adopt orphans and change its title."""

HAS_PIDFD = _IS_LINUX and hasattr(os, "pidfd_open")  # a kernel, or a Python built on one, before 5.3 has none
"""The end of any process is an event of a descriptor."""

HAS_PROC = _IS_LINUX
"""/proc has the processes, their threads, open files and memory."""

HAS_MEMFD = _IS_LINUX and hasattr(os, "memfd_create")
"""Files in memory, without a name."""

HAS_EVENTFD = _IS_LINUX and hasattr(os, "eventfd")
"""A descriptor that wakes a thread; elsewhere it is a pipe."""

HAS_ABSTRACT_SOCKETS = _IS_LINUX
"""Unix sockets whose name is no file."""

HAS_PEER_CREDENTIALS = _IS_LINUX
"""SO_PEERCRED gives the process and user at the other end of a Unix socket."""

HAS_AFFINITY = _IS_LINUX
"""A process can choose its CPUs."""

NO_FORK = f"fork is not safe on {'this system' if sys.platform == 'linux' else sys.platform}"
"""Reason why processes are not forked if there is no safe fork, for messages."""


def usable_cpus() -> int:
    return len(os.sched_getaffinity(0)) if HAS_AFFINITY else os.cpu_count() or 1


WAKE = (1).to_bytes(8, sys.byteorder)
"""Bytes to write to the second descriptor of `wake_descriptors`."""


def wake_descriptors() -> tuple[int, int]:
    """Return two descriptors: for a thread to wait for and to read, and to write `WAKE` to. An eventfd is both.

    Neither blocks. If the second is full, the thread is about to wake up anyway.
    """
    if HAS_EVENTFD:
        both = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        return both, both
    read, write = os.pipe()
    for end in (read, write):
        os.set_blocking(end, False)
    return read, write
