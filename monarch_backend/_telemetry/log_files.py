"""Files of log histories, which outlive their programs: one for each program, in a folder of this user.

A running program holds a lock on its file. Files without a lock are those of programs that have ended. When a program
makes a file, it removes the oldest of those beyond the limit.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import stat
import tempfile
import time
from pathlib import Path

from monarch_backend._core import env

SUFFIX = ".history"


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
    where.parent.mkdir(mode=0o700, exist_ok=True)
    where.mkdir(mode=0o700, exist_ok=True)
    for each in (where.parent, where) if not env.get("MONARCH_LOG_DIR") else (where,):
        _check_is_private(each)
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
        raise PermissionError(f"{path} is not a folder that only this user can write to")


def _remove_oldest(kept: int) -> None:
    ended_files = ended()
    for path in ended_files[: max(0, len(ended_files) - kept)]:
        with contextlib.suppress(OSError):
            path.unlink()


def ended() -> list[Path]:
    """Return the files of programs that have ended, oldest first."""
    with contextlib.suppress(OSError):
        return [path for path in sorted(folder().glob(f"*{SUFFIX}")) if _is_unlocked(path)]
    return []


def began(path: Path) -> float:
    """Return when a file was made, in seconds since the epoch. Raises ValueError for another file."""
    return int(path.name.partition("-")[0]) / 1e9


def _is_unlocked(path: Path) -> bool:
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW)
    except OSError:  # removed meanwhile, or another user's
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
