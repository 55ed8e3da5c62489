"""What the portable core does in another way than Linux's: names of sockets, and the names of calls that it may use.

`make build-portable` makes the environment: `.venv-portable/bin/python -m pytest tests/shm/test_portable_core.py`.
"""

from __future__ import annotations

import contextlib
import os
import re
import signal
import stat
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from elftools.elf.elffile import ELFFile

from monarch_backend import _native

pytestmark = pytest.mark.skipif(
    sys.platform != "linux" or not _native.is_portable, reason="not the portable core: make build-portable"
)

FOLDER = Path(f"/tmp/monarch-{os.geteuid()}")
ARENA = 1 << 20
LINUX_ONLY = {
    *("memfd_create", "eventfd", "timerfd_create", "timerfd_settime", "epoll_create1", "epoll_ctl", "epoll_wait"),
    *("process_vm_readv", "process_vm_writev", "prctl", "sched_getaffinity", "getrandom", "accept4", "pipe2"),
}

OWNER = f"""
import sys
from monarch_backend import _native
host = _native.Host({ARENA})
mailbox = _native.Mailbox(host, False)
print(host.token, flush=True)
sys.stdin.read()
"""


@contextlib.contextmanager
def owner() -> Iterator[tuple[subprocess.Popen[str], str]]:
    """A process with a host, and its token. It ends when its input does."""
    command = [sys.executable, "-c", OWNER]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        token = process.stdout.readline().strip()
        assert len(token) == 32
        try:
            yield process, token
        finally:
            process.kill()


def files_of(token: str) -> list[str]:
    return sorted(name for name in os.listdir(FOLDER) if name.startswith(token))


def kill(process: subprocess.Popen[str]) -> None:
    process.send_signal(signal.SIGKILL)
    assert process.wait() == -signal.SIGKILL


def test_extension_has_no_name_of_linux_alone() -> None:
    data = Path(_native.__file__).read_bytes()
    with open(_native.__file__, "rb") as file:
        symbols = {symbol.name for symbol in ELFFile(file).get_section_by_name(".dynsym").iter_symbols()}
    assert "shm_open" in symbols
    assert not symbols & LINUX_ONLY
    assert set(re.findall(rb"/proc/[^\0]*", data)) == {b"/proc/%u/stat"}, "it stands for macOS's sysctl"


def test_folder_and_socket_belong_to_the_user_alone() -> None:
    host = _native.Host(ARENA)
    folder = FOLDER.lstat()
    assert stat.S_ISDIR(folder.st_mode) and stat.S_IMODE(folder.st_mode) == 0o700 and folder.st_uid == os.geteuid()
    assert files_of(host.token) == [host.token, f"{host.token}-{os.getpid()}"]
    assert stat.S_ISSOCK((FOLDER / host.token).lstat().st_mode)


def test_end_of_a_host_removes_its_names() -> None:
    host = _native.Host(ARENA)
    token = host.token
    assert files_of(token)
    del host
    assert files_of(token) == []


def test_killed_process_is_refused_and_the_next_to_listen_removes_its_names() -> None:
    with owner() as (process, token):
        kill(process)
        assert files_of(token) == [token, f"{token}-{process.pid}"]
    host = _native.Host(ARENA)
    assert files_of(token) == [], "listening removes the names of killed processes"
    assert not host.connect(token)


def test_stale_socket_is_refused_at_once() -> None:
    host = _native.Host(ARENA)
    with owner() as (process, token):
        kill(process)
        assert files_of(token)
        assert not host.connect(token)
        assert not host.accepted(token, 0)


def test_names_of_running_processes_stay() -> None:
    with owner() as (_, first), owner() as (_, second):
        host = _native.Host(ARENA)
        for token in (first, second):
            assert len(files_of(token)) == 2
            assert host.connect(token)


def test_killed_peer_is_reported_with_its_signal() -> None:
    host = _native.Host(ARENA)
    mailbox = _native.Mailbox(host, False)
    with owner() as (process, token):
        link = mailbox.connect(token)
        assert link >= 0
        process.send_signal(signal.SIGKILL)
        assert mailbox.acquire_turn()
        events = []
        while not events or events[-1][1] != -2:
            events += mailbox.receive(30)
        mailbox.release_turn()
        assert events[-1] == (link, -2, "killed by signal 9", False)


def test_forked_child_leaves_its_parents_names() -> None:
    host = _native.Host(ARENA)
    child = os.fork()
    if child == 0:
        host.abandon()
        del host
        os._exit(0)
    assert os.waitpid(child, 0) == (child, 0)
    assert len(files_of(host.token)) == 2


def test_token_in_use_is_refused_and_stays_its_owners() -> None:
    with owner() as (process, token):
        with pytest.raises(RuntimeError, match="listening on a Unix socket"):
            _native.Host(ARENA, token)
        assert files_of(token) == [token, f"{token}-{process.pid}"]


@pytest.mark.skipif(os.geteuid() != 0, reason="root alone makes a folder of another user's")
@pytest.mark.parametrize(("uid", "mode"), [(0, 0o700), (54321, 0o755)], ids=["another user's", "open to others"])
def test_foreign_folder_is_refused(uid: int, mode: int) -> None:
    folder = Path("/tmp/monarch-54321")
    folder.mkdir(mode=mode)
    try:
        os.chown(folder, uid, uid)
        program = f"""
import os
from monarch_backend import _native
os.setresuid(54321, 54321, 54321)
try:
    _native.Host({ARENA})
except RuntimeError as error:
    print(error)
"""
        done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
        assert "/tmp/monarch-54321 must be a folder of this user" in done.stdout
        assert os.listdir(folder) == []
    finally:
        folder.rmdir()
