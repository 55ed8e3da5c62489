"""What Linux offers about processes and Python does not: with whom one dies, who adopts its orphans, its title.

Only thin wrappers live here. Elsewhere than on Linux they do nothing, or find nothing, as each one says.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import os
import signal
import sys
from collections.abc import Iterable, Iterator

LINUX = sys.platform == "linux"

_PR_SET_PDEATHSIG = 1
_PR_SET_NAME = 15
_PR_SET_CHILD_SUBREAPER = 36
_MADV_COLLAPSE = 25
_HUGE_PAGE = 2 << 20  # of x86-64, and of aarch64 with pages of 4 KiB


def _prctl(option: int, argument: int | ctypes.c_char_p) -> None:
    if LINUX and _libc().prctl(option, argument, 0, 0, 0) != 0:
        raise OSError(ctypes.get_errno(), f"prctl({option}): {os.strerror(ctypes.get_errno())}")


@functools.cache
def _libc() -> ctypes.CDLL:
    return ctypes.CDLL(None, use_errno=True)


def die_with_parent(parent: int) -> None:
    """Be killed when the thread of process ``parent`` that made this process ends; at once if that has happened."""
    if LINUX:
        _prctl(_PR_SET_PDEATHSIG, int(signal.SIGKILL))
        if os.getppid() != parent:
            os._exit(1)


def outlive_parent() -> None:
    """Undo die_with_parent."""
    _prctl(_PR_SET_PDEATHSIG, 0)


def adopt_orphans() -> None:
    """Descendants of this process that lose their parent become its children, instead of init's."""
    _prctl(_PR_SET_CHILD_SUBREAPER, 1)


def stands_still(pid: int) -> bool:
    """True if it is stopped, by a signal or a debugger."""
    try:
        with open(f"/proc/{pid}/stat", "rb") as file:
            return file.read().rpartition(b")")[2].split()[0] in (b"T", b"t")
    except (OSError, IndexError):
        return False


def set_title(title: str) -> None:
    """What ``ps`` and ``top`` show for this process: the first 15 bytes as its name, all of it as its command line."""
    if not LINUX:
        return
    text = title.encode(errors="replace")
    _prctl(_PR_SET_NAME, ctypes.c_char_p(text[:15]))
    start, size = _command_line()
    if size > 0:
        # The last byte stays zero: with another one there the kernel reads on, into the environment.
        ctypes.memmove(start, text[: size - 1].ljust(size, b"\0"), size)


@functools.cache
def _command_line() -> tuple[int, int]:
    """Address and size of the memory from which the kernel reads this process's command line; the same after a fork."""
    with contextlib.suppress(OSError, IndexError, ValueError), open("/proc/self/stat") as stat:
        fields = stat.read().rpartition(")")[2].split()
        return int(fields[45]), int(fields[46]) - int(fields[45])
    return 0, 0


def use_huge_pages() -> None:
    """Have this process's private memory mapped by as few pages as possible, which is what a fork copies.

    And what an exit takes apart, before anybody learns of it: with 150 MB of an imported torch a fork takes 1.3 instead
    of 5 ms, and a death is seen after 2.5 instead of 8.5 ms. Pages that a child writes to are copied in the small size.
    Kernels before 6.1 can't do it on demand, and don't.
    """
    with contextlib.suppress(FileNotFoundError), open("/proc/self/maps") as maps:
        for line in maps.read().splitlines():
            words = line.split()
            if words[1] == "rw-p" and (len(words) < 6 or words[5] == "[heap]"):
                start, end = (int(address, 16) for address in words[0].split("-"))
                start, end = -(-start // _HUGE_PAGE) * _HUGE_PAGE, end // _HUGE_PAGE * _HUGE_PAGE
                if start < end:
                    _libc().madvise(ctypes.c_void_p(start), ctypes.c_size_t(end - start), _MADV_COLLAPSE)


def processes() -> Iterator[tuple[int, int, int]]:
    """Pid, parent's pid and session of every process there is that has not ended; none where there is no /proc."""
    with contextlib.suppress(FileNotFoundError):
        for name in os.listdir("/proc"):
            if not name.isdigit():
                continue
            with contextlib.suppress(OSError), open(f"/proc/{name}/stat", "rb") as stat:
                state, parent, _, session, *_ = stat.read().rpartition(b")")[2].split(None, 4)
                if state not in b"ZX":
                    yield int(name), int(parent), int(session)


def children() -> set[int]:
    """The pids of this process's children, made by its main thread or adopted; those that have ended may be missing."""
    me = os.getpid()
    try:
        with open(f"/proc/{me}/task/{me}/children") as listed:
            return {int(pid) for pid in listed.read().split()}
    except FileNotFoundError:  # a kernel without CONFIG_PROC_CHILDREN
        return {pid for pid, parent, _ in processes() if parent == me}


def kill_sessions(leaders: Iterable[int]) -> int:
    """SIGKILL to every process of the sessions that the processes ``leaders`` started; how many there were."""
    wanted, found = frozenset(leaders), 0
    for pid, _, session in processes():
        if session in wanted:
            found += 1
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.kill(pid, signal.SIGKILL)
    return found
