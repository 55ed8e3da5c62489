"""Unix sockets by which processes of one user on one host find each other.

On Linux their names are abstract, which leaves no files. Elsewhere they are files in a folder that only this user can
enter. The next process that listens removes files of processes that were killed.
"""

from __future__ import annotations

import contextlib
import os
import re
import secrets
import socket
import stat
import struct
import tempfile
from pathlib import Path

from monarch_backend._core import platform

FIRST = "@" if platform.HAS_ABSTRACT_SOCKETS else "/"
"""The first character of an address."""

_FILE = re.compile(r"s(\d+)-\w+")
"""Name of a file of `listen`, with the pid of the process that has made it."""

_MAX_PATH, _MAX_NAME = 103, 40
"""Bytes of a socket's path on macOS, and of the name at its end."""


def address_of(name: str) -> str:
    """Return the address at which `listen_at` can listen under a name that other processes know: at most 40 bytes."""
    return f"@monarch-{name}" if platform.HAS_ABSTRACT_SOCKETS else str(_folder() / name)


def listen(backlog: int = 128) -> tuple[socket.socket, str]:
    """Return a listening socket and its address, with a name that cannot be guessed. Raises OSError."""
    if platform.HAS_ABSTRACT_SOCKETS:
        address = address_of(secrets.token_hex(16))
    else:
        _remove_stale(_folder())
        address = address_of(f"s{os.getpid()}-{secrets.token_hex(8)}")
    return listen_at(address, backlog), address


def listen_at(address: str, backlog: int) -> socket.socket:
    listener = socket.socket(socket.AF_UNIX)
    try:
        listener.bind(_name(address))
        listener.listen(backlog)
    except BaseException:
        listener.close()
        raise
    return listener


def connect(address: str, timeout: float | None = None) -> socket.socket:
    sock = socket.socket(socket.AF_UNIX)
    try:
        sock.settimeout(timeout)
        sock.connect(_name(address))
    except BaseException as error:
        sock.close()
        if isinstance(error, FileNotFoundError):  # an abstract name without a listener refuses connections
            raise ConnectionRefusedError(*error.args) from None
        raise
    return sock


def is_address(text: str) -> bool:
    return text.startswith(FIRST)


def close(listener: socket.socket) -> None:
    address = listener.getsockname()
    listener.close()
    if isinstance(address, str):  # an abstract one is bytes
        remove(address)


def remove(address: str) -> None:
    """Remove the file of a socket that does not listen any more, if it has one."""
    if address.startswith("/"):
        with contextlib.suppress(OSError):
            os.unlink(address)


def peer(sock: socket.socket) -> tuple[int, int]:
    """Return pid and uid of the process at the other end. Without credentials: 0, and this user, the folder's owner."""
    if not platform.HAS_PEER_CREDENTIALS:
        return 0, os.geteuid()
    pid, uid, _ = struct.unpack("iii", sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, struct.calcsize("iii")))
    return pid, uid


def _name(address: str) -> str:
    return f"\0{address[1:]}" if address.startswith("@") else address


def _folder() -> Path:
    """Return the folder of this user's sockets. Raises PermissionError if another user can enter or has made it."""
    folder = Path(tempfile.gettempdir()) / f"monarch-{os.geteuid()}"
    if len(os.fsencode(folder)) + len("/") + _MAX_NAME > _MAX_PATH:
        folder = Path("/tmp") / folder.name
    with contextlib.suppress(FileExistsError):
        folder.mkdir(mode=0o700)
    found = folder.lstat()
    if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.geteuid() or stat.S_IMODE(found.st_mode) & 0o077:
        raise PermissionError(f"{folder} must be a folder of user {os.geteuid()} with mode 700: remove it")
    return folder


def _remove_stale(folder: Path) -> None:
    for file in folder.iterdir():
        made = _FILE.fullmatch(file.name)
        if made and not _exists(int(made[1])):
            with contextlib.suppress(OSError):
                file.unlink()


def _exists(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except (PermissionError, OverflowError):
        return True
    return True
