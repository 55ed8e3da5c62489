"""Workspace synchronisation: paths outside the root, names, modes, and files that become directories."""

from __future__ import annotations

import json
import os
import stat
from pathlib import Path
from typing import Any

import pytest

from monarch_backend._hosts.workspace_sync import RECORD
from monarch_backend._hosts.workspace_tree import WorkspaceTree, check_name
from monarch_backend.actor import ActorError, this_host
from monarch_backend.hosts import WorkspaceError


@pytest.fixture(scope="module")
def host() -> Any:
    """Return this host with a running fork server, which lives until the program ends."""
    host = this_host()
    procs = host.spawn_procs({"gpus": 1})
    procs.initialized.get(120)
    procs.stop().get(30)
    return host


@pytest.fixture
def source(tmp_path: Path) -> Path:
    folder = tmp_path / "source"
    folder.mkdir()
    (folder / "kept").write_text("kept")
    return folder


@pytest.mark.parametrize("name", ["/etc/passwd", "../victim", "a/../../victim", "a//b", "./a", "", "a/", "a\0b"])
def test_file_name_outside_root_is_refused(name: str) -> None:
    with pytest.raises(WorkspaceError, match="relative to a workspace"):
        check_name(name)


@pytest.mark.parametrize("recorded", [["../victim"], ["VICTIM"], ["inner/../../victim"], [".git/config"], [7]])
def test_record_of_cloned_repository_names_foreign_file_and_is_refused(
    host: Any, source: Path, tmp_path: Path, recorded: list[Any]
) -> None:
    victim, target = tmp_path / "victim", tmp_path / "target"
    victim.write_text("precious")
    (target / ".git").mkdir(parents=True)
    (target / ".git" / "config").write_text("precious")
    recorded = [str(victim) if name == "VICTIM" else name for name in recorded]
    (target / RECORD).write_text(json.dumps(recorded))
    with pytest.raises(ActorError, match="was not written by a sync"):
        host.sync_workspace(source, str(target))
    assert victim.exists()
    assert (target / ".git" / "config").exists()
    assert not (target / "kept").exists()


def test_link_out_of_source_is_refused(host: Any, source: Path, tmp_path: Path) -> None:
    (tmp_path / "key").write_text("private")
    (source / "data").symlink_to(tmp_path / "key")
    (source / "alias").symlink_to("kept")
    with pytest.raises(WorkspaceError, match=r"'data' .* is a link to .*key, outside"):
        host.sync_workspace(source, str(tmp_path / "target"))
    assert host.sync_workspace(source, str(tmp_path / "target"), ignore=["data"]).files == 2
    assert (tmp_path / "target" / "alias").read_text() == "kept"


def test_linked_directory_of_host_is_not_written_through(host: Any, source: Path, tmp_path: Path) -> None:
    outside, target = tmp_path / "outside", tmp_path / "target"
    outside.mkdir()
    target.mkdir()
    (target / "package").symlink_to(outside)
    (source / "package").mkdir()
    (source / "package" / "module.py").write_text("")
    with pytest.raises(ActorError, match=r"'package' in .* is a link"):
        host.sync_workspace(source, str(target))
    assert not list(outside.iterdir())


def test_linked_file_of_host_is_replaced(tmp_path: Path) -> None:
    (tmp_path / "root").mkdir()
    (tmp_path / "outside").write_text("precious")
    (tmp_path / "root" / "file").symlink_to(tmp_path / "outside")
    tree = WorkspaceTree(tmp_path / "root")
    assert tree.digest("file") is None
    tree.write("file", b"new")
    assert (tmp_path / "outside").read_text() == "precious"
    assert (tmp_path / "root" / "file").read_text() == "new"


def test_modes_are_copied_on_first_and_later_syncs(host: Any, source: Path, tmp_path: Path) -> None:
    def mode(name: str) -> int:
        return stat.S_IMODE((tmp_path / "target" / name).stat().st_mode)

    (source / "secret").write_text("secret")
    (source / "secret").chmod(0o600)
    (source / "script").write_text("")
    (source / "script").chmod(0o755)
    host.sync_workspace(source, str(tmp_path / "target"))
    assert (mode("secret"), mode("script")) == (0o600, 0o755)
    (source / "script").chmod(0o640)
    assert host.sync_workspace(source, str(tmp_path / "target")).written == 0
    assert (mode("secret"), mode("script")) == (0o600, 0o640)


def test_file_and_directory_change_places(host: Any, source: Path, tmp_path: Path) -> None:
    target = tmp_path / "target"
    (source / "folder").mkdir()
    (source / "folder" / "inner.py").write_text("inner = 1\n")
    host.sync_workspace(source, str(target))
    (target / "folder" / "__pycache__").mkdir()
    (source / "folder" / "inner.py").unlink()
    (source / "folder").rmdir()
    (source / "folder").write_text("a file now")
    (source / "kept").unlink()
    (source / "kept").mkdir()
    (source / "kept" / "inner").write_text("a directory now")
    done = host.sync_workspace(source, str(target))
    assert (done.files, done.written, done.removed) == (2, 2, 2)
    assert (target / "folder").read_text() == "a file now"
    assert (target / "kept" / "inner").read_text() == "a directory now"
    assert host.sync_workspace(source, str(target)).written == 0


def test_own_files_of_host_in_the_way_are_named_and_left(host: Any, source: Path, tmp_path: Path) -> None:
    target = tmp_path / "target"
    (target / "kept").mkdir(parents=True)
    (target / "kept" / "own").write_text("own")
    with pytest.raises(ActorError, match="'kept' is a directory with files of its own"):
        host.sync_workspace(source, str(target))
    assert (target / "kept" / "own").read_text() == "own"
    assert sorted(path.name for path in target.iterdir()) == ["kept"]


def test_name_without_utf8_is_synchronised_and_removed(host: Any, source: Path, tmp_path: Path) -> None:
    odd = os.fsencode(source) + b"/caf\xe9"
    with open(odd, "wb") as file:
        file.write(b"odd")
    copied = os.fsencode(tmp_path / "target") + b"/caf\xe9"
    assert host.sync_workspace(source, str(tmp_path / "target")).written == 2
    with open(copied, "rb") as file:
        assert file.read() == b"odd"
    os.unlink(odd)
    assert host.sync_workspace(source, str(tmp_path / "target")).removed == 1
    assert not os.path.exists(copied)
