"""System calls for processes that Python lacks: parent death signal, adoption of orphans, titles.

These are thin wrappers of Linux's. On other systems they do as much as is possible there, or nothing.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import functools
import os
import signal
from collections.abc import Iterable, Iterator

from monarch_backend._core import platform
from monarch_backend._processes import parent_watch
from monarch_backend._processes.process_state import state_and_start

_PR_SET_PDEATHSIG = 1
_PR_SET_NAME = 15
_PR_SET_CHILD_SUBREAPER = 36
_MADV_COLLAPSE = 25
_HUGE_PAGE = 2 << 20  # for x86-64, and for aarch64 with pages of 4 KiB


def _prctl(option: int, argument: int | ctypes.c_char_p) -> None:
    if platform.HAS_PRCTL and _libc().prctl(option, argument, 0, 0, 0) != 0:
        raise OSError(ctypes.get_errno(), f"prctl({option}): {os.strerror(ctypes.get_errno())}")


@functools.cache
def _libc() -> ctypes.CDLL:
    return ctypes.CDLL(None, use_errno=True)


def die_with_parent(parent: int) -> None:
    """Let the kernel kill this process when the thread of ``parent`` that made it ends, or at once if that has
    ended.
    """
    if platform.HAS_PRCTL:
        _prctl(_PR_SET_PDEATHSIG, int(signal.SIGKILL))
        if os.getppid() != parent:
            os._exit(1)


def outlive_parent() -> None:
    """Undo die_with_parent, and what interpreter_args.py does in its place."""
    _prctl(_PR_SET_PDEATHSIG, 0)
    parent_watch.outlive_parent()


def adopt_orphans() -> None:
    """Make this process, instead of init, the parent of its descendants that lose theirs.

    Emulators of another processor refuse it: there, as on macOS, a program in a session of its own can survive.
    """
    try:
        _prctl(_PR_SET_CHILD_SUBREAPER, 1)
    except OSError as error:
        if error.errno != errno.EINVAL:
            raise


def stands_still(pid: int) -> bool:
    """Return whether a signal or a debugger has stopped the process."""
    try:
        return state_and_start(pid)[0] in "Tt"
    except ProcessLookupError:
        return False


def set_title(title: str) -> None:
    """Set the title that ``ps`` and ``top`` show: the first 15 bytes as its name, all of it as its command line."""
    if not platform.HAS_PRCTL:
        return
    text = title.encode(errors="replace")
    _prctl(_PR_SET_NAME, ctypes.c_char_p(text[:15]))
    start, size = _command_line()
    if size > 0:
        # The last byte stays zero: otherwise the kernel reads on into the environment.
        ctypes.memmove(start, text[: size - 1].ljust(size, b"\0"), size)


@functools.cache
def _command_line() -> tuple[int, int]:
    """Return address and size of the memory from which the kernel reads the command line. They are equal after a
    fork.
    """
    with contextlib.suppress(OSError, IndexError, ValueError), open("/proc/self/stat") as stat:
        fields = stat.read().rpartition(")")[2].split()
        return int(fields[45]), int(fields[46]) - int(fields[45])
    return 0, 0


def use_huge_pages() -> None:
    """Map this process's private memory with as few pages as possible: a fork copies the page tables.

    An exit takes them apart before its parent is notified. With 150 MB of an imported torch a fork takes 1.3 instead of
    5 ms, and a death is seen after 2.5 instead of 8.5 ms. Pages that a child writes to are copied in the small size.
    Kernels before 6.1 cannot do it on demand: there it has no effect.
    """
    if not platform.HAS_PROC:
        return
    with contextlib.suppress(FileNotFoundError), open("/proc/self/maps") as maps:
        for line in maps.read().splitlines():
            words = line.split()
            if words[1] == "rw-p" and (len(words) < 6 or words[5] == "[heap]"):
                start, end = (int(address, 16) for address in words[0].split("-"))
                start, end = -(-start // _HUGE_PAGE) * _HUGE_PAGE, end // _HUGE_PAGE * _HUGE_PAGE
                if start < end:
                    _libc().madvise(ctypes.c_void_p(start), ctypes.c_size_t(end - start), _MADV_COLLAPSE)


def processes() -> Iterator[tuple[int, int, int]]:
    """Yield pid, parent's pid and session of every process that has not ended; none where there is no /proc."""
    if not platform.HAS_PROC:
        return
    with contextlib.suppress(FileNotFoundError):
        for name in os.listdir("/proc"):
            if not name.isdigit():
                continue
            with contextlib.suppress(OSError), open(f"/proc/{name}/stat", "rb") as stat:
                state, parent, _, session, *_ = stat.read().rpartition(b")")[2].split(None, 4)
                if state not in b"ZX":
                    yield int(name), int(parent), int(session)


def children() -> set[int]:
    """Return the pids of this process's children, made by its main thread or adopted. Ended ones may be missing.

    Without /proc there are none.
    """
    if not platform.HAS_PROC:
        return set()
    me = os.getpid()
    try:
        with open(f"/proc/{me}/task/{me}/children") as listed:
            return {int(pid) for pid in listed.read().split()}
    except FileNotFoundError:  # a kernel without CONFIG_PROC_CHILDREN
        return {pid for pid, parent, _ in processes() if parent == me}


def kill_sessions(leaders: Iterable[int]) -> int:
    """Send SIGKILL to every process of the sessions that the processes ``leaders`` started. Return their number.

    Without /proc: to the process groups with these leaders. Return the number of groups then. It misses descendants
    with a process group of their own.
    """
    if not platform.HAS_PROC:
        return sum(map(_kill_group, leaders))
    wanted, found = frozenset(leaders), 0
    for pid, _, session in processes():
        if session in wanted:
            found += 1
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.kill(pid, signal.SIGKILL)
    return found


def _kill_group(leader: int) -> bool:
    try:
        os.killpg(leader, signal.SIGKILL)
    except (ProcessLookupError, PermissionError):  # macOS: the second for a group of ended processes
        return False
    return True
