"""Files of a workspace on one host, read and written without leaving its root directory.

Names come from another host, and from a file that a cloned repository can contain. So each directory is opened by
descriptor and without following links. A name or a link that leads out of the root raises WorkspaceError.
"""

from __future__ import annotations

import contextlib
import hashlib
import importlib.util
import os
import secrets
import stat
from collections.abc import Iterator
from pathlib import Path

from monarch_backend._core.errors import MonarchError, public

_DIRECTORY = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC


@public("monarch_backend.hosts")
class WorkspaceError(MonarchError, ValueError):
    """A workspace cannot be synchronized: a name or link leads out of its root, or another file is in the way.

    `HostMesh.sync_workspace` raises it, before any file is written or removed. The text names the file and the remedy.

    >>> from monarch_backend.hosts import WorkspaceError
    >>> issubclass(WorkspaceError, ValueError)
    True
    """


def check_name(name: str) -> tuple[str, ...]:
    """Return the parts of a relative file name. Raises WorkspaceError where it is absolute, empty, or contains ``..``.

    >>> check_name("package/module.py")
    ('package', 'module.py')
    """
    parts = tuple(name.split("/"))
    if "\0" in name or any(part in ("", ".", "..") for part in parts):
        raise WorkspaceError(
            f"{name!r} is not a file name relative to a workspace: it must not be absolute or contain '..'"
        )
    return parts


def digest_of_file(handle: int) -> str:
    """Return the SHA-256 of an open file. Reads the file to its end and closes it."""
    found = hashlib.sha256()
    with open(handle, "rb") as file:
        while chunk := file.read(1 << 20):
            found.update(chunk)
    return found.hexdigest()


class WorkspaceTree:
    """Files below ``root``, by relative names. A name that leads out of it, through a link too, is a WorkspaceError."""

    def __init__(self, root: Path) -> None:
        self.root = root

    def digest(self, name: str) -> str | None:
        handle = self._open(name)
        return None if handle is None else digest_of_file(handle)

    def read(self, name: str) -> bytes | None:
        handle = self._open(name)
        if handle is None:
            return None
        with open(handle, "rb") as file:
            return file.read()

    def write(self, name: str, data: bytes) -> None:
        """Replace a file as a whole, or not at all. Directories are created; a directory in its place is an error."""
        scratch = f".monarch-{secrets.token_hex(8)}"
        with self._parent(name, create=True) as (folder, last):
            handle = os.open(scratch, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600, dir_fd=folder)
            try:
                with open(handle, "wb") as file:
                    file.write(data)
                os.replace(scratch, last, src_dir_fd=folder, dst_dir_fd=folder)
            except BaseException as error:
                os.unlink(scratch, dir_fd=folder)
                if isinstance(error, IsADirectoryError):
                    raise WorkspaceError(
                        f"{name!r} is a directory with files of its own in {self.root}: move them away, then sync again"
                    ) from None
                raise
        self._forget_bytecode(name)

    def set_mode(self, name: str, mode: int) -> None:
        with self._parent(name) as (folder, last):
            if stat.S_IMODE(os.stat(last, dir_fd=folder, follow_symlinks=False).st_mode) != mode:
                handle = os.open(last, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC, dir_fd=folder)
                try:
                    os.fchmod(handle, mode)
                finally:
                    os.close(handle)

    def remove(self, name: str) -> bool:
        """Remove a regular file or a link, and directories that are empty then. Return False where there is none."""
        try:
            with self._parent(name) as (folder, last):
                if stat.S_ISDIR(os.stat(last, dir_fd=folder, follow_symlinks=False).st_mode):
                    return False
                os.unlink(last, dir_fd=folder)
        except (FileNotFoundError, NotADirectoryError):
            return False
        self._forget_bytecode(name)
        parts = check_name(name)
        for depth in range(len(parts) - 1, 0, -1):
            with self._parent("/".join(parts[:depth])) as (folder, last):
                try:
                    with contextlib.suppress(OSError):
                        os.rmdir(f"{last}/__pycache__", dir_fd=folder)
                    os.rmdir(last, dir_fd=folder)
                except OSError:
                    break  # it has other files
        return True

    def _open(self, name: str) -> int | None:
        try:
            with self._parent(name) as (folder, last):
                if stat.S_ISREG(os.stat(last, dir_fd=folder, follow_symlinks=False).st_mode):
                    return os.open(last, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC, dir_fd=folder)
        except (FileNotFoundError, NotADirectoryError):
            pass
        return None

    @contextlib.contextmanager
    def _parent(self, name: str, *, create: bool = False) -> Iterator[tuple[int, str]]:
        """Yield a descriptor of the directory of a file, and the file's name in it."""
        *folders, last = check_name(name)
        handle = os.open(self.root, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            for depth, part in enumerate(folders):
                if create:
                    with contextlib.suppress(FileExistsError):
                        os.mkdir(part, dir_fd=handle)
                try:
                    inner = os.open(part, _DIRECTORY, dir_fd=handle)
                except OSError as error:
                    self._refuse(error, handle, folders[: depth + 1], create)
                    raise
                os.close(handle)
                handle = inner
            yield handle, last
        finally:
            os.close(handle)

    def _refuse(self, error: OSError, handle: int, folders: list[str], create: bool) -> None:
        """Raise a WorkspaceError where a link, or for a write a file, is in place of a directory."""
        try:
            mode = os.stat(folders[-1], dir_fd=handle, follow_symlinks=False).st_mode
        except OSError:
            return
        where = f"{'/'.join(folders)!r} in {self.root}"
        if stat.S_ISLNK(mode):
            raise WorkspaceError(f"{where} is a link: no file of a workspace goes through it; remove it") from error
        if create and not stat.S_ISDIR(mode):
            raise WorkspaceError(f"{where} is a file of the host: move it away, then sync again") from error

    def _forget_bytecode(self, name: str) -> None:
        """Remove the bytecode of a module: Python trusts it if size and second of its source are the same."""
        path = self.root / name
        if path.suffix == ".py":
            compiled = Path(importlib.util.cache_from_source(str(path)))
            if not compiled.parent.is_symlink():
                compiled.unlink(missing_ok=True)
