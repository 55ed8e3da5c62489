"""Bringing a directory to other machines: what changed, once to each host, and modules that are loaded again.

Content is named by its hash; a host says what it lacks, and gets no more. Files that an earlier sync has brought and
that are gone are removed; others are left alone.
"""

from __future__ import annotations

import fnmatch
import hashlib
import importlib
import importlib.util
import os
import stat
import sys
import tempfile
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import msgspec

from monarch_backend.actor import Actor, endpoint

IGNORED = (".git", "__pycache__", "*.pyc", ".mypy_cache", ".pytest_cache", ".ruff_cache", ".venv", "*.egg-info")
BATCH = 8 << 20
"""Bytes of content that travel in one message; a larger file travels alone."""

RECORD = ".monarch_workspace"
"""The file in a workspace that says what has been brought there."""


class Entry(NamedTuple):
    """A file of a workspace."""

    digest: str
    executable: bool


@dataclass(frozen=True)
class Synced:
    """What a sync has done: files there are; files written and removed on all hosts together; bytes sent to each."""

    files: int
    written: int
    removed: int
    sent: int


def manifest(root: Path, ignored: Sequence[str]) -> dict[str, Entry]:
    """All files below a directory, by their paths relative to it. Links are followed to files, not to directories."""
    found = {}
    for folder, folders, names in os.walk(root):
        folders[:] = sorted(name for name in folders if not _matches(name, ignored))
        for name in sorted(names):
            path = Path(folder, name)
            if name != RECORD and not _matches(name, ignored) and path.is_file():
                executable = bool(path.stat().st_mode & stat.S_IXUSR)
                found[path.relative_to(root).as_posix()] = Entry(_digest(path), executable)
    return found


def _matches(name: str, patterns: Iterable[str]) -> bool:
    return any(fnmatch.fnmatch(name, pattern) for pattern in patterns)


def _digest(path: Path) -> str:
    digest = hashlib.sha256()
    with open(path, "rb") as file:
        while piece := file.read(1 << 20):
            digest.update(piece)
    return digest.hexdigest()


def _digest_of(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


class Keeper(Actor):
    """A host's copy of a workspace."""

    def __init__(self, to: str) -> None:
        self._root = Path(os.path.expanduser(os.path.expandvars(to)))
        self._fresh: dict[str, bytes] = {}
        self._lacking: set[str] = set()

    @endpoint
    def lacks(self, files: dict[str, Entry]) -> set[str]:
        """Hashes of content that is not here."""
        self._root.mkdir(parents=True, exist_ok=True)
        self._lacking = {name for name, entry in files.items() if not self._is_here(name, entry)}
        return {files[name].digest for name in self._lacking}

    def _is_here(self, name: str, entry: Entry) -> bool:
        path = self._root / name
        return path.is_file() and not path.is_symlink() and _digest(path) == entry.digest

    @endpoint
    def take(self, contents: dict[str, bytes]) -> None:
        """Some of what is lacking, somewhere."""
        for digest, data in contents.items():
            if _digest_of(data) != digest:
                raise ValueError(f"content {digest[:12]} has changed on its way, or while it was read: sync again")
        self._fresh.update(contents)

    @endpoint
    def settle(self, files: dict[str, Entry]) -> tuple[int, int]:
        """Make it so: files written and removed."""
        written = 0
        for name, entry in files.items():
            path = self._root / name
            if name in self._lacking:
                _write(path, self._fresh[entry.digest])
                _forget_bytecode(path)
                written += 1
            mode = path.stat().st_mode
            os.chmod(path, mode | 0o111 if entry.executable else mode & ~0o111)
        self._fresh.clear()
        record, removed = self._root / RECORD, 0
        for name in set(_recorded(record)) - files.keys():
            if (self._root / name).is_file():
                (self._root / name).unlink()
                removed += 1
        _write(record, msgspec.json.encode(sorted(files)))
        return written, removed


def _recorded(record: Path) -> list[str]:
    try:
        return msgspec.json.decode(record.read_bytes(), type=list[str])
    except (FileNotFoundError, msgspec.DecodeError):
        return []


def _write(path: Path, data: bytes) -> None:
    """Whole or not at all: somebody may be importing it."""
    path.parent.mkdir(parents=True, exist_ok=True)
    handle, scratch = tempfile.mkstemp(dir=path.parent, prefix=".monarch-")
    try:
        with open(handle, "wb") as file:
            file.write(data)
            os.fchmod(handle, 0o644)
        os.replace(scratch, path)
    except BaseException:
        os.unlink(scratch)
        raise


def _forget_bytecode(path: Path) -> None:
    """Python trusts what it has compiled if size and second are the same."""
    if path.suffix == ".py":
        Path(importlib.util.cache_from_source(str(path))).unlink(missing_ok=True)


class Reloader(Actor):
    """In each process whose modules are to be loaded again."""

    @endpoint
    def reload(self, to: str) -> list[str]:
        """Modules below the workspace, in the order in which they were imported first; their names."""
        root = Path(os.path.expanduser(os.path.expandvars(to))).resolve()
        importlib.invalidate_caches()
        names = []
        for name, module in list(sys.modules.items()):
            path = getattr(module, "__file__", None)
            if name != "__main__" and path is not None and Path(path).resolve().is_relative_to(root):
                importlib.reload(module)
                names.append(name)
        return names


def _batches(wanted: set[str], files: Mapping[str, Entry], root: Path) -> Iterator[dict[str, bytes]]:
    where = {entry.digest: root / name for name, entry in files.items()}
    batch: dict[str, bytes] = {}
    size = 0
    for digest in sorted(wanted):
        data = where[digest].read_bytes()
        if batch and size + len(data) > BATCH:
            yield batch
            batch, size = {}, 0
        batch[digest], size = data, size + len(data)
    if batch:
        yield batch


def sync(hosts: Any, path: str | os.PathLike[str], to: str | None, ignore: Sequence[str], reload: Any) -> Synced:
    """See HostMesh.sync_workspace."""
    root = Path(path).resolve()
    if not root.is_dir():
        raise NotADirectoryError(f"{root} is no directory: give the root of the workspace")
    target = str(root) if to is None else to
    files = manifest(root, (*IGNORED, *ignore))
    with hosts.spawn_procs({"workspace": 1}, name="workspace") as procs:
        keepers = procs.spawn("workspace", Keeper, target)
        wanted: set[str] = set().union(*keepers.lacks.call(files).get().values())
        sent = 0
        for batch in _batches(wanted, files, root):
            keepers.take.call(batch).get()
            sent += sum(map(len, batch.values()))
        done = list(keepers.settle.call(files).get().values())
    if reload is not None:
        reloaders = reload.spawn("workspace-reloader", Reloader)
        reloaders.reload.call(target).get()
        reloaders.stop("it has reloaded").get()
    return Synced(len(files), sum(written for written, _ in done), sum(removed for _, removed in done), sent)
