"""Unix sockets of this user's processes: with abstract names, and with files in a private folder."""

from __future__ import annotations

import os
import shutil
import stat
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from monarch_backend._core import platform
from monarch_backend._processes import local_sockets


@pytest.fixture
def temporary(monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A temporary folder with a short path, and sockets that are files in it."""
    folder = tempfile.mkdtemp(dir="/tmp")
    monkeypatch.setattr(tempfile, "tempdir", folder)
    monkeypatch.setattr(platform, "HAS_ABSTRACT_SOCKETS", False)
    monkeypatch.setattr(platform, "HAS_PEER_CREDENTIALS", False)
    yield Path(folder)
    shutil.rmtree(folder)


def _talk(address: str, listener: local_sockets.socket.socket) -> None:
    with local_sockets.connect(address, 10) as ours:
        theirs, _ = listener.accept()
        with theirs:
            assert local_sockets.peer(theirs)[1] == os.geteuid()
            ours.sendall(b"hello")
            assert theirs.recv(5) == b"hello"


def test_socket_is_found_at_its_address() -> None:
    listener, address = local_sockets.listen()
    assert local_sockets.is_address(address)
    _talk(address, listener)
    local_sockets.close(listener)
    with pytest.raises(ConnectionRefusedError):
        local_sockets.connect(address)


def test_file_of_a_socket_is_private_and_is_removed(temporary: Path) -> None:
    listener, address = local_sockets.listen()
    _talk(address, listener)
    folder = Path(address).parent
    assert folder.parent == temporary and stat.S_IMODE(folder.stat().st_mode) == 0o700
    local_sockets.close(listener)
    assert list(folder.iterdir()) == []
    with pytest.raises(ConnectionRefusedError):
        local_sockets.connect(address)


def test_known_name_is_short_enough(temporary: Path) -> None:
    address = local_sockets.address_of("agent-" + 32 * "f")
    with local_sockets.listen_at(address, 1) as listener:
        _talk(address, listener)
    local_sockets.remove(address)


def test_files_of_killed_processes_are_removed(temporary: Path) -> None:
    program = "from monarch_backend._processes import local_sockets\nimport os\n"
    program += "local_sockets.platform.HAS_ABSTRACT_SOCKETS = False\n"
    program += "print(local_sockets.listen()[1], flush=True)\nos.kill(os.getpid(), 9)"
    environment = {**os.environ, "TMPDIR": str(temporary)}
    killed = subprocess.run([sys.executable, "-c", program], env=environment, capture_output=True, text=True)
    stale = Path(killed.stdout.strip())
    assert stale.is_socket()
    kept = stale.with_name("agent-of-another-process")
    kept.touch()
    first, _ = local_sockets.listen()
    second, _ = local_sockets.listen()
    assert not stale.exists() and kept.exists()
    assert len(list(stale.parent.iterdir())) == 3
    for listener in (first, second):
        local_sockets.close(listener)


@pytest.mark.parametrize("kind", ["open to others", "a link"])
def test_folder_that_others_could_have_made_is_refused(kind: str, temporary: Path) -> None:
    folder = temporary / f"monarch-{os.geteuid()}"
    if kind == "a link":
        (temporary / "elsewhere").mkdir(mode=0o700)
        folder.symlink_to(temporary / "elsewhere")
    else:
        folder.mkdir()
        folder.chmod(0o755)
    with pytest.raises(PermissionError, match=f"monarch-{os.geteuid()} must be a folder of user"):
        local_sockets.listen()


def test_long_temporary_folder_is_not_used(temporary: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    long = temporary / ("x" * 60)
    long.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(long))
    listener, address = local_sockets.listen()
    _talk(address, listener)
    local_sockets.close(listener)
    assert Path(address).parent == Path(f"/tmp/monarch-{os.geteuid()}")
