"""The file of a job, which records its hosts for programs that attach or end them, and the file of its secret.

This module reads, writes and locks files. It starts no processes.
"""

from __future__ import annotations

import contextlib
import fcntl
import logging
import os
import re
import socket
import stat
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec

from monarch_backend._core.state import make_private, state_directory
from monarch_backend._hosts.process_identity import Identity
from monarch_backend._job.errors import JobError
from monarch_backend._transport.network.auth import write_private

log = logging.getLogger("monarch_backend")

STATE_VERSION = 1
LOCK_NOTICE_S = 3.0
"""Seconds after which a wait for a job's lock is logged."""
LOCK_TIMEOUT_S = 300.0
"""Seconds of a wait for a job's lock. A command holds it while it starts or ends hosts: at most two minutes."""
LOCK_POLL_INTERVAL_S = 0.05


class HostEntry(msgspec.Struct, frozen=True):
    """A host that has been started. ``where``: its machine for ssh, its pod or node; "" for a process of this machine.

    ``process``: the host's daemon; None where a scheduler has started it. ``incarnation``: the scheduler's identity of
    this start of the host, such as a pod's uid.
    """

    mesh: str
    index: int
    where: str
    address: str
    process: Identity | None
    log: str
    incarnation: str = ""

    @property
    def daemon(self) -> Identity:
        """The process of the host's daemon. Raises JobError for a host that a scheduler has started."""
        if self.process is None:
            raise JobError(f"{self.label} was started by a scheduler, and its process is not known")
        return self.process

    @property
    def label(self) -> str:
        return f"{self.mesh}[{self.index}] ({self.where or self.address})"


class JobFile(msgspec.Struct):
    """Content of a job's file. ``machine``: where it was applied. ``description``: the arguments of the job.

    ``submitted``: the names that a scheduler has given to the job, such as the number of a Slurm job. ``is_begun``: a
    submission was begun. The scheduler may have the job although ``submitted`` is empty. ``unanswered_at``: when a
    submission, also one of further hosts, was begun whose outcome is not known, in seconds since 1970; 0 if there is
    none.
    """

    version: int
    kind: str
    name: str
    id: str
    machine: str
    secret_file: str
    own_secret: bool  # made for this job, and removed with it
    description: dict[str, Any]
    hosts: list[HostEntry]
    submitted: dict[str, Any] = {}
    is_begun: bool = False
    unanswered_at: float = 0.0


class _OnlyVersion(msgspec.Struct):
    version: int


def default_path(name: str) -> Path:
    if not re.fullmatch(r"[A-Za-z0-9][\w.-]{0,99}", name):
        raise ValueError(f"{name!r} is not a name for a job: use letters, digits, '_', '.' and '-'")
    return state_directory() / "jobs" / f"{name}.json"


def read(path: Path) -> JobFile | None:
    """Return the content; None without a file. Raises JobError if it is another file, or other users can access it."""
    try:
        with open(path, "rb") as file:
            status = os.fstat(file.fileno())
            data = file.read()
    except FileNotFoundError:
        return None
    except OSError as error:
        raise JobError(f"the job's file can't be read: {error}") from None
    if status.st_uid != os.geteuid() or stat.S_IMODE(status.st_mode) & 0o077:
        raise JobError(f"{path} names commands to run and must be yours alone: chown it, and chmod 600 {path}")
    try:
        version = msgspec.json.decode(data, type=_OnlyVersion).version
        if version != STATE_VERSION:
            raise JobError(
                f"{path} is of version {version}, and this monarch_backend reads {STATE_VERSION}: end the job with the "
                "one that has started it"
            )
        return msgspec.json.decode(data, type=JobFile)
    except msgspec.DecodeError as error:
        raise JobError(
            f"{path} is not the file of a job ({error}): if its hosts are gone, remove it; else end them by hand"
        ) from None


def write(path: Path, file: JobFile) -> None:
    """Replace the file atomically: readers see the old or the new content, even if this process dies meanwhile."""
    write_private(path, msgspec.json.format(msgspec.json.encode(file), indent=1) + b"\n")


@contextlib.contextmanager
def locked(path: Path, command: str, until: float | None = None, *, is_kill: bool = False) -> Iterator[None]:
    """Hold the lock of a job: one program at a time starts or ends its hosts. Makes the folder.

    ``command`` is named to others that wait for the lock. A wait is logged after `LOCK_NOTICE_S`. Raises JobError at
    the monotonic time ``until``, by default after `LOCK_TIMEOUT_S`. With ``is_kill`` the holder is asked to give up.
    """
    make_private(path.parent)
    fd = os.open(_beside(path, "lock"), os.O_CREAT | os.O_RDWR, 0o600)
    try:
        _acquire(fd, path, until, is_kill)
        _note_holder(fd, f"{command}() of pid {os.getpid()} on {socket.gethostname()}")
        try:
            yield
        finally:
            _note_holder(fd, "")
    finally:
        os.close(fd)


def _note_holder(fd: int, holder: str) -> None:
    """Replace the text of a lock's file, which a killed process leaves. On a full disk the lock has no text."""
    with contextlib.suppress(OSError):
        os.ftruncate(fd, 0)
        os.pwrite(fd, holder.encode(), 0)


def _acquire(fd: int, path: Path, until: float | None, is_kill: bool) -> None:
    began = time.monotonic()
    until = began + LOCK_TIMEOUT_S if until is None else max(until, began + LOCK_NOTICE_S)
    is_logged = False
    with contextlib.ExitStack() as request:
        while not _try_lock(fd, fcntl.LOCK_EX):
            if is_kill:
                is_kill = not _request_kill(path, request)
            waited = time.monotonic() - began
            holder = os.pread(fd, 200, 0).decode(errors="replace") or "another command"
            if began + waited > until:
                raise JobError(
                    f"{path} is in use by {holder}, for {waited:.0f} s: wait for its end, or end that process"
                )
            if waited > LOCK_NOTICE_S and not is_logged:
                is_logged = True
                log.warning("waiting for %s, which is starting or ending hosts of the job %s", holder, path)
            time.sleep(LOCK_POLL_INTERVAL_S)


def _request_kill(path: Path, request: contextlib.ExitStack) -> bool:
    """Ask the holder of the job's lock to give up. A lock of another file is the request, so it ends with this process.

    Returns False if the holder looks at the request right now.
    """
    fd = os.open(_beside(path, "kill"), os.O_CREAT | os.O_RDWR, 0o600)
    if _try_lock(fd, fcntl.LOCK_SH):
        request.callback(os.close, fd)
        return True
    os.close(fd)
    return False


def is_kill_requested(path: Path) -> bool:
    """Return whether a `kill` of this job waits for its lock."""
    try:
        fd = os.open(_beside(path, "kill"), os.O_RDWR)
    except FileNotFoundError:
        return False
    try:
        return not _try_lock(fd, fcntl.LOCK_EX)
    finally:
        os.close(fd)


def _try_lock(fd: int, kind: int) -> bool:
    try:
        fcntl.flock(fd, kind | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def _beside(path: Path, suffix: str) -> Path:
    return path.with_name(f".{path.name}.{suffix}")
