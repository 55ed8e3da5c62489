"""Errors of resource limits: an operation that the system refused, with the limits that may be the cause."""

from __future__ import annotations

import contextlib
import errno
import resource
import threading
from collections.abc import Callable, Iterator
from typing import TypeVar

from monarch_backend._core.errors import MonarchError, public

_T = TypeVar("_T")

_PROCESSES = "RLIMIT_NPROC (ulimit -u)"
_MEMORY = "RLIMIT_AS (ulimit -v)"
_FILE_SIZE = "RLIMIT_FSIZE (ulimit -f)"
_OPEN_FILES = "RLIMIT_NOFILE (ulimit -n)"
_NUMBERS = {
    _PROCESSES: resource.RLIMIT_NPROC,
    _MEMORY: resource.RLIMIT_AS,
    _FILE_SIZE: resource.RLIMIT_FSIZE,
    _OPEN_FILES: resource.RLIMIT_NOFILE,
}
_THREADS = (_PROCESSES, _MEMORY)

_REFUSALS: tuple[tuple[str, int, tuple[str, ...], str], ...] = (
    ("can't start new thread", errno.EAGAIN, _THREADS, "pids.max of the control group, or threads-max of the kernel"),
    ("Resource temporarily unavailable", errno.EAGAIN, _THREADS, "pids.max of the control group"),
    ("Cannot allocate memory", errno.ENOMEM, (_MEMORY,), "memory of the control group, or of the host"),
    ("File too large", errno.EFBIG, (_FILE_SIZE,), "the file system's largest file"),
    ("Too many open files", errno.EMFILE, (_OPEN_FILES,), "fs.file-max of the kernel"),
    ("No space left on device", errno.ENOSPC, (), "the size of /dev/shm, or of the file system"),
)
"""The system's error text, its number, the limits of this process that cause it, and other possible limits."""


@public("monarch_backend.errors")
class ResourceLimitError(MonarchError, RuntimeError):
    """The system refused memory, a thread, a process or a file. The text names the limits that may be the cause.

    The call that needs the resource raises it, such as ``spawn_procs``. ``__cause__`` is the system's exception.

    >>> from monarch_backend.errors import ResourceLimitError, SpawnLimitError
    >>> issubclass(SpawnLimitError, ResourceLimitError)
    True
    """


def _explanation(error: BaseException) -> str:
    number = errno.ENOMEM if isinstance(error, MemoryError) else getattr(error, "errno", None)
    for text, code, names, others in _REFUSALS:
        if number == code or text in str(error):
            set_here = [
                f"{name} is {soft}" for name in names
                if (soft := resource.getrlimit(_NUMBERS[name])[0]) != resource.RLIM_INFINITY
            ]  # fmt: skip
            if set_here:
                return f"{' and '.join(set_here)}; raise it, or {others}"
            return f"the limit is {others}: raise it"
    return ""


@contextlib.contextmanager
def explained(what: str) -> Iterator[None]:
    """Turn a refusal by the system within the block into a ResourceLimitError that names the limit.

    ``what`` completes "can't ...". Other errors are not changed.
    """
    try:
        yield
    except ResourceLimitError:
        raise
    except (OSError, RuntimeError, MemoryError) as error:
        if why := _explanation(error):
            raise ResourceLimitError(f"can't {what}: {error or 'no memory'} ({why})") from error
        raise


def start_thread(thread: threading.Thread) -> None:
    """Start the thread. Raises ResourceLimitError where the system allows no further thread."""
    with explained(f"start the thread {thread.name!r}, which monarch_backend needs"):
        thread.start()


def within(seconds: float, call: Callable[[], _T], *, thread_name: str = "monarch-rendezvous") -> _T:
    """Return the result of ``call()``, or raise TimeoutError. A late call goes on in its thread without effect."""
    results: list[_T] = []
    errors: list[BaseException] = []

    def run() -> None:
        try:
            results.append(call())
        except BaseException as error:
            errors.append(error)

    thread = threading.Thread(target=run, name=thread_name, daemon=True)
    start_thread(thread)
    thread.join(seconds)
    if errors:
        raise errors[0]
    if not results:
        raise TimeoutError(f"no answer within {seconds:.3g} s")
    return results[0]
