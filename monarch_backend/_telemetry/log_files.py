"""Files of log histories, which outlive their programs: one for each program, in a folder of this user.

A running program holds a lock on its file. Files without a lock are those of programs that have ended. When a program
makes a file, it removes the oldest of those beyond the limit.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import re
import stat
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

from monarch_backend._core import env

SUFFIX = ".history"
NAME = re.compile(rf"\d+-\d+{re.escape(SUFFIX)}")
""""NANOSECONDS-PID.history": when the file was made, and by which process."""


def folder() -> Path:
    """Return the folder of the files: that of MONARCH_LOG_DIR, or one of this user among the temporary files."""
    given = str(env.get("MONARCH_LOG_DIR"))
    return Path(given) if given else Path(tempfile.gettempdir(), f"monarch_backend-{os.geteuid()}", "logs")


def create() -> int | None:
    """Return a descriptor of a new file, locked until this process ends. None if MONARCH_LOG_FILES is 0.

    Raises OSError where no file can be made. Raises PermissionError for a folder that other users can write to.
    """
    limit = int(env.get("MONARCH_LOG_FILES"))
    if not limit:
        return None
    where = folder()
    if not env.get("MONARCH_LOG_DIR"):
        where.parent.mkdir(mode=0o700, exist_ok=True)
        _check_is_private(where.parent)
    where.mkdir(mode=0o700, parents=True, exist_ok=True)
    _check_is_private(where)
    with _locked(where):  # otherwise another program could remove the file before it has its lock
        _remove_oldest(limit - 1)
        path = where / f"{time.time_ns()}-{os.getpid()}{SUFFIX}"
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            os.close(descriptor)
            path.unlink()
            raise
    return descriptor


def _check_is_private(path: Path) -> None:
    found = path.lstat()
    if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.geteuid() or found.st_mode & 0o022:
        raise PermissionError(
            f"{path} is not a folder that only this user can write to: chmod go-w {path}, or set MONARCH_LOG_DIR"
        )


@contextlib.contextmanager
def _locked(where: Path) -> Iterator[None]:
    descriptor = os.open(where, os.O_RDONLY | os.O_CLOEXEC | os.O_DIRECTORY)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX)
        yield
    finally:
        os.close(descriptor)


def _remove_oldest(kept: int) -> None:
    files = _unlocked()
    for path in files[: max(0, len(files) - kept)]:
        with contextlib.suppress(OSError):
            path.unlink()


def ended() -> list[Path]:
    """Return the files of programs that have ended, oldest first. There are none in a folder of another user."""
    with contextlib.suppress(OSError):
        _check_is_private(folder())
        with _locked(folder()):
            return _unlocked()
    return []


def _unlocked() -> list[Path]:
    return [path for path in sorted(folder().iterdir()) if NAME.fullmatch(path.name) and _is_unlocked(path)]


def began(path: Path) -> float:
    """Return when a file was made, in seconds since the epoch. Raises ValueError for another file."""
    if NAME.fullmatch(path.name) is None:
        raise ValueError(f"{path} is not named as a file with the output of a program")
    return int(path.name.partition("-")[0]) / 1e9


def open_to_read(path: Path) -> int:
    """Return a descriptor of a file. Raises OSError for what is not a plain file of this user."""
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK)
    found = os.fstat(descriptor)
    if not stat.S_ISREG(found.st_mode) or found.st_uid != os.geteuid():
        os.close(descriptor)
        raise PermissionError(f"{path} is not a plain file of this user")
    return descriptor


def _is_unlocked(path: Path) -> bool:
    try:
        descriptor = open_to_read(path)
    except OSError:
        return False
    try:
        fcntl.flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except OSError:
        return False
    finally:
        os.close(descriptor)
    return True


def remove(descriptor: int) -> None:
    """Remove the file of a descriptor of this process, for example if nothing was written to it."""
    with contextlib.suppress(OSError):
        os.unlink(os.readlink(f"/proc/self/fd/{descriptor}"))
