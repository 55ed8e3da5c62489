"""Synchronisation of a directory to other hosts: changed files are sent once to each host, then modules are reloaded.

Content is named by its hash, and a host requests what it lacks. A file that an earlier sync wrote is removed when it is
gone at the source. Other files of the host are not touched.
"""

from __future__ import annotations

import fnmatch
import hashlib
import importlib
import json
import os
import stat
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from monarch_backend._actor.actor import Actor, endpoint
from monarch_backend._hosts.workspace_tree import WorkspaceError, WorkspaceTree, check_name, digest_of_file

IGNORED = (".git", "__pycache__", "*.pyc", ".mypy_cache", ".pytest_cache", ".ruff_cache", ".venv", "*.egg-info")
BATCH_BYTES = 8 << 20
"""Bytes of content in one message. A larger file is sent alone."""

RECORD = ".monarch_workspace"
"""The file in a workspace that lists the files which earlier syncs wrote there."""


class Entry(NamedTuple):
    """A file of a workspace: SHA-256 of its content, and its permission bits."""

    digest: str
    mode: int


@dataclass(frozen=True)
class Synced:
    """Result of a sync: number of files; files written and removed on all hosts together; bytes sent to each host."""

    files: int
    written: int
    removed: int
    sent: int


def manifest(root: Path, ignored: Sequence[str]) -> dict[str, Entry]:
    """Return all files below a directory, by their paths relative to it.

    A link to a file counts as that file; a link to a directory is skipped. Raises WorkspaceError where a link leads out
    of ``root``: a cloned repository could send any file of this machine.
    """
    found = {}
    for folder, folders, names in os.walk(root):
        folders[:] = sorted(name for name in folders if not _is_ignored(name, ignored))
        for name in sorted(names):
            path = Path(folder, name)
            if name == RECORD or _is_ignored(name, ignored) or not path.is_file():
                continue
            relative = path.relative_to(root).as_posix()
            if path.is_symlink() and not path.resolve().is_relative_to(root):
                raise WorkspaceError(
                    f"{relative!r} in {root} is a link to {path.resolve()}, outside of the workspace: "
                    "replace it by the file, or name it in ignore="
                )
            content = digest_of_file(os.open(path, os.O_RDONLY | os.O_CLOEXEC))
            found[relative] = Entry(content, stat.S_IMODE(path.stat().st_mode) & 0o777)
    return found


def _is_ignored(name: str, patterns: Iterable[str]) -> bool:
    return any(fnmatch.fnmatch(part, pattern) for part in name.split("/") for pattern in patterns)


class Keeper(Actor):
    """Actor that writes a host's copy of a workspace."""

    def __init__(self, to: str, ignored: Sequence[str]) -> None:
        self._tree = WorkspaceTree(Path(os.path.expanduser(os.path.expandvars(to))))
        self._ignored = ignored
        self._fresh: dict[str, bytes] = {}
        self._lacking: set[str] = set()
        self._obsolete: list[str] = []

    @endpoint
    def lacks(self, files: dict[str, Entry]) -> set[str]:
        """Return hashes of the content that this host needs. Raises WorkspaceError before a file is changed."""
        for name in files:
            check_name(name)
        self._tree.root.mkdir(parents=True, exist_ok=True)
        self._obsolete = [name for name in self._recorded() if name not in files]
        self._lacking = {name for name, entry in files.items() if self._tree.digest(name) != entry.digest}
        return {files[name].digest for name in self._lacking}

    @endpoint
    def take(self, contents: dict[str, bytes]) -> None:
        for name, data in contents.items():
            if hashlib.sha256(data).hexdigest() != name:
                raise ValueError(f"content {name[:12]} has changed on its way, or while it was read: sync again")
        self._fresh.update(contents)

    @endpoint
    def settle(self, files: dict[str, Entry]) -> tuple[int, int]:
        removed = sum(
            self._tree.remove(name) for name in self._obsolete
        )  # first, because a directory may take a file's name
        for name in self._lacking:
            self._tree.write(name, self._fresh[files[name].digest])
        for name, entry in files.items():
            self._tree.set_mode(name, entry.mode)
        self._tree.write(RECORD, json.dumps(sorted(files)).encode())
        written = len(self._lacking)
        self._fresh.clear()
        self._lacking.clear()
        return written, removed

    def _recorded(self) -> list[str]:
        """Return names that earlier syncs wrote. They are checked like a peer's: the file may come from elsewhere."""
        record = self._tree.root / RECORD
        try:
            names = json.loads(self._tree.read(RECORD) or b"[]")
        except ValueError:
            return []
        if not isinstance(names, list):
            return []
        for name in names:
            try:
                if not isinstance(name, str) or _is_ignored(name, self._ignored):
                    raise WorkspaceError(f"{name!r} is not a file that a sync writes")
                check_name(name)
            except WorkspaceError as error:
                raise WorkspaceError(
                    f"{record} was not written by a sync: {error}. Remove {record}, then sync again"
                ) from None
        return names


class Reloader(Actor):
    """Actor that reloads the workspace's modules in one process."""

    @endpoint
    def reload(self, to: str) -> list[str]:
        """Reload modules below the workspace in the order of their first import; return their names."""
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
    for content in sorted(wanted):
        data = where[content].read_bytes()
        if batch and size + len(data) > BATCH_BYTES:
            yield batch
            batch, size = {}, 0
        batch[content], size = data, size + len(data)
    if batch:
        yield batch


def sync(hosts: Any, path: str | os.PathLike[str], to: str | None, ignore: Sequence[str], reload: Any) -> Synced:
    root = Path(path).resolve()
    if not root.is_dir():
        raise NotADirectoryError(f"{root} is not a directory: give the root of the workspace")
    target = str(root) if to is None else to
    ignored = (*IGNORED, *ignore)
    files = manifest(root, ignored)
    with hosts.spawn_procs({"workspace": 1}, name="workspace") as procs:
        keepers = procs.spawn("workspace", Keeper, target, ignored)
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
